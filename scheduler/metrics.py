"""What the scheduler tells Prometheus, and the spans of traced requests."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator

from opentelemetry.trace import Status, StatusCode
from prometheus_client import CollectorRegistry, Counter, Histogram
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from pagemill.telemetry import context_from_traceparent, tracer
from pagemill.weighted_histogram import WeightedHistogram
from scheduler.scheduler import SchedulerCounters
from scheduler.sequence import FinishReason, Request

_TOKEN_BUCKETS_S = (0.002, 0.005, 0.01, 0.02, 0.03, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.5, 1.0, 2.5, 5.0)
_FIRST_TOKEN_BUCKETS_S = (0.01, 0.025, 0.05, 0.1, 0.2, 0.4, 0.8, 1.5, 3.0, 6.0, 12.0, 30.0, 60.0, 120.0)

_QUEUE_BUCKETS_S = (0.001, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 120.0, 300.0)
_DECODE_BUCKETS_S = (0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 20.0, 40.0, 80.0, 160.0, 320.0, 640.0)


class CoreGauges(Collector):
    """Numbers read from the live cores at scrape time, plus the totals of cores that are gone."""

    def __init__(self, read: Callable[[], CoreTotals]) -> None:
        self._read = read

    def collect(self) -> Iterator[Metric]:
        totals = self._read()
        for name, text, value in (
            ("num_requests_running", "sequences in the running batches", totals.running),
            ("num_requests_waiting", "requests waiting for a slot", totals.waiting),
            ("kv_blocks_used", "KV blocks that live sequences refer to", totals.blocks_used),
            ("kv_blocks_total", "KV blocks in all", totals.blocks_total),
            ("kv_cache_usage_ratio", "share of the KV blocks that live sequences refer to", totals.kv_cache_usage),
            ("workers", "attached workers", totals.workers),
        ):
            yield GaugeMetricFamily(f"pagemill:{name}", text, value=value)
        for name, text, value in (
            ("preemptions", "sequences that lost their blocks and computed again", totals.preemptions),
            ("prefix_cache_hit_tokens", "tokens found in the prefix cache", totals.hit_tokens),
            ("prefix_cache_query_tokens", "tokens looked up in the prefix cache", totals.query_tokens),
            ("scheduler_steps", "steps planned", totals.steps),
            ("requests_aborted", "requests ended by their client", totals.aborted),
        ):
            yield CounterMetricFamily(f"pagemill:{name}", text, value=value)


class CoreTotals:
    """Sums over cores."""

    def __init__(self) -> None:
        self.running = self.waiting = self.blocks_used = self.blocks_total = self.workers = 0
        self.preemptions = self.hit_tokens = self.query_tokens = self.steps = self.aborted = 0

    @property
    def kv_cache_usage(self) -> float:
        """From 0 to 1; 0 where there are no blocks."""
        return self.blocks_used / self.blocks_total if self.blocks_total else 0.0

    def add_counters(self, counters: SchedulerCounters) -> None:
        self.preemptions += counters.preemptions
        self.hit_tokens += counters.prefix_cache_hit_tokens
        self.query_tokens += counters.prefix_cache_query_tokens
        self.steps += counters.steps
        self.aborted += counters.aborted


class SchedulerMetrics:
    """All metrics of a scheduler process."""

    def __init__(self, read: Callable[[], CoreTotals]) -> None:
        self.registry = CollectorRegistry()
        self.registry.register(CoreGauges(read))
        self.inter_token = WeightedHistogram(
            "pagemill:inter_token_latency_seconds", "time between tokens of a sequence", _TOKEN_BUCKETS_S
        )
        self.registry.register(self.inter_token)
        self.first_token = Histogram(
            "pagemill:time_to_first_token_seconds",
            "from arrival to the first output token",
            buckets=_FIRST_TOKEN_BUCKETS_S,
            registry=self.registry,
        )
        self.queue_time = self._phase("queue", "from arrival until its first tokens are planned", _QUEUE_BUCKETS_S)
        self.prefill_time = self._phase("prefill", "from there to the first output token", _FIRST_TOKEN_BUCKETS_S)
        self.decode_time = self._phase("decode", "from the first output token to the end", _DECODE_BUCKETS_S)
        self.finished = Counter(
            "pagemill:request_success", "sequences that ended, by reason", ["finished_reason"], registry=self.registry
        )
        self.failed = Counter(
            "pagemill:requests_failed", "requests that failed, by code", ["code"], registry=self.registry
        )
        for reason in FinishReason:
            self.finished.labels(reason.name.lower())

    def _phase(self, name: str, text: str, buckets: tuple[float, ...]) -> Histogram:
        return Histogram(f"pagemill:request_{name}_time_seconds", text, buckets=buckets, registry=self.registry)


class EngineObserver:
    """Turns a core's events into metrics and spans. One per core, called on its thread."""

    def __init__(self, metrics: SchedulerMetrics) -> None:
        self._metrics = metrics
        self._last_tokens_s = 0.0
        self._tracer = tracer("scheduler")

    def first_token(self, request: Request) -> None:
        self._metrics.first_token.observe((request.first_token_unix_ns - request.arrival_unix_ns) / 1e9)

    def tokens(self, num_tokens: int) -> None:
        now = time.monotonic()
        # After a pause the gap is idle time, not a latency that anybody saw.
        if 0 < now - self._last_tokens_s < 60 and self._last_tokens_s:
            self._metrics.inter_token.observe(now - self._last_tokens_s, num_tokens)
        self._last_tokens_s = now

    def idle(self) -> None:
        """No sequence runs: the next token has no predecessor."""
        self._last_tokens_s = 0.0

    def sequence_finished(self, reason: FinishReason) -> None:
        self._metrics.finished.labels(reason.name.lower()).inc()

    def request_ended(self, request: Request, error_code: int) -> None:
        if error_code:
            self.request_refused(error_code)
        self._observe_phases(request)
        if request.traceparent:
            self._record_spans(request, error_code)

    def request_refused(self, error_code: int) -> None:
        """A request failed, perhaps before it was one of the core's."""
        self._metrics.failed.labels(str(error_code)).inc()

    def _observe_phases(self, request: Request) -> None:
        """The phases that the request completed; the last one also where it was ended in it."""
        metrics = self._metrics
        arrival, scheduled = request.arrival_unix_ns, request.scheduled_unix_ns
        first_token, finished = request.first_token_unix_ns, request.finished_unix_ns
        if scheduled:
            metrics.queue_time.observe((scheduled - arrival) / 1e9)
        if first_token:
            metrics.prefill_time.observe((first_token - scheduled) / 1e9)
            metrics.decode_time.observe((finished - first_token) / 1e9)

    def _record_spans(self, request: Request, error_code: int) -> None:
        context = context_from_traceparent(request.traceparent)
        if context is None:
            return
        times = (
            ("scheduler.queue", request.arrival_unix_ns, request.scheduled_unix_ns),
            ("scheduler.prefill", request.scheduled_unix_ns, request.first_token_unix_ns),
            ("scheduler.decode", request.first_token_unix_ns, request.finished_unix_ns),
        )
        for name, start_ns, end_ns in times:
            if start_ns == 0:
                break
            span = self._tracer.start_span(name, context=context, start_time=start_ns)
            span.set_attribute("pagemill.request_id", request.request_id)
            if name == "scheduler.prefill":
                span.set_attribute("pagemill.prompt_tokens", request.num_prompt_tokens)
                span.set_attribute("pagemill.cached_tokens", request.cached_tokens or 0)
            if name == "scheduler.decode":
                span.set_attribute("pagemill.completion_tokens", request.usage().completion_tokens)
            if end_ns == 0 and error_code:
                span.set_status(Status(StatusCode.ERROR))
            span.end(end_ns or request.finished_unix_ns)
