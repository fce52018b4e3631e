"""The scheduler core on a deterministic model: same tokens whatever the budget, blocks, evictions, neighbours."""

from __future__ import annotations

import pytest
from scheduler_fakes import Collected, Driver, FakeModel, expected_tokens

from pagemill.errors import (
    ContextLengthError,
    DeadlineError,
    DesyncError,
    DuplicateRequestError,
    InvalidRequestError,
    NumericalError,
    OverloadedError,
)
from pagemill.sampling_params import SamplingParams, sequence_seed
from pagemill.step import StepResult, WorkerCapacity
from scheduler.admission import SchedulerLimits
from scheduler.scheduler import Scheduler
from scheduler.sequence import DeliveredTokens, FinishReason, NewRequest

VOCAB = 997
# An end-of-sequence id that is never sampled: the scheduler cannot know how long such an output gets.
NEVER = VOCAB


class Clock:
    def __init__(self) -> None:
        self.now_ns = 1_000

    def __call__(self) -> int:
        return self.now_ns


def make(
    *,
    num_blocks: int = 64,
    block_size: int = 4,
    num_slots: int = 64,
    max_model_len: int = 4096,
    max_step_tokens: int = 8192,
    depth: int = 2,
    clock: Clock | None = None,
    **limits: int | bool,
) -> Driver:
    capacity = WorkerCapacity(num_blocks, block_size, num_slots, max_model_len, VOCAB, max_step_tokens)
    scheduler = Scheduler(capacity, SchedulerLimits(**limits), clock_unix_ns=clock or Clock())  # type: ignore[arg-type]
    return Driver(scheduler, FakeModel(capacity), depth)


def prompt_of(length: int, salt: int = 0) -> list[int]:
    return [(7 * i + 13 * salt + 1) % VOCAB for i in range(length)]


def request(handle: int, prompt: list[int], max_tokens: int = 8, seed: int = 5, **options: object) -> NewRequest:
    sampling = {k: options.pop(k) for k in list(options) if k in SamplingParams.__dataclass_fields__}
    params = SamplingParams(max_tokens=max_tokens, seed=seed, **sampling)  # type: ignore[arg-type]
    return NewRequest(handle, prompt, params, **options)  # type: ignore[arg-type]


def solo(prompt: list[int], max_tokens: int, seed: int = 5, index: int = 0) -> list[int]:
    return expected_tokens(prompt, sequence_seed(seed, index), max_tokens, VOCAB)


@pytest.mark.parametrize("depth", [1, 2, 3])
@pytest.mark.parametrize("block_size", [1, 4, 16])
@pytest.mark.parametrize("budget", [1, 5, 64])
def test_output_depends_on_neither_budget_nor_block_size_nor_steps_in_flight(depth, block_size, budget) -> None:
    driver = make(num_blocks=512, block_size=block_size, depth=depth, max_num_batched_tokens=budget)
    prompts = [prompt_of(n, n) for n in (1, 3, 16, 17, 40)]
    outputs = [driver.add(request(h, p)) for h, p in enumerate(prompts)]
    driver.run()
    for prompt, output in zip(prompts, outputs, strict=True):
        assert output.token_ids[0] == solo(prompt, 8)
        assert output.reasons == {0: FinishReason.LENGTH}
        assert output.usage is not None and output.usage.completion_tokens == 8
        assert output.usage.prompt_tokens == len(prompt)


def test_64_streams_at_once_leave_nothing_behind() -> None:
    driver = make(num_blocks=400, max_num_seqs=32, max_num_batched_tokens=128)
    outputs = [driver.add(request(h, prompt_of(5 + h % 30, h), max_tokens=1 + h % 23)) for h in range(64)]
    driver.run()
    for h, output in enumerate(outputs):
        assert output.token_ids[0] == solo(prompt_of(5 + h % 30, h), 1 + h % 23)


def test_px04_a_fully_cached_prompt_computes_its_last_token_again_and_hits_the_rest() -> None:
    driver = make(block_size=4)
    prompt = prompt_of(4 * 4)
    for handle in range(3):
        output = driver.add(request(handle, prompt))
        driver.run()
        assert output.token_ids[0] == solo(prompt, 8)
        assert output.usage is not None and output.usage.cached_tokens == (0 if handle == 0 else 12)
    longer = prompt + prompt_of(4, salt=9)
    output = driver.add(request(3, longer))
    driver.run()
    assert output.token_ids[0] == solo(longer, 8)
    assert output.usage is not None and output.usage.cached_tokens == 16


def test_another_salt_shares_no_blocks() -> None:
    driver = make()
    for handle, salt in enumerate([b"a", b"b", b"a"]):
        output = driver.add(request(handle, prompt_of(16), cache_salt=salt))
        driver.run()
        assert output.usage is not None and output.usage.cached_tokens == (12 if handle == 2 else 0)


def test_output_tokens_are_cached_too_for_the_next_turn_of_a_conversation() -> None:
    driver = make()
    first = driver.add(request(0, prompt_of(10), max_tokens=15))
    driver.run()
    history = prompt_of(10) + first.token_ids[0]
    second = driver.add(request(1, [*history, 5, 6]))
    driver.run()
    assert second.usage is not None and second.usage.cached_tokens == 24
    assert second.token_ids[0] == solo([*history, 5, 6], 8)


def test_without_prefix_caching_nothing_is_shared() -> None:
    driver = make(enable_prefix_caching=False)
    for handle in range(2):
        output = driver.add(request(handle, prompt_of(16)))
        driver.run()
        assert output.usage is not None and output.usage.cached_tokens == 0
    assert driver.scheduler.counters.prefix_cache_query_tokens == 0


def pr01(n: int, *, caching: bool, depth: int) -> Driver:
    """16 long requests of which the pool holds about 60%."""
    driver = make(num_blocks=96, block_size=4, depth=depth, enable_prefix_caching=caching, max_num_batched_tokens=64)
    outputs: dict[int, Collected] = {}
    for handle in range(16):
        outputs[handle] = driver.add(request(handle, prompt_of(8, handle), max_tokens=32, n=n, eos_token_ids=[NEVER]))
    driver.run()
    assert driver.scheduler.counters.preemptions > 0
    for handle, output in outputs.items():
        assert output.error is None
        for index in range(n):
            assert output.token_ids[index] == solo(prompt_of(8, handle), 32, index=index)
        assert output.usage is not None
        assert (output.usage.prompt_tokens, output.usage.completion_tokens) == (8, 32 * n)
    return driver


@pytest.mark.parametrize("depth", [1, 2])
@pytest.mark.parametrize("caching", [True, False])
def test_pr01_evicted_requests_end_with_the_tokens_of_their_solo_run(caching, depth) -> None:
    pr01(1, caching=caching, depth=depth)


@pytest.mark.parametrize("depth", [1, 2])
@pytest.mark.parametrize("caching", [True, False])
def test_pr03_all_choices_of_n_5_complete_despite_evictions(caching, depth) -> None:
    pr01(5, caching=caching, depth=depth)


@pytest.mark.parametrize("depth", [1, 2, 3])
def test_who_could_not_stay_to_the_end_does_not_enter(depth) -> None:
    driver = make(num_blocks=96, block_size=4, depth=depth, max_num_batched_tokens=64)
    outputs = [driver.add(request(h, prompt_of(8, h), max_tokens=8 + h)) for h in range(32)]
    driver.run()
    assert driver.scheduler.counters.preemptions == 0
    for handle, output in enumerate(outputs):
        assert output.token_ids[0] == solo(prompt_of(8, handle), 8 + handle)


def test_who_has_waited_long_evicts_nobody() -> None:
    driver = make(num_blocks=96, block_size=4, max_num_batched_tokens=64, ageing_steps=4)
    for handle in range(64):
        driver.add(request(handle, prompt_of(8, handle), max_tokens=40))
    driver.run()
    assert driver.scheduler.counters.preemptions == 0


def test_a_lone_request_enters_though_it_may_outgrow_what_others_left() -> None:
    driver = make(num_blocks=16, block_size=4)
    output = driver.add(request(0, prompt_of(8), max_tokens=56))
    driver.run()
    assert output.token_ids[0] == solo(prompt_of(8), 56)


@pytest.mark.parametrize("length", [1, 8, 33])
def test_steps_are_filled_while_prompts_wait(length) -> None:
    driver = make(num_blocks=8192, num_slots=512, max_num_seqs=512, max_num_batched_tokens=256)
    for handle in range(500):
        driver.add(request(handle, prompt_of(length, handle), max_tokens=4))
    while driver.scheduler.num_waiting:
        plan = driver.plan_one()
        assert plan is not None
        assert sum(plan.num_tokens) > 256 - 16 or not driver.scheduler.num_waiting
        driver.take_one()
    driver.run()


@pytest.mark.parametrize("caching", [True, False])
@pytest.mark.parametrize("length", [1, 3, 4, 5, 8])
def test_children_share_the_prompt_and_compute_one_token_of_it(length, caching) -> None:
    driver = make(enable_prefix_caching=caching)
    output = driver.add(request(0, prompt_of(length), n=4))
    driver.run()
    assert [output.token_ids[i] for i in range(4)] == [solo(prompt_of(length), 8, index=i) for i in range(4)]
    # The prompt once, three times its last token, and 7 output tokens of each: the 8th is never computed.
    assert driver.model.num_tokens_computed == length + 3 + 4 * 7


def test_more_children_than_slots_enter_as_slots_become_free() -> None:
    driver = make(max_num_seqs=2)
    output = driver.add(request(0, prompt_of(6), n=7))
    driver.run()
    assert [output.token_ids[i] for i in range(7)] == [solo(prompt_of(6), 8, index=i) for i in range(7)]


def test_abort_of_the_first_sequence_before_its_prompt_is_computed_hands_the_prompt_to_the_next() -> None:
    driver = make(max_num_batched_tokens=4)
    output = driver.add(request(0, prompt_of(20), n=3))
    driver.step()
    assert driver.scheduler.abort(0, 0)
    driver.run()
    assert output.reasons == {0: FinishReason.ABORT, 1: FinishReason.LENGTH, 2: FinishReason.LENGTH}
    assert output.token_ids[2] == solo(prompt_of(20), 8, index=2)


def test_abort_of_one_index_leaves_the_others_alone() -> None:
    driver = make()
    output = driver.add(request(0, prompt_of(6), n=3, max_tokens=20))
    for _ in range(6):
        driver.step()
    assert driver.scheduler.abort(0, 1)
    assert not driver.scheduler.abort(0, 1)
    driver.run()
    assert output.reasons[1] is FinishReason.ABORT
    assert output.token_ids[1] == solo(prompt_of(6), 20, index=1)[: len(output.token_ids[1])]
    assert output.token_ids[2] == solo(prompt_of(6), 20, index=2)


def test_an_aborted_request_frees_its_blocks_within_two_steps() -> None:
    driver = make()
    driver.add(request(0, prompt_of(20), max_tokens=100))
    driver.add(request(1, prompt_of(6), max_tokens=100))
    for _ in range(5):
        driver.step()
    assert driver.scheduler.abort(0)
    driver.step()
    driver.step()
    assert driver.scheduler.num_running == 1
    assert driver.scheduler.blocks.num_used <= 5
    driver.run()


def test_stop_rules() -> None:
    prompt = prompt_of(5)
    tokens = solo(prompt, 12)
    stop = tokens[6]
    assert stop not in tokens[:6]
    driver = make()
    by_eos = driver.add(request(0, prompt, 12, eos_token_ids=[stop]))
    by_id = driver.add(request(1, prompt, 12, stop_token_ids=[stop]))
    ignored = driver.add(request(2, prompt, 12, eos_token_ids=[stop], ignore_eos=True))
    late = driver.add(request(3, prompt, 12, eos_token_ids=[stop], min_tokens=9))
    driver.run()
    assert by_eos.token_ids[0] == by_id.token_ids[0] == tokens[:7]
    assert (by_eos.reasons[0], by_eos.stop_token_ids[0]) == (FinishReason.STOP, None)
    assert (by_id.reasons[0], by_id.stop_token_ids[0]) == (FinishReason.STOP, stop)
    assert by_id.usage is not None and by_id.usage.completion_tokens == 7
    assert ignored.token_ids[0] == late.token_ids[0] == tokens


def test_the_context_length_cuts_the_output() -> None:
    driver = make(max_model_len=20)
    output = driver.add(request(0, prompt_of(15), max_tokens=100))
    driver.run()
    assert output.token_ids[0] == solo(prompt_of(15), 5)
    assert output.reasons == {0: FinishReason.LENGTH}


def test_a_lone_sequence_ends_with_length_when_the_pool_ends() -> None:
    driver = make(num_blocks=5, block_size=4)
    output = driver.add(request(0, prompt_of(15), max_tokens=100))
    driver.run()
    assert output.token_ids[0] == solo(prompt_of(15), 5)
    assert output.reasons == {0: FinishReason.LENGTH}


def test_sc01_a_prompt_that_the_pool_can_never_hold_is_refused_and_blocks_nobody() -> None:
    driver = make(num_blocks=62, block_size=16, max_model_len=4096)
    with pytest.raises(ContextLengthError, match=r"1500.*992"):
        driver.add(request(0, prompt_of(1500)))
    shorts = [driver.add(request(h, prompt_of(20, h))) for h in range(1, 5)]
    driver.run()
    assert {s.first_token_step for s in shorts} <= {1, 2}


def test_refusals_name_the_numbers_and_the_field() -> None:
    driver = make(max_model_len=32)
    with pytest.raises(ContextLengthError, match=r"32 tokens .* 32"):
        driver.add(request(0, prompt_of(32)))
    with pytest.raises(InvalidRequestError, match=r"token_ids\[1\] is 997") as caught:
        driver.add(request(0, [1, VOCAB]))
    assert caught.value.field == "token_ids"
    with pytest.raises(InvalidRequestError, match="no tokens"):
        driver.add(request(0, []))
    driver.add(request(0, prompt_of(3)))
    with pytest.raises(DuplicateRequestError):
        driver.scheduler.add_request(request(0, prompt_of(3)))
    driver.run()


def test_a_full_queue_refuses_with_a_retry_hint() -> None:
    driver = make(max_queued_requests=2, max_queued_tokens=100)
    driver.add(request(0, prompt_of(60)))
    with pytest.raises(OverloadedError) as caught:
        driver.add(request(1, prompt_of(60)))
    assert caught.value.retry_after_ms > 0
    driver.add(request(1, prompt_of(3)))
    with pytest.raises(OverloadedError):
        driver.add(request(2, prompt_of(3)))
    driver.step()
    driver.add(request(2, prompt_of(3)))
    driver.run()


@pytest.mark.parametrize("budget", [64, 128, 512])
def test_sc04_a_prompt_of_64_budgets_does_not_hold_up_short_ones(budget) -> None:
    driver = make(num_blocks=4096, block_size=16, max_model_len=65536, max_num_batched_tokens=budget)
    long = driver.add(request(0, prompt_of(64 * budget), max_tokens=4))
    for _ in range(4):
        driver.step()
    started = driver.num_steps
    shorts = [driver.add(request(h, prompt_of(50, h))) for h in range(1, 11)]
    driver.run()
    # Three quarters of each step are theirs.
    bound = started + 3 + -(-500 // (budget * 3 // 4 - 10))
    assert all(s.first_token_step is not None and s.first_token_step <= bound for s in shorts)
    assert long.token_ids[0] == solo(prompt_of(64 * budget), 4)


def test_a_long_prompt_ends_however_many_short_ones_keep_coming() -> None:
    driver = make(num_blocks=1024, max_num_batched_tokens=32, max_model_len=65536)
    long = driver.add(request(0, prompt_of(640), max_tokens=2))
    handle = 1
    while long.usage is None:
        if driver.scheduler.num_waiting < 4:
            driver.add(request(handle, prompt_of(20, handle), max_tokens=1))
            handle += 1
        driver.step()
        assert driver.num_steps < 200
    driver.run()


def test_sc06_an_urgent_request_takes_a_slot_from_a_less_urgent_one() -> None:
    driver = make(max_num_seqs=4)
    lows = [driver.add(request(h, prompt_of(6, h), max_tokens=40, priority=5)) for h in range(4)]
    for _ in range(4):
        driver.step()
    before = driver.num_steps
    high = driver.add(request(9, prompt_of(6, 9), priority=0))
    driver.run()
    assert high.first_token_step is not None and high.first_token_step - before <= 5
    assert driver.scheduler.counters.preemptions == 1
    assert [low.token_ids[0] for low in lows] == [solo(prompt_of(6, h), 40) for h in range(4)]


def test_sc06_a_low_priority_request_ends_within_the_ageing_bound() -> None:
    driver = make(max_num_seqs=4, ageing_steps=50)
    low = driver.add(request(0, prompt_of(6), max_tokens=10, priority=9))
    handle = 1
    while low.usage is None:
        while driver.scheduler.num_waiting < 4:
            driver.add(request(handle, prompt_of(6, handle), max_tokens=10, priority=0))
            handle += 1
        driver.step()
        assert driver.num_steps < 50 + 40
    driver.run()
    assert low.token_ids[0] == solo(prompt_of(6), 10)


def test_sc06_equals_do_not_evict_each_other_for_slots() -> None:
    driver = make(max_num_seqs=4)
    outputs = [driver.add(request(h, prompt_of(6, h), max_tokens=30)) for h in range(8)]
    driver.run()
    assert driver.scheduler.counters.preemptions == 0
    starts = [o.first_token_step for o in outputs]
    assert starts == sorted(starts)


def test_sc06_an_evicted_request_is_back_before_new_equals_start() -> None:
    driver = make(num_blocks=20, block_size=4, enable_prefix_caching=False)
    old = [driver.add(request(h, prompt_of(8, h), max_tokens=24, eos_token_ids=[NEVER])) for h in range(4)]
    while driver.scheduler.counters.preemptions == 0:
        driver.step()
    late = driver.add(request(9, prompt_of(8, 9), max_tokens=4))
    driver.run()
    assert [o.token_ids[0] for o in old] == [solo(prompt_of(8, h), 24) for h in range(4)]
    assert late.first_token_step is not None
    # A victim in the worst case computes everything again, yet the first of them ends before the newcomer.
    assert driver.scheduler.counters.preemptions < 12


def test_ab06_a_failed_row_ends_its_request_alone_and_taints_no_cache() -> None:
    driver = make(block_size=4)
    driver.model.poisoned_tokens = {VOCAB - 1}
    good = driver.add(request(0, prompt_of(6), max_tokens=12))
    for _ in range(3):
        driver.step()
    bad = driver.add(request(1, [*prompt_of(8, 3), VOCAB - 1, 4, 4, 4, 4]))
    for _ in range(3):
        driver.step()
    assert isinstance(bad.error, NumericalError)
    driver.run()
    assert good.token_ids[0] == solo(prompt_of(6), 12)
    driver.model.poisoned_tokens = set()
    retry = driver.add(request(2, [*prompt_of(8, 3), VOCAB - 1, 4, 4, 4, 4]))
    driver.run()
    assert retry.usage is not None and retry.usage.cached_tokens == 0


def test_deadlines_end_waiting_and_running_requests() -> None:
    clock = Clock()
    driver = make(max_num_seqs=1, clock=clock)
    running = driver.add(request(0, prompt_of(6), max_tokens=50, deadline_unix_ns=5_000))
    waiting = driver.add(request(1, prompt_of(6), deadline_unix_ns=4_000))
    fine = driver.add(request(2, prompt_of(6)))
    for _ in range(3):
        driver.step()
    clock.now_ns = 6_000
    driver.run()
    assert isinstance(running.error, DeadlineError) and running.token_ids[0] == solo(prompt_of(6), 50)[:3]
    assert isinstance(waiting.error, DeadlineError) and not waiting.token_ids
    assert fine.token_ids[0] == solo(prompt_of(6), 8)


def test_a_resubmission_goes_on_after_what_was_delivered() -> None:
    prompt = prompt_of(9)
    driver = make()
    delivered = {
        0: DeliveredTokens(solo(prompt, 5)),
        1: DeliveredTokens(solo(prompt, 3, index=1), finished=True),
        2: DeliveredTokens(solo(prompt, 12, index=2)),
    }
    output = driver.add(request(0, prompt, 12, n=4, delivered=delivered))
    driver.run()
    assert output.token_ids == {0: solo(prompt, 12)[5:], 3: solo(prompt, 12, index=3)}
    assert output.reasons == dict.fromkeys((0, 2, 3), FinishReason.LENGTH)
    assert output.usage is not None and output.usage.completion_tokens == 12 + 3 + 12 + 12


@pytest.mark.parametrize("steps", [1, 2, 5, 9, 14])
def test_requests_move_to_another_core_without_losing_or_repeating_tokens(steps) -> None:
    first = make(max_num_batched_tokens=16)
    outputs = [first.add(request(h, prompt_of(10, h), 12, n=2)) for h in range(3)]
    for _ in range(steps):
        first.step()
    second = make()
    second.requests = first.requests
    for new in first.scheduler.export_requests():
        second.scheduler.add_request(new)
    second.run()
    for h, output in enumerate(outputs):
        assert output.token_ids == {i: solo(prompt_of(10, h), 12, index=i) for i in range(2)}
        assert output.usage is not None and output.usage.completion_tokens == 24


def test_prompt_logprobs_are_complete_whatever_the_chunks_and_the_cache() -> None:
    driver = make(max_num_batched_tokens=5)
    driver.add(request(0, prompt_of(17)))
    driver.run()
    output = driver.add(request(1, prompt_of(17), prompt_logprobs=0, n=2))
    single = driver.add(request(2, [3], prompt_logprobs=0))
    driver.run()
    assert output.prompt_logprobs is not None
    assert output.prompt_logprobs.chosen == [-float(t) for t in prompt_of(17)[1:]]
    assert output.usage is not None and output.usage.cached_tokens == 0
    assert single.prompt_logprobs is not None and single.prompt_logprobs.chosen == []


def test_a_result_out_of_order_is_a_desync_and_changes_nothing() -> None:
    driver = make()
    driver.add(request(0, prompt_of(5)))
    driver.plan_one()
    for result in (StepResult(1, 0, [5]), StepResult(0, 1, [5]), StepResult(0, 0, [])):
        with pytest.raises(DesyncError):
            driver.scheduler.update(result)
    driver.run()
    with pytest.raises(DesyncError, match="no step is in flight"):
        driver.scheduler.update(StepResult(0, 99))


def test_a_traced_request_is_linked_to_its_first_and_last_chunk_and_now_and_then() -> None:
    driver = make(max_num_batched_tokens=8)
    driver.add(request(0, prompt_of(20), max_tokens=40, traceparent="00-t-s-01"))
    linked = []
    while (plan := driver.plan_one()) is not None:
        if plan.trace_links:
            assert plan.trace_links == ["00-t-s-01"]
            linked.append(plan.step)
        driver.take_one()
    assert linked == [0, 2, 32]
