"""The engine for asyncio, on the real weights."""

from __future__ import annotations

import asyncio
import itertools
import math
from collections.abc import Iterator

import pytest

from pagemill import AsyncLLMEngine, SamplingParams
from pagemill.engine_args import EngineArgs
from pagemill.errors import DuplicateRequestError, InvalidRequestError, OverloadedError, UnavailableError

LONG = SamplingParams(temperature=0, max_tokens=400, ignore_eos=True)
SHORT = SamplingParams(temperature=0, max_tokens=8)


@pytest.fixture(scope="module")
def engine() -> Iterator[AsyncLLMEngine]:
    made = AsyncLLMEngine.from_engine_args(
        EngineArgs(num_blocks=256, block_size=8, max_model_len=512, max_num_seqs=4, max_queued_requests=4)
    )
    yield made
    made.shutdown()


async def idle(engine: AsyncLLMEngine) -> None:
    """Wait until nothing runs and no block is used."""
    deadline = asyncio.get_running_loop().time() + 30
    scheduler = engine._alive().scheduler
    while scheduler.num_requests or scheduler.num_in_flight or scheduler.blocks.num_used:
        assert asyncio.get_running_loop().time() < deadline, "requests are left"
        await asyncio.sleep(0.01)


async def test_outputs_grow_and_the_last_one_is_finished(engine: AsyncLLMEngine) -> None:
    outputs = [output async for output in engine.generate("Once upon a time", SHORT, "grow")]
    texts = [output.outputs[0].text for output in outputs]
    assert all(later.startswith(earlier) for earlier, later in itertools.pairwise(texts))
    assert [output.finished for output in outputs] == [False] * (len(outputs) - 1) + [True]
    assert len(outputs[-1].outputs[0].token_ids) == 8
    assert outputs[-1].request_id == "grow"
    await idle(engine)


async def test_many_at_once_equal_each_alone(engine: AsyncLLMEngine) -> None:
    prompts = ["The sky is", "Water boils at", "1, 2, 3,"]

    async def last(prompt: str) -> list[int]:
        return [output async for output in engine.generate(prompt, SHORT)][-1].outputs[0].token_ids

    together = await asyncio.gather(*(last(prompt) for prompt in prompts))
    assert together == [await last(prompt) for prompt in prompts]


async def test_token_ids_and_conversations_are_taken_too(engine: AsyncLLMEngine) -> None:
    ids = engine.get_tokenizer().encode("The sky is")
    by_ids = [o async for o in engine.generate(sampling_params=SHORT, prompt_token_ids=ids)][-1]
    by_text = [o async for o in engine.generate("The sky is", SHORT)][-1]
    assert by_ids.outputs[0].token_ids == by_text.outputs[0].token_ids
    messages = [{"role": "user", "content": "What is the capital of France? Answer in one word."}]
    params = SamplingParams(temperature=0, max_tokens=60)
    chat = [o async for o in engine.generate(sampling_params=params, messages=messages)][-1]
    assert "Paris" in chat.outputs[0].text


async def test_a_second_request_of_the_same_id_is_refused(engine: AsyncLLMEngine) -> None:
    await engine.add_request("twice", "Once", SHORT)
    with pytest.raises(DuplicateRequestError, match="twice"):
        await engine.add_request("twice", "Once", SHORT)
    assert [o async for o in engine.get_output_generator("twice")][-1].finished
    with pytest.raises(InvalidRequestError, match="no request 'twice'"):
        await anext(engine.get_output_generator("twice"))
    await engine.add_request("twice", "Once", SHORT)
    assert [o async for o in engine.get_output_generator("twice")][-1].finished


async def test_abort_ends_the_generator_and_frees_the_blocks(engine: AsyncLLMEngine) -> None:
    await engine.add_request("long", "Once upon a time", LONG)
    outputs = []
    async for output in engine.get_output_generator("long"):
        outputs.append(output)
        if len(outputs) == 2:
            assert await engine.abort("long")
    assert outputs[-1].finished
    assert outputs[-1].outputs[0].finish_reason == "abort"
    assert len(outputs[-1].outputs[0].token_ids) < 400
    assert not await engine.abort("long")
    await idle(engine)


async def test_leaving_a_generator_early_aborts(engine: AsyncLLMEngine) -> None:
    generator = engine.generate("Once upon a time", LONG, "left")
    await anext(generator)
    await generator.aclose()
    await idle(engine)


async def test_a_cancelled_task_aborts(engine: AsyncLLMEngine) -> None:
    async def read() -> None:
        async for _ in engine.generate("Once upon a time", LONG):
            started.set()

    started = asyncio.Event()
    task = asyncio.create_task(read())
    await started.wait()
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    await idle(engine)


async def test_bad_requests_are_refused_by_field_and_touch_nobody(engine: AsyncLLMEngine) -> None:
    good = asyncio.create_task(_all(engine, "Once upon a time", LONG))
    await asyncio.sleep(0)
    for params in (SamplingParams(temperature=math.nan), SamplingParams(stop_token_ids=[10**6])):
        with pytest.raises(InvalidRequestError):
            await engine.add_request("bad", "Once", params)
    with pytest.raises(InvalidRequestError, match="exactly one"):
        await engine.add_request("bad", "Once", SHORT, prompt_token_ids=[1])
    assert len((await good)[-1].outputs[0].token_ids) == 400


async def test_the_queue_is_bounded(engine: AsyncLLMEngine) -> None:
    streams = []
    with pytest.raises(OverloadedError):
        for number in range(100):
            await engine.add_request(f"queued-{number}", f"Tale {number}:", LONG)
            streams.append(f"queued-{number}")
    assert len(streams) >= 4
    for name in streams:
        await engine.get_output_generator(name).aclose()
        await engine.abort(name)
    await idle(engine)


async def _all(engine: AsyncLLMEngine, prompt: str, params: SamplingParams) -> list:
    return [output async for output in engine.generate(prompt, params)]


async def test_shutdown_ends_requests_and_says_so() -> None:
    engine = AsyncLLMEngine(EngineArgs(num_blocks=128, max_model_len=512))
    assert engine.is_running()
    reading = asyncio.create_task(_all(engine, "Once upon a time", LONG))
    await asyncio.sleep(0)
    await asyncio.to_thread(engine.shutdown)
    assert not engine.is_running()
    with pytest.raises(UnavailableError):
        await reading
    with pytest.raises(UnavailableError):
        await engine.add_request("late", "Once", SHORT)
    engine.shutdown()
