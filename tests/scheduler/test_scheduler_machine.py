"""Any history of requests, aborts and steps: every delivered token is that of the undisturbed run, nothing is left."""

from __future__ import annotations

import random

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, precondition, rule
from scheduler_fakes import Collected, Driver, FakeModel, expected_tokens

from pagemill.sampling_params import SamplingParams, sequence_seed
from pagemill.step import WorkerCapacity
from scheduler.admission import SchedulerLimits
from scheduler.scheduler import Scheduler
from scheduler.sequence import FinishReason, NewRequest

VOCAB = 61
EOS = 7


def undisturbed(new: NewRequest, index: int, limit: int) -> tuple[list[int], FinishReason]:
    params = new.params
    count = min(params.max_tokens, limit - len(new.token_ids))
    tokens = expected_tokens(new.token_ids, sequence_seed(params.seed or 0, index), count, VOCAB)
    for position, token in enumerate(tokens):
        if token == EOS and position >= params.min_tokens:
            return tokens[: position + 1], FinishReason.STOP
    return tokens, FinishReason.LENGTH


def make_driver(num_blocks: int, block_size: int, budget: int, max_seqs: int, depth: int, caching: bool) -> Driver:
    capacity = WorkerCapacity(num_blocks, block_size, max_seqs, 48, VOCAB, budget)
    limits = SchedulerLimits(budget, max_seqs, enable_prefix_caching=caching, ageing_steps=20)
    return Driver(Scheduler(capacity, limits, clock_unix_ns=lambda: 1), FakeModel(capacity), depth)


class Ledger:
    """What was asked for, and the proof that it was delivered."""

    def __init__(self, driver: Driver) -> None:
        self.driver = driver
        self.limit = min(48, driver.model.capacity.num_blocks * driver.model.capacity.block_size)
        self.asked: dict[int, tuple[NewRequest, Collected]] = {}
        self.aborted: set[tuple[int, int]] = set()

    def add(self, new: NewRequest) -> None:
        if len(new.token_ids) < self.limit:
            self.asked[new.handle] = new, self.driver.add(new)

    def abort(self, handle: int, index: int | None) -> None:
        new, _ = self.asked[handle]
        if self.driver.scheduler.abort(handle, index):
            self.aborted |= {(handle, i) for i in range(new.params.n) if index in (None, i)}

    def check(self) -> None:
        self.driver.run()
        for handle, (new, collected) in self.asked.items():
            total = 0
            for index in range(new.params.n):
                tokens, reason = undisturbed(new, index, self.limit)
                got = collected.token_ids.get(index, [])
                total += len(got)
                if collected.reasons[index] is FinishReason.ABORT:
                    assert (handle, index) in self.aborted
                    assert got == tokens[: len(got)]
                else:
                    assert (got, collected.reasons[index]) == (tokens, reason)
            assert collected.usage is not None
            assert (collected.usage.prompt_tokens, collected.usage.completion_tokens) == (len(new.token_ids), total)


class CoreMachine(RuleBasedStateMachine):
    @initialize(
        num_blocks=st.integers(3, 24),
        block_size=st.sampled_from([1, 2, 4]),
        budget=st.integers(1, 24),
        max_seqs=st.integers(1, 8),
        depth=st.integers(1, 3),
        caching=st.booleans(),
    )
    def build(self, num_blocks: int, block_size: int, budget: int, max_seqs: int, depth: int, caching: bool) -> None:
        self.driver = make_driver(num_blocks, block_size, budget, max_seqs, depth, caching)
        self.ledger = Ledger(self.driver)

    @rule(
        family=st.integers(0, 2),
        length=st.integers(1, 30),
        max_tokens=st.integers(1, 20),
        n=st.sampled_from([1, 1, 1, 2, 5]),
        seed=st.integers(0, 3),
        min_tokens=st.integers(0, 1),
        priority=st.integers(-1, 1),
    )
    def add(self, family: int, length: int, max_tokens: int, n: int, seed: int, min_tokens: int, priority: int) -> None:
        prompt = [(family + 3 * i) % VOCAB for i in range(length)]
        params = SamplingParams(max_tokens=max_tokens, n=n, seed=seed, min_tokens=min_tokens)
        handle = len(self.ledger.asked)
        self.ledger.add(NewRequest(handle, prompt, params, eos_token_ids=[EOS], priority=priority))

    @precondition(lambda self: self.ledger.asked)
    @rule(which=st.integers(0, 99), index=st.sampled_from([None, None, 0, 1]))
    def abort(self, which: int, index: int | None) -> None:
        self.ledger.abort(which % len(self.ledger.asked), index)

    @rule(count=st.integers(1, 12))
    def step(self, count: int) -> None:
        for _ in range(count):
            self.driver.step()

    @rule()
    def plan_without_result(self) -> None:
        if len(self.driver.in_flight) < self.driver.depth:
            self.driver.plan_one()
        self.driver.scheduler.check_integrity()

    def teardown(self) -> None:
        if hasattr(self, "ledger"):
            self.ledger.check()


TestCore = CoreMachine.TestCase
TestCore.settings = settings(max_examples=150, stateful_step_count=30, deadline=None)


@pytest.mark.parametrize("seed", range(20))
def test_random_aborts_of_many_streams_leave_nothing(seed: int) -> None:
    rng = random.Random(seed)
    driver = make_driver(40, 4, 16, 12, 2, caching=bool(seed % 2))
    ledger = Ledger(driver)
    for handle in range(60):
        prompt = [rng.randrange(VOCAB) for _ in range(rng.randrange(1, 20))]
        ledger.add(NewRequest(handle, prompt, SamplingParams(max_tokens=20, seed=1, n=rng.choice([1, 1, 3]))))
        if rng.random() < 0.5:
            ledger.abort(rng.randrange(len(ledger.asked)), rng.choice([None, 0]))
        driver.step()
    # These requests name no end-of-sequence id.
    for new, _ in ledger.asked.values():
        new.params.ignore_eos = True
        new.params.min_tokens = 10**6
    ledger.check()
