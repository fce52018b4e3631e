"""Fills step plans: decode rows first, then prompts; forks of n > 1."""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Callable, Container, Iterable
from typing import TYPE_CHECKING

from pagemill.errors import PagemillError
from pagemill.step import NewSequence, StepPlan, WorkerCapacity
from scheduler.admission import SchedulerLimits
from scheduler.block_manager import BlockManager
from scheduler.entrance import Entrance, Refusal
from scheduler.entry import Entry
from scheduler.evictions import Evictions, next_plan_event
from scheduler.forks import Forks
from scheduler.prefill_policy import PrefillShares, num_uncomputed
from scheduler.residents import Residents
from scheduler.sequence import Request, Sequence, SequenceState
from scheduler.trace_links import TraceLinks
from scheduler.waiting_queue import WaitingQueue

if TYPE_CHECKING:
    from scheduler.scheduler import SchedulerCounters

# Waiting sequences looked at per step: so many at least, and while their tokens are fewer than a choice of what the
# step has room for. And how many of them may fail to find blocks before the rest is left alone.
LOOKAHEAD = 128
LOOKAHEAD_BUDGETS = 2
MAX_MISFITS = 4
# A new prompt does not enter for fewer tokens than this, unless all of it fits or nothing else runs.
MIN_FIRST_CHUNK = 16


class StepPlanner:
    """Decides who runs. Knows nothing of outputs and stop rules."""

    def __init__(
        self, capacity: WorkerCapacity, limits: SchedulerLimits, blocks: BlockManager, counters: SchedulerCounters
    ) -> None:
        self._block_size = capacity.block_size
        self._max_tokens = min(limits.max_num_batched_tokens, capacity.max_step_tokens)
        self._caches_prefixes = limits.enable_prefix_caching and capacity.shares_prefixes
        self._max_overtakes = limits.max_overtakes
        self._blocks = blocks
        self._counters = counters
        self._waiting = WaitingQueue(limits.ageing_steps)
        # A decode row needs a token of every step: never more residents than tokens.
        self._residents = Residents(blocks, min(limits.max_num_seqs, capacity.num_slots, self._max_tokens))
        self._forks = Forks(blocks, self._residents)
        self._evictions = Evictions(
            blocks, self._residents, self._forks, self._waiting, counters, reads_cache=self._caches_prefixes
        )
        self._entrance = Entrance(blocks, self._residents, self._forks, caches_prefixes=self._caches_prefixes)
        self._trace_links = TraceLinks()
        # (step, block) of cached blocks that are full only if a step in flight succeeds
        self._unproven: deque[tuple[int, int]] = deque()
        self.num_queued_requests = 0
        self.num_queued_tokens = 0

    @property
    def num_running(self) -> int:
        return len(self._residents)

    @property
    def num_waiting(self) -> int:
        return len(self._waiting)

    def at_slot(self, slot: int) -> Sequence | None:
        return self._residents.at_slot(slot)

    # Life of requests and sequences.

    def add(self, request: Request) -> None:
        """Count a request as queued."""
        self.num_queued_requests += 1
        self.num_queued_tokens += request.num_prompt_tokens

    def start(self, request: Request, step: int) -> None:
        """Let the first sequence that is still to run wait for a slot; it computes the prompt for the others."""
        leader = next((s for s in request.sequences if s.state is SequenceState.HELD), None)
        if leader is not None:
            self._waiting.push(leader, step)

    def discard(self, sequence: Sequence) -> None:
        """A sequence has ended along with its request: take it out of wherever it is."""
        was = sequence.state
        self._entrance.output_lengths.note(sequence)
        if sequence.is_resident:
            self._residents.leave(sequence, SequenceState.FINISHED)
        elif was is SequenceState.WAITING:
            self._waiting.remove(sequence)
        sequence.state = SequenceState.FINISHED
        sequence.event_at = -1

    def remove(self, sequence: Sequence, step: int) -> None:
        """A sequence has ended and others of its request may go on."""
        was, request = sequence.state, sequence.request
        self.discard(sequence)
        if was is not SequenceState.HELD and any(s.state is SequenceState.HELD for s in request.sequences):
            # It was to compute the prompt for the others, which need a new one to do so.
            self.start(request, step)
        self._forks.drop_if_unneeded(request)

    def keep_cached(self, sequence: Sequence) -> None:
        """Offer what a sequence that is about to end has computed to those that come later."""
        if self._caches_prefixes and sequence.is_resident:
            num_tokens = min(sequence.num_computed, len(sequence.token_ids))
            self._register_full_blocks(sequence, num_tokens, self._residents.last_planned_step)

    def forget(self, request: Request) -> None:
        """The whole request has ended."""
        self._unqueue(request)
        self._forks.drop(request)
        self._trace_links.forget(request)

    def _unqueue(self, request: Request) -> None:
        if request.is_queued:
            request.is_queued = False
            self.num_queued_requests -= 1
            self.num_queued_tokens -= request.num_prompt_tokens

    def token_came_back(self, sequence: Sequence, step: int) -> None:
        """A token of a sequence that goes on is known now; decides when to look again."""
        num_tokens = len(sequence.token_ids)
        if sequence.state is SequenceState.EVICTED:
            if num_tokens == sequence.num_known:
                self._waiting.push(sequence, step)
            return
        if not self._caches_prefixes:
            sequence.event_at = sequence.limit - 1
            return
        self._register_full_blocks(sequence, num_tokens - 1, self._residents.last_result_step)
        sequence.event_at = min(sequence.limit - 1, (sequence.num_registered + 1) * self._block_size)

    def result_is_back(self, step: int) -> None:
        self._residents.result_is_back(step)
        while self._unproven and self._unproven[0][0] <= step:
            self._unproven.popleft()

    def distrust(self, slots: Container[int]) -> dict[int, Sequence]:
        """Rows of the oldest step in flight failed: nobody else shall find blocks of theirs, ended or evicted ones too.

        Returns by slot whose rows they were, and who already reads blocks that were to be filled since that step.
        """
        tables, unproven = self._residents.tables(), {block for _, block in self._unproven}
        reached: dict[int, Sequence] = {}
        wrong: set[int] = set()
        num_reached = -1
        while num_reached < len(reached):
            num_reached = len(reached)
            for sequence, slot, block_ids in tables:
                if slot not in reached and (slot in slots or not wrong.isdisjoint(block_ids)):
                    reached[slot] = sequence
                    wrong |= unproven.intersection(block_ids)
                    self._blocks.uncache(block_ids)
                    self._blocks.uncache(sequence.request.fork_blocks)
        return reached

    # A step.

    def plan(self, plan: StepPlan, clock: Callable[[], int]) -> list[Sequence]:
        """Fill `plan` and return the sequences that it samples, in row order. No rows: nothing can run now."""
        self._waiting.promote_aged(plan.step)
        self._evictions.make_room_for_urgent(plan.step)
        rows = self._plan_decodes(plan)
        rows = self._plan_prompts(plan, rows, clock)
        if plan.slots:
            self._residents.last_planned_step = plan.step
            plan.released_slots = self._residents.take_released_slots()
            plan.trace_links = self._trace_links.periodic(plan.step, plan.trace_links)
        return rows

    def _plan_decodes(self, plan: StepPlan) -> list[Sequence]:
        residents = self._residents
        residents.refresh()
        needy = [s for s in residents.decodes if s.num_computed >= s.plan_event_at]
        grown: list[tuple[Sequence, int]] = []
        stalled: set[int] = set()
        if needy:
            grown, stalled = self._evictions.grow(needy, plan.step)
            residents.refresh()
        rows, slots = residents.decodes, residents.decode_slots
        row_of = {}
        if stalled:
            rows = [s for s in rows if s.slot not in stalled]
            slots = [s.slot for s in rows]
            row_of = {s.slot: row for row, s in enumerate(rows)}
        for sequence in rows:
            sequence.num_computed += 1
        count = len(rows)
        plan.slots = slots.copy()
        plan.num_tokens = [1] * count
        plan.sample = [True] * count
        plan.new_block_counts = [0] * count
        by_row = sorted((row_of[s.slot] if stalled else s.row, block) for s, block in grown)
        for row, block in by_row:
            plan.new_block_counts[row] = 1
            plan.new_block_ids.append(block)
        return rows

    def _plan_prompts(self, plan: StepPlan, rows: list[Sequence], clock: Callable[[], int]) -> list[Sequence]:
        budget = self._max_tokens - len(plan.slots)
        prefills = self._residents.prefills
        if budget <= 0 or not (prefills or len(self._waiting)):
            return rows
        self._entrance.begin_step()
        candidates = prefills.copy()
        if self._residents.has_free_slot and len(self._waiting):
            most = 2 * self._residents.num_free_slots + MAX_MISFITS
            candidates += self._waiting.first(min(LOOKAHEAD, most), most=most, num_tokens=LOOKAHEAD_BUDGETS * budget)
        shares = PrefillShares(budget, candidates)
        sampled: list[Sequence] = []
        planned: list[Sequence] = []
        line = sorted((s for s in candidates if s.state is SequenceState.WAITING), key=lambda s: s.rank)
        entry_is_open = not (line and line[0].overtaken >= self._max_overtakes)
        num_misfits = 0
        for sequence, most in shares:
            if sequence.state is SequenceState.WAITING:
                is_first = sequence is line[0]
                if not is_first and (num_misfits >= MAX_MISFITS or not entry_is_open):
                    continue
                wanted = min(num_uncomputed(sequence), MIN_FIRST_CHUNK)
                if not self._residents.has_free_slot or (most < wanted and plan.slots and not is_first):
                    continue
                entry = self._entrance.find(sequence, plan.step)
                if isinstance(entry, Refusal):
                    num_misfits += entry is Refusal.NO_ROOM
                    continue
                if not is_first:
                    line[0].overtaken += line[0].state is SequenceState.WAITING
                count = self._enter(plan, sequence, entry, most, clock)
            else:
                count = min(num_uncomputed(sequence), most)
                self._add_chunk_blocks(plan, sequence, count)
            shares.take(count)
            planned.append(sequence)
            self._entrance.will_compute(sequence, sequence.num_computed + count)
            if self._add_row(plan, sequence, count):
                sampled.append(sequence)
        for sequence in planned:
            # Only now: within this step nobody may rely on what this step computes.
            if self._caches_prefixes:
                self._register_full_blocks(sequence, sequence.num_computed, plan.step)
        for sequence in sampled:
            self._start_decoding(sequence, plan.step)
        return rows + sampled if sampled else rows

    def _enter(self, plan: StepPlan, sequence: Sequence, entry: Entry, most: int, clock: Callable[[], int]) -> int:
        """Put a waiting sequence into a slot; returns how many tokens of it this step computes."""
        request = sequence.request
        new_blocks = self._blocks.acquire(entry.shared, entry.num_new)
        assert new_blocks is not None
        self._waiting.remove(sequence)
        slot = self._residents.enter(sequence, entry.shared + new_blocks)
        self._entrance.entered(sequence, entry)
        sequence.num_computed = entry.num_computed
        sequence.num_registered = len(entry.shared)
        if entry.copy_source is not None:
            plan.copy_sources.append(entry.copy_source)
            plan.copy_destinations.append(new_blocks[0])
            request.fork_last_step = plan.step
        count = min(num_uncomputed(sequence), most)
        sequence.num_sent_blocks = -(-(sequence.num_computed + count) // self._block_size)
        plan.new_sequences.append(
            NewSequence(
                slot,
                sequence.token_ids.copy(),
                request.num_prompt_tokens,
                sequence.num_computed,
                sequence.block_ids[: sequence.num_sent_blocks],
                sequence.slot_sampling(),
            )
        )
        if request.scheduled_unix_ns == 0:
            request.scheduled_unix_ns = clock()
        if self._caches_prefixes and not entry.is_fork:
            self._counters.prefix_cache_query_tokens += sequence.num_known
            self._counters.prefix_cache_hit_tokens += entry.num_computed
        if request.cached_tokens is None:
            request.cached_tokens = min(entry.num_computed, request.num_prompt_tokens)
        if request.is_queued:
            self._unqueue(request)
            plan.trace_links += self._trace_links.first_chunk(request)
        plan.new_block_counts.append(0)
        self._forks.drop_if_unneeded(request)
        return count

    def _add_chunk_blocks(self, plan: StepPlan, sequence: Sequence, count: int) -> None:
        num_needed = -(-(sequence.num_computed + count) // self._block_size)
        added = sequence.block_ids[sequence.num_sent_blocks : num_needed]
        sequence.num_sent_blocks += len(added)
        plan.new_block_counts.append(len(added))
        plan.new_block_ids += added

    def _add_row(self, plan: StepPlan, sequence: Sequence, count: int) -> bool:
        """Append the row of a chunk; True where it is the last one, after which a token is drawn."""
        sequence.num_computed += count
        sequence.last_step = plan.step
        is_last = sequence.num_computed == sequence.num_known
        plan.slots.append(sequence.slot)
        plan.num_tokens.append(count)
        plan.sample.append(is_last)
        if is_last:
            plan.trace_links += self._trace_links.last_chunk(sequence.request, plan.trace_links)
        return is_last

    def _start_decoding(self, sequence: Sequence, step: int) -> None:
        sequence.plan_event_at = next_plan_event(sequence, self._block_size)
        self._residents.start_decoding(sequence)
        children = [s for s in sequence.request.sequences if s.state is SequenceState.HELD]
        if not children:
            return
        # They enter from the next step on; until then the request itself holds on to its prompt's blocks.
        self._forks.keep(sequence, step)
        for child in children:
            self._waiting.push(child, step)

    def _register_full_blocks(self, sequence: Sequence, num_tokens: int, step: int) -> None:
        """Offer what the sequence has computed once the result of `step` is back."""
        num_full = num_tokens // self._block_size
        if num_full > sequence.num_registered:
            keys = sequence.keys(num_full, self._block_size)
            for number in range(sequence.num_registered, num_full):
                self._blocks.register(sequence.block_ids[number], keys[number])
                if step > self._residents.last_result_step:
                    self._unproven.append((step, sequence.block_ids[number]))
            sequence.num_registered = num_full

    # Proof.

    def check_integrity(self, requests: Iterable[Request]) -> None:
        """Raises PagemillError naming the first contradiction between blocks, slots, queue and live requests."""
        owned = self._residents.owned_blocks()
        live: Counter[SequenceState] = Counter()
        num_queued = num_queued_tokens = 0
        for request in requests:
            owned.update(request.fork_blocks)
            live.update(s.state for s in request.sequences)
            num_queued += request.is_queued
            num_queued_tokens += request.num_prompt_tokens * request.is_queued
        self._blocks.check_integrity(owned)
        num_resident = sum(live[s] for s in (SequenceState.PREFILL, SequenceState.DECODE, SequenceState.ENDING))
        if num_resident != len(self._residents) or num_resident != len(self._residents.all()):
            raise PagemillError(f"{num_resident} live sequences are in slots, {len(self._residents)} slots are taken")
        if live[SequenceState.WAITING] != len(self._waiting):
            raise PagemillError(f"{live[SequenceState.WAITING]} sequences wait, the queue has {len(self._waiting)}")
        if (num_queued, num_queued_tokens) != (self.num_queued_requests, self.num_queued_tokens):
            raise PagemillError(f"{num_queued} requests are queued, {self.num_queued_requests} are counted")
