"""Processes as `pagemill top` sees them: their real metrics behind a real HTTP server."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from types import SimpleNamespace

from prometheus_client import generate_latest

from router.metrics import RouterMetrics, SchedulerLoad
from scheduler.metrics import CoreTotals, SchedulerMetrics
from worker.metrics import WorkerMetrics

# Body to answer with, or (status, body).
Answer = Callable[[], bytes | tuple[int, bytes]]


class RouterProcess:
    """The metrics of a router that knows the schedulers in `loads`."""

    def __init__(self, *loads: SchedulerLoad) -> None:
        self.loads = list(loads)
        self.metrics = RouterMetrics()
        self.metrics.export_scheduler_load(lambda: self.loads)

    def text(self) -> bytes:
        return generate_latest(self.metrics.registry)

    def serve(self, code: str, num_tokens: int, first_token_s: float, step_s: float) -> None:
        """Count one request."""
        self.metrics.requests.labels(code).inc()
        self.metrics.prompt_tokens.inc(10)
        self.metrics.generation_tokens.inc(num_tokens)
        if num_tokens:
            self.metrics.time_to_first_token.observe(first_token_s)
            self.metrics.inter_token_latency.observe(step_s, num_tokens - 1)


class SchedulerProcess:
    """The metrics of a scheduler whose cores count `totals`."""

    def __init__(self) -> None:
        self.totals = CoreTotals()
        self.metrics = SchedulerMetrics(lambda: self.totals)

    def text(self) -> bytes:
        return generate_latest(self.metrics.registry)


class WorkerProcess:
    """The metrics of a worker with 100 blocks."""

    def __init__(self) -> None:
        self.metrics = WorkerMetrics(SimpleNamespace(num_blocks=100))

    def text(self) -> bytes:
        return generate_latest(self.metrics.registry)

    def step(self, num_tokens: int, step_ms: float, gap_ms: float, replay: bool) -> None:
        """Count one step."""
        is_decode = num_tokens == 1
        result = SimpleNamespace(
            forward_ns=int(step_ms * 1e6),
            sample_ns=0,
            gap_ns=int(gap_ms * 1e6),
            is_decode=is_decode,
            is_replay=replay,
            ran_out_of_memory=False,
            failures=[],
        )
        self.metrics.observe(SimpleNamespace(num_tokens=[num_tokens]), result)


@contextlib.contextmanager
def http_server(answer: Answer, port: int = 0, api_key: str = "") -> Iterator[int]:
    """A server whose /metrics is `answer()`; yields its port."""

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            given = answer() if self.path == "/metrics" else (404, b"")
            status, body = given if isinstance(given, tuple) else (200, given)
            if api_key and self.headers.get("Authorization") != f"Bearer {api_key}":
                status, body = 401, b"{}"
            self.send_response(status)
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)

        def log_message(self, *_: object) -> None:
            pass

    server = ThreadingHTTPServer(("127.0.0.1", port), Handler)
    thread = threading.Thread(target=server.serve_forever, args=(0.01,), daemon=True)
    thread.start()
    try:
        yield server.server_port
    finally:
        server.shutdown()
        server.server_close()
        thread.join()
