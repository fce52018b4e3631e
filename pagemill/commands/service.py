"""`pagemill router`, `pagemill scheduler`, `pagemill worker`: one process of one kind."""

from __future__ import annotations

import asyncio
import importlib.util
from collections.abc import Callable, Coroutine
from typing import TYPE_CHECKING, Any, cast

import click

from pagemill.commands.settings_options import service_command
from pagemill.config_loader import LoadedSettings

if TYPE_CHECKING:
    from pagemill.config import RouterSettings, SchedulerSettings, WorkerSettings

_READY = "When it serves it prints one line that begins with `pagemill-ready` on stdout. SIGTERM drains, then exits 0."

_HELP = {
    "router": "Run one router: HTTP and gRPC towards clients, text to tokens and back.\n\n"
    "A router is stateless; run as many as needed and give each all schedulers, as in "
    "`pagemill router --scheduler 10.0.0.5:50052,10.0.0.6:50052 --model MODEL`. " + _READY,
    "scheduler": "Run one scheduler: block tables, prefix cache, continuous batching.\n\n"
    "Routers and workers dial it. It needs neither the model nor torch. " + _READY,
    "worker": "Run one worker: weights, KV cache, kernels, sampling.\n\n"
    "It loads the model and dials its scheduler, again and again until that one answers. " + _READY,
}


def command(name: str) -> click.Command:
    return service_command(name, _HELP[name], _RUN[name])


def _run_router(loaded: LoadedSettings) -> int:
    from router.app import run

    return _run_async(run(cast("RouterSettings", loaded.settings)))


def _run_scheduler(loaded: LoadedSettings) -> int:
    from scheduler.app import run

    return _run_async(run(cast("SchedulerSettings", loaded.settings)))


def _run_worker(loaded: LoadedSettings) -> int:
    from worker.app import run

    return int(run(cast("WorkerSettings", loaded.settings)))


def _run_async(main: Coroutine[Any, Any, int]) -> int:
    """Run a service on uvloop where it is installed, else on asyncio's own loop."""
    loop_factory: Callable[[], asyncio.AbstractEventLoop] | None = None
    if importlib.util.find_spec("uvloop"):
        import uvloop

        loop_factory = uvloop.new_event_loop
    with asyncio.Runner(loop_factory=loop_factory) as runner:
        return runner.run(main)


_RUN: dict[str, Callable[[LoadedSettings], int]] = {
    "router": _run_router,
    "scheduler": _run_scheduler,
    "worker": _run_worker,
}
