"""Bodies are strict JSON objects; what is wrong is named."""

import pytest

from pagemill.errors import InvalidRequestError
from router.http.schemas import REFUSED_CHAT, REFUSED_COMPLETION, ChatCompletionRequest, CompletionRequest, parse
from router.http.strict_json import parse_object


@pytest.mark.parametrize("literal", ["NaN", "Infinity", "-Infinity"])
@pytest.mark.parametrize(
    ("template", "field"),
    [
        ('{"temperature": %s}', "temperature"),
        ('{"logit_bias": {"5": %s}}', "logit_bias.5"),
        ('{"a": [1, {"b": %s}]}', "a[1].b"),
    ],
)
def test_sv04_non_finite_literals_are_refused_by_path(template: str, field: str, literal: str) -> None:
    with pytest.raises(InvalidRequestError, match=literal) as caught:
        parse_object((template % literal).encode())
    assert caught.value.field == field


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"temperature": "hot"}, "temperature is 'hot', must be a number"),
        ({"max_tokens": 1.5}, "max_tokens is 1.5, must be an integer"),
        ({"stream": "yes"}, "stream is 'yes', must be true or false"),
        ({"ignore_eos": 1}, "ignore_eos is 1, must be true or false"),
        ({"model": True}, "model is true, must be a string"),
        ({"stop": 5}, "stop is 5, must be a string or a list of strings"),
        ({"stop": ["a", 5]}, "stop is ['a', 5], must be a string or a list of strings"),
        ({"stop_token_ids": [1, "b"]}, "stop_token_ids[1] is 'b', must be an integer"),
        ({"stream_options": []}, "stream_options is [], must be an object"),
        ({"logit_bias": {"x": 1}}, "logit_bias holds 'x', which is not a token id"),
        ({"priority": 2**40}, f"priority is {2**40}, must be less than 2147483648"),
        ({"prompt": []}, "prompt is empty"),
        ({"prompt": [[]]}, "prompt is empty"),
        ({"prompt": [[1], []]}, "prompt is empty at position 1"),
        (
            {"prompt": 5},
            "prompt must be a string, a list of strings, a list of token ids or a list of such lists",
        ),
    ],
)
def test_faults_are_told_in_one_form(change: dict[str, object], message: str) -> None:
    with pytest.raises(InvalidRequestError) as caught:
        parse(CompletionRequest, {"prompt": "a"} | change, REFUSED_COMPLETION)
    assert caught.value.message == message


def test_what_is_missing_or_empty_is_told_by_name() -> None:
    for body, message in (({}, "messages is required"), ({"messages": []}, "messages is empty")):
        with pytest.raises(InvalidRequestError) as caught:
            parse(ChatCompletionRequest, body, REFUSED_CHAT)
        assert (caught.value.message, caught.value.field) == (message, "messages")


@pytest.mark.parametrize("raw", [rb'{"stop": ["a", "\ud800"]}', rb'{"stop": ["a", "x\uDFFF"]}'])
def test_half_a_surrogate_pair_is_refused_by_path(raw: bytes) -> None:
    with pytest.raises(InvalidRequestError, match="Unicode") as caught:
        parse_object(raw)
    assert caught.value.field == "stop[1]"


def test_whole_surrogate_pairs_are_text() -> None:
    assert parse_object(rb'{"stop": "\ud83d\ude00"}') == {"stop": "\U0001f600"}


@pytest.mark.parametrize(
    "raw",
    [
        b"",
        b"{",
        b"[]",
        b'"text"',
        b"\xff\xfe",
        b'{"a": 1,}',
        b"{'a': 1}",
        b"[" * 100_000,
        b'{"a":' * 50_000,
        b'{"a": %s}' % (b"1" * 5000),
    ],
)
def test_what_is_no_json_object_is_refused(raw: bytes) -> None:
    with pytest.raises(InvalidRequestError):
        parse_object(raw)


@pytest.mark.parametrize(
    ("change", "field"),
    [
        ({"temperature": "0.5"}, "temperature"),
        ({"temperature": True}, "temperature"),
        ({"max_tokens": 5.0}, "max_tokens"),
        ({"max_tokens": "5"}, "max_tokens"),
        ({"stream": 1}, "stream"),
        ({"stop": 5}, "stop"),
        ({"stop": ["a", 5]}, "stop"),
        ({"logit_bias": {"x": 1}}, "logit_bias"),
        ({"logit_bias": {"5": "1"}}, "logit_bias"),
        ({"logit_bias": []}, "logit_bias"),
        ({"stream_options": {"include_usage": 1}}, "stream_options.include_usage"),
        ({"temperature": 1e999}, "temperature"),
        ({"prompt": None}, "prompt"),
        ({"prompt": []}, "prompt"),
        ({"prompt": [[]]}, "prompt"),
        ({"prompt": ["a", 1]}, "prompt"),
        ({"prompt": [1, -1]}, "prompt"),
        ({"prompt": [True]}, "prompt"),
        ({"prompt": {"text": "a"}}, "prompt"),
    ],
)
def test_wrong_types_are_refused_by_name(change: dict[str, object], field: str) -> None:
    with pytest.raises(InvalidRequestError) as caught:
        parse(CompletionRequest, {"prompt": "a"} | change, REFUSED_COMPLETION)
    assert caught.value.field.startswith(field)
    assert field in caught.value.message


@pytest.mark.parametrize("prompt", ["a", "", ["a", "b"], [1, 2], [[1], [2, 3]]])
def test_all_prompt_forms_are_read(prompt: object) -> None:
    body = parse(CompletionRequest, {"prompt": prompt}, REFUSED_COMPLETION)
    expected = [prompt] if prompt in ("a", "", [1, 2]) else prompt
    assert body.prompts() == expected


def test_null_is_the_default_and_unknown_fields_are_ignored() -> None:
    nulls = dict.fromkeys(["n", "temperature", "stop", "logit_bias", "seed", "suffix", "best_of", "echo", "user"])
    body = parse(CompletionRequest, {"prompt": "a", "store": True, "x_y": [1]} | nulls, REFUSED_COMPLETION)
    assert body.sampling_params(None, None).temperature == 1.0


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("suffix", "end"),
        ("best_of", 3),
        ("guided_json", {"type": "object"}),
        ("use_beam_search", True),
        ("response_format", {"type": "json_object"}),
    ],
)
def test_unsupported_completion_fields_are_refused_by_name(name: str, value: object) -> None:
    with pytest.raises(InvalidRequestError, match=f"{name} is not supported") as caught:
        parse(CompletionRequest, {"prompt": "a", name: value}, REFUSED_COMPLETION)
    assert caught.value.field == name


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("tool_choice", "required"),
        ("tool_choice", {"type": "function", "function": {"name": "f"}}),
        ("response_format", {"type": "json_schema", "json_schema": {}}),
        ("functions", [{"name": "f"}]),
        ("modalities", ["audio"]),
        ("chat_template", "{{ messages }}"),
    ],
)
def test_unsupported_chat_fields_are_refused_by_name(name: str, value: object) -> None:
    with pytest.raises(InvalidRequestError, match=f"{name} is not supported"):
        parse(ChatCompletionRequest, {"messages": [{"role": "user", "content": "a"}], name: value}, REFUSED_CHAT)


def test_neutral_values_of_unsupported_fields_pass() -> None:
    neutral = {"response_format": {"type": "text"}, "tool_choice": "auto", "modalities": ["text"], "functions": []}
    parse(ChatCompletionRequest, {"messages": [{"role": "user", "content": "a"}]} | neutral, REFUSED_CHAT)
