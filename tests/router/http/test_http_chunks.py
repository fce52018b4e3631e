"""Chunks of a stream: nothing empty, one end per sequence, usage only where it was asked for."""

import json
from typing import Any

import pytest

from pagemill.step import TokenLogprobs
from router.generation import StreamEvent, TextDelta, Usage
from router.http.chat_completions import ChatChoices
from router.http.logprobs import ChatLogprobs
from router.http.sse import ChunkWriter

ENVELOPE = {"id": "chatcmpl-1", "object": "chat.completion.chunk", "created": 1, "model": 'a"b'}


class Spelling:
    special_ids = frozenset({9})

    def token_bytes(self, token_id: int) -> bytes:
        return b"<%d>" % token_id


def chat_writer(*, include_usage: bool = False, logprobs: bool = False) -> ChunkWriter:
    details = ChatLogprobs(Spelling(), skip_special_tokens=True) if logprobs else None
    choices = ChatChoices(details, return_token_ids=False)
    return ChunkWriter(ENVELOPE, choices, detailed=logprobs, include_usage=include_usage)


def chunks(raw: bytes) -> list[Any]:
    events = raw.decode().split("\n\n")
    assert events.pop() == ""
    assert all(event.startswith("data: ") and "\n" not in event for event in events)
    return ["DONE" if event == "data: [DONE]" else json.loads(event[6:]) for event in events]


def test_first_chunk_has_the_role_and_the_last_the_reason() -> None:
    writer = chat_writer()
    role, text = chunks(writer.write(StreamEvent([TextDelta(0, "Hi \u2028\n😀", [1])])))
    assert role["choices"][0]["delta"] == {"role": "assistant", "content": ""}
    assert text["choices"][0]["delta"] == {"content": "Hi \u2028\n😀"}
    assert text["model"] == 'a"b'
    (end,) = chunks(writer.write(StreamEvent([TextDelta(0, "", [2], finish_reason="stop")])))
    assert end["choices"][0]["delta"] == {}
    assert end["choices"][0]["finish_reason"] == "stop"
    assert chunks(writer.close()) == ["DONE"]


def test_sp05_incomplete_text_writes_nothing() -> None:
    writer = chat_writer()
    writer.write(StreamEvent([TextDelta(0, "a", [1])]))
    assert writer.write(StreamEvent([TextDelta(0, "", [2])])) == b""


def test_text_and_end_in_one_event_are_two_chunks_in_one_write() -> None:
    writer = chat_writer()
    _, text, end = chunks(writer.write(StreamEvent([TextDelta(0, "a", [1], finish_reason="length")])))
    assert (text["choices"][0]["delta"], text["choices"][0]["finish_reason"]) == ({"content": "a"}, None)
    assert end["choices"][0]["finish_reason"] == "length"


@pytest.mark.parametrize("include_usage", [True, False])
def test_us01_usage_is_one_extra_last_chunk_and_null_elsewhere(include_usage: bool) -> None:
    writer = chat_writer(include_usage=include_usage)
    usage = Usage(prompt_tokens=5, cached_tokens=4, completion_tokens=1)
    ordinary = chunks(writer.write(StreamEvent([TextDelta(0, "a", [1], finish_reason="stop")], usage=usage)))
    last = chunks(writer.close())
    if not include_usage:
        assert all("usage" not in chunk for chunk in ordinary)
        assert last == ["DONE"]
        return
    assert [chunk["usage"] for chunk in ordinary] == [None] * 3
    assert last[0]["choices"] == []
    assert last[0]["usage"] == {
        "prompt_tokens": 5,
        "completion_tokens": 1,
        "total_tokens": 6,
        "prompt_tokens_details": {"cached_tokens": 4},
    }
    assert last[1:] == ["DONE"]


def test_log_probabilities_wait_for_the_text_of_their_tokens() -> None:
    writer = chat_writer(logprobs=True)
    one = TokenLogprobs([-1.0], [1])
    assert len(chunks(writer.write(StreamEvent([TextDelta(0, "", [1], one)])))) == 1  # the role
    assert writer.write(StreamEvent([TextDelta(0, "", [2], one)])) == b""
    (text,) = chunks(writer.write(StreamEvent([TextDelta(0, "abc", [3], one)])))
    assert [entry["token"] for entry in text["choices"][0]["logprobs"]["content"]] == ["<1>", "<2>", "<3>"]
    (end,) = chunks(writer.write(StreamEvent([TextDelta(0, "", [9], one, finish_reason="stop")])))
    assert [entry["token"] for entry in end["choices"][0]["logprobs"]["content"]] == ["<9>"]
    assert one.chosen == [-1.0]


def test_sequences_of_several_prompts_have_their_own_indexes() -> None:
    writer = chat_writer()
    event = StreamEvent([TextDelta(0, "a", [1]), TextDelta(1, "b", [1])])
    found = chunks(writer.write(event, 4))
    assert [chunk["choices"][0]["index"] for chunk in found] == [4, 4, 5, 5]
