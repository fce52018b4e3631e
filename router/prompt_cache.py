"""The prompt cache in Redis: token ids of texts, and answers of requests that are deterministic by their parameters.

Best effort: Redis being slow or away makes every question a miss within a few milliseconds, and it is used again by
itself once it answers. Nothing here raises towards a request.
"""

from __future__ import annotations

import hashlib
import json
from array import array
from collections.abc import Callable
from dataclasses import asdict
from typing import TypeVar

from pagemill.config import RouterSettings
from pagemill.step import TokenLogprobs
from router.generation import CompletedSequence, CompleteOutput, PreparedRequest, Timings, Usage
from router.metrics import RouterMetrics
from router.redis_link import RedisLink

_T = TypeVar("_T")

# Part of every key: raise it when the meaning of an entry changes.
_FORMAT = "1"


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


class PromptCache:
    """The cache of one router. `start` it on the event loop, `close` it there.

    Args:
        settings: redis_url (empty: no cache at all), switches, lifetimes and bounds.
        metrics: hits, misses, errors.
    """

    def __init__(self, settings: RouterSettings, metrics: RouterMetrics) -> None:
        self._settings = settings
        self._metrics = metrics
        self._redis: RedisLink | None = None
        if settings.redis_url:
            self._redis = RedisLink(settings.redis_url, settings.redis_timeout_ms / 1000, metrics.cache_errors.inc)

    def start(self) -> None:
        """Look for Redis in the background; until it answers, everything is a miss."""
        if self._redis is not None:
            self._redis.start()

    async def close(self) -> None:
        """End what is under way and close the connections."""
        if self._redis is not None:
            await self._redis.close()

    @property
    def is_degraded(self) -> bool:
        """A cache is configured but not usable now."""
        return self._redis is not None and not self._redis.is_usable

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
        if self._settings.cache_responses and self._redis is not None and self._redis.is_usable:
            self._store(key, encode_response(output), self._settings.cache_responses_ttl_s)

    async def drain_writes(self) -> None:
        """Wait until all pending writes ended."""
        if self._redis is not None:
            await self._redis.drain_writes()

    async def _lookup(self, kind: str, key: str, decode: Callable[[bytes], _T]) -> _T | None:
        if self._redis is None:
            return None
        found: _T | None = None
        data = await self._redis.get(key)
        if data is not None:
            try:
                found = decode(data)
            except (ValueError, KeyError, TypeError):
                self._metrics.cache_errors.inc()
        (self._metrics.cache_misses if found is None else self._metrics.cache_hits).labels(kind).inc()
        return found

    def _store(self, key: str, data: bytes, ttl_s: int) -> None:
        if self._redis is not None and len(data) <= self._settings.cache_max_entry_bytes:
            self._redis.put(key, data, ttl_s)


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
