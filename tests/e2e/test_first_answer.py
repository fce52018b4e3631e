"""From one command to English sentences, by every way that a person talks to Pagemill."""

from __future__ import annotations

import json
import subprocess
import sys

import grpc
import openai
import pytest
from processes import Server

from pagemill.v1 import common_pb2, inference_pb2, inference_pb2_grpc

pytestmark = pytest.mark.e2e
QUESTION = [{"role": "user", "content": "What colour is the sky on a clear day?"}]


def test_chat_by_the_openai_client(client: openai.OpenAI, model: str) -> None:
    answer = client.chat.completions.create(model=model, messages=QUESTION, temperature=0, max_tokens=32)
    assert "sky" in answer.choices[0].message.content
    usage = answer.usage
    assert usage.total_tokens == usage.prompt_tokens + usage.completion_tokens
    assert 0 < usage.completion_tokens <= 32


def test_streamed_chat_by_the_openai_client_has_the_same_text_and_usage(client: openai.OpenAI, model: str) -> None:
    arguments = {"model": model, "messages": QUESTION, "temperature": 0, "max_tokens": 32}
    whole = client.chat.completions.create(**arguments)
    chunks = list(client.chat.completions.create(**arguments, stream=True, stream_options={"include_usage": True}))
    text = "".join(c.choices[0].delta.content or "" for c in chunks if c.choices)
    assert text == whole.choices[0].message.content
    assert chunks[-1].usage.completion_tokens == whole.usage.completion_tokens


def test_completion_by_the_openai_client(client: openai.OpenAI, model: str) -> None:
    answer = client.completions.create(model=model, prompt="The capital of France is", temperature=0, max_tokens=8)
    assert "Paris" in answer.choices[0].text


def test_completion_by_curl(server: Server, model: str) -> None:
    body = {"model": model, "prompt": "The opposite of hot is", "temperature": 0, "max_tokens": 4}
    command = ["curl", "-sS", server.http_url + "/v1/completions", "-H", "Content-Type: application/json", "-d"]
    answer = subprocess.run([*command, json.dumps(body)], capture_output=True, text=True, check=True, timeout=60)
    assert "cold" in json.loads(answer.stdout)["choices"][0]["text"]


def test_chat_by_the_generated_stubs(server: Server) -> None:
    with grpc.insecure_channel(server.grpc_address) as channel:
        stub = inference_pb2_grpc.InferenceStub(channel)
        request = inference_pb2.ChatRequest(
            messages=[inference_pb2.ChatMessage(role="user", content=QUESTION[0]["content"])],
            sampling=common_pb2.SamplingParams(temperature=0, max_tokens=32),
        )
        responses = list(stub.Chat(request, timeout=60))
    text = "".join(delta.text for response in responses for delta in response.deltas)
    assert "sky" in text
    assert responses[-1].usage.prompt_tokens == len(responses[0].prompt_token_ids)


def test_grpc_and_http_give_the_same_tokens(server: Server, client: openai.OpenAI, model: str) -> None:
    prompt = "Once upon a time"
    whole = client.completions.create(model=model, prompt=prompt, temperature=0, max_tokens=24)
    with grpc.insecure_channel(server.grpc_address) as channel:
        stub = inference_pb2_grpc.InferenceStub(channel)
        sampling = common_pb2.SamplingParams(temperature=0, max_tokens=24)
        responses = stub.Generate(inference_pb2.GenerateRequest(text=prompt, sampling=sampling), timeout=60)
        text = "".join(delta.text for response in responses for delta in response.deltas)
    assert text == whole.choices[0].text


def test_a_conversation_in_the_terminal_remembers_its_turns(server: Server, client: openai.OpenAI, model: str) -> None:
    typed = ["My name is Ada and I like boats.", "What do I like?"]
    command = [sys.executable, "-m", "pagemill.cli", "chat", "--address", server.grpc_address, "--temperature", "0"]
    command += ["--max-tokens", "24"]
    run = subprocess.run(command, input="\n".join([*typed, "/exit", ""]), capture_output=True, text=True, timeout=120)
    assert run.returncode == 0, run.stderr

    turns: list[dict[str, str]] = []
    for line in typed:
        turns.append({"role": "user", "content": line})
        answer = client.chat.completions.create(model=model, messages=turns, temperature=0, max_tokens=24)
        assert answer.choices[0].message.content in run.stdout
        turns.append({"role": "assistant", "content": answer.choices[0].message.content})
