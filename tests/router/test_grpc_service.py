from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from typing import Any

import grpc
import grpc.aio
import pytest
from router_helpers import eventually

from pagemill.api_keys import ApiKeys
from pagemill.rpc import aio_channel, aio_server, bind
from pagemill.v1 import common_pb2, inference_pb2, inference_pb2_grpc
from router.grpc_service import InferenceServicer

Connect = Callable[..., Awaitable[inference_pb2_grpc.InferenceStub]]
P = common_pb2.SamplingParams


@pytest.fixture
async def connect() -> AsyncIterator[Connect]:
    closers: list[Any] = []

    async def start(parts: Any, api_key: str = "") -> inference_pb2_grpc.InferenceStub:
        server = aio_server()
        inference_pb2_grpc.add_InferenceServicer_to_server(InferenceServicer(parts.pipeline, ApiKeys(api_key)), server)
        port = bind(server, "127.0.0.1", 0)
        await server.start()
        channel = aio_channel(f"127.0.0.1:{port}")
        closers.extend([channel.close(), server.stop(0)])
        return inference_pb2_grpc.InferenceStub(channel)

    yield start
    for closer in closers:
        await closer


async def failure(call: Any) -> tuple[grpc.StatusCode, str, str]:
    """Code, details and the field at fault."""
    with pytest.raises(grpc.aio.AioRpcError) as error:
        if hasattr(call, "read"):
            async for _ in call:
                pass
        else:
            await call
    trailers = dict(error.value.trailing_metadata())
    return error.value.code(), error.value.details(), trailers.get("pagemill-field", "")


async def test_generate_streams_and_the_last_message_has_usage(
    start_scheduler: Any, start_router: Any, says: Any, connect: Connect
) -> None:
    stub = await connect(await start_router(await start_scheduler(says("one two three žluť 👩‍👩‍👧"))))
    request = inference_pb2.GenerateRequest(
        text="Count", sampling=P(max_tokens=50, logprobs=1, prompt_logprobs=0), request_id="mine"
    )
    messages = [m async for m in stub.Generate(request)]
    assert "".join(d.text for m in messages for d in m.deltas) == "one two three žluť 👩‍👩‍👧"
    assert {m.request_id for m in messages} == {"mine"}
    assert [m.HasField("usage") for m in messages] == [False] * (len(messages) - 1) + [True]
    assert (
        messages[0].prompt_token_ids
        and len(messages[0].prompt_logprobs.chosen) == len(messages[0].prompt_token_ids) - 1
    )
    assert all(len(d.logprobs.chosen) == len(d.token_ids) for m in messages for d in m.deltas)
    assert messages[-1].deltas[0].finish_reason == common_pb2.FINISH_REASON_STOP
    assert messages[-1].timings.arrival_unix_ns > 0


async def test_final_only_is_one_message_with_the_whole_answer(
    start_scheduler: Any, start_router: Any, says: Any, connect: Connect
) -> None:
    stub = await connect(await start_router(await start_scheduler(says("all of STOP it"))))
    request = inference_pb2.ChatRequest(
        messages=[inference_pb2.ChatMessage(role="user", content="Hi")],
        sampling=P(max_tokens=50, stop=["STOP"], n=2),
        final_only=True,
    )
    messages = [m async for m in stub.Chat(request)]
    assert len(messages) == 1
    assert [(d.index, d.text, d.stop_string) for d in messages[0].deltas] == [
        (0, "all of ", "STOP"),
        (1, "all of ", "STOP"),
    ]
    assert messages[0].usage.completion_tokens == sum(len(d.token_ids) for d in messages[0].deltas)


async def test_chat_renders_the_template_and_takes_tool_turns(
    start_scheduler: Any, start_router: Any, says: Any, connect: Connect, tokenizer: Any
) -> None:
    scheduler = await start_scheduler(says("ok"))
    stub = await connect(await start_router(scheduler))
    turns = [
        inference_pb2.ChatMessage(role="user", content="weather?"),
        inference_pb2.ChatMessage(role="assistant", tool_calls_json='[{"function": {"name": "f", "arguments": "{}"}}]'),
        inference_pb2.ChatMessage(role="tool", content="sunny", tool_call_id="1"),
    ]
    async for _ in stub.Chat(inference_pb2.ChatRequest(messages=turns)):
        pass
    text = tokenizer.decode(list(scheduler.submits[0].token_ids), skip_special_tokens=False)
    assert "<|im_start|>tool\nsunny<|im_end|>" in text and text.endswith("<|im_start|>assistant\n")
    assert scheduler.submits[0].sampling.max_tokens == 8192 - len(scheduler.submits[0].token_ids)


async def test_cancelling_a_call_frees_the_sequences(
    start_scheduler: Any, start_router: Any, tokenizer: Any, connect: Connect
) -> None:
    scheduler = await start_scheduler(lambda submit, index: tokenizer.encode(" on and") * 1000)
    parts = await start_router(scheduler)
    stub = await connect(parts)
    for final_only in (False, True):
        request = inference_pb2.GenerateRequest(text="go", sampling=P(max_tokens=2000), final_only=final_only)
        call = stub.Generate(request)
        reading = asyncio.create_task(call.read())
        await eventually(lambda: scheduler.num_live_rows == 1)
        call.cancel()
        await eventually(lambda: scheduler.num_live_rows == 0 and parts.pipeline.num_inflight == 0)
        await asyncio.gather(reading, return_exceptions=True)


async def test_a_deadline_of_the_client_bounds_the_request(
    start_scheduler: Any, start_router: Any, tokenizer: Any, connect: Connect
) -> None:
    scheduler = await start_scheduler(lambda submit, index: tokenizer.encode(" on and") * 1000)
    scheduler.max_steps = 2
    stub = await connect(await start_router(scheduler))
    request = inference_pb2.GenerateRequest(text="go", sampling=P(max_tokens=2000))
    code, _, _ = await failure(stub.Generate(request, timeout=0.5))
    assert code is grpc.StatusCode.DEADLINE_EXCEEDED
    await eventually(lambda: scheduler.num_live_rows == 0)


async def test_bad_requests_have_canonical_codes_and_name_the_field(
    start_scheduler: Any, start_router: Any, says: Any, connect: Connect
) -> None:
    stub = await connect(await start_router(await start_scheduler(says("hi"), max_model_len=64)))
    generate, chat = inference_pb2.GenerateRequest, inference_pb2.ChatRequest
    bad_json = inference_pb2.ChatMessage(role="assistant", tool_calls_json="{")
    cases = [
        (stub.Generate(generate(text="x", sampling=P(temperature=float("nan")))), "temperature"),
        (stub.Generate(generate(text="x", sampling=P(logit_bias={1: float("nan")}))), "logit_bias"),
        (stub.Generate(generate(text="x", sampling=P(top_p=0.0))), "top_p"),
        (stub.Generate(generate(sampling=P())), "prompt"),
        (stub.Generate(generate(token_ids=inference_pb2.TokenIds(ids=[99999]))), "prompt"),
        (stub.Chat(chat()), "messages"),
        (stub.Chat(chat(messages=[bad_json])), "messages[0].tool_calls_json"),
        (stub.Detokenize(inference_pb2.DetokenizeRequest(token_ids=[99999])), "token_ids"),
    ]
    for call, field in cases:
        code, _, at_fault = await failure(call)
        assert (code, at_fault) == (grpc.StatusCode.INVALID_ARGUMENT, field)
    code, details, _ = await failure(stub.Generate(generate(text="word " * 100)))
    assert code is grpc.StatusCode.INVALID_ARGUMENT
    assert "100 tokens" in details or "101 tokens" in details
    assert "context length is 64" in details
    code, _, field = await failure(stub.Generate(generate(model="nope", text="x")))
    assert (code, field) == (grpc.StatusCode.NOT_FOUND, "model")


async def test_a_bug_shows_no_details(
    start_scheduler: Any, start_router: Any, says: Any, connect: Connect, monkeypatch: pytest.MonkeyPatch
) -> None:
    parts = await start_router(await start_scheduler(says("hi")))
    stub = await connect(parts)

    def broken() -> None:
        raise RuntimeError("secret")

    monkeypatch.setattr(parts.pipeline, "models", broken)
    code, details, _ = await failure(stub.ListModels(inference_pb2.ListModelsRequest()))
    assert (code, details) == (grpc.StatusCode.INTERNAL, "internal error")


async def test_tokenize_detokenize_and_models(
    start_scheduler: Any, start_router: Any, says: Any, connect: Connect
) -> None:
    stub = await connect(await start_router(await start_scheduler(says("hi"), max_model_len=100)))
    text = "Hello <|im_end|> 漢字"
    tokens = await stub.Tokenize(inference_pb2.TokenizeRequest(text=text))
    assert 2 in tokens.token_ids and tokens.max_model_len == 100
    back = await stub.Detokenize(inference_pb2.DetokenizeRequest(token_ids=tokens.token_ids))
    assert back.text == text
    without = inference_pb2.DetokenizeRequest(token_ids=tokens.token_ids, skip_special_tokens=True)
    assert (await stub.Detokenize(without)).text == "Hello  漢字"
    models = (await stub.ListModels(inference_pb2.ListModelsRequest())).models
    assert [(m.id, m.max_model_len) for m in models] == [("SmolLM2-135M-Instruct", 100)]
    assert models[0].created_unix_s > 0


async def test_keys_are_checked_and_become_tenants(
    start_scheduler: Any, start_router: Any, says: Any, connect: Connect
) -> None:
    scheduler = await start_scheduler(says("hi"))
    stub = await connect(await start_router(scheduler), api_key="a=k1,b=k2")
    request = inference_pb2.GenerateRequest(text="x")
    code, _, _ = await failure(stub.Generate(request, metadata=(("authorization", "Bearer wrong"),)))
    assert code is grpc.StatusCode.UNAUTHENTICATED
    code, _, _ = await failure(stub.ListModels(inference_pb2.ListModelsRequest()))
    assert code is grpc.StatusCode.UNAUTHENTICATED
    for key in ("k1", "k2"):
        async for _ in stub.Generate(request, metadata=(("authorization", f"Bearer {key}"),)):
            pass
    assert [s.tenant for s in scheduler.submits] == ["a", "b"]
    assert len({s.cache_salt for s in scheduler.submits}) == 2
