"""A scheduler that speaks the real Session protocol and whose tokens are known beforehand.

Each sequence repeats its prompt's token ids in a circle, so that the expected text is plain. It ends by the rules of
the protocol: end-of-sequence and stop ids, max_tokens. Scripts for request ids replace the circle, or fail the request.
"""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import AsyncIterator, Iterator
from dataclasses import dataclass, field
from typing import Any

from pagemill.rpc import aio_server, bind
from pagemill.v1 import common_pb2, scheduler_pb2, scheduler_pb2_grpc

MAX_MODEL_LEN = 512


@dataclass
class Running:
    """One request and what its sequences still have to say."""

    submit: scheduler_pb2.Submit
    tokens: dict[int, Iterator[int]]
    produced: dict[int, int] = field(default_factory=dict)
    sent_prompt: bool = False


class ScriptedScheduler(scheduler_pb2_grpc.SchedulerServicer):
    """In-process; all state belongs to the event loop that started it, counters may be read from any thread.

    Attributes:
        step_s: seconds between steps.
        replies: output ids by request id; the circle elsewhere.
        failures: by request id, the number of tokens before the error, and the error.
        submits: everything that arrived.
        aborted: number of aborted requests that were still running.
        steps_with_tokens: steps that produced something.
    """

    def __init__(self, step_s: float = 0.0005) -> None:
        self.step_s = step_s
        self.replies: dict[str, list[int]] = {}
        self.failures: dict[str, tuple[int, common_pb2.Error]] = {}
        self.submits: list[scheduler_pb2.Submit] = []
        self.running: dict[int, Running] = {}
        self.aborted = 0
        self.steps_with_tokens = 0
        self.address = ""

    async def start(self) -> None:
        """Listen on a free port of the loopback address."""
        self._server = aio_server()
        scheduler_pb2_grpc.add_SchedulerServicer_to_server(self, self._server)
        self.address = f"127.0.0.1:{bind(self._server, '127.0.0.1', 0)}"
        await self._server.start()

    async def stop(self) -> None:
        """End all sessions."""
        await self._server.stop(0.1)

    async def Session(
        self, request_iterator: AsyncIterator[scheduler_pb2.RouterMessage], context: Any
    ) -> AsyncIterator[scheduler_pb2.SchedulerMessage]:
        reader = asyncio.create_task(self._read(request_iterator))
        try:
            yield scheduler_pb2.SchedulerMessage(
                hello=scheduler_pb2.SchedulerHello(
                    scheduler_id="scripted",
                    version="0",
                    model="scripted",
                    model_fingerprint="scripted",
                    max_model_len=MAX_MODEL_LEN,
                    vocab_size=49152,
                    block_size=16,
                    ready=True,
                    kv_capacity_tokens=1 << 20,
                )
            )
            for tick in itertools.count():
                if tick % 200 == 0:
                    load = scheduler_pb2.LoadReport(running=len(self.running), workers=1, total_blocks=64)
                    yield scheduler_pb2.SchedulerMessage(load=load)
                output = self._step(tick)
                if output is not None:
                    yield scheduler_pb2.SchedulerMessage(output=output)
                await asyncio.sleep(self.step_s)
        finally:
            reader.cancel()
            self.running.clear()

    async def _read(self, messages: AsyncIterator[scheduler_pb2.RouterMessage]) -> None:
        async for message in messages:
            kind = message.WhichOneof("message")
            if kind == "submit":
                self._take(message.submit)
            elif kind == "abort":
                self._abort(message.abort)

    def _take(self, submit: scheduler_pb2.Submit) -> None:
        self.submits.append(submit)
        reply = self.replies.get(submit.request_id)
        n = submit.sampling.n if submit.sampling.HasField("n") else 1
        # Sequence i starts i places later in the circle, so that the sequences can be told apart.
        tokens: dict[int, Iterator[int]] = {
            index: iter(reply) if reply is not None else itertools.cycle(_rotated(submit.token_ids, index))
            for index in range(n)
        }
        self.running[submit.handle] = Running(submit, tokens, dict.fromkeys(range(n), 0))

    def _abort(self, abort: scheduler_pb2.Abort) -> None:
        running = self.running.get(abort.handle)
        if running is None:
            return
        if abort.HasField("index") and len(running.tokens) > 1:
            running.tokens.pop(abort.index, None)
            return
        del self.running[abort.handle]
        self.aborted += 1

    def _step(self, tick: int) -> scheduler_pb2.StepOutput | None:
        if not self.running:
            return None
        output = scheduler_pb2.StepOutput(step=tick)
        for handle, running in list(self.running.items()):
            self._advance(handle, running, output)
        self.steps_with_tokens += bool(output.handles)
        return output

    def _advance(self, handle: int, running: Running, output: scheduler_pb2.StepOutput) -> None:
        submit, sampling = running.submit, running.submit.sampling
        after, error = self.failures.get(submit.request_id, (None, None))
        if after is not None and max(running.produced.values()) >= after:
            output.errors.append(scheduler_pb2.RequestError(handle=handle, error=error))
            del self.running[handle]
            return
        if not running.sent_prompt and sampling.HasField("prompt_logprobs"):
            columns = _columns(submit.token_ids[1:], sampling.prompt_logprobs)
            output.prompt_logprobs.append(scheduler_pb2.PromptLogprobs(handle=handle, columns=columns))
        running.sent_prompt = True
        for index, tokens in list(running.tokens.items()):
            token = next(tokens)
            if sampling.HasField("logprobs"):
                columns = _columns([token], sampling.logprobs)
                output.logprobs.append(scheduler_pb2.RunLogprobs(run=len(output.handles), columns=columns))
            output.handles.append(handle)
            output.indexes.append(index)
            output.counts.append(1)
            output.token_ids.append(token)
            running.produced[index] += 1
            self._maybe_finish(handle, running, index, token, output)
        if not running.tokens:
            del self.running[handle]

    def _maybe_finish(
        self, handle: int, running: Running, index: int, token: int, output: scheduler_pb2.StepOutput
    ) -> None:
        submit, sampling = running.submit, running.submit.sampling
        finished = scheduler_pb2.Finished(handle=handle, index=index)
        if token in sampling.stop_token_ids:
            finished.reason, finished.stop_token_id = common_pb2.FINISH_REASON_STOP, token
        elif token in submit.eos_token_ids and not sampling.ignore_eos:
            finished.reason = common_pb2.FINISH_REASON_STOP
        elif running.produced[index] >= sampling.max_tokens:
            finished.reason = common_pb2.FINISH_REASON_LENGTH
        else:
            return
        del running.tokens[index]
        if not running.tokens:
            finished.request_finished = True
            finished.usage.prompt_tokens = len(submit.token_ids)
            finished.usage.completion_tokens = sum(running.produced.values())
            finished.timings.arrival_unix_ns = 1_000_000_000
            finished.timings.scheduled_unix_ns = 2_000_000_000
            finished.timings.first_token_unix_ns = 3_000_000_000
            finished.timings.finished_unix_ns = 4_000_000_000
        output.finished.append(finished)


def _rotated(token_ids: Any, places: int) -> list[int]:
    ids = list(token_ids)
    places %= len(ids)
    return ids[places:] + ids[:places]


def _columns(token_ids: Any, num_top: int) -> common_pb2.LogprobColumns:
    """The chosen token at -0.5 and impossible alternatives, as top_k=1 makes them."""
    columns = common_pb2.LogprobColumns(num_top=num_top)
    for token_id in token_ids:
        columns.chosen.append(-0.5)
        columns.ranks.append(1)
        for place in range(num_top):
            columns.top_ids.append(token_id + place if token_id < 49000 else token_id - place)
            columns.top_logprobs.append(-0.5 if place == 0 else float("-inf"))
    return columns
