"""Rates, shares and quantiles between two texts that real metrics of each kind of process gave."""

from __future__ import annotations

import math

import numpy as np
import pytest
from prometheus_client import CollectorRegistry, Histogram, generate_latest
from top_processes import RouterProcess, SchedulerProcess, WorkerProcess

from pagemill.top.figures import (
    merge_schedulers,
    router_figures,
    scheduler_figures,
    schedulers_of_router,
    worker_figures,
)
from pagemill.top.rates import Change, HistogramIncrease
from pagemill.top.scrape import parse
from router.metrics import SchedulerLoad

BOUNDS = (0.005, 0.01, 0.02, 0.04, 0.08, 0.15, 0.3, 0.6, 1.2, 2.5, 5.0)


def change(before: bytes | None, after: bytes, seconds: float = 4.0) -> Change:
    return Change.between(None if before is None else parse(before, 100.0), parse(after, 100.0 + seconds))


def numbers(figures: object) -> list[float]:
    values = [getattr(figures, name) for name in figures.__slots__]
    return [value for value in values if isinstance(value, int | float)]


def test_a_router_between_two_texts() -> None:
    router = RouterProcess()
    for _ in range(5):
        router.serve("OK", num_tokens=3, first_token_s=30, step_s=3)
    router.metrics.cache_hits.labels("tokens").inc(50)
    before = router.text()
    for _ in range(6):
        router.serve("OK", num_tokens=21, first_token_s=0.07, step_s=0.012)
    router.serve("CANCELLED", num_tokens=0, first_token_s=0, step_s=0)
    router.serve("UNAVAILABLE", num_tokens=0, first_token_s=0, step_s=0)
    router.metrics.inflight.set(2)
    router.metrics.cache_hits.labels("tokens").inc(3)
    router.metrics.cache_misses.labels("tokens").inc(1)
    router.metrics.cache_misses.labels("response").inc(4)

    figures = router_figures("r", change(before, router.text()))
    assert figures.requests_running == 2
    assert figures.requests_per_s == 2.0
    assert figures.errors_per_s == 0.25
    assert figures.output_tokens_per_s == 6 * 21 / 4
    # What came before the interval, 30 s and 3 s, is in none of the quantiles.
    assert 0.04 < figures.ttft_p50_s < figures.ttft_p99_s <= 0.08
    assert 0.01 < figures.inter_token_p50_s < figures.inter_token_p99_s <= 0.015
    assert (figures.cached_tokens_share, figures.cached_answers_share) == (0.75, 0.0)
    assert figures.requests_total == 13
    assert figures.requests_by_code == {"OK": 11, "CANCELLED": 1, "UNAVAILABLE": 1}
    assert (figures.prompt_tokens_total, figures.output_tokens_total) == (130, 5 * 3 + 6 * 21)
    assert figures.first_tokens_total == 11


def test_a_scheduler_between_two_texts() -> None:
    scheduler = SchedulerProcess()
    totals = scheduler.totals
    totals.hit_tokens, totals.query_tokens, totals.steps = 1000, 1000, 50
    before = scheduler.text()
    totals.hit_tokens, totals.query_tokens, totals.steps, totals.preemptions = 1025, 1100, 90, 2
    totals.running, totals.waiting, totals.blocks_used, totals.blocks_total, totals.workers = 3, 4, 30, 120, 1

    figures = scheduler_figures("s", change(before, scheduler.text()))
    assert (figures.running, figures.waiting, figures.workers) == (3, 4, 1)
    assert (figures.kv_use, figures.kv_blocks_used, figures.kv_blocks_total) == (0.25, 30, 120)
    assert (figures.prefix_cache_hit_share, figures.preemptions_per_s, figures.steps_per_s) == (0.25, 0.5, 10.0)
    assert (figures.preemptions_total, figures.steps_total) == (2, 90)


def test_a_worker_between_two_texts() -> None:
    worker = WorkerProcess()
    worker.step(num_tokens=512, step_ms=5000, gap_ms=5000, replay=False)
    before = worker.text()
    worker.step(num_tokens=64, step_ms=40, gap_ms=0, replay=False)
    for index in range(4):
        worker.step(num_tokens=1, step_ms=10, gap_ms=5, replay=index < 3)

    figures = worker_figures("w", change(before, worker.text()))
    assert (figures.steps_per_s, figures.tokens_per_s) == (1.25, 17.0)
    assert figures.step_ms == pytest.approx(16)
    assert figures.gap_share == pytest.approx(20 / 100)
    assert figures.graph_replay_share == 0.75
    assert (figures.kv_blocks_total, figures.steps_total, figures.tokens_total) == (100, 6, 580)


def test_the_first_look_has_counts_but_no_rates() -> None:
    router, worker = RouterProcess(), WorkerProcess()
    router.serve("OK", num_tokens=5, first_token_s=0.1, step_s=0.01)
    worker.step(num_tokens=1, step_ms=10, gap_ms=1, replay=True)
    figures = router_figures("r", change(None, router.text()))
    assert (figures.requests_total, figures.output_tokens_total) == (1, 5)
    assert {figures.requests_per_s, figures.errors_per_s, figures.ttft_p50_s, figures.cached_tokens_share} == {None}
    steps = worker_figures("w", change(None, worker.text()))
    assert {steps.steps_per_s, steps.step_ms, steps.gap_share, steps.graph_replay_share} == {None}


def test_an_idle_interval_has_rates_of_zero_and_no_latencies() -> None:
    router = RouterProcess()
    router.serve("OK", num_tokens=5, first_token_s=0.1, step_s=0.01)
    figures = router_figures("r", change(router.text(), router.text()))
    assert (figures.requests_per_s, figures.errors_per_s, figures.output_tokens_per_s) == (0.0, 0.0, 0.0)
    assert {figures.ttft_p50_s, figures.inter_token_p99_s, figures.cached_answers_share} == {None}


@pytest.mark.parametrize("num_after", [1, 500], ids=["counts less", "has overtaken its former self"])
def test_a_restarted_worker_counts_from_zero(num_after: int) -> None:
    old, new = WorkerProcess(), WorkerProcess()
    for _ in range(100):
        old.step(num_tokens=1, step_ms=10, gap_ms=5, replay=False)
    for _ in range(num_after):
        new.step(num_tokens=1, step_ms=10, gap_ms=5, replay=True)
    figures = worker_figures("w", change(old.text(), new.text()))
    assert figures.steps_per_s == num_after / 4
    assert figures.graph_replay_share == 1.0
    assert figures.step_ms == pytest.approx(10)


def test_a_restarted_router_and_scheduler_never_have_negative_rates() -> None:
    old, new = RouterProcess(), RouterProcess()
    for _ in range(9):
        old.serve("INTERNAL", num_tokens=40, first_token_s=0.2, step_s=0.3)
    old.metrics.cache_hits.labels("response").inc(7)
    new.serve("OK", num_tokens=2, first_token_s=0.07, step_s=0.012)
    figures = router_figures("r", change(old.text(), new.text()))
    assert (figures.requests_per_s, figures.errors_per_s, figures.output_tokens_per_s) == (0.25, 0.0, 0.5)
    assert 0.04 < figures.ttft_p99_s <= 0.08
    before, after = SchedulerProcess(), SchedulerProcess()
    before.totals.steps, before.totals.hit_tokens, before.totals.query_tokens = 1000, 900, 950
    after.totals.steps, after.totals.hit_tokens, after.totals.query_tokens = 8, 10, 40
    restarted = scheduler_figures("s", change(before.text(), after.text()))
    assert (restarted.steps_per_s, restarted.prefix_cache_hit_share) == (2.0, 0.25)
    assert min(numbers(figures) + numbers(restarted)) >= 0


def test_a_scheduler_that_restarts_leaves_the_rates_of_its_router_alone() -> None:
    router = RouterProcess(SchedulerLoad("s:1", True, preemptions=10), SchedulerLoad("s:2", True, preemptions=5))
    for _ in range(100):
        router.serve("OK", num_tokens=2, first_token_s=0.1, step_s=0.01)
    before = router.text()
    router.serve("OK", num_tokens=2, first_token_s=0.1, step_s=0.01)
    router.loads = [SchedulerLoad("s:1", True, preemptions=2), SchedulerLoad("s:2", True, preemptions=9)]
    seen = change(before, router.text())
    assert router_figures("r", seen).requests_per_s == 0.25
    assert [figures.preemptions_per_s for figures in schedulers_of_router("r", seen)] == [0.5, 1.0]


def test_aliases_that_come_and_go_are_no_restart() -> None:
    scheduler = SchedulerProcess()
    scheduler.totals.steps = 1000
    before = scheduler.text() + b'# TYPE vllm:prompt_tokens_total counter\nvllm:prompt_tokens_total{model_name="m"} 9\n'
    scheduler.totals.steps = 1008
    assert scheduler_figures("s", change(before, scheduler.text())).steps_per_s == 2.0


def test_schedulers_of_two_routers_and_their_own_ports_become_one_row_each() -> None:
    lost = RouterProcess(SchedulerLoad("s:1", False), SchedulerLoad("s:2", True, running=1))
    good = RouterProcess(
        SchedulerLoad("s:1", True, running=7, kv_blocks_used=1, kv_blocks_total=4), SchedulerLoad("s:2", True)
    )
    routed = [
        *schedulers_of_router("lost", change(None, lost.text())),
        *schedulers_of_router("good", change(None, good.text())),
    ]
    rows = merge_schedulers([], routed)
    assert [(row.address, row.seen_by, row.running) for row in rows] == [("s:1", "good", 7), ("s:2", "lost", 1)]
    assert (rows[0].kv_use, rows[0].is_connected) == (0.25, True)
    own = scheduler_figures("own", change(None, SchedulerProcess().text()))
    assert [row.address for row in merge_schedulers([own], routed)] == ["own", "s:1", "s:2"]
    assert [row.address for row in merge_schedulers([own, own], routed)] == ["own", "own"]


@pytest.mark.parametrize("q", [0.01, 0.5, 0.9, 0.99, 1.0])
@pytest.mark.parametrize("shape", ["uniform", "exponential"])
def test_quantiles_of_an_interval_against_numpy(q: float, shape: str) -> None:
    registry = CollectorRegistry()
    registry.register(RouterProcess().metrics.registry)
    histogram = Histogram("pagemill:latency_seconds", "for the test", buckets=BOUNDS, registry=registry)
    rng = np.random.default_rng(5)
    for value in rng.uniform(0, 5, 3000):
        histogram.observe(value)
    before = generate_latest(registry)
    data = rng.uniform(0.02, 0.3, 4000) if shape == "uniform" else np.minimum(rng.exponential(0.2, 4000), 5.0)
    for value in data:
        histogram.observe(value)
    increase = change(before, generate_latest(registry)).histogram("pagemill:latency_seconds")
    assert increase.count == 4000
    assert increase.mean() == pytest.approx(data.mean())
    estimate, truth = increase.quantile(q), np.quantile(data, q)
    bucket = np.searchsorted(BOUNDS, truth)
    width = BOUNDS[bucket] - (BOUNDS[bucket - 1] if bucket else 0.0)
    # Data that is even within buckets is estimated well; else the error is bounded by the bucket.
    assert abs(estimate - truth) <= (0.004 if shape == "uniform" else width)


def test_quantiles_at_the_edges() -> None:
    assert HistogramIncrease((1.0, math.inf), (0.0, 0.0), 0.0).quantile(0.5) is None
    assert HistogramIncrease((), (), 0.0).quantile(0.5) is None
    assert HistogramIncrease((1.0, 2.0, math.inf), (0.0, 0.0, 5.0), 50.0).quantile(0.5) == 2.0
    assert HistogramIncrease((1.0, 2.0, math.inf), (0.0, 4.0, 4.0), 6.0).quantile(0.0) == 1.0
    assert HistogramIncrease((1.0, 2.0, math.inf), (0.0, 4.0, 4.0), 6.0).quantile(0.5) == 1.5
