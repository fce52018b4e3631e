"""What `pagemill serve` runs: the settings of its processes, fitted to each other, and their environment."""

from __future__ import annotations

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
from pagemill.errors import UnavailableError

CONFIG_FILE_NAME = "pagemill.yaml"


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


def check_ports_free(plan: ServePlan) -> None:
    """Fail before weights are loaded, not after.

    Raises:
        UnavailableError: another process listens on a port that the router or the scheduler wants.
    """
    wanted = [
        (plan.router.http_host, plan.router.http_port, "--http-port"),
        (plan.router.grpc_host, plan.router.grpc_port, "--grpc-port"),
        (plan.scheduler.host, plan.scheduler.port, "--scheduler-port"),
    ]
    for host, port, option in wanted:
        if port:
            _check_port_free(host, port, option)


def _check_port_free(host: str, port: int, option: str) -> None:
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    with socket.socket(family, socket.SOCK_STREAM) as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind((host, port))
        except OSError as err:
            raise UnavailableError(
                f"port {port} on {host} cannot be used: {err.strerror}; {option} N takes another, 0 a free one",
                field=option.removeprefix("--").replace("-", "_"),
            ) from None


def process_environment(name: str, plan: ServePlan, environment: Mapping[str, str]) -> dict[str, str]:
    """Environment of one process: the settings come from its file alone, threads are shared out.

    Workers compute, so they share all cores; router and scheduler wait most of the time.
    """
    result = {key: value for key, value in environment.items() if not is_setting_variable(key)}
    result["PAGEMILL_PARENT_PID"] = str(os.getpid())
    result["PYTHONUNBUFFERED"] = "1"
    if name.startswith("worker"):
        share = max(1, available_cores() // len(plan.workers))
        result.setdefault("OMP_NUM_THREADS", str(plan.workers[0].num_threads or share))
        # A thread that spins at a barrier takes its core from router and scheduler.
        result.setdefault("OMP_WAIT_POLICY", "PASSIVE")
    else:
        result["OMP_NUM_THREADS"] = "1"
    if name == "router":
        result.setdefault("TOKENIZERS_PARALLELISM", "false")
    return result
