from __future__ import annotations

import logging
from collections.abc import Iterator
from typing import Any

import pytest
from opentelemetry import trace
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter
from router_helpers import chat, complete, prompt

from pagemill.errors import InvalidRequestError


@pytest.fixture
def spans(monkeypatch: pytest.MonkeyPatch) -> Iterator[InMemorySpanExporter]:
    exporter = InMemorySpanExporter()
    provider = TracerProvider()
    provider.add_span_processor(SimpleSpanProcessor(exporter))
    for module in ("router.pipeline", "router.prompts"):
        monkeypatch.setattr(f"{module}._tracer", provider.get_tracer(module))
    yield exporter
    provider.shutdown()


PARENT = "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01"


async def test_one_trace_from_the_caller_to_the_scheduler(
    start_scheduler: Any, start_router: Any, says: Any, spans: InMemorySpanExporter, caplog: pytest.LogCaptureFixture
) -> None:
    scheduler = await start_scheduler(says("hi"))
    parts = await start_router(scheduler)
    request = chat()
    request.traceparent, request.request_id = PARENT, "mine"
    with caplog.at_level(logging.INFO, "router.requests"):
        await complete(parts, request)
    by_name = {s.name: s for s in spans.get_finished_spans()}
    assert {"router.request", "router.render", "router.tokenize", "router.cache"} <= by_name.keys()
    root = by_name["router.request"]
    assert root.context is not None and root.parent is not None and root.attributes is not None
    assert trace.format_trace_id(root.context.trace_id) == PARENT.split("-")[1]
    assert trace.format_span_id(root.parent.span_id) == PARENT.split("-")[2]
    for name in ("router.render", "router.tokenize", "router.cache"):
        parent = by_name[name].parent
        assert parent is not None and parent.span_id == root.context.span_id
    span_id = trace.format_span_id(root.context.span_id)
    assert scheduler.submits[0].traceparent == f"00-{PARENT.split('-')[1]}-{span_id}-01"
    assert root.attributes["pagemill.request_id"] == "mine" and root.attributes["pagemill.outcome"] == "OK"
    (record,) = caplog.records
    assert (record.request_id, record.outcome, record.prompt_cache) == ("mine", "OK", "miss")  # type: ignore[attr-defined]


async def test_a_refused_request_ends_its_span_and_is_counted(
    start_scheduler: Any, start_router: Any, says: Any, spans: InMemorySpanExporter
) -> None:
    parts = await start_router(await start_scheduler(says("hi")))
    with pytest.raises(InvalidRequestError):
        await parts.pipeline.prepare(prompt(top_p=0.0))
    (span,) = spans.get_finished_spans()
    assert span.attributes is not None and span.attributes["pagemill.outcome"] == "INVALID_ARGUMENT"
    count = parts.metrics.registry.get_sample_value("pagemill:requests_total", {"code": "INVALID_ARGUMENT"})
    assert count == 1


async def test_latencies_and_tokens_are_counted(start_scheduler: Any, start_router: Any, says: Any) -> None:
    parts = await start_router(await start_scheduler(says("a b c d")))
    usage = (await complete(parts, prompt())).usage
    value = parts.metrics.registry.get_sample_value
    assert value("pagemill:generation_tokens_total") == usage.completion_tokens
    assert value("pagemill:prompt_tokens_total") == usage.prompt_tokens
    assert value("pagemill:time_to_first_token_seconds_count") == 1
    assert value("pagemill:inter_token_latency_seconds_count") == usage.completion_tokens - 1
    assert value("pagemill:requests_inflight") == 0
