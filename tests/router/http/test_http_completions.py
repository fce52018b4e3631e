"""POST /v1/completions through the official client, a real server and a real pipeline."""

from __future__ import annotations

import json

import httpx
import openai
import pytest
from http_server import HttpServer

PROMPT = "Hello world, this is a test"


def test_string_prompt_is_continued(client: openai.OpenAI, server: HttpServer) -> None:
    ids = server.ids(PROMPT)
    answer = client.completions.create(model=server.model, prompt=PROMPT, max_tokens=len(ids), temperature=0)
    assert answer.choices[0].text == PROMPT
    assert answer.choices[0].finish_reason == "length"
    assert answer.id.startswith("cmpl-")
    assert answer.object == "text_completion"
    assert answer.model == server.model
    assert answer.usage is not None
    assert (answer.usage.prompt_tokens, answer.usage.completion_tokens) == (len(ids), len(ids))
    assert answer.usage.total_tokens == 2 * len(ids)


def test_max_tokens_is_sixteen_unless_given(client: openai.OpenAI, server: HttpServer) -> None:
    answer = client.completions.create(model=server.model, prompt=PROMPT)
    assert answer.usage is not None
    assert answer.usage.completion_tokens == 16


def test_all_prompt_forms_give_one_choice_per_prompt(client: openai.OpenAI, server: HttpServer) -> None:
    one, two = server.ids("alpha beta"), server.ids("gamma")
    for prompt in (["alpha beta", "gamma"], [one, two]):
        answer = client.completions.create(model=server.model, prompt=prompt, max_tokens=6)
        assert [choice.index for choice in answer.choices] == [0, 1]
        assert answer.choices[0].text.startswith("alpha beta")
        assert answer.choices[1].text.startswith("gamma")
        assert answer.usage is not None
        assert answer.usage.prompt_tokens == len(one) + len(two)
        assert answer.usage.completion_tokens == 12
    answer = client.completions.create(model=server.model, prompt=one, max_tokens=len(one))
    assert answer.choices[0].text == "alpha beta"


@pytest.mark.parametrize("stream", [False, True])
def test_several_prompts_with_several_sequences_are_numbered_in_order(
    client: openai.OpenAI, server: HttpServer, stream: bool
) -> None:
    texts = dict.fromkeys(range(4), "")
    prompts = ["one two three four", "red green blue black"]
    length = len(server.ids(prompts[0]))
    arguments = {"model": server.model, "prompt": prompts, "n": 2, "max_tokens": length, "seed": 1}
    if stream:
        for chunk in client.completions.create(**arguments, stream=True):
            texts[chunk.choices[0].index] += chunk.choices[0].text
    else:
        texts = {choice.index: choice.text for choice in client.completions.create(**arguments).choices}
    assert texts[0] == prompts[0]
    assert texts[2] == prompts[1]
    assert sorted(texts[1].split()) == sorted(texts[0].split()) or texts[1] != texts[0]
    assert texts[1] != texts[3]


def test_sv05_streamed_sequences_end_once_each_and_usage_counts_the_prompt_once(
    client: openai.OpenAI, server: HttpServer
) -> None:
    chunks = list(
        client.completions.create(
            model=server.model,
            prompt=PROMPT,
            n=3,
            temperature=1,
            seed=7,
            max_tokens=10,
            stream=True,
            stream_options={"include_usage": True},
        )
    )
    ends = [chunk.choices[0].index for chunk in chunks if chunk.choices and chunk.choices[0].finish_reason]
    assert sorted(ends) == [0, 1, 2]
    assert {chunk.choices[0].index for chunk in chunks if chunk.choices} == {0, 1, 2}
    usage = chunks[-1].usage
    assert usage is not None
    assert (usage.prompt_tokens, usage.completion_tokens) == (len(server.ids(PROMPT)), 30)


def test_sv05_greedy_with_several_sequences_is_answered_or_refused_by_name(
    client: openai.OpenAI, server: HttpServer
) -> None:
    try:
        answer = client.completions.create(model=server.model, prompt=PROMPT, n=3, temperature=0, max_tokens=4)
    except openai.BadRequestError as error:
        assert error.param == "n"
    else:
        assert [choice.index for choice in answer.choices] == [0, 1, 2]


@pytest.mark.parametrize(
    ("options", "has_usage"), [({"include_usage": True}, True), ({}, False), (None, False), ({"other": 1}, False)]
)
def test_us01_usage_chunk_rules(server: HttpServer, options: dict[str, object] | None, has_usage: bool) -> None:
    body = {"prompt": PROMPT, "max_tokens": 3, "stream": True, "stream_options": options}
    lines = server.stream_lines("/v1/completions", body)
    assert lines.pop() == "[DONE]"
    chunks = [json.loads(line) for line in lines]
    if not has_usage:
        assert all("usage" not in chunk for chunk in chunks)
        return
    last = chunks.pop()
    assert last["choices"] == []
    assert last["usage"]["completion_tokens"] == 3
    assert all(chunk["usage"] is None for chunk in chunks)


def test_us01_stream_options_without_stream_are_refused(server: HttpServer) -> None:
    for stream in ({}, {"stream": False}):
        body = {"prompt": PROMPT, "stream_options": {"include_usage": True}} | stream
        answer = server.http.post("/v1/completions", json=body)
        assert answer.status_code == 400
        assert answer.json()["error"]["param"] == "stream_options"


def test_sp08b_one_chunk_alone_has_the_finish_reason(server: HttpServer) -> None:
    server.scheduler.replies["sp08b"] = [*server.ids("The end."), server.eos]
    body = {"prompt": PROMPT, "max_tokens": 50, "stream": True}
    lines = server.stream_lines("/v1/completions", body, {"x-request-id": "sp08b"})
    assert lines.pop() == "[DONE]"
    choices = [json.loads(line)["choices"][0] for line in lines]
    assert [choice["finish_reason"] for choice in choices] == [None] * (len(choices) - 1) + ["stop"]
    assert "".join(choice["text"] for choice in choices) == "The end."
    assert all(choice["text"] for choice in choices[:-1])


@pytest.mark.parametrize("stream", [False, True])
def test_stop_string_ends_the_text_before_it(client: openai.OpenAI, server: HttpServer, stream: bool) -> None:
    arguments = {"model": server.model, "prompt": "aa bb cc STOP dd", "max_tokens": 50, "stop": ["OP d", "zz"]}
    if stream:
        chunks = list(client.completions.create(**arguments, stream=True))
        text = "".join(chunk.choices[0].text for chunk in chunks)
        choice = chunks[-1].choices[0]
    else:
        choice = client.completions.create(**arguments).choices[0]
        text = choice.text
    assert text == "aa bb cc ST"
    assert choice.finish_reason == "stop"
    assert choice.stop_reason == "OP d"  # type: ignore[attr-defined]


@pytest.mark.parametrize("stream", [False, True])
def test_lp01_lp03_echo_with_log_probabilities(server: HttpServer, stream: bool) -> None:
    prompt = "\n3. Nora bought 15"
    body = {"prompt": prompt, "echo": True, "logprobs": 1, "max_tokens": 5, "top_k": 1, "stream": stream}
    if stream:
        lines = server.stream_lines("/v1/completions", body)
        choices = [json.loads(line, parse_constant=pytest.fail)["choices"][0] for line in lines[:-1]]
    else:
        answer = server.http.post("/v1/completions", json=body)
        assert answer.status_code == 200
        choices = json.loads(answer.text, parse_constant=pytest.fail)["choices"]
    text = "".join(choice["text"] for choice in choices)
    tokens = [token for choice in choices for token in choice["logprobs"]["tokens"]]
    offsets = [offset for choice in choices for offset in choice["logprobs"]["text_offset"]]
    values = [value for choice in choices for value in choice["logprobs"]["token_logprobs"]]
    assert text.startswith(prompt)
    assert "".join(tokens) == text
    assert offsets == [len("".join(tokens[:at])) for at in range(len(tokens))]
    assert values == [None] + [-0.5] * (len(tokens) - 1)
    assert len(tokens) == len(server.ids(prompt)) + 5


def test_lp01_impossible_alternatives_are_clamped(server: HttpServer) -> None:
    answer = server.http.post("/v1/completions", json={"prompt": PROMPT, "logprobs": 3, "max_tokens": 2})
    block = json.loads(answer.text, parse_constant=pytest.fail)["choices"][0]["logprobs"]
    assert all(sorted(top.values()) == [-9999.0, -9999.0, -0.5] for top in block["top_logprobs"])


@pytest.mark.parametrize("stream", [False, True])
def test_echo_without_output_scores_the_prompt_alone(server: HttpServer, stream: bool) -> None:
    body = {"prompt": PROMPT, "echo": True, "logprobs": 0, "max_tokens": 0, "stream": stream}
    if stream:
        lines = server.stream_lines("/v1/completions", body)
        choices = [json.loads(line)["choices"][0] for line in lines[:-1]]
    else:
        answer = server.http.post("/v1/completions", json=body).json()
        assert answer["usage"]["completion_tokens"] == 0
        choices = answer["choices"]
    assert "".join(choice["text"] for choice in choices) == PROMPT
    assert len([t for choice in choices for t in choice["logprobs"]["tokens"]]) == len(server.ids(PROMPT))


def test_echo_of_token_ids_repeats_their_text(client: openai.OpenAI, server: HttpServer) -> None:
    answer = client.completions.create(model=server.model, prompt=server.ids("café 😀"), echo=True, max_tokens=1)
    assert answer.choices[0].text.startswith("café 😀")


def test_prompt_log_probabilities_are_one_entry_per_prompt_token(server: HttpServer) -> None:
    answer = server.http.post("/v1/completions", json={"prompt": PROMPT, "prompt_logprobs": 0, "max_tokens": 1})
    entries = answer.json()["choices"][0]["prompt_logprobs"]
    ids = server.ids(PROMPT)
    assert entries[0] is None
    assert [list(entry) for entry in entries[1:]] == [[str(token_id)] for token_id in ids[1:]]
    assert entries[1][str(ids[1])] == {"logprob": -0.5, "rank": 1, "decoded_token": " world"}


def test_token_ids_are_returned_on_request(server: HttpServer) -> None:
    body = {"prompt": PROMPT, "max_tokens": 5, "return_token_ids": True}
    choice = server.http.post("/v1/completions", json=body).json()["choices"][0]
    ids = server.ids(PROMPT)
    assert choice["token_ids"] == ids[:5]
    assert choice["prompt_token_ids"] == ids
    lines = server.stream_lines("/v1/completions", body | {"stream": True})
    chunks = [json.loads(line)["choices"][0] for line in lines[:-1]]
    assert [token_id for chunk in chunks for token_id in chunk["token_ids"]] == ids[:5]


def test_sampling_parameters_reach_the_scheduler(client: openai.OpenAI, server: HttpServer) -> None:
    client.completions.create(
        model=server.model,
        prompt=PROMPT,
        max_tokens=3,
        temperature=0.5,
        top_p=0.9,
        presence_penalty=0.25,
        frequency_penalty=-0.5,
        logit_bias={"100": 2.0},
        seed=42,
        user="somebody",
        extra_body={
            "top_k": 7,
            "min_p": 0.125,
            "repetition_penalty": 1.5,
            "min_tokens": 2,
            "ignore_eos": True,
            "stop_token_ids": [5],
            "priority": -3,
            "cache_salt": "salt",
        },
    )
    submit = server.scheduler.submits[-1]
    sampling = submit.sampling
    assert (sampling.temperature, sampling.top_k, sampling.min_p, sampling.seed) == (0.5, 7, 0.125, 42)
    assert sampling.top_p == pytest.approx(0.9)
    assert (sampling.presence_penalty, sampling.frequency_penalty, sampling.repetition_penalty) == (0.25, -0.5, 1.5)
    assert (sampling.max_tokens, sampling.min_tokens, sampling.ignore_eos) == (3, 2, True)
    assert dict(sampling.logit_bias) == {100: 2.0}
    assert list(sampling.stop_token_ids) == [5]
    assert submit.priority == -3
    client.completions.create(model=server.model, prompt=PROMPT, max_tokens=3)
    assert submit.cache_salt != server.scheduler.submits[-1].cache_salt


def test_generate_answers_with_text(server: HttpServer) -> None:
    answer = server.http.post("/generate", json={"prompt": "Hello, world", "max_tokens": 4})
    assert answer.status_code == 200
    assert answer.json()["text"].startswith("Hello, world")
    for name, value in (("n", 2), ("stream", True)):
        refused = server.http.post("/generate", json={"prompt": "a", name: value})
        assert (refused.status_code, refused.json()["error"]["param"]) == (400, name)


def test_one_refused_prompt_refuses_all_and_frees_the_others(server: HttpServer) -> None:
    before = len(server.scheduler.submits)
    answer = server.http.post("/v1/completions", json={"prompt": ["fine", "x " * 2000], "max_tokens": 3})
    assert answer.status_code == 400
    assert answer.json()["error"]["code"] == "context_length_exceeded"
    assert len(server.scheduler.submits) == before


def test_failure_of_one_of_several_prompts_ends_the_call(server: HttpServer) -> None:
    server.fail("several", after_tokens=2, code=13, message="gone for good")
    answer: httpx.Response = server.http.post(
        "/v1/completions", json={"prompt": ["a", "b"], "max_tokens": 400}, headers={"x-request-id": "several"}
    )
    assert answer.status_code == 500
    server.wait_idle()
