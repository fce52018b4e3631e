"""Log lines, trace contexts in messages, and the metrics port."""

from __future__ import annotations

import json
import logging
import socket
import sys
import urllib.request

import pytest
from opentelemetry import trace
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.sampling import ALWAYS_OFF
from prometheus_client import CollectorRegistry, Gauge

from pagemill.config import CommonSettings
from pagemill.errors import UnavailableError
from pagemill.telemetry import (
    ConsoleFormatter,
    JsonFormatter,
    context_from_traceparent,
    inject_traceparent,
    link_from_traceparent,
    start_metrics_server,
)

TRACEPARENT = "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01"


def record(message: str = "served %d", *args: object, **extra: object) -> logging.LogRecord:
    made = logging.LogRecord("router.app", logging.INFO, __file__, 1, message, args or (3,), None)
    vars(made).update(extra)
    return made


def test_a_json_line_holds_extra_fields_and_the_ids_of_the_current_span() -> None:
    tracer = TracerProvider().get_tracer("test")
    with tracer.start_as_current_span("span") as span:
        line = JsonFormatter("router").format(record(request_id="r1"))
    entry = json.loads(line)
    assert "\n" not in line
    assert (entry["message"], entry["service"], entry["level"]) == ("served 3", "router", "INFO")
    assert entry["request_id"] == "r1"
    assert entry["trace_id"] == trace.format_trace_id(span.get_span_context().trace_id)
    assert entry["span_id"] == trace.format_span_id(span.get_span_context().span_id)


def test_a_json_line_survives_odd_values_newlines_and_exceptions() -> None:
    try:
        raise ValueError("two\nlines")
    except ValueError:
        made = record("a\nb", what=object(), level="mine")
        made.args = ()
        made.exc_info = sys.exc_info()
    line = JsonFormatter("worker").format(made)
    assert "\n" not in line
    assert "two\nlines" in json.loads(line)["exception"]
    assert json.loads(line)["level"] == "INFO"


def test_a_console_line_is_readable_and_ends_with_its_fields() -> None:
    line = ConsoleFormatter("router").format(record(request_id="r1", trace_id="t1"))
    assert line.endswith("router router.app: served 3 request_id=r1 trace_id=t1")


def test_a_traceparent_survives_the_trip_through_a_message() -> None:
    context = context_from_traceparent(TRACEPARENT)
    assert context is not None
    assert inject_traceparent(context) == TRACEPARENT
    link = link_from_traceparent(TRACEPARENT)
    assert link is not None
    assert trace.format_span_id(link.context.span_id) == "b7ad6b7169203331"


def test_a_child_of_a_remote_span_keeps_its_trace() -> None:
    tracer = TracerProvider().get_tracer("test")
    span = tracer.start_span("child", context=context_from_traceparent(TRACEPARENT))
    assert inject_traceparent(span).startswith("00-0af7651916cd43dd8448eb211c80319c-")
    with trace.use_span(span):
        assert inject_traceparent() == inject_traceparent(span)


@pytest.mark.parametrize("text", ["", "junk", "00-0-0-01", TRACEPARENT.replace("0af7", "zzzz"), "00-" + "0" * 32])
def test_a_malformed_traceparent_is_none(text: str) -> None:
    assert context_from_traceparent(text) is None
    assert link_from_traceparent(text) is None


def test_what_is_not_recorded_travels_as_nothing() -> None:
    assert inject_traceparent() == ""
    span = TracerProvider(sampler=ALWAYS_OFF).get_tracer("test").start_span("span")
    assert inject_traceparent(span) == ""


def test_the_metrics_port_serves_the_given_registry_and_names_a_port_in_use() -> None:
    registry = CollectorRegistry()
    Gauge("pagemill:num_requests_running", "running", registry=registry).set(3)
    assert start_metrics_server(CommonSettings(), registry) is None
    port = start_metrics_server(CommonSettings(metrics_port=0), registry)
    text = urllib.request.urlopen(f"http://127.0.0.1:{port}/metrics", timeout=10).read().decode()
    assert "pagemill:num_requests_running 3.0" in text
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        number = taken.getsockname()[1]
        with pytest.raises(UnavailableError, match=str(number)):
            start_metrics_server(CommonSettings(metrics_port=number), registry)
