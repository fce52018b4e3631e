from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from dataclasses import replace
from typing import Any

import pytest
import redis.asyncio
from hypothesis import given
from hypothesis import strategies as st
from opentelemetry.trace import INVALID_SPAN
from router_helpers import chat, collect, complete, eventually, prompt, text_of

from pagemill.config import RouterSettings
from pagemill.redis_server import RedisServer
from pagemill.sampling_params import SamplingParams
from pagemill.step import TokenLogprobs
from router.generation import (
    CompletedSequence,
    CompleteOutput,
    GenerationRequest,
    InflightSlot,
    PreparedRequest,
    Timings,
    Usage,
)
from router.metrics import RouterMetrics
from router.prompt_cache import (
    PromptCache,
    decode_response,
    encode_response,
    is_deterministic,
    response_key,
    tokens_key,
)

StartCache = Callable[..., Awaitable[PromptCache]]


def redis_client(url: str) -> redis.asyncio.Redis:
    return redis.asyncio.Redis.from_url(url)


def prepared(sampling: SamplingParams, **changes: Any) -> PreparedRequest:
    request = GenerationRequest(sampling, prompt_text="x", **changes)
    return PreparedRequest(
        request,
        "r",
        "m",
        [1, 2, 3],
        sampling,
        sampling.seed is not None,
        0,
        0,
        InflightSlot(lambda: None),
        INVALID_SPAN,
    )


def key(request: PreparedRequest, *, tokenizer: str = "t", weights: str = "w") -> str:
    return response_key(request, tokenizer_fingerprint=tokenizer, model_fingerprint=weights, eos_token_ids=[2])


def hits(parts: Any, kind: str) -> float:
    return parts.metrics.registry.get_sample_value("pagemill:prompt_cache_hits_total", {"kind": kind})


GREEDY = SamplingParams(temperature=0.0)


def test_PX07_every_field_that_can_change_an_answer_changes_the_key() -> None:
    different = [
        prepared(GREEDY),
        *(
            prepared(replace(GREEDY, **change))
            for change in (
                {"max_tokens": 17},
                {"stop": ["x"]},
                {"stop": ["x", "y"]},
                {"seed": 1},
                {"seed": 2},
                {"top_p": 0.5},
                {"top_k": 3},
                {"min_p": 0.1},
                {"n": 2},
                {"min_tokens": 1},
                {"presence_penalty": 1.0},
                {"frequency_penalty": 1.0},
                {"repetition_penalty": 1.1},
                {"stop_token_ids": [5]},
                {"ignore_eos": True},
                {"include_stop_str_in_output": True},
                {"logprobs": 0},
                {"prompt_logprobs": 0},
                {"logit_bias": {1: 1.0}},
                {"skip_special_tokens": False},
                {"temperature": 0.5, "seed": 1},
            )
        ),
        prepared(GREEDY, tenant="a"),
        prepared(GREEDY, cache_salt="a"),
        prepared(GREEDY, tenant="a", cache_salt="a"),
    ]
    other_prompt, other_model, of_chat = prepared(GREEDY), prepared(GREEDY), prepared(GREEDY)
    other_prompt.prompt_token_ids = [1, 2, 4]
    other_model.model = "m2"
    of_chat.request.messages = []
    keys = [key(p) for p in [*different, other_prompt, other_model, of_chat]]
    keys += [key(prepared(GREEDY), tokenizer="t2"), key(prepared(GREEDY), weights="w2")]
    assert len(set(keys)) == len(keys)


def test_PX07_what_can_not_change_an_answer_does_not_change_the_key() -> None:
    drawn, other = prepared(GREEDY), prepared(GREEDY, priority=3, traceparent="x", request_id="y")
    drawn.sampling = replace(GREEDY, seed=123)  # drawn by the router
    assert key(drawn) == key(prepared(GREEDY)) == key(other)


def test_PX07_an_omitted_temperature_without_a_seed_is_never_deterministic() -> None:
    assert not is_deterministic(prepared(SamplingParams()))
    assert not is_deterministic(prepared(SamplingParams(temperature=0.1)))
    assert is_deterministic(prepared(GREEDY))
    assert is_deterministic(prepared(SamplingParams(seed=4)))


@given(st.tuples(st.text(), st.text()), st.tuples(st.text(), st.text()))
def test_keys_of_texts_differ_whenever_texts_or_tokenizers_do(one: tuple[str, str], two: tuple[str, str]) -> None:
    same = tokens_key(*one, add_special_tokens=True) == tokens_key(*two, add_special_tokens=True)
    assert same == (one == two)
    assert tokens_key(*one, add_special_tokens=True) != tokens_key(*one, add_special_tokens=False)


def test_answers_come_back_as_they_were_kept() -> None:
    logprobs = TokenLogprobs([-0.123456789, -1.0], [1, 2], 1, [7, 8], [-0.1, -0.2])
    sequence = CompletedSequence(0, "žluť 👩", [7, 9], logprobs, "stop", "END")
    output = CompleteOutput("r", "m", [1, 2], [sequence], Usage(2, 0, 2), Timings(), logprobs)
    back = decode_response(encode_response(output))
    assert back.sequences == [sequence] and back.prompt_logprobs == logprobs
    assert back.usage == Usage(2, 2, 2) and back.from_cache


@pytest.fixture
async def start_cache() -> AsyncIterator[StartCache]:
    started: list[PromptCache] = []

    async def start(url: str, **settings: Any) -> PromptCache:
        values: dict[str, Any] = {"redis_url": url, "redis_timeout_ms": 500} | settings
        cache = PromptCache(RouterSettings(**values), RouterMetrics())
        cache.start()
        started.append(cache)
        return cache

    yield start
    for cache in started:
        await cache.close()


async def test_ids_are_found_again_until_their_time_is_over(redis_server: RedisServer, start_cache: StartCache) -> None:
    cache = await start_cache(redis_server.url, cache_tokens_ttl_s=1)
    await eventually(lambda: not cache.is_degraded)
    assert await cache.get_tokens("ids") is None
    cache.put_tokens("ids", [1, 2, 70000])
    await cache.drain_writes()
    assert await cache.get_tokens("ids") == [1, 2, 70000]
    deadline = time.monotonic() + 10
    while await cache.get_tokens("ids") is not None:
        assert time.monotonic() < deadline
        await asyncio.sleep(0.05)


async def test_entries_over_the_bound_and_broken_entries_are_misses(
    redis_server: RedisServer, start_cache: StartCache
) -> None:
    cache = await start_cache(redis_server.url, cache_max_entry_bytes=1024)
    await eventually(lambda: not cache.is_degraded)
    cache.put_tokens("long", [1] * 1000)
    await cache.drain_writes()
    assert await cache.get_tokens("long") is None
    client = redis_client(redis_server.url)
    await client.set("broken", b"abc")
    await client.aclose()
    assert await cache.get_tokens("broken") is None
    assert await cache.get_response("broken") is None


async def test_switches_turn_each_kind_off(redis_server: RedisServer, start_cache: StartCache) -> None:
    cache = await start_cache(redis_server.url, cache_tokens=False)
    await eventually(lambda: not cache.is_degraded)
    cache.put_tokens("off", [1])
    await cache.drain_writes()
    assert await cache.get_tokens("off") is None


def away_lines(caplog: pytest.LogCaptureFixture) -> list[str]:
    return [r.getMessage() for r in caplog.records if "the prompt cache is away" in r.getMessage()]


@pytest.mark.parametrize("busy_s", [0.0, 0.03])
async def test_a_stopped_redis_costs_three_time_limits_and_then_nothing(
    start_cache: StartCache, caplog: pytest.LogCaptureFixture, busy_s: float
) -> None:
    with RedisServer() as server:
        cache = await start_cache(server.url, redis_timeout_ms=20)
        await eventually(lambda: not cache.is_degraded)
        assert server.pid is not None
        os.kill(server.pid, signal.SIGSTOP)
        try:
            with busy_loop(busy_s):
                for _ in range(3):
                    assert not cache.is_degraded
                    assert await asyncio.gather(*(cache.get_tokens(f"x{i}") for i in range(100))) == [None] * 100
                assert cache.is_degraded
                assert await cache.get_tokens("x") is None
        finally:
            os.kill(server.pid, signal.SIGCONT)
        assert away_lines(caplog) == ["the prompt cache is away: no answer in 20 ms"]
        await eventually(lambda: not cache.is_degraded)


@contextlib.contextmanager
def busy_loop(turn_s: float) -> Iterator[None]:
    """Every turn of the event loop computes for so long, as if hundreds of requests came in each."""
    loop, is_over = asyncio.get_running_loop(), False

    def compute() -> None:
        time.sleep(turn_s)
        if not is_over:
            loop.call_soon(compute)

    if turn_s:
        compute()
    yield
    is_over = True


async def test_a_busy_router_takes_no_healthy_redis_for_absent(
    redis_server: RedisServer, start_cache: StartCache, caplog: pytest.LogCaptureFixture
) -> None:
    cache = await start_cache(redis_server.url, redis_timeout_ms=20)
    await eventually(lambda: not cache.is_degraded)
    for number in range(50):
        cache.put_tokens(f"busy {number}", [number])
    await cache.drain_writes()
    with busy_loop(0.03):
        for _ in range(2):
            found = await asyncio.gather(*(cache.get_tokens(f"busy {number}") for number in range(50)))
            assert found == [[number] for number in range(50)]
    assert not cache.is_degraded
    assert not away_lines(caplog)


async def test_questions_of_one_burst_share_a_round_trip_and_a_connection(
    redis_server: RedisServer, start_cache: StartCache
) -> None:
    cache = await start_cache(redis_server.url, redis_timeout_ms=500)
    await eventually(lambda: not cache.is_degraded)
    client = redis_client(redis_server.url)
    before = await client.info("all")
    await asyncio.gather(*(cache.get_tokens(f"burst {number}") for number in range(100)))
    after = await client.info("all")
    await client.aclose()

    def reads(info: dict[str, Any]) -> int:
        return info.get("cmdstat_mget", {}).get("calls", 0)

    assert reads(after) - reads(before) == 1
    assert after["total_connections_received"] - before["total_connections_received"] <= 1


async def test_a_caller_that_gives_up_takes_no_answer_from_the_others(
    redis_server: RedisServer, start_cache: StartCache
) -> None:
    cache = await start_cache(redis_server.url, redis_timeout_ms=500)
    await eventually(lambda: not cache.is_degraded)
    cache.put_tokens("kept", [7])
    await cache.drain_writes()
    tasks = [asyncio.create_task(cache.get_tokens("kept")) for _ in range(3)]
    await asyncio.sleep(0)
    tasks[0].cancel()
    assert await asyncio.gather(*tasks[1:]) == [[7], [7]]


async def test_a_redis_that_is_away_from_the_start_is_reported_once_with_a_reason(
    start_cache: StartCache, caplog: pytest.LogCaptureFixture
) -> None:
    cache = await start_cache("unix:///nonexistent/redis.sock")
    await eventually(lambda: bool(away_lines(caplog)))
    assert await cache.get_tokens("x") is None and cache.is_degraded
    (line,) = away_lines(caplog)
    assert "/nonexistent/redis.sock" in line


async def test_OP09_redis_dies_and_returns_under_requests(start_scheduler: Any, start_router: Any, says: Any) -> None:
    scheduler = await start_scheduler(says("an answer of several words"))
    with RedisServer() as server:
        parts = await start_router(scheduler, redis_url=server.url, redis_timeout_ms=500)
        await eventually(lambda: not parts.cache.is_degraded)
        request = prompt("a deterministic prompt", temperature=0.0)
        for _ in range(2):
            assert (await complete(parts, request)).sequences[0].text == "an answer of several words"
            await parts.cache.drain_writes()
        assert hits(parts, "response") == 1 and len(scheduler.submits) == 1

        server.kill()
        answers = await asyncio.gather(*(complete(parts, request) for _ in range(20)))
        assert {a.sequences[0].text for a in answers} == {"an answer of several words"}
        await eventually(lambda: parts.cache.is_degraded)
        assert parts.pipeline.status()["ready"]
        assert parts.pipeline.status()["degraded"] == ["prompt cache (redis)"]

        server.start()
        await eventually(lambda: not parts.cache.is_degraded)
        before = hits(parts, "response")
        for _ in range(2):
            await complete(parts, request)
            await parts.cache.drain_writes()
        assert hits(parts, "response") == before + 1


async def test_OP09_a_router_starts_while_redis_is_away(start_scheduler: Any, start_router: Any, says: Any) -> None:
    parts = await start_router(await start_scheduler(says("hi")), redis_url="unix:///nonexistent/redis.sock")
    assert parts.pipeline.status()["ready"] and parts.cache.is_degraded
    assert (await complete(parts, prompt(temperature=0.0))).sequences[0].text == "hi"


async def test_a_cached_answer_streams_the_same_text_and_usage(
    start_scheduler: Any, start_router: Any, says: Any, redis_server: RedisServer
) -> None:
    scheduler = await start_scheduler(says("the same text twice STOP unseen"))
    parts = await start_router(scheduler, redis_url=redis_server.url, redis_timeout_ms=500)
    await eventually(lambda: not parts.cache.is_degraded)
    request = chat("cached stream", temperature=0.0, stop=["STOP"], logprobs=1)
    fresh = await collect(parts, request)
    await parts.cache.drain_writes()
    cached = await collect(parts, request)
    whole = await complete(parts, request)
    assert len(scheduler.submits) == 1
    assert text_of(cached) == text_of(fresh) == whole.sequences[0].text == "the same text twice "
    assert fresh[-1].usage is not None and cached[-1].usage is not None
    assert cached[-1].usage.completion_tokens == fresh[-1].usage.completion_tokens
    assert cached[-1].usage.cached_tokens == cached[-1].usage.prompt_tokens
    assert whole.from_cache and whole.sequences[0].stop_reason == "STOP"
    assert hits(parts, "tokens") == 2 and hits(parts, "response") == 2


async def test_PX07_no_answer_crosses_between_requests(
    start_scheduler: Any, start_router: Any, tokenizer: Any, redis_server: RedisServer
) -> None:
    answers = iter(range(100))
    scheduler = await start_scheduler(lambda submit, index: [*tokenizer.encode(f"answer {next(answers)}"), 2])
    parts = await start_router(scheduler, redis_url=redis_server.url, redis_timeout_ms=500)
    await eventually(lambda: not parts.cache.is_degraded)
    requests = [
        chat("who", temperature=0.0, **change)
        for change in ({}, {"max_tokens": 50}, {"stop": ["zz"]}, {"seed": 1}, {"seed": 2}, {"top_p": 0.9})
    ]
    for tenant, salt in [("a", ""), ("b", ""), ("", "a")]:
        request = chat("who", temperature=0.0)
        request.tenant, request.cache_salt = tenant, salt
        requests.append(request)
    requests += [chat("who"), chat("who")]  # no temperature: never from the cache
    texts = []
    for request in requests:
        texts.append((await complete(parts, request)).sequences[0].text)
        await parts.cache.drain_writes()
    assert len(set(texts)) == len(requests)
    assert (await complete(parts, requests[0])).sequences[0].text == texts[0]


async def test_cut_off_answers_are_not_kept(
    start_scheduler: Any, start_router: Any, says: Any, redis_server: RedisServer
) -> None:
    scheduler = await start_scheduler(says("one two three four five six seven"))
    parts = await start_router(scheduler, redis_url=redis_server.url, redis_timeout_ms=500)
    await eventually(lambda: not parts.cache.is_degraded)
    request = prompt("cut off", temperature=0.0)
    events = parts.pipeline.generate(request)
    await anext(events)
    await events.aclose()
    await parts.cache.drain_writes()
    assert not (await complete(parts, request)).from_cache
