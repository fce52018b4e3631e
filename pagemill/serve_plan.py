"""What `pagemill serve` runs: the settings of its processes, fitted to each other, and their environment."""

from __future__ import annotations

import errno
import os
import socket
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

import yaml

from pagemill.config import CommonSettings, RouterSettings, SchedulerSettings, ServeSettings, WorkerSettings
from pagemill.config_loader import LoadedSettings, is_setting_variable
from pagemill.cpu_cores import available_cores
from pagemill.cuda_driver import VISIBLE_DEVICES_ENV, NoCudaError, cuda_devices
from pagemill.errors import ConfigError, UnavailableError

CONFIG_FILE_NAME = "pagemill.yaml"

_NOT_OUR_ADDRESS = (errno.EADDRNOTAVAIL, errno.EAFNOSUPPORT)


@dataclass(slots=True)
class ServePlan:
    """Settings of all processes; the supervisor fills in ports and addresses as they become known.

    `model_name` is what clients may call the model.
    """

    serve: ServeSettings
    router: RouterSettings
    scheduler: SchedulerSettings
    workers: list[WorkerSettings]
    model_name: str

    def by_name(self) -> dict[str, CommonSettings]:
        """Settings of each process but the supervisor's own, by process name."""
        workers = {worker_name(index): worker for index, worker in enumerate(self.workers)}
        return {"router": self.router, "scheduler": self.scheduler, **workers}

    def write_config(self, directory: Path) -> None:
        """One YAML file per process name, readable by this user alone (it may hold an API key)."""
        for name, settings in self.by_name().items():
            section = "worker" if name.startswith("worker") else name
            path = config_path(directory, name)
            descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600)
            with os.fdopen(descriptor, "w", encoding="utf-8") as file:
                yaml.safe_dump({section: settings.model_dump()}, file, allow_unicode=True)


def config_path(directory: Path, name: str) -> Path:
    """Config file of one process."""
    return directory / f"{name}-{CONFIG_FILE_NAME}"


def worker_name(index: int) -> str:
    """`worker`, `worker-1`, `worker-2`, ..."""
    return "worker" if index == 0 else f"worker-{index}"


def make_plan(loaded: Mapping[str, LoadedSettings], model: str) -> ServePlan:
    """Fit the settings of the four services to each other; `model` is the model's default name.

    The scheduler takes a free port of its own unless one was asked for: nobody outside needs to know it. A metrics
    port given for all becomes consecutive ones.
    """
    serve = cast(ServeSettings, loaded["serve"].settings)
    router = cast(RouterSettings, loaded["router"].settings).model_copy()
    scheduler = cast(SchedulerSettings, loaded["scheduler"].settings).model_copy()
    worker = cast(WorkerSettings, loaded["worker"].settings)
    if loaded["scheduler"].is_default("port"):
        scheduler.port = 0
    workers = [worker.model_copy() for _ in range(serve.num_workers)]
    plan = ServePlan(
        serve, router, scheduler, workers, router.served_model_name[0] if router.served_model_name else model
    )
    _spread_metrics_ports([router, scheduler, *plan.workers])
    return plan


def _spread_metrics_ports(services: list[Any]) -> None:
    taken: set[int] = set()
    for settings in services:
        if settings.metrics_port:
            while settings.metrics_port in taken:
                settings.metrics_port += 1
            taken.add(settings.metrics_port)


def check_listening(plan: ServePlan) -> None:
    """Try all addresses before anything is loaded; what is wrong with any of them comes in one message.

    Raises:
        ConfigError: a host is not this machine's, or two servers are to share a port.
        UnavailableError: another process listens on a port.
    """
    router, scheduler = plan.router, plan.scheduler
    listeners = [
        _Listener(router.http_host, router.http_port, "http"),
        _Listener(router.grpc_host, router.grpc_port, "grpc"),
        _Listener(scheduler.host, scheduler.port, "scheduler"),
    ]
    metrics = [_Listener(s.metrics_host, s.metrics_port, "metrics") for s in plan.by_name().values() if s.metrics_port]
    problems: list[ConfigError | UnavailableError] = []
    seen: dict[int, str] = {}
    for listener in [*listeners, *metrics]:
        problem = listener.problem()
        if listener.port in seen:
            text = f"port {listener.port} is given twice, by {seen[listener.port]} and {listener.port_option}"
            problem = ConfigError(text, field=listener.field)
        if listener.port:
            seen[listener.port] = listener.port_option
        if problem is not None and problem.message not in [earlier.message for earlier in problems]:
            problems.append(problem)
    if problems:
        first = next((problem for problem in problems if isinstance(problem, ConfigError)), problems[0])
        raise type(first)("; ".join(problem.message for problem in problems), field=first.field)


@dataclass(frozen=True, slots=True)
class _Listener:
    """An address that one of the servers wants; `name` is what its options begin with."""

    host: str
    port: int
    name: str

    @property
    def port_option(self) -> str:
        return f"--{self.name}-port"

    @property
    def field(self) -> str:
        return f"{self.name}_port"

    def problem(self) -> ConfigError | UnavailableError | None:
        """Why nobody could listen here now."""
        family = socket.AF_INET6 if ":" in self.host else socket.AF_INET
        with socket.socket(family, socket.SOCK_STREAM) as probe:
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            try:
                probe.bind((self.host, self.port))
            except OSError as err:
                return self._explain(err)
        return None

    def _explain(self, err: OSError) -> ConfigError | UnavailableError:
        if isinstance(err, socket.gaierror) or err.errno in _NOT_OUR_ADDRESS:
            text = f"--{self.name}-host {self.host} is no address of this machine"
            return ConfigError(f"{text}; 0.0.0.0 stands for all of its addresses", field=f"{self.name}_host")
        reason = "is in use" if err.errno == errno.EADDRINUSE else f"cannot be used: {err.strerror}"
        text = f"port {self.port} on {self.host} {reason}; {self.port_option} N takes another, 0 a free one"
        return UnavailableError(text, field=self.field)


def process_environment(name: str, plan: ServePlan, environment: Mapping[str, str]) -> dict[str, str]:
    """Environment of one process: the settings come from its file alone, threads and GPUs are shared out.

    Workers compute, so they share all cores; router and scheduler wait most of the time. Of several workers each sees
    one GPU, in turn where there are fewer.
    """
    result = {key: value for key, value in environment.items() if not is_setting_variable(key)}
    result["PAGEMILL_PARENT_PID"] = str(os.getpid())
    result["PYTHONUNBUFFERED"] = "1"
    if name.startswith("worker"):
        share = max(1, available_cores() // len(plan.workers))
        result.setdefault("OMP_NUM_THREADS", str(plan.workers[0].num_threads or share))
        # A thread that spins at a barrier takes its core from router and scheduler.
        result.setdefault("OMP_WAIT_POLICY", "PASSIVE")
        gpus = _visible_gpus(environment)
        if gpus and len(plan.workers) > 1 and plan.workers[0].device != "cpu":
            index = [worker_name(number) for number in range(len(plan.workers))].index(name)
            result[VISIBLE_DEVICES_ENV] = gpus[index % len(gpus)]
    else:
        result["OMP_NUM_THREADS"] = "1"
    if name == "router":
        result.setdefault("TOKENIZERS_PARALLELISM", "false")
    return result


def _visible_gpus(environment: Mapping[str, str]) -> list[str]:
    """Names of the GPUs as CUDA_VISIBLE_DEVICES takes them."""
    given = environment.get(VISIBLE_DEVICES_ENV)
    if given is not None:
        return [part.strip() for part in given.split(",") if part.strip()]
    try:
        return [str(index) for index in range(len(cuda_devices()))]
    except NoCudaError:
        return []
