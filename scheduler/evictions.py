"""Who has to give up blocks when they run short: kept forks first, then whoever is last in line."""

from __future__ import annotations

from typing import TYPE_CHECKING

from scheduler.block_manager import BlockManager
from scheduler.entry import find_entry
from scheduler.forks import Forks
from scheduler.residents import Residents
from scheduler.sequence import Sequence, SequenceState
from scheduler.waiting_queue import WaitingQueue

if TYPE_CHECKING:
    from scheduler.scheduler import SchedulerCounters


def next_plan_event(sequence: Sequence, block_size: int) -> int:
    """Computed tokens at which a decoding sequence needs a block or has its last token in flight."""
    return min(len(sequence.block_ids) * block_size, sequence.limit - 1)


class Evictions:
    """Blocks for those that run, and room for those that are more urgent."""

    def __init__(
        self,
        blocks: BlockManager,
        residents: Residents,
        forks: Forks,
        waiting: WaitingQueue,
        counters: SchedulerCounters,
        *,
        reads_cache: bool,
    ) -> None:
        self._blocks = blocks
        self._residents = residents
        self._forks = forks
        self._waiting = waiting
        self._counters = counters
        self._reads_cache = reads_cache

    def grow(self, needy: list[Sequence], step: int) -> tuple[list[tuple[Sequence, int]], set[int]]:
        """Give a block to each that has filled its last one, evicting from the end of the line where none is left.

        Returns (sequence, new block) pairs and the slots that have to sit out this step.
        """
        grown: list[tuple[Sequence, int]] = []
        stalled: set[int] = set()
        num_coming: int | None = None  # blocks that the results in flight free; counting them takes a look at all
        if self._blocks.num_available < len(needy):
            needy.sort(key=lambda s: s.rank)
        for sequence in needy:
            if sequence.state is not SequenceState.DECODE:
                continue  # evicted for one before it in line
            if sequence.num_computed + 1 >= sequence.limit:
                self._residents.stop_planning(sequence, step - 1)
                num_coming = None
                continue
            blocks = self._blocks.acquire((), 1)
            while blocks is None and sequence.state is SequenceState.DECODE:
                if self._forks.drop_all():
                    num_coming = None
                    blocks = self._blocks.acquire((), 1)
                    continue
                if num_coming is None:
                    num_coming = self._residents.coming()[0]
                if num_coming > len(stalled):
                    stalled.add(sequence.slot)
                    break
                victim = self._residents.last_in_line()
                assert victim is not None
                stalled.discard(victim.slot)
                self._evict(victim, step)
                num_coming = None
                blocks = self._blocks.acquire((), 1) if victim is not sequence else None
            if blocks is not None:
                sequence.block_ids += blocks
                sequence.num_sent_blocks += 1
                sequence.plan_event_at = next_plan_event(sequence, self._blocks.block_size)
                grown.append((sequence, blocks[0]))
        return grown, stalled

    def make_room_for_urgent(self, step: int) -> None:
        """Evict residents of lower priority for the first in line, where it cannot enter otherwise."""
        lowest = self._residents.lowest_priority
        if lowest is None or not len(self._waiting):
            return
        urgent = self._waiting.first(1)[0]
        # The request's own priority: age brings a sequence to the front of the line, but evicts nobody.
        if lowest <= urgent.request.priority:
            return
        entry = find_entry(urgent, self._blocks, step, reads_cache=self._reads_cache)
        while True:
            blocks_coming, slots_coming = self._residents.coming()
            has_slot = self._residents.has_free_slot or slots_coming
            has_blocks = self._blocks.can_acquire(entry.shared, max(0, entry.num_new - blocks_coming))
            if has_slot and has_blocks:
                return
            if not has_blocks and self._forks.drop_all():
                continue
            victim = self._residents.last_in_line()
            if victim is None or victim.priority <= urgent.request.priority:
                return
            self._evict(victim, step)

    def _evict(self, victim: Sequence, step: int) -> None:
        """Take slot and blocks from a sequence; it computes its tokens again when it is back in line."""
        self._counters.preemptions += 1
        if victim.state is SequenceState.DECODE:
            victim.num_known = victim.num_computed + 1
        self._residents.leave(victim, SequenceState.EVICTED)
        victim.num_computed = 0
        victim.event_at = -1
        if victim.num_known == len(victim.token_ids):
            self._waiting.push(victim, step)
