"""POST /v1/chat/completions through the official client, a real server and a real pipeline."""

from __future__ import annotations

import json
from typing import Any

import openai
import pytest
from http_server import HttpServer

MESSAGES: list[Any] = [{"role": "user", "content": "Hello there"}]
REPLY = "Hi 😀, naïve café: 日本語!"


def scripted(server: HttpServer, name: str, text: str = REPLY) -> dict[str, str]:
    """Headers of a request that is answered with `text` and an end-of-sequence token."""
    server.scheduler.replies[name] = [*server.ids(text), server.eos]
    return {"x-request-id": name}


def test_answer_has_the_openai_form(client: openai.OpenAI, server: HttpServer) -> None:
    headers = scripted(server, "chat-form")
    answer = client.chat.completions.create(model=server.model, messages=MESSAGES, extra_headers=headers)
    assert answer.id.startswith("chatcmpl-")
    assert answer.object == "chat.completion"
    (choice,) = answer.choices
    assert (choice.message.role, choice.message.content, choice.finish_reason) == ("assistant", REPLY, "stop")
    assert choice.logprobs is None
    assert answer.usage is not None
    assert answer.usage.completion_tokens == len(server.ids(REPLY)) + 1


def test_st01_stream_equals_the_answer_and_begins_with_the_role(client: openai.OpenAI, server: HttpServer) -> None:
    headers = scripted(server, "chat-stream")
    chunks = list(
        client.chat.completions.create(model=server.model, messages=MESSAGES, stream=True, extra_headers=headers)
    )
    assert chunks[0].choices[0].delta.role == "assistant"
    assert chunks[0].choices[0].delta.content == ""
    deltas = [chunk.choices[0].delta.content for chunk in chunks[1:-1]]
    assert all(deltas)
    assert "".join(delta or "" for delta in deltas) == REPLY
    assert not any("\ufffd" in (delta or "") for delta in deltas)
    assert chunks[-1].choices[0].delta.content is None
    assert [chunk.choices[0].finish_reason for chunk in chunks] == [None] * (len(chunks) - 1) + ["stop"]
    assert len({chunk.id for chunk in chunks}) == 1


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("top_logprobs", [None, 0, 3])
def test_lp04_log_probabilities_of_every_token(
    client: openai.OpenAI, server: HttpServer, top_logprobs: int | None, stream: bool
) -> None:
    headers = scripted(server, "chat-logprobs")
    top = {} if top_logprobs is None else {"top_logprobs": top_logprobs}
    create = client.chat.completions.create
    arguments = {"model": server.model, "messages": MESSAGES, "logprobs": True, "extra_headers": headers} | top
    if stream:
        choices = [chunk.choices[0] for chunk in create(**arguments, stream=True)]
    else:
        choices = create(**arguments).choices
    entries = [entry for choice in choices if choice.logprobs for entry in choice.logprobs.content or []]
    assert len(entries) == len(server.ids(REPLY)) + 1
    assert all(len(entry.top_logprobs) == (top_logprobs or 0) for entry in entries)
    assert bytes(byte for entry in entries for byte in entry.bytes or []).decode() == REPLY
    assert not any(mark in entry.token for entry in entries for mark in "Ġ▁Ċ")
    assert all(-9999 <= each.logprob <= 0 for entry in entries for each in entry.top_logprobs)


def test_lp01_top_logprobs_are_strict_json(server: HttpServer) -> None:
    body = {"messages": MESSAGES, "logprobs": True, "top_logprobs": 5, "top_k": 1, "max_tokens": 3}
    answer = server.http.post("/v1/chat/completions", json=body)
    assert answer.status_code == 200
    content = json.loads(answer.text, parse_constant=pytest.fail)["choices"][0]["logprobs"]["content"]
    assert [top["logprob"] for top in content[0]["top_logprobs"]] == [-0.5] + [-9999.0] * 4


def test_ct06_tool_turns_without_content_are_rendered(server: HttpServer) -> None:
    call = {"id": "c1", "type": "function", "function": {"name": "f", "arguments": '{"a": 1}'}}
    for tool_turn in ({"content": None}, {"content": ""}, {}, {"content": "42"}):
        messages = [
            {"role": "user", "content": "go"},
            {"role": "assistant", "content": None, "tool_calls": [call]},
            {"role": "tool", "tool_call_id": "c1"} | tool_turn,
        ]
        answer = server.http.post("/v1/chat/completions", json={"messages": messages, "max_tokens": 1})
        assert answer.status_code == 200, answer.text


@pytest.mark.parametrize(
    ("messages", "status", "param"),
    [
        ([], 400, "messages"),
        (None, 400, "messages"),
        ("text", 400, "messages"),
        ([{"role": "user", "content": ""}], 200, None),
        ([{"role": "user", "content": None}], 400, "messages[0].content"),
        ([{"role": "user"}], 400, "messages[0].content"),
        ([{"content": "a"}], 400, "messages[0].role"),
        ([{"role": "pirate", "content": "a"}], 400, "messages[0].role"),
        ([{"role": "user", "content": [{"type": "image_url", "image_url": {}}]}], 400, "messages[0].content[0]"),
        ([{"role": "user", "content": [{"type": "text", "text": "a"}]}], 200, None),
        (["a"], 400, "messages[0]"),
    ],
)
def test_ct06_odd_conversations_are_answered_or_refused_by_path(
    server: HttpServer, messages: Any, status: int, param: str | None
) -> None:
    answer = server.http.post("/v1/chat/completions", json={"messages": messages, "max_tokens": 1})
    assert answer.status_code == status, answer.text
    if param is not None:
        assert answer.json()["error"]["param"] == param


def test_output_limit_has_two_names(server: HttpServer) -> None:
    for limits, expected in (({"max_tokens": 3}, 3), ({"max_completion_tokens": 4, "max_tokens": 9}, 4)):
        answer = server.http.post("/v1/chat/completions", json={"messages": MESSAGES} | limits).json()
        assert answer["usage"]["completion_tokens"] == expected


def test_tools_reach_the_template_unless_forbidden(server: HttpServer) -> None:
    tools = [{"type": "function", "function": {"name": "get_weather", "parameters": {}}}]
    body = {"messages": MESSAGES, "max_tokens": 1, "tools": tools}
    for choice in ("auto", "none", None):
        answer = server.http.post("/v1/chat/completions", json=body | {"tool_choice": choice})
        assert answer.status_code == 200
    refused = server.http.post("/v1/chat/completions", json=body | {"tool_choice": "required"})
    assert (refused.status_code, refused.json()["error"]["param"]) == (400, "tool_choice")


def test_top_logprobs_need_logprobs(server: HttpServer) -> None:
    answer = server.http.post("/v1/chat/completions", json={"messages": MESSAGES, "top_logprobs": 2})
    assert (answer.status_code, answer.json()["error"]["param"]) == (400, "top_logprobs")


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("path", ["/v1/chat/completions", "/v1/completions"])
def test_cl01_an_over_long_prompt_is_refused_before_any_event(server: HttpServer, path: str, stream: bool) -> None:
    submitted = len(server.scheduler.submits)
    text = "word " * (server.max_model_len + 10)
    prompt = {"prompt": text} if path == "/v1/completions" else {"messages": [{"role": "user", "content": text}]}
    answer = server.http.post(path, json=prompt | {"stream": stream, "max_tokens": 1})
    assert answer.status_code == 400
    assert answer.headers["content-type"] == "application/json"
    error = answer.json()["error"]
    assert (error["type"], error["code"]) == ("invalid_request_error", "context_length_exceeded")
    assert str(server.max_model_len) in error["message"]
    assert len(server.scheduler.submits) == submitted
