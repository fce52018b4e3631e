"""Whether a waiting sequence may enter a slot in the step that is being planned, and with which blocks."""

from __future__ import annotations

import enum

from scheduler.block_manager import BlockManager
from scheduler.entry import Entry, find_entry
from scheduler.forks import Forks
from scheduler.growth_forecast import GrowthForecast, OutputLengths
from scheduler.residents import Residents
from scheduler.sequence import Sequence

# A sequence waits for others to compute its prefix where that is at least this part of what it has to compute.
_WORTH_WAITING = 1 / 4


class Refusal(enum.Enum):
    """Why a sequence does not enter in this step."""

    NO_ROOM = enum.auto()  # blocks are short
    PREFIX_IS_COMING = enum.auto()  # another sequence computes the same tokens in this step


class Entrance:
    """One per core. `begin_step`, then `find` for each that wants to enter; told about all that the step computes."""

    def __init__(self, blocks: BlockManager, residents: Residents, forks: Forks, *, caches_prefixes: bool) -> None:
        self._blocks = blocks
        self._residents = residents
        self._forks = forks
        self._caches_prefixes = caches_prefixes
        self._computing: set[bytes] = set()  # keys of blocks that the step being planned completes
        self._forecast: GrowthForecast | None = None
        self.output_lengths = OutputLengths()

    def begin_step(self) -> None:
        """A new step is planned."""
        self._computing.clear()
        self._forecast = None

    def will_compute(self, sequence: Sequence, num_tokens: int) -> None:
        """The step computes the tokens of `sequence` up to `num_tokens`: who shares them may better wait a step."""
        if self._caches_prefixes:
            size = self._blocks.block_size
            num_full = num_tokens // size
            if num_full > sequence.num_registered:
                self._computing.update(sequence.keys(num_full, size)[sequence.num_registered : num_full])

    def find(self, sequence: Sequence, step: int) -> Entry | Refusal:
        """Blocks for a waiting sequence, such that it can stay. Changes nothing but that it may give up kept forks."""
        entry = find_entry(sequence, self._blocks, step, reads_cache=self._caches_prefixes)
        if self._computing and not entry.is_fork and self._prefix_is_coming(sequence, len(entry.shared)):
            return Refusal.PREFIX_IS_COMING
        if self._has_room(sequence, entry):
            return entry
        if len(self._residents) == 0 and self._forks.drop_all():
            entry = find_entry(sequence, self._blocks, step, reads_cache=self._caches_prefixes)
            if self._blocks.can_acquire(entry.shared, entry.num_new):
                return entry
        return Refusal.NO_ROOM

    def entered(self, sequence: Sequence, entry: Entry) -> None:
        """A sequence that was found a place has taken it."""
        if self._forecast is not None:
            self._forecast.enter(sequence, entry.num_new)

    def _prefix_is_coming(self, sequence: Sequence, num_shared: int) -> bool:
        """The step computes what `sequence` would compute first, and enough of it.

        What is computed now can be shared from the next step on: nobody waits for longer than others make progress.
        """
        if sequence.reads_prompt_logprobs:
            return False
        size, num_tokens = self._blocks.block_size, len(sequence.token_ids)
        keys = sequence.keys((num_tokens - 1) // size, size)
        num_coming = num_shared
        while num_coming < (num_tokens - 1) // size and keys[num_coming] in self._computing:
            num_coming += 1
        coming = (num_coming - num_shared) * size
        return coming > 0 and coming >= _WORTH_WAITING * (num_tokens - num_shared * size)

    def _has_room(self, sequence: Sequence, entry: Entry) -> bool:
        blocks, residents = self._blocks, self._residents
        lowest = residents.lowest_priority
        if lowest is None or sequence.request.priority < lowest:
            # Nobody else is there, or nobody as urgent: those that run may be evicted for it.
            return blocks.can_acquire(entry.shared, entry.num_new)
        # Without spare blocks, entering would at once evict somebody, at worst in turns: what ended gives its blocks
        # back with the result of a later step, while the others go on.
        spare = min(len(residents), blocks.num_blocks // 16)
        if not blocks.can_acquire(entry.shared, entry.num_new, spare):
            return False
        if self._forecast is None:
            available = blocks.num_available - spare
            self._forecast = GrowthForecast(residents.all(), available, self.output_lengths, blocks.block_size)
        return self._forecast.has_room(sequence, len(entry.shared) + entry.num_new, entry.num_new)
