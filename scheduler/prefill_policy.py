"""How the tokens of a step that decodes leave over are shared among prompts."""

from __future__ import annotations

from collections.abc import Iterator
from collections.abc import Sequence as Seq

from scheduler.sequence import Rank, Sequence

# The first in line gets at least this share, so that it ends however many short prompts keep coming.
HEAD_SHARE = 4


class PrefillShares:
    """Shortest prompts first, with a guaranteed share for the first in line.

    A prompt many times the budget therefore costs a short one a quarter of its speed instead of the whole wait, and
    the long one still moves in every step. Sizes are compared by powers of two, so that equals keep their order.

    Iterate over (sequence, most tokens it may take) and report with `take` what was planned.
    """

    def __init__(self, budget: int, candidates: Seq[Sequence]) -> None:
        self._left = budget
        self._head = min(candidates, key=_rank, default=None)
        self._order = sorted(candidates, key=_service_order)
        self._reserve = max(1, budget // HEAD_SHARE) if self._head is not None else 0
        if self._head is not None:
            self._reserve = min(self._reserve, num_uncomputed(self._head))

    @property
    def head(self) -> Sequence | None:
        """The candidate of best rank, whatever its size."""
        return self._head

    def __iter__(self) -> Iterator[tuple[Sequence, int]]:
        for sequence in self._order:
            if sequence is self._head:
                self._reserve = 0
            if self._left > self._reserve:
                yield sequence, self._left - self._reserve

    def take(self, num_tokens: int) -> None:
        self._left -= num_tokens


def num_uncomputed(sequence: Sequence) -> int:
    """Known tokens that no step has been planned for."""
    if sequence.is_expecting_fork and sequence.request.fork_blocks:
        return 1
    return sequence.num_known - sequence.num_computed


def _rank(sequence: Sequence) -> Rank:
    return sequence.rank


def _service_order(sequence: Sequence) -> tuple[int, int, int, int]:
    request = sequence.request
    return sequence.priority, num_uncomputed(sequence).bit_length(), request.number, sequence.index
