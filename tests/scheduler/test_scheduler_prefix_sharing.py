"""A worker whose KV depends on more than the prefix shares none of it."""

from __future__ import annotations

import dataclasses

import pytest

from pagemill.sampling_params import SamplingParams
from pagemill.step import StepResult, WorkerCapacity
from scheduler.admission import SchedulerLimits
from scheduler.scheduler import Scheduler
from scheduler.sequence import NewRequest

CAPACITY = WorkerCapacity(
    num_blocks=32, block_size=4, num_slots=4, max_model_len=64, vocab_size=100, max_step_tokens=64
)


def hit_tokens_of_a_repeat(capacity: WorkerCapacity) -> int:
    core = Scheduler(capacity, SchedulerLimits(64, 4, 16, 1024, True))
    for handle in (1, 2):
        core.add_request(NewRequest(handle, list(range(20)), SamplingParams(max_tokens=1, temperature=0)))
        plan = core.schedule()
        assert plan is not None
        core.update(StepResult(plan.epoch, plan.step, sampled_token_ids=[7] * sum(plan.sample)))
    core.check_integrity()
    return core.counters.prefix_cache_hit_tokens


@pytest.mark.parametrize("shares_prefixes", [True, False])
def test_prefixes_are_shared_where_their_kv_is_equal(shares_prefixes: bool) -> None:
    hits = hit_tokens_of_a_repeat(dataclasses.replace(CAPACITY, shares_prefixes=shares_prefixes))
    assert bool(hits) == shares_prefixes
