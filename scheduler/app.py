"""The scheduler process."""

from __future__ import annotations

import asyncio
import json
import logging
import os
import platform
import signal

from pagemill.config import SchedulerSettings
from pagemill.garbage_collector import settle_garbage_collector
from pagemill.rpc import Health, ShutdownSignal, aio_server, bind
from pagemill.telemetry import setup_logging, setup_tracing, shutdown_tracing, start_metrics_server
from pagemill.v1 import scheduler_pb2_grpc
from pagemill.vllm_names import SCHEDULER_ALIASES, exported_registry
from scheduler.dispatcher import Dispatcher
from scheduler.metrics import SchedulerMetrics
from scheduler.service import SERVICE_NAME, SchedulerServicer

_log = logging.getLogger(__name__)

TICK_S = 1.0
# Steps that each worker profiles after a SIGUSR1.
PROFILED_STEPS = 64
_LAST_WORDS_S = 0.05
# Streams that were told to end get this long to do so.
CLOSE_GRACE_S = 2.0


class SchedulerProcess:
    """Server, dispatcher and metrics of one scheduler; also what tests start in their own loop."""

    def __init__(self, settings: SchedulerSettings) -> None:
        self._settings = settings
        scheduler_id = f"{platform.node() or 'scheduler'}-{os.getpid()}"
        self.dispatcher = Dispatcher(settings, scheduler_id)
        self.metrics = SchedulerMetrics(self.dispatcher.totals)
        self._health = Health()
        self._server = aio_server()
        servicer = SchedulerServicer(settings, scheduler_id, self.dispatcher, self.metrics)
        scheduler_pb2_grpc.add_SchedulerServicer_to_server(servicer, self._server)  # type: ignore[no-untyped-call]
        self._health.add_to(self._server, [SERVICE_NAME])
        self._ticker: asyncio.Task[None] | None = None
        self.port = 0

    async def start(self) -> None:
        """Bind and serve.

        Raises:
            UnavailableError: the port is in use.
        """
        self.port = bind(self._server, self._settings.host, self._settings.port)
        await self._server.start()
        self._ticker = asyncio.create_task(self._tick())

    async def _tick(self) -> None:
        # Serving means that workers and routers may come; whether work is accepted is in the hello.
        await self._health.set_serving(True)
        while True:
            try:
                self.dispatcher.tick()
            except Exception:
                _log.exception("the periodic report failed")
            await asyncio.sleep(TICK_S)

    async def drain(self) -> None:
        """Refuse new work, finish what runs within `drain_timeout_s`."""
        await self._health.set_serving(False)
        self.dispatcher.start_draining()
        try:
            async with asyncio.timeout(self._settings.drain_timeout_s):
                await self.dispatcher.idle.wait()
        except TimeoutError:
            _log.warning("%d requests were cut off by the drain timeout", self.dispatcher.num_requests)

    async def stop(self) -> None:
        """End all streams and the server."""
        if self._ticker is not None:
            self._ticker.cancel()
        # A beat for last tokens to leave before their sessions close.
        await asyncio.sleep(_LAST_WORDS_S)
        self.dispatcher.end()
        await self._server.stop(CLOSE_GRACE_S)


async def run(settings: SchedulerSettings) -> int:
    """Serve until SIGTERM or SIGINT; returns the exit code.

    Raises:
        UnavailableError: a port is in use.
    """
    setup_logging("scheduler", settings)
    setup_tracing("scheduler", settings)
    shutdown = ShutdownSignal()
    shutdown.install(asyncio.get_running_loop())
    try:
        process = SchedulerProcess(settings)
        asyncio.get_running_loop().add_signal_handler(
            signal.SIGUSR1, process.dispatcher.profile_workers, PROFILED_STEPS
        )
        registry = exported_registry(
            settings, process.metrics.registry, SCHEDULER_ALIASES, lambda: process.dispatcher.model_name
        )
        metrics_port = start_metrics_server(settings, registry)
        await process.start()
        settle_garbage_collector()
        ready = {"service": "scheduler", "port": process.port, "grpc_port": process.port, "metrics_port": metrics_port}
        print(f"pagemill-ready {json.dumps(ready)}", flush=True)
        await shutdown.event.wait()
        _log.info("draining")
        await process.drain()
        await process.stop()
    finally:
        shutdown_tracing()
    return 0
