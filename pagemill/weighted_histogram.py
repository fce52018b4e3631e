"""A Prometheus histogram that takes many equal observations at the cost of one."""

from __future__ import annotations

import threading
from bisect import bisect_left
from collections.abc import Iterator

from prometheus_client.core import HistogramMetricFamily, Metric
from prometheus_client.registry import Collector


class WeightedHistogram(Collector):
    """A histogram for tokens: a step, or a message, gives all of its tokens the same latency.

    Args:
        name, documentation: of the series.
        buckets: upper bounds in ascending order, without infinity.
    """

    def __init__(self, name: str, documentation: str, buckets: tuple[float, ...]) -> None:
        self._name, self._documentation, self._bounds = name, documentation, buckets
        self._counts = [0] * (len(buckets) + 1)
        self._sum = 0.0
        self._lock = threading.Lock()

    def observe(self, value: float, count: int) -> None:
        """Take `count` observations of `value`."""
        with self._lock:
            self._counts[bisect_left(self._bounds, value)] += count
            self._sum += value * count

    def collect(self) -> Iterator[Metric]:
        """The series at this moment."""
        with self._lock:
            counts, total = self._counts.copy(), self._sum
        cumulative, buckets = 0, []
        for bound, count in zip([*map(str, self._bounds), "+Inf"], counts, strict=True):
            cumulative += count
            buckets.append((bound, float(cumulative)))
        yield HistogramMetricFamily(self._name, self._documentation, buckets=buckets, sum_value=total)
