"""When conversations begin: at random times of a given rate, or as soon as an earlier one has ended."""

from __future__ import annotations

import math
import random
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class OpenLoop:
    """Conversation i begins at `times_s[i]` after the start, however many are running."""

    times_s: tuple[float, ...]


@dataclass(frozen=True, slots=True)
class ClosedLoop:
    """At most `concurrency` conversations at once; the next begins when one has ended.

    Ends after `num_conversations`, and begins none after `duration_s`.
    """

    concurrency: int
    num_conversations: int | None = None
    duration_s: float = math.inf


@dataclass(frozen=True, slots=True)
class Rounds:
    """`batch_size` conversations at the same moment; the next ones when all of these have ended."""

    batch_size: int
    num_rounds: int


Schedule = OpenLoop | ClosedLoop | Rounds


def random_arrivals(
    rate: float, burstiness: float, seed: int, *, count: int | None = None, duration_s: float = math.inf
) -> OpenLoop:
    """Arrivals with gamma-distributed gaps of mean 1 / rate.

    Args:
        rate: conversations a second; infinite is all at once.
        burstiness: shape of the gamma distribution turned round: 1 is a Poisson process, 4 has gaps of shape 1/4, which
            come in bursts; below 1 they are more even.
        seed: of the gaps.
        count: most arrivals; None is bounded by `duration_s` alone.
        duration_s: none comes later.
    """
    if math.isinf(rate):
        return OpenLoop((0.0,) * (count or 0))
    generator = random.Random(f"arrivals:{seed}")
    shape = 1 / burstiness
    times_s: list[float] = []
    now_s = 0.0
    while count is None or len(times_s) < count:
        now_s += generator.gammavariate(shape, burstiness / rate)
        if now_s > duration_s:
            break
        times_s.append(now_s)
    return OpenLoop(tuple(times_s))
