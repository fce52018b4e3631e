"""The scheduler core: which tokens of which sequences run in each step. Pure: no threads, no gRPC, no model.

`schedule` plans a step, a worker executes it, `update` takes its result. Steps may overlap: `schedule` plans ahead
while results are outstanding, with tokens in flight counted as known. One thread owns a core.
"""

from __future__ import annotations

import dataclasses
import heapq
import secrets
import time
from collections import Counter, deque
from collections.abc import Callable, Hashable
from dataclasses import dataclass, field

from pagemill.errors import (
    AbortedError,
    DeadlineError,
    DesyncError,
    DuplicateRequestError,
    NumericalError,
    OverloadedError,
    PagemillError,
)
from pagemill.step import PromptChunkLogprobs, StepPlan, StepResult, WorkerCapacity
from scheduler.admission import SchedulerLimits, check_request, longest_sequence
from scheduler.block_manager import BlockManager
from scheduler.output_collector import NullObserver, OutputCollector, SchedulerObserver
from scheduler.planner import StepPlanner
from scheduler.sequence import (
    FinishedSequence,
    FinishReason,
    NewRequest,
    Request,
    RequestFailure,
    Sequence,
    SequenceState,
    StepOutputs,
)

RETRY_AFTER_MS = 1000
_FINISHED = SequenceState.FINISHED
# What was running somewhere before may exceed the queue bounds, by this factor at most: overload must not end streams.
_RESUMED_QUEUE_FACTOR = 2


@dataclass(slots=True)
class SchedulerCounters:
    """Totals since the core was built."""

    steps: int = 0
    preemptions: int = 0
    prefix_cache_hit_tokens: int = 0
    prefix_cache_query_tokens: int = 0
    aborted: int = 0
    failed: int = 0
    finished: Counter[FinishReason] = field(default_factory=Counter)


class Scheduler:
    """Continuous batching for one worker.

    Args:
        capacity: what the worker can hold.
        limits: bounds of this scheduler.
        epoch: number that all plans carry.
        observer: told about first tokens and ends.
        clock_unix_ns: Unix time in nanoseconds, for deadlines and timings.
    """

    def __init__(
        self,
        capacity: WorkerCapacity,
        limits: SchedulerLimits,
        *,
        epoch: int = 0,
        observer: SchedulerObserver | None = None,
        clock_unix_ns: Callable[[], int] = time.time_ns,
    ) -> None:
        self.capacity = capacity
        self.limits = limits
        self.epoch = epoch
        self.counters = SchedulerCounters()
        self.blocks = BlockManager(capacity.num_blocks, capacity.block_size)
        self._clock = clock_unix_ns
        self._observer = observer or NullObserver()
        self._planner = StepPlanner(capacity, limits, self.blocks, self.counters)
        self._outputs = OutputCollector()
        self._requests: dict[tuple[Hashable, int], Request] = {}
        self._num_accepted = 0
        self._deadlines: list[tuple[int, int, Request]] = []
        self._in_flight: deque[tuple[int, list[Sequence]]] = deque()
        self._next_step = 0

    # What is going on.

    @property
    def num_running(self) -> int:
        """Sequences in slots."""
        return self._planner.num_running

    @property
    def num_waiting(self) -> int:
        """Sequences that wait for a slot."""
        return self._planner.num_waiting

    @property
    def num_requests(self) -> int:
        """Requests that have not ended."""
        return len(self._requests)

    @property
    def num_in_flight(self) -> int:
        """Steps planned whose results are not back."""
        return len(self._in_flight)

    @property
    def has_outputs(self) -> bool:
        """Something happened outside a step (an abort, an expired deadline) that `take_outputs` would return."""
        return bool(self._outputs)

    # Requests in and out.

    def add_request(self, new: NewRequest) -> None:
        """Take in a request.

        Raises:
            InvalidRequestError, ContextLengthError: it can never run here.
            DuplicateRequestError: the owner has a live request of this handle.
            OverloadedError: the queue is full; `retry_after_ms` is set.
        """
        check_request(new, self.capacity)
        if (new.owner, new.handle) in self._requests:
            raise DuplicateRequestError(f"request {new.handle} is running already", field="handle")
        self._check_queue(new)
        if new.params.seed is None:
            new = dataclasses.replace(new, params=dataclasses.replace(new.params, seed=secrets.randbits(63)))
        request = Request(new, self._num_accepted, self._clock())
        self._num_accepted += 1
        longest = longest_sequence(self.capacity)
        for sequence in request.sequences:
            sequence.limit = min(request.num_prompt_tokens + new.params.max_tokens, longest)
        self._requests[request.key] = request
        if request.deadline_unix_ns:
            self._note_deadline(request)
        if request.prompt_logprobs is not None and request.num_prompt_tokens == 1:
            # A first token has no log-probability: complete before it starts.
            self._outputs.of(request.owner).prompt_logprobs.append((request.handle, request.prompt_logprobs))
            request.prompt_logprobs = None
        self._planner.add(request)
        # Tokens delivered before a loss may already end a sequence whose end got lost.
        for sequence in request.live_sequences():
            if sequence.num_output_tokens:
                self._finish_if_ended(sequence, sequence.token_ids[-1])
        if not request.live_sequences() and request.key in self._requests:
            # Every sequence was reported finished before, but the end of the request may not have been.
            last = request.sequences[-1]
            reason = FinishReason.LENGTH if len(last.token_ids) >= last.limit else FinishReason.STOP
            self._report_finished(last, reason, None)
        self._planner.start(request, self._next_step)

    def _check_queue(self, new: NewRequest) -> None:
        factor = _RESUMED_QUEUE_FACTOR if new.delivered or new.arrival_unix_ns else 1
        num_requests, num_tokens = self._planner.num_queued_requests, self._planner.num_queued_tokens
        if num_requests >= self.limits.max_queued_requests * factor:
            raise OverloadedError(f"{num_requests} requests are waiting", retry_after_ms=RETRY_AFTER_MS)
        if num_requests and num_tokens + len(new.token_ids) > self.limits.max_queued_tokens * factor:
            raise OverloadedError(f"{num_tokens} prompt tokens are waiting", retry_after_ms=RETRY_AFTER_MS)

    def abort(self, handle: int, index: int | None = None, *, owner: Hashable = None) -> bool:
        """End a request, or one of its sequences, and free what it holds. False where there is no such live one."""
        request = self._requests.get((owner, handle))
        if request is None:
            return False
        live = [s for s in request.live_sequences() if index is None or s.index == index]
        if live:
            self.counters.aborted += len(live) == len(request.live_sequences())
        for sequence in live:
            self._finish(sequence, FinishReason.ABORT, None)
        return bool(live)

    def abort_owner(self, owner: Hashable) -> int:
        """End all requests of an owner that is gone. Returns how many; reports nothing."""
        requests = [r for r in self._requests.values() if r.owner == owner]
        for request in requests:
            self.counters.aborted += 1
            self._count_unfinished(request, FinishReason.ABORT)
            self._end_request(request)
            self._observer.request_ended(request, AbortedError.grpc_code)
        return len(requests)

    def export_requests(self) -> list[NewRequest]:
        """All live requests as another core takes them in. This core is not to be used any more."""
        return [request.export() for request in self._requests.values()]

    # A step.

    def schedule(self) -> StepPlan | None:
        """Plan the next step. None where nothing can run before a result or a request comes in."""
        self._expire_deadlines()
        plan = StepPlan(self.epoch, self._next_step)
        rows = self._planner.plan(plan, self._clock)
        if not plan.slots:
            return None
        self._in_flight.append((plan.step, rows))
        self._next_step += 1
        self.counters.steps += 1
        return plan

    def update(self, result: StepResult) -> StepOutputs:
        """Take the result of the oldest step in flight and return what is new, per owner.

        Raises:
            DesyncError: the result is not that of the oldest step in flight; the core is unchanged.
        """
        rows = self._rows_of(result)
        self._in_flight.popleft()
        if result.failures:
            self._fail_rows(result)
        for chunk in result.prompt_logprobs:
            self._take_prompt_logprobs(chunk)
        dropped: set[Sequence] = set()
        num_first = 0
        for sequence, token in zip(rows, result.sampled_token_ids, strict=True):
            token_ids = sequence.token_ids
            if len(token_ids) < sequence.event_at and token not in sequence.ending_ids:
                token_ids.append(token)
            elif sequence.state is _FINISHED:
                dropped.add(sequence)
            else:
                num_first += sequence.num_output_tokens == 0
                token_ids.append(token)
                self._look_at(sequence, token)
        self._outputs.add_tokens(rows, result, dropped)
        if rows:
            self._observer.tokens(len(rows) - len(dropped) - num_first)
        self._planner.result_is_back(result.step)
        return self._outputs.take()

    def _fail_rows(self, result: StepResult) -> None:
        messages = {failure.slot: failure.message for failure in result.failures}
        for slot, sequence in self._planner.distrust(messages).items():
            if sequence.state is _FINISHED:
                continue
            if result.ran_out_of_memory:
                # Nothing was computed: who began with blocks of that step cannot go on either.
                message = messages.get(slot, "out of memory in the step that computed a shared prefix")
                self._fail(sequence.request, PagemillError(message))
            elif slot in messages:
                # NaN goes to who shares it, and fails its rows in turn.
                self._fail(sequence.request, NumericalError(messages[slot] or "the model produced NaN logits"))

    def take_outputs(self) -> StepOutputs:
        """What happened outside steps."""
        return self._outputs.take()

    def _rows_of(self, result: StepResult) -> list[Sequence]:
        if not self._in_flight:
            raise DesyncError(f"a result of step {result.step} came while no step is in flight")
        step, rows = self._in_flight[0]
        if (result.epoch, result.step) != (self.epoch, step):
            raise DesyncError(
                f"expected the result of step {step} of epoch {self.epoch}, got step {result.step} of {result.epoch}"
            )
        if len(result.sampled_token_ids) != len(rows):
            raise DesyncError(
                f"step {step} samples {len(rows)} rows, its result has {len(result.sampled_token_ids)} tokens"
            )
        return rows

    def _look_at(self, sequence: Sequence, token: int) -> None:
        """A token that may be the first, the last, one that fills a block, or that of an evicted sequence."""
        request = sequence.request
        if request.first_token_unix_ns == 0:
            request.first_token_unix_ns = self._clock()
            self._observer.first_token(request)
        if self._finish_if_ended(sequence, token):
            return
        self._planner.token_came_back(sequence, self._next_step)

    def _finish_if_ended(self, sequence: Sequence, token: int) -> bool:
        """Apply the stop rules to the last known token."""
        request = sequence.request
        if token in sequence.ending_ids and sequence.num_output_tokens > request.params.min_tokens:
            # A model's own end-of-sequence id is no stop reason that a client named.
            named = token if token in request.stop_token_ids else None
            self._finish(sequence, FinishReason.STOP, named)
        elif len(sequence.token_ids) >= sequence.limit:
            self._finish(sequence, FinishReason.LENGTH, None)
        else:
            return False
        return True

    # Ends.

    def _finish(self, sequence: Sequence, reason: FinishReason, stop_token_id: int | None) -> None:
        self._planner.keep_cached(sequence)
        self._planner.remove(sequence, self._next_step)
        self._report_finished(sequence, reason, stop_token_id)

    def _report_finished(self, sequence: Sequence, reason: FinishReason, stop_token_id: int | None) -> None:
        request = sequence.request
        finished = FinishedSequence(request.handle, sequence.index, reason, stop_token_id)
        self.counters.finished[reason] += 1
        self._observer.sequence_finished(reason)
        if not request.live_sequences():
            self._end_request(request)
            finished.usage = request.usage()
            finished.timings = request.timings()
            self._observer.request_ended(request, 0)
        self._outputs.of(request.owner).finished.append(finished)

    def _fail(self, request: Request, error: PagemillError) -> None:
        self._count_unfinished(request, FinishReason.ERROR)
        self._end_request(request)
        self.counters.failed += 1
        self._observer.request_ended(request, error.grpc_code)
        self._outputs.of(request.owner).failures.append(RequestFailure(request.handle, error, request.timings()))

    def _count_unfinished(self, request: Request, reason: FinishReason) -> None:
        for _ in request.live_sequences():
            self.counters.finished[reason] += 1
            self._observer.sequence_finished(reason)

    def _end_request(self, request: Request) -> None:
        request.finished_unix_ns = self._clock()
        for sequence in request.live_sequences():
            self._planner.discard(sequence)
        self._planner.forget(request)
        del self._requests[request.key]

    def _note_deadline(self, request: Request) -> None:
        if len(self._deadlines) > 64 + 2 * len(self._requests):
            # Most requests end long before their deadline.
            self._deadlines = [entry for entry in self._deadlines if self._requests.get(entry[2].key) is entry[2]]
            heapq.heapify(self._deadlines)
        heapq.heappush(self._deadlines, (request.deadline_unix_ns, request.number, request))

    def _expire_deadlines(self) -> None:
        if not self._deadlines:
            return
        now = self._clock()
        while self._deadlines and self._deadlines[0][0] <= now:
            _, _, request = heapq.heappop(self._deadlines)
            if self._requests.get(request.key) is request:
                self._fail(request, DeadlineError("the request's deadline passed"))

    def _take_prompt_logprobs(self, chunk: PromptChunkLogprobs) -> None:
        sequence = self._planner.at_slot(chunk.slot)
        request = sequence.request if sequence is not None else None
        if request is None or request.prompt_logprobs is None or request.key not in self._requests:
            return
        got = request.prompt_logprobs
        # After a preemption the prompt is computed again: skip what is known.
        known = len(got.chosen) + 1 - chunk.first_position
        if known < 0:
            raise DesyncError(f"prompt log-probabilities of request {request.handle} have a gap")
        new, num_top = chunk.logprobs, chunk.logprobs.num_top
        got.num_top = num_top
        got.chosen += new.chosen[known:]
        got.ranks += new.ranks[known:]
        got.top_ids += new.top_ids[known * num_top :]
        got.top_logprobs += new.top_logprobs[known * num_top :]
        if len(got.chosen) >= request.num_prompt_tokens - 1:
            request.prompt_logprobs = None
            self._outputs.of(request.owner).prompt_logprobs.append((request.handle, got))

    def check_integrity(self) -> None:
        """Prove that every block reference is owned by a live sequence and that idle means empty.

        Raises PagemillError naming the first contradiction.
        """
        self._planner.check_integrity(self._requests.values())
