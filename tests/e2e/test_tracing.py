"""One trace per request goes through the three processes and arrives at a real OTLP receiver."""

from __future__ import annotations

from concurrent import futures

import grpc
import httpx
import pytest
from opentelemetry.proto.collector.trace.v1 import trace_service_pb2, trace_service_pb2_grpc
from processes import serve, wait_until

pytestmark = pytest.mark.e2e
TRACE_ID = "0af7651916cd43dd8448eb211c80319c"
CALLER_SPAN_ID = "b7ad6b7169203331"


class Receiver(trace_service_pb2_grpc.TraceServiceServicer):
    """Keeps every span with the name of the service that sent it."""

    def __init__(self) -> None:
        self.spans: list[tuple[str, object]] = []

    def Export(self, request, context):
        for resource_spans in request.resource_spans:
            attributes = {a.key: a.value.string_value for a in resource_spans.resource.attributes}
            for scope in resource_spans.scope_spans:
                self.spans += [(attributes["service.name"], span) for span in scope.spans]
        return trace_service_pb2.ExportTraceServiceResponse()

    def named(self, name: str) -> list[tuple[str, object]]:
        return [(service, span) for service, span in list(self.spans) if span.name == name]


@pytest.fixture()
def receiver():
    servicer = Receiver()
    server = grpc.server(futures.ThreadPoolExecutor(2))
    trace_service_pb2_grpc.add_TraceServiceServicer_to_server(servicer, server)
    port = server.add_insecure_port("127.0.0.1:0")
    server.start()
    yield servicer, f"http://127.0.0.1:{port}"
    server.stop(0)


def test_one_trace_spans_router_scheduler_and_worker(receiver) -> None:
    servicer, endpoint = receiver
    with serve("--otlp-endpoint", endpoint) as server:
        headers = {"traceparent": f"00-{TRACE_ID}-{CALLER_SPAN_ID}-01"}
        body = {"messages": [{"role": "user", "content": "Name a colour."}], "max_tokens": 12, "temperature": 0}
        url = server.http_url + "/v1/chat/completions"
        assert httpx.post(url, json=body, headers=headers, timeout=60).status_code == 200
        wanted = ["router.request", "router.render", "router.tokenize", "scheduler.queue", "scheduler.prefill"]
        wanted += ["scheduler.decode", "worker.step"]
        wait_until(lambda: all(servicer.named(n) for n in wanted), 20, f"spans {wanted}")

    by_name = {name: servicer.named(name)[0] for name in [*wanted, "router.cache"]}
    request = by_name["router.request"][1]
    assert request.parent_span_id.hex() == CALLER_SPAN_ID
    for name, (service, span) in by_name.items():
        if name == "worker.step":
            assert service == "pagemill-worker"
            assert TRACE_ID in {link.trace_id.hex() for link in span.links}
            continue
        assert span.trace_id.hex() == TRACE_ID, name
        assert service == ("pagemill-router" if name.startswith("router.") else "pagemill-scheduler")
        if name != "router.request":
            assert span.parent_span_id == request.span_id, name
        assert span.end_time_unix_nano >= span.start_time_unix_nano
    # Never a span per token.
    assert len(servicer.spans) < 20
