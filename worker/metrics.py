"""Prometheus metrics of a worker."""

from __future__ import annotations

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram

from pagemill.step import StepPlan, StepResult, WorkerCapacity

_STEP_BUCKETS = (0.001, 0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1.0, 2.0, 5.0)
_GAP_BUCKETS = (0.0001, 0.0002, 0.0005, 0.001, 0.002, 0.005, 0.01, 0.05, 0.1, 1.0)


class WorkerMetrics:
    """What a worker counts; `registry` is served on the metrics port."""

    def __init__(self, capacity: WorkerCapacity) -> None:
        self.registry = CollectorRegistry()
        self._steps = Counter("pagemill:worker_steps", "Steps executed", registry=self.registry)
        self._tokens = Counter("pagemill:worker_tokens", "Tokens computed", registry=self.registry)
        self._step_seconds = Histogram(
            "pagemill:worker_step_seconds",
            "Forward pass and sampling of a step",
            buckets=_STEP_BUCKETS,
            registry=self.registry,
        )
        self._gap_seconds = Histogram(
            "pagemill:step_gap_seconds",
            "Time for which the device waited for a step that continues running sequences",
            buckets=_GAP_BUCKETS,
            registry=self.registry,
        )
        self._nan_failures = Counter(
            "pagemill:worker_nan_failures", "Sequences ended by NaN or infinite logits", registry=self.registry
        )
        self._out_of_memory = Counter(
            "pagemill:worker_out_of_memory", "Steps that ran out of memory", registry=self.registry
        )
        self._decode_steps = Counter(
            "pagemill:worker_decode_steps", "Steps with one token per sequence", registry=self.registry
        )
        self._graph_replays = Counter(
            "pagemill:worker_graph_replays", "Decode steps that replayed a CUDA graph", registry=self.registry
        )
        self._attaches = Counter(
            "pagemill:worker_attaches", "Streams to a scheduler that were accepted", registry=self.registry
        )
        blocks = Gauge("pagemill:kv_blocks_total", "KV blocks in the pool", registry=self.registry)
        blocks.set(capacity.num_blocks)

    def attached(self) -> None:
        """A scheduler took this worker."""
        self._attaches.inc()

    def observe(self, plan: StepPlan, result: StepResult) -> None:
        """Count one step."""
        self._steps.inc()
        self._tokens.inc(sum(plan.num_tokens))
        self._step_seconds.observe((result.forward_ns + result.sample_ns) * 1e-9)
        if result.gap_ns:
            self._gap_seconds.observe(result.gap_ns * 1e-9)
        self._decode_steps.inc(result.is_decode)
        self._graph_replays.inc(result.is_replay)
        if result.ran_out_of_memory:
            self._out_of_memory.inc()
        elif result.failures:
            self._nan_failures.inc(len(result.failures))
