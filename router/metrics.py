"""Prometheus metrics of the router. One object per process, around an explicit registry."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import get_args

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from pagemill.weighted_histogram import WeightedHistogram
from router.generation import FinishReason

_TTFT_BUCKETS = (0.005, 0.01, 0.02, 0.04, 0.08, 0.15, 0.3, 0.6, 1.2, 2.5, 5, 10, 20, 40, 80)
_ITL_BUCKETS = (0.002, 0.005, 0.01, 0.015, 0.02, 0.03, 0.05, 0.08, 0.12, 0.2, 0.4, 0.8, 2, 5)
_TOKEN_COUNT_BUCKETS = (1, 4, 16, 64, 128, 256, 512, 1024, 2048, 4096, 8192, 16384, 32768, 65536, 131072)
_E2E_BUCKETS = (0.1, 0.2, 0.5, 1, 2, 5, 10, 20, 40, 80, 160, 320, 640)


@dataclass(slots=True, frozen=True)
class SchedulerLoad:
    """Load of one scheduler, as its last report told it."""

    scheduler: str
    connected: bool
    running: int = 0
    waiting: int = 0
    kv_blocks_used: int = 0
    kv_blocks_total: int = 0
    workers: int = 0
    preemptions: int = 0


class _LoadCollector(Collector):
    """Re-exports the load of each scheduler when scraped."""

    def __init__(self, read: Callable[[], list[SchedulerLoad]]) -> None:
        self._read = read

    def collect(self) -> Iterable[Metric]:
        loads = self._read()
        gauges: list[tuple[str, str, Callable[[SchedulerLoad], int]]] = [
            ("pagemill:scheduler_up", "1 while the session to the scheduler stands", lambda s: int(s.connected)),
            ("pagemill:num_requests_running", "sequences in the running batch", lambda s: s.running),
            ("pagemill:num_requests_waiting", "requests waiting at the scheduler", lambda s: s.waiting),
            ("pagemill:kv_blocks_used", "KV blocks in use", lambda s: s.kv_blocks_used),
            ("pagemill:kv_blocks_total", "KV blocks in all", lambda s: s.kv_blocks_total),
            ("pagemill:workers", "workers attached to the scheduler", lambda s: s.workers),
        ]
        for name, text, value in gauges:
            family = GaugeMetricFamily(name, text, labels=["scheduler"])
            for load in loads:
                family.add_metric([load.scheduler], value(load))
            yield family
        preemptions = CounterMetricFamily("pagemill:preemptions", "preempted sequences", labels=["scheduler"])
        for load in loads:
            preemptions.add_metric([load.scheduler], load.preemptions)
        yield preemptions


class RouterMetrics:
    """All series of the router; `registry` is what /metrics and the metrics port serve."""

    def __init__(self, registry: CollectorRegistry | None = None) -> None:
        self.registry = registry or CollectorRegistry()
        r = self.registry
        self.requests = Counter("pagemill:requests_total", "requests ended, by gRPC code name", ["code"], registry=r)
        self.inflight = Gauge("pagemill:requests_inflight", "requests being served", registry=r)
        self.time_to_first_token = Histogram(
            "pagemill:time_to_first_token_seconds", "arrival to first token", buckets=_TTFT_BUCKETS, registry=r
        )
        self.inter_token_latency = WeightedHistogram(
            "pagemill:inter_token_latency_seconds", "time between tokens of a sequence", _ITL_BUCKETS
        )
        r.register(self.inter_token_latency)
        self.request_latency = Histogram(
            "pagemill:e2e_request_latency_seconds", "arrival to last token", buckets=_E2E_BUCKETS, registry=r
        )
        self.prompt_tokens = Counter("pagemill:prompt_tokens_total", "prompt tokens taken", registry=r)
        self.generation_tokens = Counter("pagemill:generation_tokens_total", "output tokens delivered", registry=r)
        self.request_prompt_tokens = Histogram(
            "pagemill:request_prompt_tokens", "prompt tokens of a request", buckets=_TOKEN_COUNT_BUCKETS, registry=r
        )
        self.request_generation_tokens = Histogram(
            "pagemill:request_generation_tokens",
            "output tokens of a request, all of its sequences together",
            buckets=_TOKEN_COUNT_BUCKETS,
            registry=r,
        )
        self.finished = Counter(
            "pagemill:request_success_total",
            "sequences that ended, by the reason that the client was told",
            ["finished_reason"],
            registry=r,
        )
        self.resubmissions = Counter(
            "pagemill:resubmissions_total", "requests handed to a scheduler again after a loss", registry=r
        )
        self.cache_hits = Counter(
            "pagemill:prompt_cache_hits_total", "answers of the prompt cache", ["kind"], registry=r
        )
        self.cache_misses = Counter(
            "pagemill:prompt_cache_misses_total",
            "questions that the prompt cache had no answer to",
            ["kind"],
            registry=r,
        )
        self.cache_errors = Counter("pagemill:prompt_cache_errors_total", "failed Redis operations", registry=r)
        for reason in get_args(FinishReason):
            self.finished.labels(reason)
        for kind in ("tokens", "response"):
            self.cache_hits.labels(kind)
            self.cache_misses.labels(kind)

    def export_scheduler_load(self, read: Callable[[], list[SchedulerLoad]]) -> None:
        """Re-export what `read` returns at each scrape. Call it once."""
        self.registry.register(_LoadCollector(read))
