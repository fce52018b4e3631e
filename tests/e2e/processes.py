"""Real Pagemill processes for tests: started, watched, asked and ended."""

from __future__ import annotations

import contextlib
import json
import os
import queue
import signal
import subprocess
import sys
import threading
import time
import urllib.request
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

READY_PREFIX = "pagemill-ready "
START_TIMEOUT_S = 120
STOP_TIMEOUT_S = 60


def wait_until(condition: Callable[[], Any], timeout_s: float, what: str) -> Any:
    """Polls until the condition gives something true, which is returned; fails with `what` after the deadline."""
    deadline = time.monotonic() + timeout_s
    while True:
        value = condition()
        if value:
            return value
        if time.monotonic() > deadline:
            raise AssertionError(f"not within {timeout_s} s: {what}")
        time.sleep(0.05)


@dataclass
class Process:
    """One `pagemill COMMAND` process and everything it printed."""

    popen: subprocess.Popen
    ready: dict[str, Any] = field(default_factory=dict)
    output: list[str] = field(default_factory=list)

    @property
    def pid(self) -> int:
        return self.popen.pid

    def stop(self) -> int:
        """SIGTERM, then the exit code."""
        if self.popen.poll() is None:
            self.popen.send_signal(signal.SIGTERM)
        return self.popen.wait(STOP_TIMEOUT_S)

    def kill(self) -> None:
        if self.popen.poll() is None:
            self.popen.kill()
        self.popen.wait(STOP_TIMEOUT_S)

    def text(self) -> str:
        return "".join(self.output)


def _pump(process: Process, lines: queue.Queue[str | None]) -> None:
    assert process.popen.stdout is not None
    for line in process.popen.stdout:
        process.output.append(line)
        lines.put(line)
    lines.put(None)


def start(*args: str, env: dict[str, str] | None = None) -> Process:
    """Starts `pagemill ARGS` and waits for its ready line."""
    command = [sys.executable, "-m", "pagemill.cli", *args]
    popen = subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, env=os.environ | (env or {})
    )
    process = Process(popen)
    lines: queue.Queue[str | None] = queue.Queue()
    threading.Thread(target=_pump, args=(process, lines), daemon=True).start()
    deadline = time.monotonic() + START_TIMEOUT_S
    while True:
        try:
            line = lines.get(timeout=max(0.01, deadline - time.monotonic()))
        except queue.Empty:
            process.kill()
            raise AssertionError(f"no ready line from {args} in {START_TIMEOUT_S} s:\n{process.text()}") from None
        if line is None:
            raise AssertionError(f"{args} ended with exit code {popen.wait()}:\n{process.text()}")
        if line.startswith(READY_PREFIX):
            process.ready = json.loads(line[len(READY_PREFIX) :])
            return process


@dataclass
class Server:
    """A complete Pagemill on loopback: where it listens, and what it says of itself."""

    process: Process
    api_key: str = ""

    @property
    def http_url(self) -> str:
        return f"http://127.0.0.1:{self.process.ready['http_port']}"

    @property
    def grpc_address(self) -> str:
        return f"127.0.0.1:{self.process.ready['grpc_port']}"

    def get(self, path: str) -> str:
        """Body of a path on the router."""
        headers = {"Authorization": f"Bearer {self.api_key}"} if self.api_key else {}
        request = urllib.request.Request(self.http_url + path, headers=headers)
        with urllib.request.urlopen(request, timeout=10) as response:
            return response.read().decode()

    def metric(self, name: str, of: str = "router") -> float:
        """Sum over all label sets of a metric of one process; a metric that it lacks fails the test."""
        if of == "router":
            text = self.get("/metrics")
        else:
            url = f"http://127.0.0.1:{self.process.ready['metrics_ports'][of]}/metrics"
            with urllib.request.urlopen(url, timeout=10) as response:
                text = response.read().decode()
        lines = [line for line in text.splitlines() if line.startswith(name) and line[len(name)] in "{ "]
        assert lines or f"# TYPE {name.removesuffix('_total')}" in text, f"{of} has no metric {name}:\n{text}"
        return sum(float(line.rsplit(" ", 1)[1]) for line in lines)

    def busy(self) -> dict[str, float]:
        """Gauges that must be 0 at idle, those that are not."""
        names = ["pagemill:num_requests_running", "pagemill:num_requests_waiting", "pagemill:kv_blocks_used"]
        return {name: value for name in names if (value := self.metric(name))}

    def wait_until_idle(self, timeout_s: float = 10) -> None:
        wait_until(lambda: not self.busy(), timeout_s, f"idle; still busy: {self.busy()}")


@contextlib.contextmanager
def serve(*args: str, env: dict[str, str] | None = None) -> Iterator[Server]:
    """`pagemill serve` on free ports with integrity checks on; it must end with exit code 0 on SIGTERM."""
    ports = ["--http-port", "0", "--grpc-port", "0", "--port", "0", "--metrics-port", "0"]
    process = start("serve", *ports, "--check-integrity", *args, env=env)
    try:
        yield Server(process)
    except BaseException:
        process.stop()
        print(process.text()[-6000:])
        raise
    exit_code = process.stop()
    assert exit_code == 0, f"exit code {exit_code} after SIGTERM:\n{process.text()[-4000:]}"
