"""Logs, traces and metrics, set up once per process from `CommonSettings`."""

from __future__ import annotations

import json
import logging
import sys
import threading
from datetime import UTC, datetime
from typing import TYPE_CHECKING, Any

from opentelemetry import trace
from opentelemetry.context import Context
from opentelemetry.trace import Link, Span, Tracer
from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator

from pagemill.config import CommonSettings
from pagemill.errors import UnavailableError

if TYPE_CHECKING:
    from prometheus_client import CollectorRegistry

_SHUTDOWN_DEADLINE_S = 5.0
_EXPORT_TIMEOUT_S = 5
# `color_message` is uvicorn's second copy of its message.
_STANDARD_ATTRIBUTES = frozenset(vars(logging.makeLogRecord({}))) | {"message", "asctime", "taskName", "color_message"}
_PROPAGATOR = TraceContextTextMapPropagator()


def _fields(record: logging.LogRecord) -> dict[str, Any]:
    """What a line has besides its text: ids of the current span, and all that came in by `extra`."""
    span_context = trace.get_current_span().get_span_context()
    fields: dict[str, Any] = {}
    if span_context.is_valid:
        fields["trace_id"] = trace.format_trace_id(span_context.trace_id)
        fields["span_id"] = trace.format_span_id(span_context.span_id)
    fields.update({key: value for key, value in vars(record).items() if key not in _STANDARD_ATTRIBUTES})
    return fields


class ConsoleFormatter(logging.Formatter):
    """`12:34:56.789 INFO  router router.app: text key=value`."""

    def __init__(self, service: str) -> None:
        super().__init__()
        self._service = service

    def format(self, record: logging.LogRecord) -> str:
        time = datetime.fromtimestamp(record.created).strftime("%H:%M:%S.%f")[:-3]
        pairs = "".join(f" {key}={value}" for key, value in _fields(record).items())
        line = f"{time} {record.levelname:<7} {self._service} {record.name}: {record.getMessage()}{pairs}"
        if record.exc_info:
            line += "\n" + self.formatException(record.exc_info)
        return line


class JsonFormatter(logging.Formatter):
    """One JSON object per line: time, level, service, logger, message, exception, ids and `extra` fields."""

    def __init__(self, service: str) -> None:
        super().__init__()
        self._service = service

    def format(self, record: logging.LogRecord) -> str:
        entry: dict[str, Any] = {
            "time": datetime.fromtimestamp(record.created, UTC).isoformat(timespec="milliseconds"),
            "level": record.levelname,
            "service": self._service,
            "logger": record.name,
            "message": record.getMessage(),
        }
        entry |= {key: value for key, value in _fields(record).items() if key not in entry}
        if record.exc_info:
            entry["exception"] = self.formatException(record.exc_info)
        return json.dumps(entry, ensure_ascii=False, default=str)


def setup_logging(service: str, settings: CommonSettings) -> None:
    """Send all log records of the process to stderr, in the configured form. A second call replaces the first's."""
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(JsonFormatter(service) if settings.log_format == "json" else ConsoleFormatter(service))
    root = logging.getLogger()
    root.handlers[:] = [handler]
    root.setLevel(settings.log_level)
    # These log a line per request at INFO, which a log of the service's own already does better.
    for name in ("httpx", "httpcore", "uvicorn.access", "urllib3"):
        logging.getLogger(name).setLevel(max(logging.WARNING, root.level))


def setup_tracing(service: str, settings: CommonSettings) -> None:
    """Export spans by OTLP where `otlp_endpoint` is set; else `tracer()` gives tracers that cost nothing.

    New traces are sampled by `trace_sample_ratio`; a trace that came from outside keeps its own decision. The export
    queue is bounded: with the collector away, spans are dropped and requests are not slowed.
    """
    if not settings.otlp_endpoint:
        return
    from opentelemetry.exporter.otlp.proto.grpc.trace_exporter import OTLPSpanExporter
    from opentelemetry.sdk.resources import Resource
    from opentelemetry.sdk.trace import TracerProvider
    from opentelemetry.sdk.trace.export import BatchSpanProcessor
    from opentelemetry.sdk.trace.sampling import ParentBased, TraceIdRatioBased

    provider = TracerProvider(
        sampler=ParentBased(TraceIdRatioBased(settings.trace_sample_ratio)),
        resource=Resource.create({"service.name": f"pagemill-{service}"}),
    )
    exporter = OTLPSpanExporter(
        endpoint=settings.otlp_endpoint,
        insecure=not settings.otlp_endpoint.startswith("https://"),
        timeout=_EXPORT_TIMEOUT_S,
    )
    provider.add_span_processor(BatchSpanProcessor(exporter, max_queue_size=4096, schedule_delay_millis=1000))
    trace.set_tracer_provider(provider)


def shutdown_tracing() -> None:
    """Flush and end the exporter; gives up after five seconds, since a collector may be away."""
    shutdown = getattr(trace.get_tracer_provider(), "shutdown", None)
    if shutdown is None:
        return
    thread = threading.Thread(target=shutdown, name="shutdown-tracing", daemon=True)
    thread.start()
    thread.join(_SHUTDOWN_DEADLINE_S)


def tracer(name: str) -> Tracer:
    """A tracer; `name` is the module that owns the spans."""
    return trace.get_tracer(name)


def inject_traceparent(span_or_context: Span | Context | None = None) -> str:
    """W3C traceparent of a span, a context, or (None) the current span; "" where it is not recorded."""
    if isinstance(span_or_context, Span):
        context = trace.set_span_in_context(span_or_context)
    else:
        context = span_or_context if span_or_context is not None else Context()
    span = span_or_context if isinstance(span_or_context, Span) else trace.get_current_span(span_or_context)
    span_context = span.get_span_context()
    if not (span_context.is_valid and span_context.trace_flags.sampled):
        return ""
    carrier: dict[str, str] = {}
    _PROPAGATOR.inject(carrier, context=trace.set_span_in_context(span, context))
    return carrier["traceparent"]


def context_from_traceparent(tp: str) -> Context | None:
    """A context whose current span is the remote one; None where `tp` is empty or malformed."""
    if not tp:
        return None
    context = _PROPAGATOR.extract({"traceparent": tp}, context=Context())
    return context if trace.get_current_span(context).get_span_context().is_valid else None


def link_from_traceparent(tp: str) -> Link | None:
    """A link to the remote span; None where `tp` is empty or malformed."""
    context = context_from_traceparent(tp)
    return None if context is None else Link(trace.get_current_span(context).get_span_context())


def start_metrics_server(settings: CommonSettings, registry: CollectorRegistry) -> int | None:
    """Serve `registry` in Prometheus form on its own port, from a daemon thread; returns the port, None where unset.

    Raises:
        UnavailableError: the port is in use.
    """
    if settings.metrics_port is None:
        return None
    from prometheus_client import start_http_server

    try:
        server, _ = start_http_server(settings.metrics_port, addr=settings.metrics_host, registry=registry)
    except OSError as err:
        raise UnavailableError(
            f"cannot listen on {settings.metrics_host}:{settings.metrics_port} for metrics: {err.strerror or err}",
            field="metrics_port",
        ) from err
    return int(server.server_port)
