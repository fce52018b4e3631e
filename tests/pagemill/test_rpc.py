"""gRPC ends as all services use them, over real servers on loopback."""

from __future__ import annotations

import asyncio
import signal
import subprocess
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import grpc
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha import reflection_pb2, reflection_pb2_grpc

from pagemill.errors import (
    AbortedError,
    ContextLengthError,
    InvalidRequestError,
    NumericalError,
    OverloadedError,
    PagemillError,
    UnavailableError,
    from_grpc,
)
from pagemill.rpc import (
    MAX_MESSAGE_BYTES,
    Health,
    abort_with,
    aio_channel,
    aio_server,
    bind,
    error_from_rpc,
    sync_channel,
)
from pagemill.v1 import inference_pb2, inference_pb2_grpc


def test_an_internal_error_keeps_the_code_of_nan_and_no_other() -> None:
    error = from_grpc(13, "the model produced NaN or infinite logits")
    assert (type(error), error.http_status, error.openai_code) == (NumericalError, 500, "numerical_error")
    other = from_grpc(13, "out of memory in the step that computed this request")
    assert (type(other), other.http_status, other.openai_code) == (PagemillError, 500, None)


class FailingService(inference_pb2_grpc.InferenceServicer):
    """Tokenize fails with the given error, Detokenize sends back what came."""

    def __init__(self, error: PagemillError | None = None) -> None:
        self._error = error

    async def Tokenize(self, request: Any, context: Any) -> Any:
        if self._error is None:
            await asyncio.sleep(60)
        await abort_with(context, self._error)

    async def Detokenize(self, request: Any, context: Any) -> Any:
        return inference_pb2.DetokenizeResponse(text="x" * len(request.token_ids))


@asynccontextmanager
async def serving(service: FailingService, health: Health | None = None) -> AsyncIterator[str]:
    server = aio_server()
    inference_pb2_grpc.add_InferenceServicer_to_server(service, server)
    if health is not None:
        health.add_to(server, ["pagemill.v1.Inference"])
    port = bind(server, "127.0.0.1", 0)
    await server.start()
    try:
        yield f"127.0.0.1:{port}"
    finally:
        await server.stop(0)


async def call_tokenize(address: str) -> PagemillError:
    async with aio_channel(address) as channel:
        with pytest.raises(grpc.RpcError) as caught:
            await inference_pb2_grpc.InferenceStub(channel).Tokenize(inference_pb2.TokenizeRequest(), timeout=10)
        return error_from_rpc(caught.value)


@pytest.mark.parametrize(
    "error",
    [
        InvalidRequestError("top_p is 0", field="sampling.top_p"),
        ContextLengthError("the context length is 5 tokens", field="prompt"),
        OverloadedError("queue full", retry_after_ms=250),
        UnavailableError("draining"),
        InvalidRequestError("größer als 5", field="größe"),
    ],
)
async def test_an_error_arrives_as_it_was_raised(error: PagemillError) -> None:
    async with serving(FailingService(error)) as address:
        received = await call_tokenize(address)
    assert type(received) is type(error)
    assert (received.message, received.retry_after_ms) == (error.message, error.retry_after_ms)
    assert received.field == error.field.encode("ascii", "backslashreplace").decode()


async def test_a_long_message_is_cut_rather_than_breaking_the_call() -> None:
    async with serving(FailingService(InvalidRequestError("é" * 100_000, field="f" * 5000))) as address:
        received = await call_tokenize(address)
    assert isinstance(received, InvalidRequestError)
    assert received.message.startswith("ééé")


async def test_nobody_at_the_address_is_unavailable_and_a_cancelled_call_is_aborted() -> None:
    assert isinstance(await call_tokenize("127.0.0.1:1"), UnavailableError)
    async with serving(FailingService()) as address:
        channel = sync_channel(address)
        future = inference_pb2_grpc.InferenceStub(channel).Tokenize.future(inference_pb2.TokenizeRequest())
        future.cancel()
        with pytest.raises(grpc.FutureCancelledError):
            future.result()
        assert isinstance(error_from_rpc(future), AbortedError)
        channel.close()


async def test_messages_over_four_mebibytes_pass() -> None:
    num_tokens = 6 << 20
    assert num_tokens < MAX_MESSAGE_BYTES
    async with serving(FailingService()) as address, aio_channel(address) as channel:
        stub = inference_pb2_grpc.InferenceStub(channel)
        answer = await stub.Detokenize(inference_pb2.DetokenizeRequest(token_ids=[1] * num_tokens), timeout=60)
    assert len(answer.text) == num_tokens


async def test_health_follows_set_serving_for_the_server_and_each_service() -> None:
    health = Health()
    async with serving(FailingService(), health) as address, aio_channel(address) as channel:
        stub = health_pb2_grpc.HealthStub(channel)

        async def status(service: str) -> int:
            return (await stub.Check(health_pb2.HealthCheckRequest(service=service), timeout=10)).status

        for serving_now, expected in ((True, 1), (False, 2)):
            await health.set_serving(serving_now)
            assert [await status(name) for name in ("", "pagemill.v1.Inference")] == [expected, expected]


async def test_reflection_lists_the_services() -> None:
    async with serving(FailingService(), Health()) as address, aio_channel(address) as channel:
        stub = reflection_pb2_grpc.ServerReflectionStub(channel)
        call = stub.ServerReflectionInfo(iter([reflection_pb2.ServerReflectionRequest(list_services="")]), timeout=10)
        names = [service.name async for answer in call for service in answer.list_services_response.service]
    assert {"pagemill.v1.Inference", "grpc.health.v1.Health"} <= set(names)


async def test_a_port_in_use_is_named_and_never_shared() -> None:
    async with serving(FailingService()) as address:
        port = int(address.rpartition(":")[2])
        with pytest.raises(UnavailableError, match=str(port)):
            bind(aio_server(), "127.0.0.1", port)


@pytest.mark.parametrize(("signals", "code"), [(1, 0), (2, 1)])
def test_the_first_signal_asks_and_the_second_ends_at_once(signals: int, code: int) -> None:
    script = (
        "import asyncio\n"
        "from pagemill.rpc import ShutdownSignal\n"
        "async def main():\n"
        "    shutdown = ShutdownSignal(before_exit=lambda: print('ending', flush=True))\n"
        "    shutdown.install(asyncio.get_running_loop())\n"
        "    print('installed', flush=True)\n"
        "    await shutdown.event.wait()\n"
        "    print('asked', flush=True)\n"
        f"    await asyncio.sleep({0 if signals == 1 else 60})\n"
        "asyncio.run(main())\n"
    )
    process = subprocess.Popen([sys.executable, "-c", script], stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None
    expected = ["installed\n", "asked\n", "ending\n"]
    for line in expected[: signals + 1]:
        assert process.stdout.readline() == line
        if line != expected[signals]:
            process.send_signal(signal.SIGTERM)
    assert process.wait(30) == code
    process.stdout.close()


async def test_a_receive_window_bounds_what_is_on_its_way_unread() -> None:
    sent = 0

    async def answer(request: bytes, context: grpc.aio.ServicerContext) -> None:
        nonlocal sent
        while True:
            await context.write(b"x" * 8192)
            sent += 1

    class Handler(grpc.GenericRpcHandler):
        def service(self, details: grpc.HandlerCallDetails) -> grpc.RpcMethodHandler:
            return grpc.unary_stream_rpc_method_handler(answer)

    server = aio_server()
    server.add_generic_rpc_handlers([Handler()])
    port = bind(server, "127.0.0.1", 0)
    await server.start()
    async with aio_channel(f"127.0.0.1:{port}", receive_window_bytes=1 << 16) as channel:
        call = channel.unary_stream("/any/method")(b"")
        for num_read in range(1, 60):
            await call.read()
            await asyncio.sleep(0.002)
            assert sent - num_read < 24
        call.cancel()
    await server.stop(None)
