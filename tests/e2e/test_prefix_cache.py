"""Shared prefixes are computed once, and never across what must stay apart."""

from __future__ import annotations

from typing import Any

import httpx
import pytest
from processes import Server, serve

pytestmark = pytest.mark.e2e
BLOCK_SIZE = 16


def complete(server: Server, prompt: Any, key: str = "", **extra: Any) -> tuple[str, int]:
    """(text, cached prompt tokens) of one greedy completion."""
    body = {"prompt": prompt, "max_tokens": 8, "temperature": 0} | extra
    headers = {"Authorization": f"Bearer {key}"} if key else {}
    response = httpx.post(server.http_url + "/v1/completions", json=body, headers=headers, timeout=120)
    assert response.status_code == 200, response.text
    answer = response.json()
    details = answer["usage"].get("prompt_tokens_details") or {}
    return answer["choices"][0]["text"], details.get("cached_tokens") or 0


@pytest.fixture(scope="module")
def uncached_responses():
    """A server whose engine answers every time."""
    with serve("--no-cache-responses", "--api-key", "a=key-of-a,b=key-of-b") as server:
        yield server


def test_a_repeated_prefix_is_read_from_the_cache_with_the_same_text(uncached_responses: Server) -> None:
    prompt = list(range(1000, 1000 + 20 * BLOCK_SIZE + 5))
    first, cold = complete(uncached_responses, prompt, key="key-of-a")
    second, warm = complete(uncached_responses, prompt, key="key-of-a")
    assert (cold, warm) == (0, 20 * BLOCK_SIZE)
    assert first == second


def test_PX03_tenants_share_nothing_even_with_each_others_salt(uncached_responses: Server) -> None:
    prompt = list(range(3000, 3000 + 128 * BLOCK_SIZE))
    ask = {"max_tokens": 4}
    assert complete(uncached_responses, prompt, "key-of-a", cache_salt="s", **ask)[1] == 0
    assert complete(uncached_responses, prompt, "key-of-b", **ask)[1] == 0
    assert complete(uncached_responses, prompt, "key-of-a", cache_salt="s", **ask)[1] > 0
    assert complete(uncached_responses, prompt, "key-of-b", cache_salt="s", **ask)[1] == 0


def test_PX03_the_response_cache_keeps_tenants_apart() -> None:
    with serve("--api-key", "a=key-of-a,b=key-of-b") as server:
        server.api_key = "key-of-a"
        prompt = list(range(5000, 5000 + 4 * BLOCK_SIZE))
        complete(server, prompt, "key-of-a")
        before = server.metric("pagemill:prompt_cache_hits_total")
        complete(server, prompt, "key-of-b")
        assert server.metric("pagemill:prompt_cache_hits_total") == before
        complete(server, prompt, "key-of-a")
        assert server.metric("pagemill:prompt_cache_hits_total") == before + 1


def test_PX04_a_prompt_of_whole_blocks_stays_right_when_all_of_it_is_cached(uncached_responses: Server) -> None:
    prompt = list(range(7000, 7000 + 4 * BLOCK_SIZE))
    runs = [complete(uncached_responses, prompt, "key-of-a") for _ in range(3)]
    assert len({text for text, _ in runs}) == 1
    assert all(3 * BLOCK_SIZE <= cached < 4 * BLOCK_SIZE for _, cached in runs[1:])
    longer = prompt + list(range(9000, 9000 + BLOCK_SIZE))
    assert complete(uncached_responses, longer, "key-of-a")[1] >= 3 * BLOCK_SIZE


def test_PX07_no_answer_crosses_between_requests_that_differ(server: Server, model: str) -> None:
    prompt = "The three largest cities of Italy are"
    base = {"model": model, "prompt": prompt, "temperature": 0, "max_tokens": 12}
    variants = [
        {},
        {"max_tokens": 5},
        {"stop": ","},
        {"temperature": 1.0, "seed": 1},
        {"temperature": 1.0, "seed": 2},
        {"temperature": 1.0, "seed": 1, "top_p": 0.5},
        {"n": 2},
        {"logit_bias": {"28": -100}},
        {"min_tokens": 12},
        {"cache_salt": "other"},
    ]

    def ask(body: dict[str, Any]) -> list[str]:
        response = httpx.post(server.http_url + "/v1/completions", json=body, timeout=60)
        assert response.status_code == 200, response.text
        return [choice["text"] for choice in response.json()["choices"]]

    fresh = [ask(base | v | {"user": "first"}) for v in variants]
    again = [ask(base | v | {"user": "second"}) for v in variants]
    assert fresh == again
    assert len(fresh[6]) == 2
    assert fresh[0] != fresh[1] and fresh[0] != fresh[2] and fresh[3] != fresh[4]
    free_temperature = {"model": model, "prompt": prompt, "max_tokens": 40}
    assert ask(free_temperature) != ask(free_temperature), (
        "an omitted temperature was taken for a deterministic request"
    )
