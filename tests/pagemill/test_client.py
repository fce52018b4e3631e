"""The typed gRPC clients against the real servicer and the real pipeline."""

from __future__ import annotations

import asyncio
import math
import sys
from collections.abc import Callable, Iterator
from contextlib import aclosing, closing
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parents[1] / "router"))
sys.path.insert(0, str(Path(__file__).parents[1] / "router" / "http"))

from http_server import HttpServer, serve_http

from pagemill.client import AsyncClient, Client
from pagemill.errors import (
    ContextLengthError,
    InvalidRequestError,
    ModelNotFoundError,
    OverloadedError,
    UnauthenticatedError,
    UnavailableError,
)
from pagemill.outputs import Logprob, RequestOutput
from pagemill.sampling_params import SamplingParams

PROMPT = "Hello world, this is a test 😀"


@pytest.fixture(scope="module")
def router() -> Iterator[HttpServer]:
    with serve_http() as running:
        yield running


@pytest.fixture()
def client(router: HttpServer) -> Iterator[Client]:
    with Client(f"127.0.0.1:{router.grpc_port}", timeout_s=30) as opened:
        yield opened


def test_o01_to_o13_a_whole_output(client: Client, router: HttpServer) -> None:
    ids = router.ids(PROMPT)
    params = SamplingParams(n=2, max_tokens=len(ids), logprobs=2, prompt_logprobs=1, seed=1)
    output = client.generate(PROMPT, params, request_id="mine")
    assert output.request_id == "mine"
    assert output.prompt == PROMPT
    assert output.prompt_token_ids == ids
    assert output.finished
    assert output.num_cached_tokens == 16
    assert output.prompt_logprobs is not None
    assert len(output.prompt_logprobs) == len(ids)
    assert output.prompt_logprobs[0] is None
    assert output.prompt_logprobs[1] == {ids[1]: Logprob(-0.5, 1)}
    assert [sequence.index for sequence in output.outputs] == [0, 1]
    first = output.outputs[0]
    assert first.text == PROMPT
    assert first.token_ids == ids
    assert first.logprobs is not None
    assert [next(iter(position)) for position in first.logprobs] == ids
    assert first.cumulative_logprob == pytest.approx(-0.5 * len(ids))
    assert (first.finish_reason, first.stop_reason, first.finished) == ("length", None, True)
    metrics = output.metrics
    assert metrics is not None
    assert metrics.first_scheduled_time is not None
    assert metrics.first_token_time is not None
    assert metrics.finished_time is not None
    assert metrics.arrival_time <= metrics.first_scheduled_time <= metrics.first_token_time <= metrics.finished_time
    assert metrics.time_in_queue == pytest.approx(metrics.first_scheduled_time - metrics.arrival_time)


def test_a_stream_joins_to_the_whole_output_and_is_finished_once(client: Client, router: HttpServer) -> None:
    params = SamplingParams(n=2, max_tokens=20, logprobs=0, seed=1)
    whole = client.generate(PROMPT, params)
    deltas = list(client.generate_stream(PROMPT, params))
    assert [delta.finished for delta in deltas] == [False] * (len(deltas) - 1) + [True]
    joined = RequestOutput("")
    for delta in deltas:
        joined.extend(delta)
    assert [sequence.text for sequence in joined.outputs] == [sequence.text for sequence in whole.outputs]
    assert [sequence.token_ids for sequence in joined.outputs] == [s.token_ids for s in whole.outputs]
    assert [len(sequence.logprobs or []) for sequence in joined.outputs] == [20, 20]
    assert joined.prompt_token_ids == whole.prompt_token_ids


def test_token_ids_as_prompt_and_stop_reasons(client: Client, router: HttpServer) -> None:
    ids = router.ids("aa bb cc STOP dd")
    output = client.generate(ids, SamplingParams(max_tokens=50, stop=["OP d"]))
    assert (output.prompt, output.prompt_token_ids) == (None, ids)
    assert (output.outputs[0].text, output.outputs[0].stop_reason) == ("aa bb cc ST", "OP d")
    by_id = client.generate(ids, SamplingParams(max_tokens=50, stop_token_ids=[ids[2]]))
    assert by_id.outputs[0].stop_reason == ids[2]
    assert by_id.outputs[0].finish_reason == "stop"


def test_chat_whole_and_streamed(client: Client, router: HttpServer) -> None:
    router.scheduler.replies["chat"] = [*router.ids("Good day 😀"), router.eos]
    messages = [
        {"role": "user", "content": "Hello"},
        {"role": "assistant", "content": None, "tool_calls": [{"function": {"name": "f", "arguments": "{}"}}]},
        {"role": "tool", "content": "42", "tool_call_id": "c1"},
    ]
    assert client.chat(messages, request_id="chat").outputs[0].text == "Good day 😀"
    deltas = client.chat_stream(messages, SamplingParams(max_tokens=30), request_id="chat")
    assert "".join(sequence.text for delta in deltas for sequence in delta.outputs) == "Good day 😀"


def test_tokenizer_and_models(client: Client, router: HttpServer) -> None:
    assert client.tokenize(PROMPT) == router.ids(PROMPT)
    assert client.detokenize(router.ids(PROMPT)) == PROMPT
    (model,) = client.list_models()
    assert (model.id, model.max_model_len) == (router.model, router.max_model_len)


def test_leaving_a_stream_aborts_the_request(client: Client, router: HttpServer) -> None:
    router.wait_idle()
    aborted = router.scheduler.num_aborted
    with closing(client.generate_stream(PROMPT, SamplingParams(max_tokens=400))) as stream:  # type: ignore[type-var]
        next(stream)
    router.wait_for(lambda: router.scheduler.num_aborted == aborted + 1)
    router.wait_idle()


def test_errors_are_those_of_the_router(client: Client, router: HttpServer) -> None:
    with pytest.raises(InvalidRequestError) as caught:
        client.generate(PROMPT, SamplingParams(logit_bias={49_999_999: 1.0}))
    assert caught.value.field == "logit_bias"
    router.fail("full", after_tokens=0, code=8, message="queue is full", retry_after_ms=2500)
    with pytest.raises(OverloadedError, match="queue is full") as overloaded:
        client.generate(PROMPT, request_id="full")
    assert overloaded.value.retry_after_ms == 2500
    with (
        Client(f"127.0.0.1:{router.grpc_port}", model="nobody/knows") as lost,
        pytest.raises(ModelNotFoundError),
    ):
        lost.generate(PROMPT)


def test_cl01_an_over_long_prompt_is_refused(client: Client, router: HttpServer) -> None:
    submitted = len(router.scheduler.submits)
    with pytest.raises(ContextLengthError, match=str(router.max_model_len)):
        client.generate("word " * (router.max_model_len + 10))
    assert len(router.scheduler.submits) == submitted


def test_sv04_bad_arguments_are_refused_before_a_call() -> None:
    with Client("127.0.0.1:1") as nowhere:
        with pytest.raises(InvalidRequestError, match="temperature"):
            nowhere.generate(PROMPT, SamplingParams(temperature=math.nan))
        with pytest.raises(InvalidRequestError, match=r"prompt\[1\]"):
            nowhere.generate([1, -1])
        with pytest.raises(InvalidRequestError, match=r"messages\[0\]\.role"):
            nowhere.chat([{"content": "a"}])


LONE = "\ud800"


@pytest.mark.parametrize(
    ("call", "field"),
    [
        (lambda client: client.generate(5), "prompt"),
        (lambda client: client.generate(None), "prompt"),
        (lambda client: client.generate({"a": 1}), "prompt"),
        (lambda client: client.generate([True]), "prompt[0]"),
        (lambda client: client.generate(["a"]), "prompt[0]"),
        (lambda client: client.generate(LONE), "prompt"),
        (lambda client: client.generate("a", {"temperature": 0}), "sampling_params"),
        (lambda client: client.generate("a", SamplingParams(stop=LONE)), "stop"),
        (lambda client: client.generate("a", request_id=7), "request_id"),
        (lambda client: client.generate("a", cache_salt=LONE), "cache_salt"),
        (lambda client: client.generate("a", priority=1 << 40), "priority"),
        (lambda client: client.generate_stream(5), "prompt"),
        (lambda client: client.chat("hi"), "messages"),
        (lambda client: client.chat({"role": "user", "content": "hi"}), "messages"),
        (lambda client: client.chat(["hi"]), "messages[0]"),
        (lambda client: client.chat([{"role": "user", "content": LONE}]), "messages[0].content"),
        (lambda client: client.chat([{"role": 5, "content": "a"}]), "messages[0].role"),
        (lambda client: client.chat([{"role": "a", "tool_calls": {1, 2}}]), "messages[0].tool_calls"),
        (lambda client: client.tokenize(5), "text"),
        (lambda client: client.detokenize(5), "token_ids"),
        (lambda client: client.detokenize("ab"), "token_ids"),
    ],
)
def test_sv04_an_argument_of_the_wrong_kind_is_named_before_a_call(
    call: Callable[[Client], object], field: str
) -> None:
    with Client("127.0.0.1:1") as nowhere, pytest.raises(InvalidRequestError) as refusal:
        call(nowhere)
    assert refusal.value.field == field
    assert field in refusal.value.message


def test_a_key_that_no_header_can_hold_is_named() -> None:
    with pytest.raises(InvalidRequestError, match="api_key"):
        Client("127.0.0.1:1", api_key="schlüssel")


async def test_a_closed_client_says_so() -> None:
    with Client("127.0.0.1:1") as closed:
        pass
    for call in (
        closed.list_models,
        lambda: closed.generate("a"),
        lambda: list(closed.chat_stream([{"role": "user"}])),
    ):
        with pytest.raises(UnavailableError, match="closed"):
            call()
    async with AsyncClient("127.0.0.1:1") as over:
        pass
    with pytest.raises(UnavailableError, match="closed"):
        await over.list_models()
    with pytest.raises(UnavailableError, match="closed"):
        await over.generate("a")


def test_a_router_that_is_away_is_unavailable() -> None:
    with Client("127.0.0.1:1", timeout_s=5) as nowhere, pytest.raises(UnavailableError):
        nowhere.list_models()


async def test_the_asyncio_client_serves_many_at_once(router: HttpServer) -> None:
    async with AsyncClient(f"127.0.0.1:{router.grpc_port}", timeout_s=30) as client:
        prompts = [f"number {at}" for at in range(16)]
        params = SamplingParams(max_tokens=12)
        outputs = await asyncio.gather(*(client.generate(prompt, params) for prompt in prompts))
        assert all(out.outputs[0].text.startswith(prompt) for out, prompt in zip(outputs, prompts, strict=True))
        assert await client.detokenize(await client.tokenize(PROMPT)) == PROMPT
        assert [model.id for model in await client.list_models()] == [router.model]
        with pytest.raises(ContextLengthError):
            await client.chat([{"role": "user", "content": "word " * 600}])


async def test_cancelling_an_asyncio_stream_aborts_the_request(router: HttpServer) -> None:
    await asyncio.to_thread(router.wait_idle)
    aborted = router.scheduler.num_aborted
    params = SamplingParams(max_tokens=400)
    async with AsyncClient(f"127.0.0.1:{router.grpc_port}", timeout_s=30) as client:
        async with aclosing(client.generate_stream(PROMPT, params)) as stream:  # type: ignore[type-var]
            await anext(stream)
        task = asyncio.create_task(client.generate(PROMPT, params))
        submits = len(router.scheduler.submits)
        await asyncio.to_thread(router.wait_for, lambda: len(router.scheduler.submits) > submits)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        await asyncio.to_thread(router.wait_for, lambda: router.scheduler.num_aborted == aborted + 2)


def test_the_api_key_is_sent() -> None:
    with serve_http(api_key="sesame") as guarded:
        address = f"127.0.0.1:{guarded.grpc_port}"
        with Client(address, api_key="sesame") as right:
            assert right.tokenize("a")
        with Client(address) as wrong, pytest.raises(UnauthenticatedError):
            wrong.tokenize("a")
