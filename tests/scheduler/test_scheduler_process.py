"""The scheduler as a process of its own: it says when it serves, and leaves cleanly."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
from collections.abc import Iterator

import pytest
from scheduler_fakes import expected_tokens
from scheduler_peers import VOCAB, PeerRouter, PeerWorker, until

COMMAND = [sys.executable, "-m", "pagemill.cli", "scheduler", "--port"]


@pytest.fixture
def process() -> Iterator[subprocess.Popen[str]]:
    with subprocess.Popen([*COMMAND, "0"], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as process:
        yield process
        process.kill()


def ready_of(process: subprocess.Popen[str]) -> dict[str, object]:
    assert process.stdout is not None
    line = process.stdout.readline()
    assert line.startswith("pagemill-ready ")
    return dict(json.loads(line.split(" ", 1)[1]))


async def test_sigterm_finishes_what_runs_and_exits_with_0(process) -> None:
    address = f"127.0.0.1:{ready_of(process)['grpc_port']}"
    worker, router = PeerWorker(address, step_s=0.002), PeerRouter(address)
    await until(lambda: router.hello is not None, "hello")
    await router.submit(1, [1, 2, 3], 100)
    await until(lambda: bool(router.tokens), "running")
    process.send_signal(signal.SIGTERM)
    await router.wait(1)
    assert router.tokens[1][0] == expected_tokens([1, 2, 3], 5, 100, VOCAB)
    await until(lambda: process.poll() is not None, "exit")
    assert process.returncode == 0
    assert worker.drained.is_set()
    await worker.close()
    await router.close()


def test_a_port_in_use_is_one_clear_line_and_not_0(process) -> None:
    port = str(ready_of(process)["grpc_port"])
    second = subprocess.run([*COMMAND, port], capture_output=True, text=True, timeout=60, check=False)
    assert second.returncode != 0
    assert port in second.stderr and "in use" in second.stderr
    assert "Traceback" not in second.stderr


async def test_sigusr1_has_the_workers_profile_their_next_steps(process) -> None:
    address = f"127.0.0.1:{ready_of(process)['grpc_port']}"
    worker = PeerWorker(address)
    await until(lambda: worker.attached is not None, "attached")
    process.send_signal(signal.SIGUSR1)
    await until(lambda: worker.profiled_steps > 0, "a profile is asked for")
    assert process.poll() is None
    await worker.close()
