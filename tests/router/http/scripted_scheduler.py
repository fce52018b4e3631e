"""A scheduler whose every sequence repeats its prompt's token ids in a circle, so that the expected text is plain.

Scripts for request ids replace the circle, or fail the request.
"""

from __future__ import annotations

import itertools

from session_scheduler import FakeScheduler, Row, Session

from pagemill.v1 import common_pb2, scheduler_pb2

MAX_MODEL_LEN = 512


class ScriptedScheduler(FakeScheduler):
    """Belongs to the event loop that started it; counters may be read from any thread.

    Attributes:
        replies: output ids by request id; the circle elsewhere.
        failures: by request id, the number of tokens before the error, and the error.
        num_aborted: requests that were still running when they were aborted.
    """

    def __init__(self) -> None:
        super().__init__(self._tokens, max_model_len=MAX_MODEL_LEN)
        self.step_s = 0.0005
        self.replies: dict[str, list[int]] = {}
        self.failures: dict[str, tuple[int, common_pb2.Error]] = {}
        self.num_aborted = 0

    def _tokens(self, submit: scheduler_pb2.Submit, index: int) -> list[int]:
        sampling, ids = submit.sampling, list(submit.token_ids)
        # Sequence i starts i places later in the circle, so that the sequences can be told apart.
        start = index % len(ids)
        circle = itertools.islice(itertools.cycle(ids[start:] + ids[:start]), sampling.max_tokens)
        tokens = self.replies.get(submit.request_id) or list(circle)
        stops = {*sampling.stop_token_ids, *(() if sampling.ignore_eos else submit.eos_token_ids)}
        end = next((at for at, token in enumerate(tokens, 1) if token in stops), len(tokens))
        return tokens[:end]

    def _abort(self, session: Session, abort: scheduler_pb2.Abort) -> None:
        is_live = any(row.handle == abort.handle for row in session.rows)
        self.num_aborted += is_live and not abort.HasField("index")
        super()._abort(session, abort)

    def _step(self, session: Session) -> scheduler_pb2.StepOutput:
        failed = {row.handle for row in session.rows if self._fails(session, row)}
        session.rows[:] = [row for row in session.rows if row.handle not in failed]
        output = super()._step(session)
        for handle in failed:
            _, error = self.failures[session.submits[handle].request_id]
            output.errors.append(scheduler_pb2.RequestError(handle=handle, error=error))
        for run in output.logprobs:
            # Only the first alternative is possible, as top_k=1 makes it.
            num_top, num_tokens = run.columns.num_top, len(run.columns.chosen)
            row = [-0.5, *[float("-inf")] * (num_top - 1)][:num_top]
            run.columns.top_logprobs[:] = row * num_tokens
        return output

    def _fails(self, session: Session, row: Row) -> bool:
        request_id = session.submits[row.handle].request_id
        return request_id in self.failures and row.position >= self.failures[request_id][0]

    def _finish(self, session: Session, output: scheduler_pb2.StepOutput, row: Row, reason: int) -> None:
        super()._finish(session, output, row, reason)
        timings = output.finished[-1].timings
        timings.scheduled_unix_ns = timings.arrival_unix_ns + 1_000_000
        timings.first_token_unix_ns = timings.arrival_unix_ns + 2_000_000
        timings.finished_unix_ns = timings.arrival_unix_ns + 3_000_000
