"""Between the router's records and the messages of `Scheduler.Session`: the one translation on this edge."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field, replace

from pagemill.errors import PagemillError, from_grpc
from pagemill.sampling_params import SamplingParams, to_proto
from pagemill.step import TokenLogprobs
from pagemill.v1 import common_pb2, scheduler_pb2
from router.generation import FinishReason, Timings, Usage

_FINISH_REASONS: dict[int, FinishReason] = {
    common_pb2.FINISH_REASON_STOP: "stop",
    common_pb2.FINISH_REASON_LENGTH: "length",
    common_pb2.FINISH_REASON_ABORT: "abort",
    common_pb2.FINISH_REASON_ERROR: "error",
}
FINISH_REASON_NUMBERS = {name: number for number, name in _FINISH_REASONS.items()}


@dataclass(slots=True, frozen=True)
class SchedulerRequest:
    """One request as a scheduler gets it, whichever scheduler that is."""

    request_id: str
    token_ids: list[int]
    sampling: SamplingParams
    eos_token_ids: list[int]
    priority: int = 0
    deadline_unix_ns: int = 0
    cache_salt: bytes = b""
    traceparent: str = ""
    tenant: str = ""


@dataclass(slots=True)
class TokenRun:
    """New tokens of one sequence."""

    token_ids: list[int] = field(default_factory=list)
    logprobs: TokenLogprobs | None = None


@dataclass(slots=True, frozen=True)
class SequenceEnd:
    """How one sequence ended."""

    reason: FinishReason
    stop_token_id: int | None = None


@dataclass(slots=True)
class RequestUpdate:
    """What one or more steps brought for one request. Merging two in order loses nothing."""

    runs: dict[int, TokenRun] = field(default_factory=dict)  # by sequence index
    ends: dict[int, SequenceEnd] = field(default_factory=dict)
    usage: Usage | None = None  # set once the request finished
    timings: Timings | None = None
    prompt_logprobs: TokenLogprobs | None = None
    error: PagemillError | None = None

    @property
    def weight(self) -> int:
        """Size in numbers held: what bounds a buffer."""
        weight = 0
        for run in self.runs.values():
            weight += len(run.token_ids)
            if run.logprobs is not None:
                weight += len(run.logprobs.top_ids)
        return weight

    def add_run(self, index: int, token_ids: list[int], logprobs: TokenLogprobs | None) -> None:
        """Append tokens of one sequence."""
        run = self.runs.get(index)
        if run is None:
            self.runs[index] = TokenRun(token_ids, logprobs)
            return
        run.token_ids += token_ids
        if logprobs is not None:
            if run.logprobs is None:
                run.logprobs = logprobs
            else:
                run.logprobs.extend(logprobs)

    def merge(self, later: RequestUpdate) -> None:
        """Append what came after this."""
        for index, run in later.runs.items():
            self.add_run(index, run.token_ids, run.logprobs)
        self.ends.update(later.ends)
        self.usage = later.usage or self.usage
        self.timings = later.timings or self.timings
        self.prompt_logprobs = later.prompt_logprobs or self.prompt_logprobs
        self.error = later.error or self.error


@dataclass(slots=True, frozen=True)
class DeliveredSequence:
    """Output that one sequence already delivered to the client."""

    index: int
    token_ids: list[int]
    finished: bool


def submit_message(
    handle: int, request: SchedulerRequest, delivered: Iterable[DeliveredSequence]
) -> scheduler_pb2.RouterMessage:
    """The Submit of a request; stop strings stay here, the scheduler does not know text."""
    return scheduler_pb2.RouterMessage(
        submit=scheduler_pb2.Submit(
            handle=handle,
            request_id=request.request_id,
            token_ids=request.token_ids,
            sampling=to_proto(replace(request.sampling, stop=None)),
            eos_token_ids=request.eos_token_ids,
            priority=request.priority,
            deadline_unix_ns=request.deadline_unix_ns,
            cache_salt=request.cache_salt,
            traceparent=request.traceparent,
            tenant=request.tenant,
            delivered=[
                scheduler_pb2.DeliveredTokens(index=d.index, token_ids=d.token_ids, finished=d.finished)
                for d in delivered
            ],
        )
    )


def abort_message(handle: int, index: int | None = None) -> scheduler_pb2.RouterMessage:
    """End a request, or one of its sequences."""
    return scheduler_pb2.RouterMessage(abort=scheduler_pb2.Abort(handle=handle, index=index))


def hello_message(router_id: str, version: str) -> scheduler_pb2.RouterMessage:
    """The first message of a session."""
    return scheduler_pb2.RouterMessage(hello=scheduler_pb2.RouterHello(router_id=router_id, version=version))


def read_logprobs(columns: common_pb2.LogprobColumns) -> TokenLogprobs:
    """Columns of a message as a record."""
    return TokenLogprobs(
        list(columns.chosen),
        list(columns.ranks),
        columns.num_top,
        list(columns.top_ids),
        list(columns.top_logprobs),
    )


def write_logprobs(logprobs: TokenLogprobs) -> common_pb2.LogprobColumns:
    """A record as columns of a message."""
    return common_pb2.LogprobColumns(
        chosen=logprobs.chosen,
        ranks=logprobs.ranks,
        num_top=logprobs.num_top,
        top_ids=logprobs.top_ids,
        top_logprobs=logprobs.top_logprobs,
    )


def read_output(output: scheduler_pb2.StepOutput) -> dict[int, RequestUpdate]:
    """A step's output by handle.

    Raises:
        ValueError: the columns do not fit together.
    """
    updates: dict[int, RequestUpdate] = {}

    def update_of(handle: int) -> RequestUpdate:
        found = updates.get(handle)
        if found is None:
            found = updates[handle] = RequestUpdate()
        return found

    counts, token_ids = list(output.counts), list(output.token_ids)
    if sum(counts) != len(token_ids) or not len(output.handles) == len(output.indexes) == len(counts):
        raise ValueError("columns of a step output differ in length")
    logprobs = {run.run: read_logprobs(run.columns) for run in output.logprobs}
    start = 0
    for position, (handle, index, count) in enumerate(zip(output.handles, output.indexes, counts, strict=True)):
        run_ids = token_ids[start : start + count]
        start += count
        columns = logprobs.get(position) if logprobs else None
        update = updates.get(handle)
        if update is None:
            updates[handle] = RequestUpdate({index: TokenRun(run_ids, columns)})
        else:
            update.add_run(index, run_ids, columns)
    for prompt in output.prompt_logprobs:
        update_of(prompt.handle).prompt_logprobs = read_logprobs(prompt.columns)
    for end in output.finished:
        update = update_of(end.handle)
        stop_id = end.stop_token_id if end.HasField("stop_token_id") else None
        update.ends[end.index] = SequenceEnd(_FINISH_REASONS.get(end.reason, "error"), stop_id)
        if end.request_finished:
            update.usage, update.timings = _usage(end.usage), _timings(end.timings)
    for failed in output.errors:
        error = failed.error
        update_of(failed.handle).error = from_grpc(
            error.code, error.message, field=error.field, retry_after_ms=error.retry_after_ms
        )
    return updates


def _usage(usage: common_pb2.Usage) -> Usage:
    return Usage(usage.prompt_tokens, usage.cached_tokens, usage.completion_tokens)


def _timings(timings: common_pb2.Timings) -> Timings:
    return Timings(
        timings.arrival_unix_ns, timings.scheduled_unix_ns, timings.first_token_unix_ns, timings.finished_unix_ns
    )
