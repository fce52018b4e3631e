"""Percentiles of samples, without numpy: the router's and the client's installation have none."""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass


def percentile(ordered: list[float], share: float) -> float:
    """Linear interpolation between the two nearest samples, as numpy's default.

    Args:
        ordered: samples in ascending order.
        share: in [0, 1].

    Returns:
        NaN where there is no sample.
    """
    if not ordered:
        return math.nan
    position = share * (len(ordered) - 1)
    below = math.floor(position)
    above = min(below + 1, len(ordered) - 1)
    return ordered[below] + (ordered[above] - ordered[below]) * (position - below)


@dataclass(frozen=True, slots=True)
class Distribution:
    """Mean and percentiles of one quantity, all NaN where there is no sample."""

    count: int
    mean: float
    p50: float
    p90: float
    p99: float
    highest: float

    @staticmethod
    def of(samples: Iterable[float]) -> Distribution:
        ordered = sorted(samples)
        mean = math.fsum(ordered) / len(ordered) if ordered else math.nan
        p50, p90, p99 = (percentile(ordered, share) for share in (0.5, 0.9, 0.99))
        return Distribution(len(ordered), mean, p50, p90, p99, ordered[-1] if ordered else math.nan)

    def columns(self, name: str, factor: float = 1.0) -> dict[str, float]:
        """`name_mean`, `name_p50`, ..., each times `factor`."""
        values = {"mean": self.mean, "p50": self.p50, "p90": self.p90, "p99": self.p99, "max": self.highest}
        return {f"{name}_{key}": value * factor for key, value in values.items()}
