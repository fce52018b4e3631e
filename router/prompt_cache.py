"""The prompt cache in Redis: token ids of texts, and answers of requests that are deterministic by their parameters.

Best effort: Redis being slow or away makes every question a miss within a few milliseconds, and it is used again by
itself once it answers. Nothing here raises towards a request.
"""

from __future__ import annotations

import asyncio
import hashlib
import json
import logging
from array import array
from collections.abc import Awaitable, Callable, Coroutine
from dataclasses import asdict
from typing import Any, TypeVar, cast

import redis.asyncio
from redis.exceptions import RedisError

from pagemill.config import RouterSettings
from pagemill.step import TokenLogprobs
from router.generation import CompletedSequence, CompleteOutput, PreparedRequest, Timings, Usage
from router.metrics import RouterMetrics

_log = logging.getLogger(__name__)
_T = TypeVar("_T")

# Part of every key: raise it when the meaning of an entry changes.
_FORMAT = "1"
MAX_CONCURRENT_READS = 128
MAX_PENDING_WRITES = 64
WRITE_TIMEOUT_S = 1.0
FAILURES_TO_OPEN = 3
PROBE_FIRST_S = 0.1
PROBE_MOST_S = 1.0


def is_deterministic(prepared: PreparedRequest) -> bool:
    """The parameters alone decide the answer: greedy, or a seed that the client gave.

    An absent temperature is 1, so that a request which names neither is never deterministic.
    """
    return prepared.sampling.temperature == 0 or prepared.explicit_seed


def tokens_key(tokenizer_fingerprint: str, text: str, *, add_special_tokens: bool) -> str:
    """Key of a text's token ids."""
    digest = _digest(tokenizer_fingerprint, text, str(int(add_special_tokens)))
    return f"pagemill:{_FORMAT}:tokens:{digest}"


def response_key(
    prepared: PreparedRequest, *, tokenizer_fingerprint: str, model_fingerprint: str, eos_token_ids: list[int]
) -> str:
    """Key of an answer, over every field that can change it, and over who asks."""
    sampling = asdict(prepared.sampling)
    sampling["stop"] = prepared.sampling.stop_strings
    sampling["logit_bias"] = sorted(prepared.sampling.logit_bias.items())
    if not prepared.explicit_seed:
        sampling["seed"] = None  # drawn by the router: without meaning for a greedy request
    request = prepared.request
    digest = _digest(
        tokenizer_fingerprint,
        model_fingerprint,
        prepared.model,
        request.tenant,
        request.cache_salt,
        "chat" if request.messages is not None else "prompt",
        json.dumps(sampling, sort_keys=True),
        json.dumps(eos_token_ids),
        array("I", prepared.prompt_token_ids).tobytes().hex(),
    )
    return f"pagemill:{_FORMAT}:response:{digest}"


def _digest(*parts: str) -> str:
    """Hash over parts; their lengths are hashed too, so that no two lists of parts collide by shifting text."""
    hasher = hashlib.blake2b(digest_size=20)
    for part in parts:
        data = part.encode("utf-8", "surrogatepass")
        hasher.update(len(data).to_bytes(8, "little"))
        hasher.update(data)
    return hasher.hexdigest()


class CircuitBreaker:
    """Closed while Redis answers. After some failures in a row it opens: nobody waits, and a probe runs until it
    succeeds."""

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

    def failed(self) -> None:
        """An operation failed."""
        self._failures += 1
        if self._failures >= FAILURES_TO_OPEN:
            self.open()

    def open(self) -> None:
        """Stop using Redis until a probe succeeds."""
        if self._task is None:
            self._task = asyncio.create_task(self._run(), name="redis probe")

    async def close(self) -> None:
        """End a running probe."""
        if self._task is not None:
            self._task.cancel()
            await asyncio.gather(self._task, return_exceptions=True)

    async def _run(self) -> None:
        delay_s = PROBE_FIRST_S
        while True:
            try:
                await self._probe()
            except (RedisError, OSError, TimeoutError):
                await asyncio.sleep(delay_s)
                delay_s = min(PROBE_MOST_S, delay_s * 2)
                continue
            self._failures = 0
            self._task = None
            _log.info("the prompt cache is in use")
            return


class PromptCache:
    """The cache of one router. `start` it on the event loop, `close` it there.

    Args:
        settings: redis_url (empty: no cache at all), switches, lifetimes and bounds.
        metrics: hits, misses, errors.
    """

    def __init__(self, settings: RouterSettings, metrics: RouterMetrics) -> None:
        self._settings = settings
        self._metrics = metrics
        self._timeout_s = settings.redis_timeout_ms / 1000
        self._redis: redis.asyncio.Redis | None = None
        if settings.redis_url:
            self._redis = redis.asyncio.Redis.from_url(
                settings.redis_url,
                socket_connect_timeout=WRITE_TIMEOUT_S,
                socket_timeout=WRITE_TIMEOUT_S,
                max_connections=MAX_CONCURRENT_READS + MAX_PENDING_WRITES + 1,
                retry=None,
                decode_responses=False,
            )
        self._breaker = CircuitBreaker(self._ping)
        self._reads = 0
        self._writes: set[asyncio.Task[None]] = set()

    def start(self) -> None:
        """Look for Redis in the background; until it answers, everything is a miss."""
        if self._redis is not None:
            self._breaker.open()

    async def close(self) -> None:
        """End what is under way and close the connections."""
        await self._breaker.close()
        for task in list(self._writes):
            task.cancel()
        await asyncio.gather(*self._writes, return_exceptions=True)
        if self._redis is not None:
            await self._redis.aclose()

    @property
    def is_degraded(self) -> bool:
        """A cache is configured but not usable now."""
        return self._redis is not None and self._breaker.is_open

    async def get_tokens(self, key: str) -> list[int] | None:
        """Cached token ids; None is a miss."""
        if not self._settings.cache_tokens:
            return None
        return await self._lookup("tokens", key, _decode_tokens)

    def put_tokens(self, key: str, token_ids: list[int]) -> None:
        """Keep token ids, in the background."""
        if self._settings.cache_tokens:
            self._store(key, array("I", token_ids).tobytes(), self._settings.cache_tokens_ttl_s)

    async def get_response(self, key: str) -> CompleteOutput | None:
        """A cached answer; None is a miss. Its usage says that all prompt tokens were cached."""
        if not self._settings.cache_responses:
            return None
        return await self._lookup("response", key, decode_response)

    def put_response(self, key: str, output: CompleteOutput) -> None:
        """Keep an answer, in the background."""
        if self._settings.cache_responses and self._redis is not None and not self._breaker.is_open:
            self._store(key, encode_response(output), self._settings.cache_responses_ttl_s)

    async def drain_writes(self) -> None:
        """Wait until all pending writes ended."""
        await asyncio.gather(*self._writes, return_exceptions=True)

    async def _lookup(self, kind: str, key: str, decode: Callable[[bytes], _T]) -> _T | None:
        client = self._redis
        if client is None:
            return None
        found: _T | None = None
        if not self._breaker.is_open and self._reads < MAX_CONCURRENT_READS:
            self._reads += 1
            try:
                data = await self._guarded(cast(Coroutine[Any, Any, bytes | None], client.get(key)), self._timeout_s)
            finally:
                self._reads -= 1
            if data is not None:
                try:
                    found = decode(data)
                except (ValueError, KeyError, TypeError):
                    self._metrics.cache_errors.inc()
        (self._metrics.cache_misses if found is None else self._metrics.cache_hits).labels(kind).inc()
        return found

    def _store(self, key: str, data: bytes, ttl_s: int) -> None:
        client = self._redis
        full = len(self._writes) >= MAX_PENDING_WRITES or len(data) > self._settings.cache_max_entry_bytes
        if client is None or self._breaker.is_open or full:
            return

        async def write() -> None:
            await self._guarded(cast(Coroutine[Any, Any, Any], client.set(key, data, ex=ttl_s)), WRITE_TIMEOUT_S)

        task = asyncio.create_task(write())
        self._writes.add(task)
        task.add_done_callback(self._writes.discard)

    async def _guarded(self, operation: Coroutine[Any, Any, _T], timeout_s: float) -> _T | None:
        try:
            result = await asyncio.wait_for(operation, timeout_s)
        except (RedisError, OSError, TimeoutError) as error:
            self._metrics.cache_errors.inc()
            self._breaker.failed()
            if self._breaker.is_open:
                _log.warning("the prompt cache is away: %s", error or type(error).__name__)
            return None
        self._breaker.succeeded()
        return result

    async def _ping(self) -> None:
        if self._redis is not None:
            async with asyncio.timeout(WRITE_TIMEOUT_S):
                await cast(Awaitable[Any], self._redis.ping())


def _decode_tokens(data: bytes) -> list[int]:
    if len(data) % 4:
        raise ValueError("no list of 32-bit ids")
    return array("I", data).tolist()


def encode_response(output: CompleteOutput) -> bytes:
    """An answer as bytes. The prompt is not kept: who asks has it."""
    content = {
        "sequences": [asdict(s) for s in output.sequences],
        "prompt_logprobs": asdict(output.prompt_logprobs) if output.prompt_logprobs else None,
        "usage": asdict(output.usage),
    }
    return json.dumps(content, separators=(",", ":")).encode()


def decode_response(data: bytes) -> CompleteOutput:
    """The inverse, without names and prompt, which the caller fills in.

    Raises:
        ValueError, KeyError, TypeError: no such entry.
    """
    content = json.loads(data)
    sequences = [
        CompletedSequence(**{**s, "logprobs": TokenLogprobs(**s["logprobs"]) if s["logprobs"] else None})
        for s in content["sequences"]
    ]
    prompt_logprobs = content["prompt_logprobs"]
    usage = Usage(**content["usage"])
    usage.cached_tokens = usage.prompt_tokens
    return CompleteOutput(
        request_id="",
        model="",
        prompt_token_ids=[],
        sequences=sequences,
        usage=usage,
        timings=Timings(),
        prompt_logprobs=TokenLogprobs(**prompt_logprobs) if prompt_logprobs else None,
        from_cache=True,
    )
