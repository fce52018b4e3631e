"""The router process: gRPC and HTTP on one event loop, over one pipeline."""

from __future__ import annotations

import asyncio
import contextlib
import json
import logging
import socket
import sys
from collections.abc import Generator
from dataclasses import dataclass
from typing import Any

import grpc.aio
import uvicorn
from starlette.types import ASGIApp

from pagemill.api_keys import ApiKeys
from pagemill.config import RouterSettings
from pagemill.errors import ConfigError, PagemillError, UnavailableError
from pagemill.garbage_collector import settle_garbage_collector
from pagemill.model_source import load_config, resolve_model
from pagemill.rpc import Health, ShutdownSignal, aio_server, bind
from pagemill.telemetry import setup_logging, setup_tracing, shutdown_tracing, start_metrics_server
from pagemill.v1 import inference_pb2_grpc
from pagemill.vllm_names import ROUTER_ALIASES, exported_registry
from router.chat import ChatRenderer, configured_templates
from router.grpc_service import SERVICE_NAME, InferenceServicer
from router.http.app import create_app
from router.metrics import RouterMetrics
from router.pipeline import Pipeline
from router.prompt_cache import PromptCache
from router.scheduler_pool import SchedulerPool
from router.tokenizer import Tokenizer, load_tokenizer

_log = logging.getLogger(__name__)

READINESS_POLL_S = 0.2
# Responses of streams that ended by the drain still have to leave.
CLOSE_GRACE_S = 2.0


@dataclass(slots=True)
class RouterParts:
    """What the process owns besides its servers; closed in reverse order of use."""

    pipeline: Pipeline
    schedulers: SchedulerPool
    cache: PromptCache
    metrics: RouterMetrics

    def start(self) -> None:
        """Begin to connect to schedulers and Redis."""
        self.schedulers.start()
        self.cache.start()

    async def close(self) -> None:
        """End connections and threads."""
        await self.schedulers.close()
        await self.cache.close()
        self.pipeline.close()


@dataclass(slots=True, frozen=True)
class ModelFiles:
    """What the router reads of a model."""

    name: str
    config: dict[str, Any]
    tokenizer: Tokenizer
    renderer: ChatRenderer


def load_model_files(settings: RouterSettings) -> ModelFiles:
    """Read (and for a hub id fetch) config, tokenizer and chat templates. Blocks; call it on any thread.

    Raises:
        ModelLoadError: model or tokenizer are missing or unsupported.
        ConfigError: a setting is wrong.
    """
    source = resolve_model(settings.model, files="tokenizer")
    tokenizer = load_tokenizer(source, settings.tokenizer)
    templates = configured_templates(settings.chat_template, tokenizer.chat_templates)
    return ModelFiles(source.name, load_config(source), tokenizer, ChatRenderer(templates, tokenizer.special_tokens))


def build_parts(settings: RouterSettings, files: ModelFiles) -> RouterParts:
    """Put the pipeline together. Call it on the event loop; nothing runs yet."""
    metrics = RouterMetrics()
    cache = PromptCache(settings, metrics)
    schedulers = SchedulerPool(settings.scheduler, metrics, vocab_size=int(files.config.get("vocab_size") or 0))
    metrics.export_scheduler_load(schedulers.loads)
    pipeline = Pipeline(
        settings,
        tokenizer=files.tokenizer,
        renderer=files.renderer,
        schedulers=schedulers,
        cache=cache,
        metrics=metrics,
        model_names=settings.served_model_name or [files.name],
        config=files.config,
    )
    return RouterParts(pipeline, schedulers, cache, metrics)


class _HttpServer(uvicorn.Server):
    """uvicorn on a socket that is bound already; signals are the process's own affair."""

    def __init__(self, app: ASGIApp) -> None:
        self.serving = asyncio.Event()
        super().__init__(
            uvicorn.Config(
                app,
                log_config=None,
                access_log=False,
                lifespan="off",
                timeout_keep_alive=75,
                timeout_graceful_shutdown=max(1, round(CLOSE_GRACE_S)),
                server_header=False,
            )
        )

    @contextlib.contextmanager
    def capture_signals(self) -> Generator[None]:
        """Nothing: `ShutdownSignal` has them."""
        yield

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        await super().startup(sockets)
        self.serving.set()


def _http_socket(settings: RouterSettings) -> socket.socket:
    family = socket.AF_INET6 if ":" in settings.http_host else socket.AF_INET
    sock = socket.socket(family, socket.SOCK_STREAM)
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        sock.bind((settings.http_host, settings.http_port))
        sock.listen(2048)
    except OSError as error:
        sock.close()
        raise UnavailableError(
            f"cannot listen on {settings.http_host}:{settings.http_port}: port {settings.http_port}: {error.strerror}",
            field="http_port",
        ) from error
    sock.setblocking(False)
    return sock


async def run(settings: RouterSettings) -> int:
    """Serve until SIGTERM or SIGINT, then drain. Returns the exit code.

    Requests are taken as soon as both ports listen, which is when the ready line is printed; whether they can be served
    is what health says.
    """
    setup_logging("router", settings)
    setup_tracing("router", settings)
    shutdown = ShutdownSignal()
    shutdown.install(asyncio.get_running_loop())
    try:
        return await _serve(settings, shutdown)
    except PagemillError as error:
        print(f"pagemill router: {error.message}", file=sys.stderr, flush=True)
        return 2 if isinstance(error, ConfigError) else 1
    finally:
        shutdown_tracing()


async def _serve(settings: RouterSettings, shutdown: ShutdownSignal) -> int:
    files = await asyncio.to_thread(load_model_files, settings)
    if shutdown.event.is_set():
        return 0
    parts = build_parts(settings, files)
    http_socket = _http_socket(settings)
    try:
        grpc_server = aio_server()
        health = Health()
        inference_pb2_grpc.add_InferenceServicer_to_server(  # type: ignore[no-untyped-call]
            InferenceServicer(parts.pipeline, ApiKeys(settings.api_key)), grpc_server
        )
        health.add_to(grpc_server, [SERVICE_NAME])
        grpc_port = bind(grpc_server, settings.grpc_host, settings.grpc_port)
        # The model's own name, not a served one: schedulers, which know no other, have to show the same.
        registry = exported_registry(settings, parts.metrics.registry, ROUTER_ALIASES, lambda: files.name)
        metrics_port = start_metrics_server(settings, registry)
        parts.start()
        app = create_app(parts.pipeline, settings, registry, files.tokenizer)
        http_server = _HttpServer(app)
        await health.set_serving(False)
        await grpc_server.start()
        http_task = asyncio.create_task(http_server.serve([http_socket]), name="http")
        health_task = asyncio.create_task(_follow_readiness(parts.pipeline, health), name="health")
        await _until(http_server.serving, http_task)
        settle_garbage_collector()
        _print_ready(settings, http_socket.getsockname()[1], grpc_port, metrics_port)
        await _until(shutdown.event, http_task)
        health_task.cancel()
        await _drain(settings, parts, health, grpc_server, http_server, http_task)
    finally:
        http_socket.close()
        await parts.close()
    return 0


def _print_ready(settings: RouterSettings, http_port: int, grpc_port: int, metrics_port: int | None) -> None:
    ready = {
        "service": "router",
        "http_host": settings.http_host,
        "http_port": http_port,
        "grpc_host": settings.grpc_host,
        "grpc_port": grpc_port,
        "metrics_port": metrics_port,
    }
    print(f"pagemill-ready {json.dumps(ready)}", flush=True)


async def _until(event: asyncio.Event, http_task: asyncio.Task[None]) -> None:
    """Wait for an event, but not beyond the end of the HTTP server, which is an error."""
    waiter = asyncio.create_task(event.wait())
    try:
        await asyncio.wait({waiter, http_task}, return_when=asyncio.FIRST_COMPLETED)
    finally:
        waiter.cancel()
    if http_task.done() and not event.is_set():
        http_task.result()
        raise PagemillError("the HTTP server ended by itself")


async def _follow_readiness(pipeline: Pipeline, health: Health) -> None:
    """Keep the gRPC health service at what the pipeline says."""
    serving: bool | None = None
    while True:
        ready = bool(pipeline.status()["ready"])
        if ready is not serving:
            await health.set_serving(ready)
            serving = ready
        await asyncio.sleep(READINESS_POLL_S)


async def _drain(
    settings: RouterSettings,
    parts: RouterParts,
    health: Health,
    grpc_server: grpc.aio.Server,
    http_server: _HttpServer,
    http_task: asyncio.Task[None],
) -> None:
    """Not ready at once, no new requests, running streams finish, then the servers close."""
    parts.pipeline.begin_drain()
    await health.set_serving(False)
    _log.info("draining: %d requests are running", parts.pipeline.num_inflight)
    if not await parts.pipeline.wait_idle(settings.drain_timeout_s):
        _log.warning("%d requests are cut off by the end of the drain", parts.pipeline.num_inflight)
    http_server.should_exit = True
    await grpc_server.stop(CLOSE_GRACE_S)
    try:
        async with asyncio.timeout(2 * CLOSE_GRACE_S):
            await http_task
    except TimeoutError:
        http_server.force_exit = True
