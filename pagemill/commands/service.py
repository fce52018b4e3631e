"""`pagemill router`, `pagemill scheduler`, `pagemill worker`: one process of one kind."""

from __future__ import annotations

import asyncio
import importlib.util
import os
import sys
import traceback
from collections.abc import Callable, Coroutine
from typing import TYPE_CHECKING, Any, cast

import click

from pagemill.commands.settings_options import service_command
from pagemill.config_loader import LoadedSettings
from pagemill.errors import ModelLoadError, PagemillError
from pagemill.open_files import allow_most_open_files

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

    allow_most_open_files()
    return _run_async(run(cast("RouterSettings", loaded.settings)))


def _run_scheduler(loaded: LoadedSettings) -> int:
    from scheduler.app import run

    allow_most_open_files()
    return _run_async(run(cast("SchedulerSettings", loaded.settings)))


def _run_worker(loaded: LoadedSettings) -> int:
    from pagemill.kernel_variables import cpu_isa_note
    from worker.app import run

    note = cpu_isa_note(os.environ)
    if note:
        print(f"pagemill: note: {note}", file=sys.stderr, flush=True)
    try:
        return int(run(cast("WorkerSettings", loaded.settings)))
    except ValueError as err:
        # The native library refuses what it cannot run in this form. While a model is loaded that is about the model or
        # the settings; in a step it is a bug, whose trace is needed.
        if isinstance(err, PagemillError) or not _came_from(err, "worker.model_runner", "__init__"):
            raise
        raise ModelLoadError(f"the model cannot be run here: {err}", field="model") from err


def _came_from(err: BaseException, module: str, function: str) -> bool:
    frames = (frame for frame, _ in traceback.walk_tb(err.__traceback__))
    return any(f.f_globals.get("__name__") == module and f.f_code.co_name == function for f in frames)


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
