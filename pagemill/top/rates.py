"""What happened between two snapshots of a process: increases, rates, shares and quantiles."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Self

from pagemill.top.scrape import Labels, SeriesKey, Snapshot

# Series of the router with this label tell of another process, which restarts on its own.
_FOREIGN_LABEL = "scheduler"


@dataclass(frozen=True, slots=True)
class HistogramIncrease:
    """Observations of an interval.

    Args:
        bounds: upper bounds of the buckets in ascending order, the last one infinite.
        cumulative: observations at or below each bound.
        sum: of all observations.
    """

    bounds: tuple[float, ...]
    cumulative: tuple[float, ...]
    sum: float

    @property
    def count(self) -> float:
        return self.cumulative[-1] if self.cumulative else 0.0

    def mean(self) -> float | None:
        """None where there is no observation."""
        return self.sum / self.count if self.count > 0 else None

    def quantile(self, q: float) -> float | None:
        """Estimate of the q-quantile, 0 <= q <= 1; None where there is no observation.

        Observations are taken to lie evenly in their bucket. Beyond the last finite bound nothing is known: the
        answer is that bound.
        """
        return _quantile(q, self.bounds, self.cumulative)


def _quantile(q: float, bounds: Sequence[float], cumulative: Sequence[float]) -> float | None:
    count = cumulative[-1] if cumulative else 0.0
    if count <= 0:
        return None
    rank = q * count
    lower, below = 0.0, 0.0
    for bound, up_to in zip(bounds, cumulative, strict=True):
        if up_to >= rank and up_to > below:
            if bound == float("inf"):
                return lower
            return lower + (bound - lower) * max(0.0, rank - below) / (up_to - below)
        # Buckets that are empty move the lower edge all the same.
        lower, below = (bound if bound != float("inf") else lower), max(below, up_to)
    return lower


def has_restarted(previous: Snapshot, current: Snapshot) -> bool:
    """Whether the two come from different lives of a process: it counts from another time on, or counts less."""
    for key, before in previous.series.items():
        name, labels = key
        if any(label == _FOREIGN_LABEL for label, _ in labels):
            continue
        now = current.series.get(key)
        if key in previous.counters and (now is None or now < before):
            return True
        if name.endswith("_created") and now is not None and now != before:
            return True
    return False


@dataclass(frozen=True, slots=True)
class Change:
    """Two snapshots of one process. Where it has restarted in between, all that it counted is of the interval.

    Args:
        previous: None at the first look; then there are no increases.
        since_start: whether `current` counts from a start that is within the interval.
    """

    previous: Snapshot | None
    current: Snapshot
    since_start: bool

    @classmethod
    def between(cls, previous: Snapshot | None, current: Snapshot) -> Self:
        if previous is not None and previous.kind != current.kind:
            previous = None
        return cls(previous, current, previous is not None and has_restarted(previous, current))

    @property
    def seconds(self) -> float | None:
        """Time between the snapshots."""
        return None if self.previous is None else self.current.time_s - self.previous.time_s

    def value(self, name: str, **labels: str) -> float | None:
        """Present sum over the series that have these labels; None where there are none."""
        return _sum(self.current, name, labels)

    def total(self, name: str, **labels: str) -> int:
        """Present count of a counter, 0 where it has no series yet."""
        return int(self.value(name, **labels) or 0)

    def increase(self, name: str, **labels: str) -> float | None:
        """Sum of the increases of all series that have these labels, never negative; None at the first look."""
        if self.previous is None:
            return None
        return sum(self._increase(key) for key in _keys(self.current, name, labels))

    def rate(self, name: str, **labels: str) -> float | None:
        """Increase per second."""
        increase, seconds = self.increase(name, **labels), self.seconds
        return None if increase is None or not seconds or seconds <= 0 else increase / seconds

    def histogram(self, name: str) -> HistogramIncrease:
        """Observations since the previous look; none at the first look."""
        if self.previous is None:
            return HistogramIncrease((), (), 0.0)
        buckets = sorted(
            (float(dict(key[1])["le"]), self._increase(key)) for key in _keys(self.current, f"{name}_bucket", {})
        )
        total = self.increase(f"{name}_sum") or 0.0
        return HistogramIncrease(tuple(b for b, _ in buckets), tuple(c for _, c in buckets), total)

    def _increase(self, key: SeriesKey) -> float:
        now = self.current.series[key]
        before = 0.0 if self.since_start or self.previous is None else self.previous.series.get(key, 0.0)
        # A series of another process may have begun anew without a restart of this one.
        return now - before if now >= before else now


def share(part: float | None, whole: float | None) -> float | None:
    """`part / whole`; None where one is unknown or nothing happened."""
    return None if part is None or not whole else part / whole


def label_values(snapshot: Snapshot, name: str, label: str) -> list[str]:
    """Values of a label in the series of a name, in order of appearance."""
    found = (dict(labels).get(label) for series, labels in snapshot.series if series == name)
    return list(dict.fromkeys(value for value in found if value is not None))


def _keys(snapshot: Snapshot, name: str, labels: dict[str, str]) -> list[SeriesKey]:
    return [key for key in snapshot.series if key[0] == name and _has(key[1], labels)]


def _has(labels: Labels, wanted: dict[str, str]) -> bool:
    return all((label, value) in labels for label, value in wanted.items())


def _sum(snapshot: Snapshot, name: str, labels: dict[str, str]) -> float | None:
    keys = _keys(snapshot, name, labels)
    return sum(snapshot.series[key] for key in keys) if keys else None
