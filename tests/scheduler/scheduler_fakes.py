"""A deterministic stand-in for a worker: it executes plans on a KV cache of hashes and samples from what it reads.

The next token is a pure function of the KV entries of all positions before it, read through the block table, and of
the seed. A wrong block, a missed copy, a stale or an overwritten entry therefore changes the output.
"""

from __future__ import annotations

import hashlib
from collections import deque
from dataclasses import dataclass, field

from pagemill.step import (
    NewSequence,
    PromptChunkLogprobs,
    SlotFailure,
    StepPlan,
    StepResult,
    TokenLogprobs,
    WorkerCapacity,
)
from scheduler.scheduler import Scheduler
from scheduler.sequence import FinishReason, NewRequest, OwnerOutput, Usage


def _hash(*parts: object) -> int:
    return int.from_bytes(hashlib.blake2b(repr(parts).encode(), digest_size=8).digest(), "little")


def next_token(entries: list[int], seed: int, vocab_size: int) -> int:
    return _hash("token", tuple(entries), seed) % vocab_size


def expected_tokens(prompt: list[int], seed: int, count: int, vocab_size: int) -> list[int]:
    """What an undisturbed run samples, stops aside."""
    entries: list[int] = []
    for token in prompt:
        entries.append(_hash(entries[-1] if entries else 0, token, len(entries)))
    output: list[int] = []
    for _ in range(count):
        output.append(next_token(entries, seed, vocab_size))
        entries.append(_hash(entries[-1], output[-1], len(entries)))
    return output


@dataclass
class _Slot:
    token_ids: list[int]
    num_prompt_tokens: int
    num_computed: int
    block_ids: list[int]
    seed: int
    num_prompt_logprobs: int


@dataclass
class FakeModel:
    """Executes plans and checks that each is well-formed."""

    capacity: WorkerCapacity
    epoch: int = 0
    poisoned_tokens: set[int] = field(default_factory=set)  # a row that computes one of these fails
    next_step: int = 0
    num_rows_computed: int = 0
    num_tokens_computed: int = 0

    def __post_init__(self) -> None:
        self.slots: dict[int, _Slot] = {}
        self.kv: list[list[int | None]] = [[None] * self.capacity.block_size for _ in range(self.capacity.num_blocks)]

    def execute(self, plan: StepPlan) -> StepResult:
        assert (plan.epoch, plan.step) == (self.epoch, self.next_step)
        self.next_step += 1
        columns = (plan.slots, plan.num_tokens, plan.sample, plan.new_block_counts)
        assert len({len(c) for c in columns}) == 1 and plan.slots
        assert len(set(plan.slots)) == len(plan.slots)
        assert sum(plan.num_tokens) <= self.capacity.max_step_tokens and min(plan.num_tokens) >= 1
        for slot in plan.released_slots:
            del self.slots[slot]
        for new in plan.new_sequences:
            self._enter(new, plan)
        new_blocks = iter(plan.new_block_ids)
        for slot, count in zip(plan.slots, plan.new_block_counts, strict=True):
            self.slots[slot].block_ids += [next(new_blocks) for _ in range(count)]
        assert next(new_blocks, None) is None
        assert not set(plan.copy_sources) & set(plan.copy_destinations)
        for source, destination in zip(plan.copy_sources, plan.copy_destinations, strict=True):
            self.kv[destination] = self.kv[source].copy()
        result = StepResult(plan.epoch, plan.step)
        # All rows store their KV before any row reads; rows of one step must not depend on each other all the same.
        before = [block.copy() for block in self.kv]
        for slot, count, sample in zip(plan.slots, plan.num_tokens, plan.sample, strict=True):
            self._compute_row(slot, count, sample, before, result)
        return result

    def _enter(self, new: NewSequence, plan: StepPlan) -> None:
        assert new.slot not in self.slots and 0 <= new.slot < self.capacity.num_slots
        assert new.num_computed_tokens < len(new.token_ids)
        count = plan.num_tokens[plan.slots.index(new.slot)]
        assert len(new.block_ids) == -(-(new.num_computed_tokens + count) // self.capacity.block_size)
        self.slots[new.slot] = _Slot(
            list(new.token_ids),
            new.num_prompt_tokens,
            new.num_computed_tokens,
            list(new.block_ids),
            new.sampling.seed,
            new.sampling.num_prompt_logprobs,
        )

    def _compute_row(
        self, slot: int, count: int, sample: bool, before: list[list[int | None]], result: StepResult
    ) -> None:
        state, size = self.slots[slot], self.capacity.block_size
        first, end = state.num_computed, state.num_computed + count
        assert end <= len(state.token_ids) and sample == (end == len(state.token_ids))
        assert len(state.block_ids) == -(-end // size), "exactly the blocks that the tokens need"
        entries: list[int] = []
        for position in range(first):
            entry = before[state.block_ids[position // size]][position % size]
            assert entry is not None
            entries.append(entry)
        failed = False
        for position in range(first, end):
            token = state.token_ids[position]
            failed |= token in self.poisoned_tokens
            entries.append(_hash(entries[-1] if entries else 0, token, position))
            self.kv[state.block_ids[position // size]][position % size] = entries[-1]
        state.num_computed = end
        self.num_rows_computed += 1
        self.num_tokens_computed += count
        if state.num_prompt_logprobs >= 0:
            low, high = max(first + 1, 1), min(end + 1, state.num_prompt_tokens)
            if low < high:
                chosen = [-float(state.token_ids[p]) for p in range(low, high)]
                columns = TokenLogprobs(chosen, [1] * len(chosen))
                result.prompt_logprobs.append(PromptChunkLogprobs(slot, low, columns))
        if failed:
            result.failures.append(SlotFailure(slot, "NaN logits"))
        if sample:
            token = 0 if failed else next_token(entries, state.seed, self.capacity.vocab_size)
            result.sampled_token_ids.append(token)
            state.token_ids.append(token)


@dataclass
class Collected:
    """All that one request delivered."""

    token_ids: dict[int, list[int]] = field(default_factory=dict)
    reasons: dict[int, FinishReason] = field(default_factory=dict)
    stop_token_ids: dict[int, int | None] = field(default_factory=dict)
    usage: Usage | None = None
    error: Exception | None = None
    first_token_step: int | None = None
    prompt_logprobs: TokenLogprobs | None = None


class Driver:
    """Runs a core against a `FakeModel` with up to `depth` steps in flight and collects the outputs."""

    def __init__(self, scheduler: Scheduler, model: FakeModel, depth: int = 2) -> None:
        self.scheduler = scheduler
        self.model = model
        self.depth = depth
        self.in_flight: deque[StepResult] = deque()
        self._used_in_flight: deque[tuple[set[int], set[int]]] = deque()  # slots and blocks, by step
        self.requests: dict[int, Collected] = {}
        self.num_steps = 0

    def add(self, new: NewRequest) -> Collected:
        collected = self.requests[new.handle] = Collected()
        try:
            self.scheduler.add_request(new)
        except BaseException:
            del self.requests[new.handle]
            raise
        return collected

    def plan_one(self) -> StepPlan | None:
        plan = self.scheduler.schedule()
        if plan is not None:
            assert sum(plan.num_tokens) <= self.scheduler.limits.max_num_batched_tokens
            self._check_reuse(plan)
            self.in_flight.append(self.model.execute(plan))
            tables = (self.model.slots[slot].block_ids for slot in plan.slots)
            self._used_in_flight.append((set(plan.slots), set().union(*tables)))
            self.num_steps += 1
        return plan

    def _check_reuse(self, plan: StepPlan) -> None:
        """No slot is given away, and no block written by somebody new, before the last step with it has a result."""
        slots: set[int] = set().union(*(used for used, _ in self._used_in_flight))
        blocks: set[int] = set().union(*(used for _, used in self._used_in_flight))
        assert not slots & set(plan.released_slots)
        size = self.model.capacity.block_size
        written = {*plan.new_block_ids, *plan.copy_destinations}
        for new in plan.new_sequences:
            written.update(new.block_ids[-(-new.num_computed_tokens // size) :])
        assert not blocks & written

    def take_one(self) -> None:
        self._used_in_flight.popleft()
        for output in self.scheduler.update(self.in_flight.popleft()).values():
            self._collect(output)

    def step(self) -> bool:
        """One turn of the loop: plan ahead up to `depth`, then take the oldest result. False where nothing is left."""
        while len(self.in_flight) < self.depth and self.plan_one() is not None:
            pass
        if self.scheduler.has_outputs:
            for output in self.scheduler.take_outputs().values():
                self._collect(output)
        if not self.in_flight:
            return False
        self.take_one()
        self.scheduler.check_integrity()
        return True

    def run(self, max_steps: int = 20_000) -> None:
        for _ in range(max_steps):
            if not self.step():
                break
        assert self.scheduler.num_requests == 0, "the core stopped with requests left"
        assert (self.scheduler.num_running, self.scheduler.num_waiting, self.scheduler.blocks.num_used) == (0, 0, 0)

    def _collect(self, output: OwnerOutput) -> None:
        for handle, index, token in zip(output.handles, output.indexes, output.token_ids, strict=True):
            collected = self.requests[handle]
            assert index not in collected.reasons, "a token after the end of its sequence"
            assert collected.error is None
            collected.token_ids.setdefault(index, []).append(token)
            if collected.first_token_step is None:
                collected.first_token_step = self.num_steps
        for finished in output.finished:
            collected = self.requests[finished.handle]
            assert finished.index not in collected.reasons
            collected.reasons[finished.index] = finished.reason
            collected.stop_token_ids[finished.index] = finished.stop_token_id
            if finished.usage is not None:
                collected.usage = finished.usage
        for failure in output.failures:
            self.requests[failure.handle].error = failure.error
        for handle, columns in output.prompt_logprobs:
            assert self.requests[handle].prompt_logprobs is None
            self.requests[handle].prompt_logprobs = columns
