"""A scheduler core and a runner in one loop, with so many steps in flight: the offline engine without text."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field, replace

from pagemill.sampling_params import SamplingParams
from pagemill.step import StepResult
from scheduler.admission import SchedulerLimits
from scheduler.scheduler import Scheduler
from scheduler.sequence import FinishReason, NewRequest
from worker.model_runner import ModelRunner
from worker.pending_step import PendingStep

EOS = 2


@dataclass(slots=True)
class Outcome:
    """What became of the requests.

    Attributes:
        token_ids: by (request, index of the sequence).
        gaps: of the same, between the two best log-probabilities, where the request asked for two.
        reasons: by (request, index).
        failures: messages by request.
        preemptions: how often a sequence lost its blocks.
    """

    token_ids: dict[tuple[int, int], list[int]] = field(default_factory=dict)
    gaps: dict[tuple[int, int], list[float]] = field(default_factory=dict)
    reasons: dict[tuple[int, int], FinishReason] = field(default_factory=dict)
    failures: dict[int, str] = field(default_factory=dict)
    preemptions: int = 0
    results: list[StepResult] = field(default_factory=list)


def serve(
    runner: ModelRunner,
    requests: list[tuple[list[int], SamplingParams]],
    *,
    steps_in_flight: int,
    num_blocks: int | None = None,
    budget: int | None = None,
    aborts: dict[int, int] | None = None,
    urgent: dict[int, int] | None = None,
) -> Outcome:
    """Run requests to their end.

    Args:
        requests: prompt and parameters of each.
        num_blocks: of the pool, at most the runner's; None is all.
        budget: tokens of a step; None is what the runner holds.
        aborts: after how many results a request is aborted, by request.
        urgent: after how many results a request comes that goes before all others, by request.
    """
    late = dict(urgent or {})
    capacity = replace(runner.capacity, num_blocks=num_blocks or runner.capacity.num_blocks)
    limits = SchedulerLimits(
        max_num_batched_tokens=budget or capacity.max_step_tokens,
        max_num_seqs=capacity.num_slots,
        max_queued_requests=1 << 20,
        max_queued_tokens=1 << 30,
        enable_prefix_caching=True,
    )
    core = Scheduler(capacity, limits, epoch=1)
    runner.begin_epoch(1)
    for handle, (prompt, params) in enumerate(requests):
        if handle not in late:
            core.add_request(NewRequest(handle, prompt, params, [EOS]))
    outcome, in_flight = Outcome(), deque[PendingStep]()
    while core.num_requests or in_flight or late:
        for handle in [h for h, after in late.items() if after <= len(outcome.results) or not core.num_requests]:
            del late[handle]
            core.add_request(NewRequest(handle, *requests[handle], [EOS], priority=-1))
        while len(in_flight) < steps_in_flight and (plan := core.schedule()) is not None:
            in_flight.append(runner.launch(plan))
        outputs = {}
        if in_flight:
            outcome.results.append(in_flight.popleft().result())
            outputs = core.update(outcome.results[-1])
        elif core.has_outputs:
            outputs = core.take_outputs()
        for handle, after in (aborts or {}).items():
            if len(outcome.results) == after:
                core.abort(handle)
        for output in outputs.values():
            for position, handle in enumerate(output.handles):
                key = handle, output.indexes[position]
                outcome.token_ids.setdefault(key, []).append(output.token_ids[position])
                run = output.logprobs.get(position)
                if run is not None and run.num_top == 2:
                    outcome.gaps.setdefault(key, []).append(run.top_logprobs[0] - run.top_logprobs[1])
            for finished in output.finished:
                outcome.reasons[finished.handle, finished.index] = finished.reason
            for failure in output.failures:
                outcome.failures[failure.handle] = failure.error.message
        assert len(outcome.results) < 10_000
    core.check_integrity()
    outcome.preemptions = core.counters.preemptions
    return outcome


def assert_same(actual: Outcome, expected: Outcome, *, without: frozenset[int] = frozenset()) -> None:
    """Ids and reasons are equal, up to positions where the two best tokens are within 1e-4.

    Args:
        without: aborted requests, of which one outcome may have more tokens than the other.
    """
    assert actual.failures == expected.failures
    for key, ids in expected.token_ids.items():
        got, gaps = actual.token_ids.get(key, []), expected.gaps.get(key, [])
        length = min(len(got), len(ids)) if key[0] in without else max(len(got), len(ids))
        differs = [i for i in range(length) if got[i : i + 1] != ids[i : i + 1]]
        if differs:
            assert len(gaps) > differs[0] and gaps[differs[0]] < 1e-4, f"{key}: {got} for {ids}, gaps {gaps}"
        elif key[0] not in without:
            assert actual.reasons[key] == expected.reasons[key]
