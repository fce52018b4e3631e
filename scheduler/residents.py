"""Sequences in slots: who holds which slot and blocks, and when both may be used again."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass

from scheduler.block_manager import BlockManager
from scheduler.sequence import Sequence, SequenceState


@dataclass(slots=True)
class _Deferred:
    """Blocks and a slot (-1: none) that a step in flight still refers to."""

    step: int
    block_ids: list[int]
    slot: int


class Residents:
    """Slots and the sequences in them.

    `decodes` holds the sequences that get one token a step. The list object is replaced, never changed, so that a step
    in flight may keep it.
    """

    def __init__(self, blocks: BlockManager, num_slots: int) -> None:
        self._blocks = blocks
        self._free_slots = list(range(num_slots - 1, -1, -1))
        self._released_slots: list[int] = []  # to be told to the worker
        self._slot_owner: list[Sequence | None] = [None] * num_slots
        self._deferred: list[_Deferred] = []
        self.last_result_step = -1
        self.last_planned_step = -1
        self._priorities: Counter[int] = Counter()
        self._count = 0
        self._joining: list[Sequence] = []
        self._is_stale = False
        self.decodes: list[Sequence] = []
        self.decode_slots: list[int] = []
        self.prefills: list[Sequence] = []

    def __len__(self) -> int:
        return self._count

    @property
    def has_free_slot(self) -> bool:
        return bool(self._free_slots)

    @property
    def num_free_slots(self) -> int:
        return len(self._free_slots)

    @property
    def lowest_priority(self) -> int | None:
        """The largest priority number among residents; None where there is none."""
        return max(self._priorities, default=None)

    def enter(self, sequence: Sequence, block_ids: list[int]) -> int:
        """Give a slot, which is returned, and a block table to a sequence that starts or goes on with its prompt."""
        slot = self._free_slots.pop()
        self._slot_owner[slot] = sequence
        self._count += 1
        self._priorities[sequence.priority] += 1
        sequence.slot = slot
        sequence.block_ids = block_ids
        sequence.state = SequenceState.PREFILL
        self.prefills.append(sequence)
        return slot

    def start_decoding(self, sequence: Sequence) -> None:
        """Its last chunk is planned: from the next step on it has a decode row."""
        sequence.state = SequenceState.DECODE
        self.prefills.remove(sequence)
        self._joining.append(sequence)
        self._is_stale = True

    def stop_planning(self, sequence: Sequence, last_step: int) -> None:
        """Its last token is in flight, drawn by `last_step` or before: no more rows, slot and blocks stay."""
        sequence.last_step = last_step
        sequence.state = SequenceState.ENDING
        self._is_stale = True

    def leave(self, sequence: Sequence, state: SequenceState) -> None:
        """Take slot and blocks away. They can be used again once no step in flight refers to them."""
        # A decoding sequence has a row in nearly every step: assume the latest, and keep no account per row.
        last_step = self.last_planned_step if sequence.state is SequenceState.DECODE else sequence.last_step
        if sequence.state is SequenceState.PREFILL:
            self.prefills.remove(sequence)
        else:
            self._is_stale = True
        self._count -= 1
        self._priorities[sequence.priority] -= 1
        if self._priorities[sequence.priority] == 0:
            del self._priorities[sequence.priority]
        block_ids, slot = sequence.block_ids, sequence.slot
        sequence.state = state
        sequence.block_ids = []
        sequence.slot = -1
        sequence.row = -1
        sequence.num_sent_blocks = 0
        sequence.num_registered = 0
        self.give_back(block_ids, last_step, slot)

    def give_back(self, block_ids: list[int], last_step: int, slot: int = -1) -> None:
        """Release blocks and slot, after the result of `last_step` if that is still to come."""
        if last_step > self.last_result_step:
            self._deferred.append(_Deferred(last_step, block_ids, slot))
        else:
            self._release(block_ids, slot)

    def _release(self, block_ids: list[int], slot: int) -> None:
        self._blocks.release(block_ids)
        if slot >= 0:
            self._slot_owner[slot] = None
            self._free_slots.append(slot)
            self._released_slots.append(slot)

    def result_is_back(self, step: int) -> None:
        """No step up to this one is in flight any more."""
        self.last_result_step = step
        if self._deferred:
            due = [d for d in self._deferred if d.step <= step]
            self._deferred = [d for d in self._deferred if d.step > step]
            for deferred in due:
                self._release(deferred.block_ids, deferred.slot)

    def refresh(self) -> None:
        """Bring `decodes` and its columns up to date with who came and went."""
        if self._is_stale:
            decode = SequenceState.DECODE
            self.decodes = [s for s in self.decodes if s.state is decode and s.row >= 0]
            self.decodes += [s for s in self._joining if s.state is decode]
            self._joining = []
            self.decode_slots = [s.slot for s in self.decodes]
            for row, sequence in enumerate(self.decodes):
                sequence.row = row
            self._is_stale = False

    def take_released_slots(self) -> list[int]:
        released, self._released_slots = self._released_slots, []
        return released

    def at_slot(self, slot: int) -> Sequence | None:
        """The sequence whose step in flight, or whose next one, uses the slot."""
        return self._slot_owner[slot] if 0 <= slot < len(self._slot_owner) else None

    def all(self) -> list[Sequence]:
        """All sequences in slots."""
        return [s for slot, s in enumerate(self._slot_owner) if s is not None and s.slot == slot]

    def tables(self) -> list[tuple[Sequence, int, list[int]]]:
        """Sequence, slot and blocks of all in slots, and of all that left while a step in flight refers to theirs."""
        tables = [(s, s.slot, s.block_ids) for s in self.all()]
        for deferred in self._deferred:
            owner = self._slot_owner[deferred.slot] if deferred.slot >= 0 else None
            if owner is not None:
                tables.append((owner, deferred.slot, deferred.block_ids))
        return tables

    def last_in_line(self) -> Sequence | None:
        """The sequence of worst rank that could be evicted with gain."""
        evictable = [s for s in self.all() if s.state is not SequenceState.ENDING]
        return max(evictable, key=lambda s: s.rank, default=None)

    def coming(self) -> tuple[int, int]:
        """(blocks, slots) that become available when the results in flight are back, whatever they bring."""
        references: Counter[int] = Counter()
        num_slots = 0
        for deferred in self._deferred:
            references.update(deferred.block_ids)
            num_slots += deferred.slot >= 0
        for sequence in self.all():
            if sequence.state is SequenceState.ENDING:
                references.update(sequence.block_ids)
                num_slots += 1
        return sum(self._blocks.ref_count(b) == count for b, count in references.items()), num_slots

    def owned_blocks(self) -> Counter[int]:
        """References per block held by sequences in slots and by steps in flight."""
        owned: Counter[int] = Counter()
        for sequence in self.all():
            owned.update(sequence.block_ids)
        for deferred in self._deferred:
            owned.update(deferred.block_ids)
        return owned
