"""How many KV blocks those that run will need at most, so that no more enter than can stay.

A sequence that has to be evicted computes its prompt twice. So what is asked of the pool at entry is not only room for
the prompt, but also that everybody's output fits until somebody ends.
"""

from __future__ import annotations

from bisect import insort
from collections.abc import Iterable

from scheduler.sequence import Sequence

# Least weight of one more output in the mean of lengths.
_MIN_WEIGHT = 1 / 64


class OutputLengths:
    """How long outputs have been that could end by themselves."""

    def __init__(self) -> None:
        self._mean = 0.0
        self._count = 0

    def note(self, sequence: Sequence) -> None:
        """A sequence has ended. One without output was never run, or failed, and says nothing."""
        if sequence.ending_ids and sequence.num_output_tokens:
            self._count += 1
            self._mean += max(_MIN_WEIGHT, 1 / self._count) * (sequence.num_output_tokens - self._mean)

    def expected(self, sequence: Sequence) -> int:
        """Tokens, prompt included, with which a sequence is expected to end. Nothing is expected of the unknown."""
        if not sequence.ending_ids:
            return sequence.limit
        mean = sequence.request.num_prompt_tokens + round(self._mean)
        return min(sequence.limit, max(len(sequence.token_ids) + 1, mean))


class GrowthForecast:
    """What lies ahead of the residents of one step.

    All grow alike, and one that ends gives its blocks back: most are needed just before an end. A block that several
    share counts as one of each, so that with shared prefixes more seems to come back than does.

    Args:
        residents: sequences in slots.
        num_available: blocks that may be used up.
        lengths: of outputs.
        block_size: tokens of a block.
    """

    def __init__(
        self, residents: Iterable[Sequence], num_available: int, lengths: OutputLengths, block_size: int
    ) -> None:
        self._num_available = num_available
        self._lengths = lengths
        self._block_size = block_size
        # (blocks still to come, blocks in the end), next to end first
        self._ahead = sorted(self._future(s, len(s.block_ids)) for s in residents)
        self._num_coming = sum(growth for growth, _ in self._ahead)

    def _future(self, sequence: Sequence, num_held: int) -> tuple[int, int]:
        num_last = max(num_held, -(-self._lengths.expected(sequence) // self._block_size))
        return num_last - num_held, num_last

    def has_room(self, sequence: Sequence, num_held: int, num_new: int) -> bool:
        """Whether the pool lasts if `sequence` enters with `num_held` blocks, `num_new` of them unused until then."""
        future = self._future(sequence, num_held)
        if num_new + self._num_coming + future[0] <= self._num_available:
            return True  # even if nobody ends
        ahead = self._ahead.copy()
        insort(ahead, future)
        available, num_left, grown = self._num_available - num_new, len(ahead), 0
        for growth, num_last in ahead:
            available -= (growth - grown) * num_left
            if available < 0:
                return False
            available += num_last
            grown = growth
            num_left -= 1
        return True

    def enter(self, sequence: Sequence, num_new: int) -> None:
        """`sequence` has entered and took `num_new` blocks."""
        future = self._future(sequence, len(sequence.block_ids))
        insort(self._ahead, future)
        self._num_available -= num_new
        self._num_coming += future[0]
