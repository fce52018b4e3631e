"""One process of a supervisor: started, watched for its ready line, signalled, waited for."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import re
import signal
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from pagemill.errors import ConfigError, UnavailableError

READY_PREFIX = "pagemill-ready "
# How a process of ours says in its last line why it ends: the command line's form, and that of a service.
_ERROR_LINE = re.compile(r"pagemill(?: \w+|: error): (?P<reason>.+)")
_CONFIG_EXIT_CODE = 2
_LAST_OUTPUT_S = 2.0
_MAX_LINE_BYTES = 1 << 20


class ManagedProcess:
    """A child in a process group of its own, so that a terminal's Ctrl-C reaches the supervisor alone.

    Args:
        name: for messages.
        command: program and arguments.
        environment: the whole environment.
        on_line: gets each line of output that is neither a ready line nor the reason for its end, which `ending` tells.
    """

    def __init__(
        self,
        name: str,
        command: Sequence[str],
        environment: Mapping[str, str],
        on_line: Callable[[str], None],
    ) -> None:
        self.name = name
        self._command = list(command)
        self._environment = dict(environment)
        self._on_line = on_line
        self._process: asyncio.subprocess.Process | None = None
        self._ready: asyncio.Future[dict[str, Any]] | None = None
        self._reason = ""
        self._readers: list[asyncio.Task[None]] = []

    @property
    def pid(self) -> int | None:
        return self._process.pid if self._process else None

    @property
    def returncode(self) -> int | None:
        """None while it runs and before it was started."""
        return self._process.returncode if self._process else None

    @property
    def running(self) -> bool:
        return self._process is not None and self._process.returncode is None

    async def start(self) -> None:
        """Start it, again where it had ended."""
        self._ready = asyncio.get_running_loop().create_future()
        self._reason = ""
        self._process = await asyncio.create_subprocess_exec(
            *self._command,
            env=self._environment,
            stdin=asyncio.subprocess.DEVNULL,
            stdout=asyncio.subprocess.PIPE,
            stderr=asyncio.subprocess.PIPE,
            process_group=0,
            limit=_MAX_LINE_BYTES,
        )
        outputs = (self._process.stdout, self._process.stderr)
        self._readers = [asyncio.create_task(self._read(output)) for output in outputs]

    async def _read(self, stream: asyncio.StreamReader | None) -> None:
        assert stream is not None
        while True:
            try:
                raw = await stream.readline()
            except ValueError:
                continue  # a line over the limit is dropped, the stream goes on
            if not raw:
                return
            line = raw.decode("utf-8", "replace").rstrip("\n")
            error = _ERROR_LINE.fullmatch(line)
            if line.startswith(READY_PREFIX):
                self._set_ready(line.removeprefix(READY_PREFIX))
            elif error is not None:
                self._reason = error["reason"]
            else:
                self._on_line(line)

    def _set_ready(self, text: str) -> None:
        try:
            info = json.loads(text)
        except ValueError:
            return
        if self._ready is not None and not self._ready.done() and isinstance(info, dict):
            self._ready.set_result(info)

    async def wait_ready(self, timeout_s: float) -> dict[str, Any]:
        """What its ready line says.

        Raises:
            ConfigError: it ended before, with the exit code of a wrong setting; the message is its own.
            UnavailableError: it ended before for another reason, or said nothing in time.
        """
        assert self._process is not None and self._ready is not None
        ended = asyncio.create_task(self._process.wait())
        try:
            either: set[asyncio.Future[Any]] = {ended, self._ready}
            await asyncio.wait(either, timeout=timeout_s, return_when=asyncio.FIRST_COMPLETED)
        finally:
            ended.cancel()
        if self._ready.done():
            return self._ready.result()
        if self._process.returncode is not None:
            await self._last_output()
            kind = ConfigError if self._process.returncode == _CONFIG_EXIT_CODE else UnavailableError
            raise kind(self._ending("before it was ready"))
        raise UnavailableError(f"{self.name} was not ready within {timeout_s:.0f} s")

    async def wait(self) -> int:
        """Its exit code, negative for a signal, after its output was read."""
        assert self._process is not None
        code = await self._process.wait()
        await self._last_output()
        return code

    def ending(self) -> str:
        """How it ended, in one sentence: its own reason where it gave one, else its exit code."""
        return self._ending("")

    def _ending(self, when: str) -> str:
        if self._reason:
            return f"{self.name}: {self._reason}"
        return f"{self.name} ended with code {self.returncode} {when}".rstrip()

    async def _last_output(self) -> None:
        """What it wrote before it ended. Not for ever: a grandchild may hold the pipe open."""
        if self._readers:
            await asyncio.wait(self._readers, timeout=_LAST_OUTPUT_S)

    async def stop(self, timeout_s: float) -> int | None:
        """SIGTERM, SIGKILL to the group after `timeout_s`; the exit code, None where it never ran."""
        if self._process is None:
            return None
        self.signal(signal.SIGTERM)
        try:
            return await asyncio.wait_for(self._process.wait(), timeout_s)
        except TimeoutError:
            self.kill()
            return await self._process.wait()

    def signal(self, number: signal.Signals) -> None:
        """Send a signal to the process alone. Nothing where it has ended."""
        if self.running:
            assert self._process is not None
            self._process.send_signal(number)

    def kill(self) -> None:
        """SIGKILL to the whole group."""
        if self.running and self._process is not None:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(self._process.pid, signal.SIGKILL)
