"""Sequences that wait for a slot: served by rank, with ageing so that none waits forever."""

from __future__ import annotations

import heapq
from collections import deque
from collections.abc import Iterator

from scheduler.sequence import PROMOTED_PRIORITY, Rank, Sequence, SequenceState


class WaitingQueue:
    """A heap by rank with lazy deletion, and a queue by time of arrival for ageing.

    A sequence leaves by changing its state; stale entries are dropped when they surface, and swept when they are many.
    After `ageing_steps` steps of waiting a sequence is promoted: it is served first and keeps that rank for life, so
    that what was promoted cannot be evicted by newer work of higher priority.
    """

    def __init__(self, ageing_steps: int) -> None:
        self._ageing_steps = ageing_steps
        self._heap: list[tuple[Rank, int, Sequence]] = []
        self._serial = 0  # keeps two entries of one sequence comparable
        self._by_age: deque[tuple[int, Sequence]] = deque()
        self._members: set[int] = set()

    def __len__(self) -> int:
        return len(self._members)

    def push(self, sequence: Sequence, step: int) -> None:
        """Take in a sequence. One that waited before (it was preempted) keeps its age."""
        sequence.state = SequenceState.WAITING
        if sequence.queued_step < 0:
            sequence.queued_step = step
        self._members.add(id(sequence))
        self._push_entry(sequence)
        if sequence.priority != PROMOTED_PRIORITY:
            if sequence.queued_step < step:
                self._by_age.appendleft((sequence.queued_step, sequence))
            else:
                self._by_age.append((step, sequence))
        if len(self._heap) > 64 + 2 * len(self._members):
            self._sweep()

    def _push_entry(self, sequence: Sequence) -> None:
        self._serial += 1
        heapq.heappush(self._heap, (sequence.rank, self._serial, sequence))

    def remove(self, sequence: Sequence) -> None:
        """Forget a sequence that no longer waits. Its state is the caller's to change."""
        self._members.discard(id(sequence))

    def promote_aged(self, step: int) -> None:
        """Move up what has waited too long."""
        by_age = self._by_age
        while by_age:
            queued_step, sequence = by_age[0]
            if id(sequence) in self._members and sequence.priority != PROMOTED_PRIORITY:
                if step - queued_step < self._ageing_steps:
                    return
                sequence.priority = PROMOTED_PRIORITY
                self._push_entry(sequence)
            by_age.popleft()

    def first(self, count: int, *, most: int = 0, num_tokens: int = 0) -> list[Sequence]:
        """Up to `count` waiting sequences, best rank first. They stay in the queue.

        More than `count`, but not more than `most`, while fewer than `num_tokens` tokens are known of them together.
        """
        taken: list[tuple[Rank, int, Sequence]] = []
        seen: set[int] = set()
        while self._heap and (len(taken) < count or (len(taken) < most and num_tokens > 0)):
            entry = heapq.heappop(self._heap)
            rank, _, sequence = entry
            if id(sequence) in self._members and rank == sequence.rank and id(sequence) not in seen:
                seen.add(id(sequence))
                taken.append(entry)
                num_tokens -= len(sequence.token_ids)
        for entry in taken:
            heapq.heappush(self._heap, entry)
        return [sequence for _, _, sequence in taken]

    def __iter__(self) -> Iterator[Sequence]:
        """All waiting sequences, in no order."""
        seen: set[int] = set()
        for rank, _, sequence in self._heap:
            if id(sequence) in self._members and rank == sequence.rank and id(sequence) not in seen:
                seen.add(id(sequence))
                yield sequence

    def _sweep(self) -> None:
        self._heap = [(sequence.rank, number, sequence) for number, sequence in enumerate(self)]
        self._serial = len(self._heap)
        heapq.heapify(self._heap)
        self._by_age = deque(entry for entry in self._by_age if id(entry[1]) in self._members)
