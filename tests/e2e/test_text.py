"""Streams carry exactly the text of the whole answer: characters, stops, limits and usage."""

from __future__ import annotations

import json
from typing import Any

import httpx
import openai
import pytest
from processes import Server

from pagemill.client import Client

pytestmark = pytest.mark.e2e
MULTIBYTE = {
    "emoji": "👩‍👩‍👧‍👦 🙂🙃 🇫🇷 👍🏽 🤷‍♀️",
    "cjk": "東京は日本の首都です。你好，世界 안녕하세요",
    "combining marks": "e\u0301a\u0300o\u0302n\u0303 Příliš žluťoučký kůň Z\u0351\u0349a\u0353l\u0360g\u0321o",
}


def sse_events(server: Server, path: str, body: dict[str, Any]) -> list[dict[str, Any]]:
    """All events of a stream; every data line must be UTF-8 JSON and the last one [DONE]."""
    with httpx.stream("POST", server.http_url + path, json=body | {"stream": True}, timeout=120) as response:
        raw = response.read()
        assert response.status_code == 200, raw
    lines = [line for line in raw.decode("utf-8", "strict").split("\n") if line.startswith("data: ")]
    assert lines[-1] == "data: [DONE]"
    return [json.loads(line[6:]) for line in lines[:-1]]


def stream_text(server: Server, body: dict[str, Any]) -> tuple[str, list[str], str]:
    """(joined text, deltas, finish reason) of one streamed completion; exactly one chunk carries the reason."""
    choices = [e["choices"][0] for e in sse_events(server, "/v1/completions", body) if e["choices"]]
    reasons = [c["finish_reason"] for c in choices if c["finish_reason"]]
    assert len(reasons) == 1
    deltas = [c["text"] for c in choices]
    return "".join(deltas), deltas, reasons[0]


def whole(server: Server, body: dict[str, Any]) -> dict[str, Any]:
    response = httpx.post(server.http_url + "/v1/completions", json=body, timeout=120)
    assert response.status_code == 200, response.text
    return response.json()


@pytest.fixture()
def byte_soup(server: Server, model: str) -> dict[str, dict[str, Any]]:
    """Per script, a request whose output is a random walk over the tokens of that script, split characters included."""
    bodies = {}
    with Client(server.grpc_address) as client:
        for script, text in MULTIBYTE.items():
            bias = {str(i): 60 for i in client.tokenize(text)}
            bodies[script] = {
                "model": model,
                "prompt": text,
                "logit_bias": bias,
                "temperature": 1.5,
                "ignore_eos": True,
            }
    return bodies


@pytest.mark.parametrize("script", MULTIBYTE)
def test_joined_deltas_equal_the_whole_text_also_when_cut_inside_a_character(server, byte_soup, script) -> None:
    cut_inside = 0
    for seed in range(4):
        for max_tokens in (1, 2, 3, 7, 24):
            body = byte_soup[script] | {"seed": seed, "max_tokens": max_tokens, "cache_salt": "stream"}
            answer = whole(server, body)["choices"][0]
            text, deltas, reason = stream_text(server, body)
            assert text == answer["text"]
            assert reason == answer["finish_reason"] == "length"
            assert all("\ufffd" not in d for d in deltas) or "\ufffd" in answer["text"]
            cut_inside += answer["text"].endswith("\ufffd")
    if script == "emoji":
        assert cut_inside > 0, "no output was cut inside a character: the test shows nothing"


def test_ST01_chat_repeats_a_line_of_many_scripts(server: Server, model: str) -> None:
    line = "👩‍👩‍👧 日本語 Příliš žluťoučký"
    body = {"model": model, "messages": [{"role": "user", "content": f"Repeat exactly: {line}"}]}
    body |= {"temperature": 0, "max_tokens": 60}
    answer = httpx.post(server.http_url + "/v1/chat/completions", json=body, timeout=60).json()["choices"][0]
    events = sse_events(server, "/v1/chat/completions", body)
    deltas = [e["choices"][0]["delta"].get("content") or "" for e in events if e["choices"]]
    assert "".join(deltas) == answer["message"]["content"]
    assert "\ufffd" in answer["message"]["content"] or not any("\ufffd" in d for d in deltas)


def test_ST03_a_run_of_lone_continuation_bytes_ends_in_time_with_all_tokens(server: Server, model: str) -> None:
    with Client(server.grpc_address) as client:
        lone = client.tokenize("🙂")[-1]
    body = {"model": model, "prompt": "x", "logit_bias": {str(lone): 100}, "max_tokens": 8, "temperature": 0}
    answer = whole(server, body)
    assert answer["usage"]["completion_tokens"] == 8
    text, _, reason = stream_text(server, body)
    assert text == answer["choices"][0]["text"]
    assert reason == "length"


LETTERS = {"prompt": "The alphabet is A, B, C, D, E, F, G, H, I, J, K, L, M, N, O. Again: A, B, C,", "temperature": 0}


def continuation(server: Server, model: str, **extra: Any) -> str:
    return whole(server, LETTERS | {"model": model, "max_tokens": 24} | extra)["choices"][0]["text"]


def test_SP01_a_stop_over_several_tokens_leaks_nothing(server: Server, model: str) -> None:
    free = continuation(server, model)
    stop = free[2:14]
    body = LETTERS | {"model": model, "max_tokens": 24, "stop": stop}
    text, deltas, reason = stream_text(server, body)
    assert reason == "stop"
    assert text == free[: free.index(stop)] == whole(server, body)["choices"][0]["text"]
    assert all(stop[0] not in d or d in free[: free.index(stop)] for d in deltas)


def test_SP02_a_stop_that_ends_inside_a_token_cuts_right_there(server: Server, model: str) -> None:
    prompt = {"model": model, "prompt": "The capital of France is", "temperature": 0, "max_tokens": 12}
    free = whole(server, prompt)["choices"][0]["text"]
    stop = free.strip()[1:3]
    answer = whole(server, prompt | {"stop": stop})["choices"][0]
    assert answer["finish_reason"] == "stop"
    assert answer["text"] == free[: free.index(stop)]
    assert stream_text(server, prompt | {"stop": stop})[0] == answer["text"]


def test_SP04_text_held_for_a_failed_match_is_released_once(server: Server, model: str) -> None:
    free = continuation(server, model)
    near_miss = free[3:8] + "#"
    body = LETTERS | {"model": model, "max_tokens": 24, "stop": ["\n\n\n", near_miss]}
    text, _, _ = stream_text(server, body)
    assert text == free


def test_SP05_text_held_at_the_end_is_flushed(server: Server, model: str) -> None:
    free = continuation(server, model)
    never_complete = free[-6:] + "#####"
    body = LETTERS | {"model": model, "max_tokens": 24, "stop": [never_complete]}
    text, deltas, reason = stream_text(server, body)
    assert (text, reason) == (free, "length")
    assert sum(not d for d in deltas) <= 1


def test_SP06_min_tokens_outlasts_an_early_stop(server: Server, model: str) -> None:
    body = {
        "model": model,
        "prompt": "List:\n1. apples\n2. pears\n3.",
        "temperature": 0,
        "stop": ["\n"],
        "max_tokens": 60,
    }
    assert whole(server, body)["usage"]["completion_tokens"] < 20
    answer = whole(server, body | {"min_tokens": 20})
    assert answer["usage"]["completion_tokens"] >= 20
    assert answer["choices"][0]["finish_reason"] in ("stop", "length")


def test_SP08_ignore_eos_runs_to_max_tokens_and_a_natural_end_is_one_stop_chunk(server: Server, model: str) -> None:
    question = [{"role": "user", "content": "What is 2 + 2?"}]
    body = {"model": model, "messages": question, "temperature": 0, "max_tokens": 200}
    answer = httpx.post(server.http_url + "/v1/chat/completions", json=body | {"ignore_eos": True}, timeout=120).json()
    assert answer["usage"]["completion_tokens"] == 200
    assert answer["choices"][0]["finish_reason"] == "length"
    events = sse_events(server, "/v1/chat/completions", body)
    assert [e["choices"][0]["finish_reason"] for e in events if e["choices"][0]["finish_reason"]] == ["stop"]


def test_US01_usage_comes_when_asked_for_and_only_then(server: Server, model: str) -> None:
    body = {"model": model, "prompt": "Hi", "max_tokens": 4, "temperature": 0}
    events = sse_events(server, "/v1/completions", body | {"stream_options": {"include_usage": True}})
    assert events[-1]["choices"] == []
    assert events[-1]["usage"]["completion_tokens"] == 4
    assert all(e["usage"] is None for e in events[:-1])
    for options in ({}, {"stream_options": {}}):
        assert all(not e.get("usage") for e in sse_events(server, "/v1/completions", body | options))
    refused = httpx.post(server.http_url + "/v1/completions", json=body | {"stream_options": {"include_usage": True}})
    assert refused.status_code == 400
    assert "stream_options" in refused.json()["error"]["message"]


@pytest.mark.parametrize("stream", [True, False])
def test_CL01_an_over_long_prompt_is_refused_before_any_stream(server: Server, client: openai.OpenAI, stream) -> None:
    listed = httpx.get(server.http_url + "/v1/models").json()["data"][0]
    limit = listed["max_model_len"]
    prompt_tokens = server.metric("pagemill:prompt_tokens_total")
    body = {"model": listed["id"], "prompt": [5] * (limit + 10), "max_tokens": 4, "stream": stream}
    response = httpx.post(server.http_url + "/v1/completions", json=body, timeout=60)
    assert response.status_code == 400
    error = response.json()["error"]
    assert error["type"] == "invalid_request_error"
    assert error["code"] == "context_length_exceeded"
    assert str(limit) in error["message"]
    assert str(limit + 10) in error["message"]
    assert server.metric("pagemill:prompt_tokens_total") == prompt_tokens


def test_CL01_an_over_long_prompt_is_invalid_argument_by_grpc(server: Server) -> None:
    from pagemill.errors import InvalidRequestError

    with Client(server.grpc_address) as client:
        limit = client.list_models()[0].max_model_len
        with pytest.raises(InvalidRequestError, match=str(limit)):
            client.generate([5] * (limit + 10))
