"""`pagemill serve` for the length of a measurement: three real processes on free ports, gone afterwards."""

from __future__ import annotations

import collections
import contextlib
import json
import os
import queue
import subprocess
import sys
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from pagemill.errors import PagemillError, UnavailableError

_READY_PREFIX = "pagemill-ready "
_ERROR_PREFIX = "pagemill: error: "
_START_TIMEOUT_S = 900.0
_STOP_TIMEOUT_S = 60.0
_KEPT_LINES = 40
# Free ports, no prompt cache, and no wait for streams that are of no more interest.
_OPTIONS = (
    "--http-port", "0", "--grpc-port", "0", "--port", "0", "--metrics-port", "0", "--redis", "off",
    "--drain-timeout-s", "1",
)  # fmt: skip


@dataclass(frozen=True, slots=True)
class StartedServer:
    """Where a server that was started here listens.

    Attributes:
        metrics_urls: by name of the process.
        start_s: seconds until it was ready.
    """

    base_url: str
    address: str
    metrics_urls: Mapping[str, str]
    start_s: float


@contextlib.contextmanager
def started_server(arguments: Sequence[str]) -> Iterator[StartedServer]:
    """`pagemill serve ARGUMENTS` on free ports without a prompt cache, ready for requests.

    Raises:
        UnavailableError: it does not start; the message is its own last word.
    """
    command = [sys.executable, "-m", "pagemill.cli", "serve", *_OPTIONS, *arguments]
    begin_s = time.monotonic()
    process = subprocess.Popen(
        command,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        env=os.environ | {"PAGEMILL_PARENT_PID": str(os.getpid())},
        process_group=0,
    )
    output = _Output(process)
    try:
        ready = output.wait_ready()
        ports = {"router": ready["http_port"], **ready["metrics_ports"]}
        yield StartedServer(
            f"http://127.0.0.1:{ready['http_port']}",
            f"127.0.0.1:{ready['grpc_port']}",
            {name: f"http://127.0.0.1:{port}/metrics" for name, port in ports.items()},
            time.monotonic() - begin_s,
        )
    except PagemillError:
        output.show_end()
        raise
    finally:
        process.terminate()
        try:
            process.wait(_STOP_TIMEOUT_S)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()


class _Output:
    """What the server prints: read to the end, so that it never waits for us; its end is kept."""

    def __init__(self, process: subprocess.Popen[str]) -> None:
        self._process = process
        self._lines: queue.Queue[str | None] = queue.Queue()
        self._last: collections.deque[str] = collections.deque(maxlen=_KEPT_LINES)
        threading.Thread(target=self._read, daemon=True).start()

    def _read(self) -> None:
        assert self._process.stdout is not None
        for line in self._process.stdout:
            self._last.append(line.rstrip("\n"))
            if line.startswith(_READY_PREFIX):
                self._lines.put(line)
        self._lines.put(None)

    def wait_ready(self) -> dict[str, Any]:
        try:
            line = self._lines.get(timeout=_START_TIMEOUT_S)
        except queue.Empty:
            raise UnavailableError(f"the server was not ready within {_START_TIMEOUT_S:.0f} s") from None
        if line is None:
            raise UnavailableError(f"the server did not start: {self._reason()}")
        ready: dict[str, Any] = json.loads(line.removeprefix(_READY_PREFIX))
        return ready

    def show_end(self) -> None:
        """The last lines on stderr, for whoever looks for the reason of a failure."""
        for line in list(self._last):
            print(f"  server: {line}", file=sys.stderr)

    def _reason(self) -> str:
        errors = [line.removeprefix(_ERROR_PREFIX) for line in self._last if line.startswith(_ERROR_PREFIX)]
        return errors[-1] if errors else "\n".join(self._last)
