"""A whole router in this process: the real pipeline with the demo model's tokenizer, both real servers on loopback
ports, and behind them a scripted scheduler. It runs on a thread with its own event loop, so that tests may block."""

from __future__ import annotations

import asyncio
import contextlib
import socket
import threading
import time
from collections.abc import Callable, Coroutine, Iterator
from dataclasses import dataclass
from typing import Any, TypeVar

import httpx
import uvicorn
from fastapi import FastAPI
from scripted_scheduler import MAX_MODEL_LEN, ScriptedScheduler

from pagemill.api_keys import ApiKeys
from pagemill.config import RouterSettings
from pagemill.demo_model import demo_model_path
from pagemill.rpc import aio_server, bind
from pagemill.v1 import common_pb2, inference_pb2_grpc
from router.app import RouterParts, build_parts, load_model_files
from router.grpc_service import InferenceServicer
from router.http.app import create_app
from router.tokenizer import Tokenizer

T = TypeVar("T")
DEADLINE_S = 20.0


@dataclass
class HttpServer:
    """A running router and how tests speak to it."""

    settings: RouterSettings
    parts: RouterParts
    app: FastAPI
    scheduler: ScriptedScheduler
    tokenizer: Tokenizer
    loop: asyncio.AbstractEventLoop
    port: int
    grpc_port: int
    url: str
    http: httpx.Client
    max_model_len: int = MAX_MODEL_LEN

    @property
    def model(self) -> str:
        """The served name."""
        return self.parts.pipeline.models()[0].id

    @property
    def eos(self) -> int:
        """An end-of-sequence id."""
        return self.tokenizer.eos_token_ids[0]

    def ids(self, text: str) -> list[int]:
        """Token ids of a text."""
        return self.tokenizer.encode(text, add_special_tokens=False)

    def on_loop(self, work: Coroutine[Any, Any, T]) -> T:
        """Runs a coroutine on the server's loop."""
        return asyncio.run_coroutine_threadsafe(work, self.loop).result(DEADLINE_S)

    def fail(self, request_id: str, *, after_tokens: int, code: int, message: str, retry_after_ms: int = 0) -> None:
        """Requests of this name fail after so many tokens."""
        error = common_pb2.Error(code=code, message=message, retry_after_ms=retry_after_ms)
        self.scheduler.failures[request_id] = (after_tokens, error)

    def stream_lines(self, path: str, body: dict[str, Any], headers: dict[str, str] | None = None) -> list[str]:
        """What stands behind `data: ` in each event of a stream; the last one may be [DONE]."""
        with self.http.stream("POST", path, json=body, headers=headers) as answer:
            assert answer.status_code == 200, answer.read()
            assert answer.headers["content-type"].startswith("text/event-stream")
            events = answer.read().decode().split("\n\n")
        assert events.pop() == ""
        assert all(event.startswith("data: ") for event in events)
        return [event.removeprefix("data: ") for event in events]

    def wait_for(self, condition: Callable[[], bool]) -> None:
        """Polls until the condition holds."""
        deadline = time.monotonic() + DEADLINE_S
        while not condition():
            assert time.monotonic() < deadline, "condition did not come true in time"
            time.sleep(0.005)

    def wait_idle(self) -> None:
        """Polls until neither router nor scheduler has a request."""
        self.wait_for(lambda: self.scheduler.num_live_rows == 0 and self.parts.pipeline.num_inflight == 0)

    def routes(self) -> list[tuple[str, set[str]]]:
        """Every registered path with its methods."""
        return [(route.path, route.methods or set()) for route in self.app.routes]  # type: ignore[attr-defined]


@contextlib.contextmanager
def serve_http(*, api_key: str = "", with_scheduler: bool = True) -> Iterator[HttpServer]:
    """A router that is ready, or one whose scheduler is away."""
    loop = asyncio.new_event_loop()
    thread = threading.Thread(target=loop.run_forever, name="router")
    thread.start()

    def on_loop(work: Coroutine[Any, Any, T]) -> T:
        return asyncio.run_coroutine_threadsafe(work, loop).result(60)

    try:
        running = on_loop(_start(api_key, with_scheduler=with_scheduler))
        try:
            if with_scheduler:
                running.server.wait_for(lambda: running.server.parts.pipeline.status()["ready"])
            yield running.server
        finally:
            running.server.http.close()
            on_loop(running.stop())
    finally:
        loop.call_soon_threadsafe(loop.stop)
        thread.join(10)
        loop.close()


@dataclass
class _Running:
    server: HttpServer
    uvicorn: uvicorn.Server
    serving: asyncio.Task[None]
    grpc: Any

    async def stop(self) -> None:
        self.uvicorn.should_exit = True
        await self.serving
        await self.grpc.stop(0.1)
        await self.server.parts.close()
        await self.server.scheduler.stop()


async def _start(api_key: str, *, with_scheduler: bool) -> _Running:
    scheduler = ScriptedScheduler()
    await scheduler.start()
    address = scheduler.address if with_scheduler else "127.0.0.1:1"
    settings = RouterSettings(
        model=str(demo_model_path()), api_key=api_key, scheduler=[address], max_request_bytes=1 << 20
    )
    files = load_model_files(settings)
    parts = build_parts(settings, files)
    app = create_app(parts.pipeline, settings, parts.metrics.registry, files.tokenizer)
    parts.start()
    grpc_server = aio_server()
    inference_pb2_grpc.add_InferenceServicer_to_server(InferenceServicer(parts.pipeline, ApiKeys(api_key)), grpc_server)
    grpc_port = bind(grpc_server, "127.0.0.1", 0)
    await grpc_server.start()
    server = uvicorn.Server(
        uvicorn.Config(app, log_config=None, access_log=False, lifespan="off", timeout_graceful_shutdown=1)
    )
    listener = socket.create_server(("127.0.0.1", 0))  # connections wait in its backlog until uvicorn accepts them
    port = listener.getsockname()[1]
    server.install_signal_handlers = lambda: None  # type: ignore[attr-defined]
    serving = asyncio.create_task(server.serve([listener]))
    url = f"http://127.0.0.1:{port}"
    http = httpx.Client(base_url=url, timeout=DEADLINE_S, trust_env=False)
    running = HttpServer(
        settings, parts, app, scheduler, files.tokenizer, asyncio.get_running_loop(), port, grpc_port, url, http
    )
    return _Running(running, server, serving, grpc_server)
