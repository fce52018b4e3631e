"""Best-effort reads and writes in Redis: what is not there in time is a miss. Lives on the router's event loop.

Questions that come while one is under way go out together as the next one, and so do writes: a burst of requests costs
Redis and the event loop a few round trips on one connection each way, not a connection for each request.
"""

from __future__ import annotations

import asyncio
import logging
from collections import deque
from collections.abc import Awaitable, Callable, Coroutine
from typing import Any, TypeVar, cast

import redis.asyncio
from redis.exceptions import ConnectionError as RedisConnectionError
from redis.exceptions import RedisError

_log = logging.getLogger(__name__)
_T = TypeVar("_T")

MAX_WAITING_READS = 4096
MAX_WAITING_WRITES = 64
KEYS_PER_READ = 128
ENTRIES_PER_WRITE = 16
WRITE_TIMEOUT_S = 1.0
FAILURES_TO_OPEN = 3
PROBE_FIRST_S = 0.1
PROBE_MOST_S = 1.0
# A time limit passes in this many parts, each begun in a later turn of the event loop than the one before.
_PARTS_OF_A_WAIT = 8


async def within(operation: Coroutine[Any, Any, _T], limit_s: float) -> _T:
    """The result of an operation on another process, or TimeoutError after `limit_s` seconds without an answer.

    An event loop that is late with everything says nothing about the other side. So the limit is counted in parts:
    a busy loop makes each part longer, and in between an answer that has come gets its turns to be read.
    """
    task = asyncio.ensure_future(operation)
    try:
        for _ in range(_PARTS_OF_A_WAIT):
            done, _pending = await asyncio.wait({task}, timeout=limit_s / _PARTS_OF_A_WAIT)
            if done:
                return task.result()
        raise TimeoutError(f"no answer in {limit_s * 1000:g} ms")
    finally:
        task.cancel()
        task.add_done_callback(_forget)


def _forget(task: asyncio.Task[Any]) -> None:
    """Nobody waits for the task any more: what it ended with is not to be logged as unseen."""
    if not task.cancelled():
        task.exception()


class CircuitBreaker:
    """Closed while Redis answers. Opens after some failures in a row, or when the connection breaks: nobody waits then,
    and a probe runs until it succeeds. Logs one line per change."""

    def __init__(self, probe: Callable[[], Awaitable[None]]) -> None:
        self._probe = probe
        self._failures = 0
        self._task: asyncio.Task[None] | None = None

    @property
    def is_open(self) -> bool:
        return self._task is not None

    def succeeded(self) -> None:
        """An operation worked."""
        self._failures = 0

    def failed(self, error: Exception) -> None:
        """An operation failed."""
        self._failures += 1
        is_broken = isinstance(error, RedisConnectionError | OSError) and not isinstance(error, TimeoutError)
        if is_broken or self._failures >= FAILURES_TO_OPEN:
            self.open(error)

    def open(self, reason: Exception | None = None) -> None:
        """Stop using Redis until a probe succeeds. Without a reason to log, the first failed probe gives one."""
        if self._task is None:
            self._task = asyncio.create_task(self._run(reason), name="redis probe")

    async def close(self) -> None:
        """End a running probe."""
        if self._task is not None:
            self._task.cancel()
            await asyncio.gather(self._task, return_exceptions=True)

    async def _run(self, reason: Exception | None) -> None:
        if reason is not None:
            _log_opening(reason)
        delay_s = PROBE_FIRST_S
        while True:
            try:
                await self._probe()
            except (RedisError, OSError) as error:
                if reason is None:
                    reason = error
                    _log_opening(reason)
                await asyncio.sleep(delay_s)
                delay_s = min(PROBE_MOST_S, delay_s * 2)
                continue
            self._failures = 0
            self._task = None
            _log.info("the prompt cache is in use")
            return


def _log_opening(reason: Exception) -> None:
    _log.warning("the prompt cache is away: %s", str(reason) or type(reason).__name__)


class RedisLink:
    """One Redis. `start` it on the event loop, `close` it there. Nothing raises towards a request.

    Args:
        url: redis:// or unix:// address.
        read_timeout_s: longest wait for values; what has not come by then is a miss.
        on_error: called for each failed operation.
    """

    def __init__(self, url: str, read_timeout_s: float, on_error: Callable[[], None]) -> None:
        self._read_timeout_s = read_timeout_s
        self._on_error = on_error
        # One reads, one writes, one probes; the others are those of operations that were given up and still close.
        self._client = redis.asyncio.Redis.from_url(
            url,
            socket_connect_timeout=WRITE_TIMEOUT_S,
            socket_timeout=WRITE_TIMEOUT_S,
            max_connections=16,
            retry=None,
            decode_responses=False,
        )
        self._breaker = CircuitBreaker(self._ping)
        self._questions: deque[tuple[str, asyncio.Future[bytes | None]]] = deque()
        self._entries: deque[tuple[str, bytes, int]] = deque()
        self._reader: asyncio.Task[None] | None = None
        self._writer: asyncio.Task[None] | None = None

    def start(self) -> None:
        """Look for Redis in the background; until it answers, everything is a miss."""
        self._breaker.open()

    async def close(self) -> None:
        """End what is under way and close the connections."""
        await self._breaker.close()
        tasks = [task for task in (self._reader, self._writer) if task is not None]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        await self._client.aclose()

    @property
    def is_usable(self) -> bool:
        return not self._breaker.is_open

    async def get(self, key: str) -> bytes | None:
        """The value of a key; None where there is none, or none in time."""
        if not self.is_usable or len(self._questions) >= MAX_WAITING_READS:
            return None
        future: asyncio.Future[bytes | None] = asyncio.get_running_loop().create_future()
        self._questions.append((key, future))
        if self._reader is None:
            self._reader = asyncio.create_task(self._read())
        return await future

    def put(self, key: str, data: bytes, ttl_s: int) -> None:
        """Keep a value for `ttl_s` seconds, in the background; dropped where too many wait."""
        if not self.is_usable or len(self._entries) >= MAX_WAITING_WRITES:
            return
        self._entries.append((key, data, ttl_s))
        if self._writer is None:
            self._writer = asyncio.create_task(self._write())

    async def drain_writes(self) -> None:
        """Wait until nothing is being written."""
        if self._writer is not None:
            await asyncio.wait({self._writer})

    async def _read(self) -> None:
        asked: list[tuple[str, asyncio.Future[bytes | None]]] = []
        try:
            while self._questions:
                asked = [self._questions.popleft() for _ in range(min(KEYS_PER_READ, len(self._questions)))]
                operation = cast(Coroutine[Any, Any, list[bytes | None]], self._client.mget([key for key, _ in asked]))
                values = await self._guarded(operation, self._read_timeout_s)
                if values is None:
                    return
                for (_, future), value in zip(asked, values, strict=True):
                    if not future.done():
                        future.set_result(value)
        finally:
            # Whoever waited behind a question without answer has waited long enough.
            for _, future in (*asked, *self._questions):
                if not future.done():
                    future.set_result(None)
            self._questions.clear()
            self._reader = None

    async def _write(self) -> None:
        try:
            while self._entries and self.is_usable:
                pipeline = self._client.pipeline(transaction=False)
                for _ in range(min(ENTRIES_PER_WRITE, len(self._entries))):
                    key, data, ttl_s = self._entries.popleft()
                    pipeline.set(key, data, ex=ttl_s)
                await self._guarded(pipeline.execute(), WRITE_TIMEOUT_S)
        finally:
            self._entries.clear()
            self._writer = None

    async def _guarded(self, operation: Coroutine[Any, Any, _T], timeout_s: float) -> _T | None:
        try:
            result = await within(operation, timeout_s)
        except (RedisError, OSError) as error:
            self._on_error()
            self._breaker.failed(error)
            return None
        self._breaker.succeeded()
        return result

    async def _ping(self) -> None:
        await within(cast(Coroutine[Any, Any, Any], self._client.ping()), WRITE_TIMEOUT_S)
