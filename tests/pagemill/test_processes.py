"""Pieces of the supervisor: a watched process, a guarded one, Redis, restarts, the plan."""

from __future__ import annotations

import os
import signal
import socket
import stat
import subprocess
import sys
import tempfile
from pathlib import Path

import psutil
import pytest
import yaml

from pagemill import serve_plan
from pagemill.commands.serve import load_all
from pagemill.cpu_cores import available_cores
from pagemill.cuda_driver import DriverDevice
from pagemill.errors import ConfigError, UnavailableError
from pagemill.managed_process import ManagedProcess
from pagemill.redis_server import RedisServer, find_redis_server, guarded, ping, redis_command, socket_path
from pagemill.restart_policy import RestartPolicy
from pagemill.run_directory import RunDirectory, remove_stale_directories
from pagemill.serve_plan import (
    ServePlan,
    check_listening,
    config_path,
    make_plan,
    process_environment,
    worker_name,
)


def python(script: str, lines: list[str] | None = None) -> ManagedProcess:
    kept = [] if lines is None else lines
    return ManagedProcess("child", [sys.executable, "-u", "-c", script], dict(os.environ), kept.append)


async def test_a_process_is_ready_when_it_says_so_and_its_other_lines_are_passed_on() -> None:
    lines: list[str] = []
    process = python(
        "import sys; print('hello'); print('oops', file=sys.stderr); print('pagemill-ready {\"port\": 5}'); input()",
        lines,
    )
    await process.start()
    assert await process.wait_ready(30) == {"port": 5}
    await process.wait()
    assert sorted(line for line in lines if line in ("hello", "oops")) == ["hello", "oops"]


async def test_a_process_that_ends_before_it_is_ready_is_reported_with_its_code() -> None:
    process = python("import sys; sys.exit(3)")
    await process.start()
    with pytest.raises(UnavailableError, match="child ended with code 3 before it was ready"):
        await process.wait_ready(30)


@pytest.mark.parametrize(("code", "kind"), [(2, ConfigError), (1, UnavailableError)])
async def test_the_reason_that_a_process_gives_is_that_of_the_failed_start(code: int, kind: type[Exception]) -> None:
    lines: list[str] = []
    process = python(f"import sys; print('pagemill: error: no such thing', file=sys.stderr); sys.exit({code})", lines)
    await process.start()
    with pytest.raises(kind, match="child: no such thing"):
        await process.wait_ready(30)
    assert lines == []


async def test_a_process_that_says_nothing_in_time_is_reported_and_can_be_stopped() -> None:
    process = python("import time; time.sleep(60)")
    await process.start()
    with pytest.raises(UnavailableError, match="not ready within"):
        await process.wait_ready(0.05)
    assert await process.stop(30) == -signal.SIGTERM


async def test_a_process_that_ignores_sigterm_is_killed_with_its_group() -> None:
    script = (
        "import os, signal, subprocess, sys, time\n"
        "signal.signal(signal.SIGTERM, signal.SIG_IGN)\n"
        "child = subprocess.Popen([sys.executable, '-c', 'import time; time.sleep(60)'])\n"
        "print(f'pagemill-ready {{\"child\": {child.pid}}}')\n"
        "time.sleep(60)\n"
    )
    process = python(script)
    await process.start()
    grandchild = psutil.Process((await process.wait_ready(30))["child"])
    assert await process.stop(0.2) == -signal.SIGKILL
    gone, _ = psutil.wait_procs([grandchild], timeout=10)
    assert gone or grandchild.status() == psutil.STATUS_ZOMBIE


async def test_a_line_without_end_is_dropped_and_the_ready_line_still_found() -> None:
    process = python("print('x' * 3_000_000); print('pagemill-ready {}'); input()", [])
    await process.start()
    assert await process.wait_ready(30) == {}
    await process.wait()


def test_a_guarded_process_dies_with_its_parent() -> None:
    script = (
        "import subprocess, sys, time\n"
        "from pagemill.redis_server import guarded\n"
        "child = subprocess.Popen(guarded([sys.executable, '-c', 'print(1, flush=True); import time; time.sleep(60)']),"
        " stdout=subprocess.PIPE)\n"
        "child.stdout.readline()\n"
        "print(child.pid, flush=True)\n"
        "time.sleep(60)\n"
    )
    parent = subprocess.Popen([sys.executable, "-c", script], stdout=subprocess.PIPE, text=True)
    assert parent.stdout is not None
    child = psutil.Process(int(parent.stdout.readline()))
    parent.kill()
    parent.wait(30)
    parent.stdout.close()
    gone, _ = psutil.wait_procs([child], timeout=10)
    assert gone or child.status() == psutil.STATUS_ZOMBIE


def test_a_guarded_process_whose_parent_is_gone_does_not_start() -> None:
    command = guarded([sys.executable, "-c", "print('started')"])
    command[command.index(str(os.getpid()))] = "1"
    run = subprocess.run(command, capture_output=True, text=True, timeout=30)
    assert (run.returncode, run.stdout) == (1, "")


def test_redis_is_private_bounded_and_comes_back_at_the_same_address() -> None:
    import redis

    with RedisServer(maxmemory_mb=16) as server:
        client = redis.Redis.from_url(server.url)
        client.set("key", "value")
        config = client.config_get("*")
        assert (config["port"], config["save"], config["appendonly"]) == ("0", "", "no")
        assert (config["maxmemory"], config["maxmemory-policy"]) == (str(16 << 20), "allkeys-lru")
        server.kill()
        with pytest.raises(redis.ConnectionError):
            client.get("key")
        server.start()
        assert client.get("key") is None
        path = Path(server.url.removeprefix("unix://"))
        assert stat.S_IMODE(path.stat().st_mode) == 0o700
    assert not path.parent.exists()
    assert not ping(path)


def test_a_directory_too_deep_for_a_socket_is_refused(tmp_path: Path) -> None:
    binary = find_redis_server()
    assert binary is not None
    with pytest.raises(UnavailableError, match="too long for a unix socket"):
        redis_command(binary, tmp_path / ("d" * 120), 16)
    assert socket_path(Path("folder")) == Path("folder/redis.sock")


def test_redis_on_path_comes_before_the_package(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    mine = tmp_path / "redis-server"
    mine.write_text("#!/bin/sh\n")
    mine.chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path))
    assert find_redis_server() == mine


def test_restarts_slow_down_and_end() -> None:
    policy = RestartPolicy()
    assert [policy.delay_after_death(now_s) for now_s in range(6)] == [0.25, 0.5, 1, 2, 4, None]


def test_rare_deaths_are_forgiven() -> None:
    policy = RestartPolicy()
    assert {policy.delay_after_death(hour * 3600.0) for hour in range(50)} == {0.25}


def test_cores_are_those_of_affinity_and_quota(tmp_path: Path) -> None:
    quota = tmp_path / "cpu.max"
    usable = len(os.sched_getaffinity(0))
    for text, expected in (
        ("max 100000", usable),
        ("50000 100000", 1),
        ("900000 100000", min(usable, 9)),
        ("x", usable),
    ):
        quota.write_text(text)
        assert available_cores(quota) == expected
    assert available_cores(tmp_path / "absent") == usable


def test_the_plan_fits_the_processes_to_each_other(tmp_path: Path) -> None:
    options = {"num_workers": "2", "metrics_port": "9100", "api_key": "hunter2", "block_size": "8"}
    plan = make_plan(load_all(None, options, {}), "model")
    assert plan.scheduler.port == 0
    assert [s.metrics_port for s in (plan.router, plan.scheduler, *plan.workers)] == [9100, 9101, 9102, 9103]
    plan.write_config(tmp_path)
    file = config_path(tmp_path, "worker-1")
    assert yaml.safe_load(file.read_text())["worker"]["block_size"] == 8
    assert {stat.S_IMODE(path.stat().st_mode) for path in tmp_path.iterdir()} == {0o600}
    assert [worker_name(index) for index in range(3)] == ["worker", "worker-1", "worker-2"]


def test_a_scheduler_port_that_was_asked_for_is_kept() -> None:
    assert make_plan(load_all(None, {"port": "50052"}, {}), "model").scheduler.port == 50052


def plan_with(**options: str) -> ServePlan:
    return make_plan(load_all(None, {"http_port": "0", "grpc_port": "0"} | options, {}), "model")


def test_all_ports_in_use_are_named_with_their_options_before_anything_starts() -> None:
    with socket.socket() as one, socket.socket() as other:
        for taken in (one, other):
            taken.bind(("127.0.0.1", 0))
            taken.listen()
        first, second = (str(taken.getsockname()[1]) for taken in (one, other))
        with pytest.raises(UnavailableError, match=f"port {second} on 127.0.0.1.*--grpc-port") as refusal:
            check_listening(plan_with(http_port=first, grpc_port=second))
        assert f"port {first} on 127.0.0.1 is in use; --http-port" in refusal.value.message


@pytest.mark.parametrize("host", ["198.51.100.7", "no.such.host.invalid"])
def test_a_host_that_is_not_this_machines_is_named(host: str) -> None:
    with pytest.raises(ConfigError, match=f"--http-host {host} is no address of this machine") as refusal:
        check_listening(plan_with(http_host=host))
    assert refusal.value.field == "http_host"


def test_two_servers_on_one_port_are_refused() -> None:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = str(probe.getsockname()[1])
    with pytest.raises(ConfigError, match=f"port {port} is given twice, by --http-port and --grpc-port"):
        check_listening(plan_with(http_port=port, grpc_port=port))


def test_a_run_directory_is_removed_by_its_owner_or_after_its_death(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    script = (
        "import tempfile, os, signal\n"
        f"tempfile.tempdir = {str(tmp_path)!r}\n"
        "from pagemill.run_directory import RunDirectory\n"
        "print(RunDirectory().path, flush=True)\n"
        "os.kill(os.getpid(), signal.SIGKILL)\n"
    )
    killed = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=60)
    stale = Path(killed.stdout.strip())
    assert stale.is_dir()
    foreign = tmp_path / "pagemill-serve-without-lock"
    foreign.mkdir()
    mine = RunDirectory()
    remove_stale_directories()
    assert not stale.exists()
    assert mine.path.is_dir()
    assert foreign.is_dir()
    mine.remove()
    mine.remove()
    assert not mine.path.exists()


def test_processes_get_threads_by_their_work_and_settings_from_their_file_alone() -> None:
    plan = make_plan(load_all(None, {"num_threads": "3"}, {}), "model")
    environment = {"PATH": "/bin", "PAGEMILL_ROUTER_HTTP_PORT": "1", "PAGEMILL_CPU_ISA": "avx2"}
    worker = process_environment("worker", plan, environment)
    router = process_environment("router", plan, environment)
    assert (worker["OMP_NUM_THREADS"], router["OMP_NUM_THREADS"]) == ("3", "1")
    assert "PAGEMILL_ROUTER_HTTP_PORT" not in router
    assert (worker["PAGEMILL_CPU_ISA"], worker["PATH"]) == ("avx2", "/bin")
    assert worker["PAGEMILL_PARENT_PID"] == str(os.getpid())


def test_several_workers_see_one_gpu_each(monkeypatch: pytest.MonkeyPatch) -> None:
    def gpus(environment: dict[str, str], **options: str) -> list[str | None]:
        plan = make_plan(load_all(None, options, {}), "model")
        names = ["router", *(worker_name(index) for index in range(len(plan.workers)))]
        return [process_environment(name, plan, environment).get("CUDA_VISIBLE_DEVICES") for name in names]

    monkeypatch.setattr(serve_plan, "cuda_devices", lambda: [DriverDevice("GPU", 90, 1)] * 2)
    assert gpus({}, num_workers="3") == [None, "0", "1", "0"]
    assert gpus({"CUDA_VISIBLE_DEVICES": "5, GPU-1"}, num_workers="2") == ["5, GPU-1", "5", "GPU-1"]
    assert gpus({}, num_workers="1") == [None, None]
    assert gpus({}, num_workers="2", device="cpu") == [None, None, None]
    monkeypatch.setattr(serve_plan, "cuda_devices", list)
    assert gpus({}, num_workers="2") == [None, None, None]
