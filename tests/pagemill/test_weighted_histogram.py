"""A weighted histogram shows what an ordinary one shows that got each observation by itself."""

from __future__ import annotations

from prometheus_client import CollectorRegistry, Histogram

from pagemill.weighted_histogram import WeightedHistogram

BUCKETS = (0.1, 1.0, 5.0)
OBSERVATIONS = [(0.05, 3), (0.1, 2), (0.5, 7), (1.0, 1), (5.0, 4), (6.0, 2)]


def samples(registry: CollectorRegistry) -> dict[tuple[str, str], float]:
    return {
        (sample.name, sample.labels.get("le", "")): sample.value
        for metric in registry.collect()
        for sample in metric.samples
        if not sample.name.endswith("_created")
    }


def test_it_equals_a_histogram_of_single_observations() -> None:
    ordinary, weighted = CollectorRegistry(), CollectorRegistry()
    reference = Histogram("latency_seconds", "of tokens", buckets=BUCKETS, registry=ordinary)
    histogram = WeightedHistogram("latency_seconds", "of tokens", BUCKETS)
    weighted.register(histogram)
    for value, count in OBSERVATIONS:
        histogram.observe(value, count)
        for _ in range(count):
            reference.observe(value)
    expected, got = samples(ordinary), samples(weighted)
    assert got.keys() == expected.keys()
    assert all(abs(got[name] - expected[name]) < 1e-9 for name in expected)
