"""gRPC as every Pagemill process uses it: channels, servers, health, errors at the edge, shutdown on signals."""

from __future__ import annotations

import asyncio
import os
import signal
from collections.abc import Callable, Sequence
from typing import Any, NoReturn

import grpc
import grpc.aio

from pagemill.errors import AbortedError, PagemillError, UnavailableError, from_grpc

MAX_MESSAGE_BYTES: int = 64 << 20
FIELD_TRAILER = "pagemill-field"
RETRY_AFTER_TRAILER = "retry-after-ms"

# A status message travels percent-encoded in an HTTP/2 header, three bytes for each byte that is not plain ASCII; peers
# may refuse header lists over 8 KiB.
_MAX_DETAILS_BYTES = 4096

_STATUS_BY_NUMBER = {status.value[0]: status for status in grpc.StatusCode}


def channel_options() -> list[tuple[str, int]]:
    """Options of every channel: a dead peer is noticed within 15 s, and a restarted one is found again within 1 s."""
    return [
        ("grpc.max_send_message_length", MAX_MESSAGE_BYTES),
        ("grpc.max_receive_message_length", MAX_MESSAGE_BYTES),
        ("grpc.keepalive_time_ms", 10_000),
        ("grpc.keepalive_timeout_ms", 5_000),
        ("grpc.keepalive_permit_without_calls", 1),
        ("grpc.http2.max_pings_without_data", 0),
        ("grpc.initial_reconnect_backoff_ms", 100),
        ("grpc.min_reconnect_backoff_ms", 1_000),
        ("grpc.max_reconnect_backoff_ms", 1_000),
        # The processes of one deployment talk directly; a proxy meant for the internet breaks loopback and pods.
        ("grpc.enable_http_proxy", 0),
    ]


def server_options() -> list[tuple[str, int]]:
    """Options of every server; they accept the pings of `channel_options` and share no port with another process."""
    return [
        ("grpc.max_send_message_length", MAX_MESSAGE_BYTES),
        ("grpc.max_receive_message_length", MAX_MESSAGE_BYTES),
        ("grpc.keepalive_time_ms", 10_000),
        ("grpc.keepalive_timeout_ms", 5_000),
        ("grpc.keepalive_permit_without_calls", 1),
        ("grpc.http2.max_pings_without_data", 0),
        ("grpc.http2.min_ping_interval_without_data_ms", 5_000),
        # With port sharing, a second server would start silently and take half of the connections.
        ("grpc.so_reuseport", 0),
    ]


def aio_channel(address: str, *, receive_window_bytes: int = 0) -> grpc.aio.Channel:
    """An asyncio channel to `host:port`. Connects lazily; the caller closes it.

    With `receive_window_bytes`, about so much may be on its way here unread; otherwise gRPC lets it grow to megabytes.
    """
    options = channel_options()
    if receive_window_bytes:
        options += [("grpc.http2.bdp_probe", 0), ("grpc.http2.lookahead_bytes", receive_window_bytes)]
    return grpc.aio.insecure_channel(address, options=options)


def sync_channel(address: str) -> grpc.Channel:
    """A blocking channel to `host:port`. Connects lazily; the caller closes it."""
    return grpc.insecure_channel(address, options=channel_options())


def aio_server() -> grpc.aio.Server:
    """An asyncio server with Pagemill's options, not bound and not started."""
    return grpc.aio.server(options=server_options())


def bind(server: grpc.aio.Server, host: str, port: int) -> int:
    """Bind a server that is not started yet and return the port (a free one for 0).

    Raises:
        UnavailableError: the port is in use or the address is not this machine's.
    """
    address = f"[{host}]:{port}" if ":" in host else f"{host}:{port}"
    try:
        bound = int(server.add_insecure_port(address))
    except RuntimeError:
        bound = 0
    if bound == 0:
        raise UnavailableError(
            f"cannot listen on {address}: port {port} is in use or the address is not on this machine", field="port"
        )
    return bound


class Health:
    """grpc.health.v1 and server reflection of one server. Call `set_serving(False)` before a start that takes time."""

    def __init__(self) -> None:
        from grpc_health.v1 import health

        self._servicer = health.aio.HealthServicer()
        self._service_names: list[str] = [""]

    def add_to(self, server: grpc.aio.Server, service_names: Sequence[str]) -> None:
        """Register both services. `service_names` are full names, such as "pagemill.v1.Inference"."""
        from grpc_health.v1 import health, health_pb2_grpc
        from grpc_reflection.v1alpha import reflection

        self._service_names += service_names
        health_pb2_grpc.add_HealthServicer_to_server(self._servicer, server)
        reflection.enable_server_reflection((*service_names, health.SERVICE_NAME, reflection.SERVICE_NAME), server)

    async def set_serving(self, serving: bool) -> None:
        """Answer SERVING or NOT_SERVING for the whole server and for each of its services."""
        from grpc_health.v1 import health_pb2

        status = health_pb2.HealthCheckResponse.SERVING if serving else health_pb2.HealthCheckResponse.NOT_SERVING
        for name in self._service_names:
            await self._servicer.set(name, status)


def _cut_details(message: str) -> str:
    """As much of the beginning as fits into a header."""
    room = _MAX_DETAILS_BYTES
    for length, char in enumerate(message):
        room -= 1 if " " <= char <= "~" and char != "%" else 3 * len(char.encode(errors="replace"))
        if room < 0:
            return message[:length]
    return message


async def abort_with(context: grpc.aio.ServicerContext[Any, Any], error: PagemillError) -> NoReturn:
    """End a call with the error's code and message, its field and retry hint in the trailers."""
    trailers: list[tuple[str, str]] = []
    if error.field:
        trailers.append((FIELD_TRAILER, error.field.encode("ascii", "backslashreplace").decode()[:200]))
    if error.retry_after_ms:
        trailers.append((RETRY_AFTER_TRAILER, str(error.retry_after_ms)))
    await context.abort(
        _STATUS_BY_NUMBER[error.grpc_code], _cut_details(error.message), trailing_metadata=tuple(trailers)
    )
    raise AssertionError("abort returns never")


def error_from_rpc(err: grpc.RpcError) -> PagemillError:
    """The deliberate error behind a failed call, with field and retry hint where the peer sent them."""
    code, details, trailers = err.code(), err.details() or "", err.trailing_metadata() or ()
    values = {key: value for key, value in trailers if isinstance(value, str)}
    if code is grpc.StatusCode.CANCELLED:
        return AbortedError(details or "the call was cancelled")
    retry_after = values.get(RETRY_AFTER_TRAILER, "")
    return from_grpc(
        code.value[0],
        details or code.name,
        field=values.get(FIELD_TRAILER, ""),
        retry_after_ms=int(retry_after) if retry_after.isdecimal() else 0,
    )


class ShutdownSignal:
    """SIGTERM and SIGINT of an asyncio process: the first sets `event`, the second ends the process at once, code 1.

    Args:
        before_exit: called before that sudden end.
    """

    def __init__(self, before_exit: Callable[[], None] | None = None) -> None:
        self.event = asyncio.Event()
        self._before_exit = before_exit

    def install(self, loop: asyncio.AbstractEventLoop) -> None:
        """Take over both signals. Call it on the main thread."""
        for number in (signal.SIGTERM, signal.SIGINT):
            loop.add_signal_handler(number, self._on_signal)

    def _on_signal(self) -> None:
        if self.event.is_set():
            if self._before_exit is not None:
                self._before_exit()
            os._exit(1)
        self.event.set()
