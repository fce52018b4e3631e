"""Who shares which prefix: what comes at once computes it once; a worker whose KV depends on more shares none."""

from __future__ import annotations

import dataclasses
from random import Random

import pytest
from scheduler_fakes import Driver, FakeModel, expected_tokens

from pagemill.sampling_params import SamplingParams
from pagemill.step import SlotFailure, StepPlan, StepResult, WorkerCapacity
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


VOCAB = 997


def driver_of(budget: int, *, depth: int = 2) -> Driver:
    capacity = WorkerCapacity(256, 4, 32, 512, VOCAB, 4096)
    limits = SchedulerLimits(max_num_batched_tokens=budget, max_num_seqs=32)
    return Driver(Scheduler(capacity, limits), FakeModel(capacity), depth)


def prompt_of(length: int, salt: int) -> list[int]:
    return [(7 * i + 13 * salt + 1) % VOCAB for i in range(length)]


def add(driver: Driver, handle: int, prompt: list[int], priority: int = 0) -> None:
    params = SamplingParams(max_tokens=6, seed=5)
    driver.add(NewRequest(handle, prompt, params, priority=priority))


def assert_tokens(driver: Driver, prompts: dict[int, list[int]]) -> None:
    for handle, prompt in prompts.items():
        assert driver.requests[handle].token_ids[0] == expected_tokens(prompt, 5, 6, VOCAB)


@pytest.mark.parametrize("depth", [1, 2])
@pytest.mark.parametrize("budget", [16, 50, 4096])
def test_requests_that_come_at_once_compute_their_prefix_once(budget: int, depth: int) -> None:
    driver = driver_of(budget, depth=depth)
    prompts = {handle: prompt_of(64, 0) + prompt_of(4, 100 + handle) for handle in range(12)}
    for handle, prompt in prompts.items():
        add(driver, handle, prompt)
    driver.run()
    assert_tokens(driver, prompts)
    # The prefix once; of each its own tokens and all output but the last token.
    assert driver.model.num_tokens_computed == 64 + 12 * (4 + 5)


def test_others_need_not_wait_for_those_whose_prefix_is_coming() -> None:
    driver = driver_of(256)
    prompts = {handle: prompt_of(64, 0) + prompt_of(4, 100 + handle) for handle in range(4)}
    prompts |= {handle: prompt_of(20, handle) for handle in range(4, 8)}
    for handle, prompt in prompts.items():
        add(driver, handle, prompt)
    plan = driver.plan_one()
    assert plan is not None
    assert sorted(len(new.token_ids) for new in plan.new_sequences) == [20, 20, 20, 20, 68]
    driver.run()
    assert_tokens(driver, prompts)


def test_a_short_common_beginning_is_not_waited_for() -> None:
    driver = driver_of(4096)
    prompts = {handle: prompt_of(4, 0) + prompt_of(60, 100 + handle) for handle in range(8)}
    for handle, prompt in prompts.items():
        add(driver, handle, prompt)
    plan = driver.plan_one()
    assert plan is not None and len(plan.new_sequences) == 8
    driver.run()
    assert_tokens(driver, prompts)


def test_who_waited_for_a_prefix_computes_it_when_the_other_is_gone() -> None:
    driver = driver_of(16)
    prompts = {handle: prompt_of(64, 0) + prompt_of(4, 100 + handle) for handle in range(3)}
    for handle, prompt in prompts.items():
        add(driver, handle, prompt)
    for _ in range(2):
        driver.step()
    assert driver.scheduler.abort(0)
    driver.run()
    del prompts[0]
    assert_tokens(driver, prompts)
    assert driver.model.num_tokens_computed <= 64 + 16 + 3 * (4 + 5)


def out_of_memory(plan: StepPlan) -> StepResult:
    failures = [SlotFailure(slot, "out of memory") for slot in plan.slots]
    return StepResult(plan.epoch, plan.step, [0] * sum(plan.sample), failures=failures, ran_out_of_memory=True)


def planned(core: Scheduler) -> StepPlan:
    plan = core.schedule()
    assert plan is not None
    return plan


def a_step_that_computes_a_prompt(num_blocks: int = 64) -> tuple[Scheduler, StepPlan]:
    core = Scheduler(dataclasses.replace(CAPACITY, num_blocks=num_blocks), SchedulerLimits(64, 4, 16, 1024, True))
    core.add_request(NewRequest(1, list(range(20)), SamplingParams(max_tokens=4, temperature=0)))
    return core, planned(core)


def cached_tokens_of_a_repeat(core: Scheduler) -> int:
    core.add_request(NewRequest(9, list(range(20)), SamplingParams(max_tokens=4, temperature=0)))
    (new,) = planned(core).new_sequences
    return new.num_computed_tokens


def test_who_began_with_blocks_of_a_step_that_ran_out_of_memory_ends_with_it() -> None:
    core, plan = a_step_that_computes_a_prompt()
    other = NewRequest(3, list(range(50, 70)), SamplingParams(max_tokens=4, temperature=0))
    core.add_request(NewRequest(2, list(range(20)), SamplingParams(max_tokens=4, temperature=0)))
    core.add_request(other)
    following = planned(core)
    assert sorted(new.num_computed_tokens for new in following.new_sequences) == [0, 16]
    (output,) = core.update(out_of_memory(plan)).values()
    assert sorted(failure.handle for failure in output.failures) == [1, 2]
    num_rows = sum(following.sample)
    (output,) = core.update(StepResult(following.epoch, following.step, [7] * num_rows)).values()
    assert (output.handles, output.failures) == ([3], [])
    assert cached_tokens_of_a_repeat(core) == 0
    core.check_integrity()


def test_nothing_is_cached_of_an_aborted_request_whose_step_ran_out_of_memory() -> None:
    core, plan = a_step_that_computes_a_prompt()
    assert core.abort(1)
    core.update(out_of_memory(plan))
    assert cached_tokens_of_a_repeat(core) == 0


def test_nothing_is_cached_of_an_evicted_request_whose_step_ran_out_of_memory() -> None:
    core, plan = a_step_that_computes_a_prompt(num_blocks=8)
    urgent = NewRequest(2, list(range(50, 70)), SamplingParams(max_tokens=4, temperature=0), priority=-1)
    core.add_request(urgent)
    core.schedule()
    assert core.counters.preemptions == 1
    core.update(out_of_memory(plan))
    core.abort(2)
    assert cached_tokens_of_a_repeat(core) == 0


def test_a_cached_prefix_survives_the_failure_of_a_later_step() -> None:
    core, plan = a_step_that_computes_a_prompt()
    core.update(StepResult(plan.epoch, plan.step, [7]))
    core.add_request(NewRequest(2, list(range(20)), SamplingParams(max_tokens=4, temperature=0)))
    failing = planned(core)
    core.add_request(NewRequest(3, list(range(20)), SamplingParams(max_tokens=4, temperature=0)))
    following = planned(core)
    (output,) = core.update(out_of_memory(failing)).values()
    assert sorted(failure.handle for failure in output.failures) == [1, 2]
    (output,) = core.update(StepResult(following.epoch, following.step, [7] * sum(following.sample))).values()
    assert output.handles == [3]


@dataclasses.dataclass
class ExhaustedModel(FakeModel):
    """Some of its steps run out of memory and leave in their blocks what nobody computed."""

    random: Random = dataclasses.field(default_factory=Random)

    def execute(self, plan: StepPlan) -> StepResult:
        result = super().execute(plan)
        if self.random.random() > 0.05:
            return result
        for slot, count in zip(plan.slots, plan.num_tokens, strict=True):
            state, size = self.slots[slot], self.capacity.block_size
            for position in range(state.num_computed - count, state.num_computed):
                self.kv[state.block_ids[position // size]][position % size] = -self.random.randrange(1, 1 << 40)
        return out_of_memory(plan)


@pytest.mark.parametrize("seed", range(24))
def test_steps_that_run_out_of_memory_spoil_no_answer_of_others(seed: int) -> None:
    random = Random(seed)
    capacity = WorkerCapacity(random.choice([24, 60]), 4, random.choice([4, 8]), 96, VOCAB, 64)
    core = Scheduler(capacity, SchedulerLimits(random.choice([8, 24, 64]), 8))
    driver = Driver(core, ExhaustedModel(capacity, random=random), depth=random.choice([1, 2, 3]))
    prefixes = [prompt_of(40, 0), prompt_of(40, 1)]
    prompts: dict[int, list[int]] = {}
    while len(prompts) < 14 or core.num_requests:
        if len(prompts) < 14 and random.random() < 0.7:
            handle, shared = len(prompts), random.randrange(1, 40)
            prompts[handle] = random.choice(prefixes)[:shared] + prompt_of(random.randrange(1, 6), 50 + handle)
            params = SamplingParams(max_tokens=random.randrange(1, 24), seed=handle)
            driver.add(NewRequest(handle, prompts[handle], params, priority=random.choice([0, 0, -1])))
        if prompts and random.random() < 0.08:
            core.abort(random.choice(list(prompts)))
        driver.step()
    driver.run()
    for handle, prompt in prompts.items():
        for token_ids in driver.requests[handle].token_ids.values():
            assert token_ids == expected_tokens(prompt, handle, len(token_ids), VOCAB)
