from __future__ import annotations

import asyncio
from contextlib import aclosing

import pytest
from router_helpers import chat, collect, complete, eventually, prompt, text_of

from pagemill.errors import (
    ContextLengthError,
    DeadlineError,
    InvalidRequestError,
    ModelNotFoundError,
    OverloadedError,
    UnavailableError,
)
from pagemill.sampling_params import SamplingParams
from router.generation import GenerationRequest

EMOJI_LINE = "👩‍👩‍👧‍👦 漢字とかな Příliš žluťoučký kůň e\u0301\u0328 🇨🇿 done"


async def test_ST01_joined_deltas_equal_the_whole_text(start_scheduler, start_router, says, tokenizer):
    parts = await start_router(await start_scheduler(says(EMOJI_LINE)))
    events = await collect(parts, chat())
    whole = await complete(parts, chat())
    assert text_of(events) == whole.sequences[0].text == EMOJI_LINE
    assert not any("\ufffd" in d.text for e in events for d in e.deltas)
    assert len([e for e in events if e.deltas]) > 10
    assert whole.usage.completion_tokens == len(tokenizer.encode(EMOJI_LINE)) + 1


async def test_only_the_first_event_has_the_prompt_and_only_the_last_usage(start_scheduler, start_router, says):
    parts = await start_router(await start_scheduler(says("one two three four")))
    events = await collect(parts, prompt(logprobs=2, prompt_logprobs=1))
    assert events[0].prompt_token_ids == parts.pipeline._tokenizer.encode("Once upon a time")
    assert len(events[0].prompt_logprobs.chosen) == len(events[0].prompt_token_ids) - 1
    assert all(e.prompt_token_ids is None for e in events[1:])
    assert [e.usage is not None for e in events] == [False] * (len(events) - 1) + [True]
    for delta in (d for e in events for d in e.deltas):
        assert len(delta.logprobs.chosen) == len(delta.token_ids)
        assert len(delta.logprobs.top_ids) == 2 * len(delta.token_ids)


async def test_ST03_lone_continuation_bytes_do_not_stall(start_scheduler, start_router, tokenizer):
    lone = next(i for i, data in enumerate(tokenizer.table.token_bytes) if data == b"\x9f")
    parts = await start_router(await start_scheduler(lambda submit, index: [lone] * 8))
    events = await collect(parts, prompt(max_tokens=8))
    whole = await complete(parts, prompt(max_tokens=8))
    assert text_of(events) == whole.sequences[0].text == "\ufffd" * 8
    assert whole.usage.completion_tokens == 8
    assert whole.sequences[0].finish_reason == "length"


async def test_a_character_cut_by_max_tokens_becomes_a_replacement_character(start_scheduler, start_router, tokenizer):
    ids = tokenizer.encode("ok 👩‍👩‍👧‍👦")
    cut = next(n for n in range(2, len(ids)) if "\ufffd" in tokenizer.decode(ids[:n]))
    parts = await start_router(await start_scheduler(lambda submit, index: ids))
    events = await collect(parts, prompt(max_tokens=cut))
    assert text_of(events) == tokenizer.decode(ids[:cut])


async def test_SP01_a_stop_over_several_tokens_leaks_nothing(start_scheduler, start_router, says):
    scheduler = await start_scheduler(says(" D E F G H I J K L M N O P Q R S T U V"))
    parts = await start_router(scheduler)
    stop = " F G H I J K L"
    events = await collect(parts, prompt("A B C", stop=[stop]))
    whole = await complete(parts, prompt("A B C", stop=[stop]))
    assert text_of(events) == whole.sequences[0].text == " D E"
    assert not any("F" in d.text for e in events for d in e.deltas)
    assert whole.sequences[0].finish_reason == "stop"
    assert whole.sequences[0].stop_reason == stop
    assert whole.usage.completion_tokens == len(whole.sequences[0].token_ids)
    assert whole.usage.cached_tokens == 16
    await eventually(lambda: scheduler.num_live_rows == 0)


async def test_SP02_a_stop_that_ends_inside_of_a_token_cuts_before_it(start_scheduler, start_router, tokenizer):
    ids = [*tokenizer.encode("see the international"), *tokenizer.encode(" space")]
    scheduler = await start_scheduler(lambda submit, index: ids)
    parts = await start_router(scheduler)
    whole = await complete(parts, prompt(stop=["nat"]))
    assert whole.sequences[0].text == "see the inter"
    assert tokenizer.decode(whole.sequences[0].token_ids).startswith("see the internat")
    assert [a.index for a in scheduler.aborts] == [0]


async def test_SP04_text_held_for_a_failed_match_comes_once(start_scheduler, start_router, says):
    parts = await start_router(await start_scheduler(says("Mira! She said Mira and Mir and more")))
    request = prompt(stop=["\n", "Mira:"])
    events = await collect(parts, request)
    assert text_of(events) == "Mira! She said Mira and Mir and more"
    assert text_of(events) == (await complete(parts, request)).sequences[0].text


async def test_SP05_text_held_at_the_end_is_flushed_and_no_delta_is_empty(start_scheduler, start_router, says):
    parts = await start_router(await start_scheduler(says("alpha beta gamma delta")))
    events = await collect(parts, prompt(stop=["gamma delta epsilon zeta eta theta"]))
    assert text_of(events) == "alpha beta gamma delta"
    assert all(d.text or d.finish_reason for e in events for d in e.deltas)


async def test_SP06_no_stop_matches_before_min_tokens(start_scheduler, start_router, tokenizer):
    newline = tokenizer.encode("\n")[0]
    words = tokenizer.encode(" word") * 4
    parts = await start_router(await start_scheduler(lambda submit, index: [newline, *words] * 10))
    whole = await complete(parts, prompt(min_tokens=20, stop=["\n"]))
    assert whole.usage.completion_tokens == 21  # the next newline behind token 20
    assert whole.sequences[0].finish_reason == "stop"
    assert whole.sequences[0].text.count("\n") == 4


async def test_the_text_of_a_stop_token_is_left_out_unless_asked_for(start_scheduler, start_router, tokenizer):
    end = tokenizer.encode(" end")[0]
    ids = [*tokenizer.encode("to the"), end]
    parts = await start_router(await start_scheduler(lambda submit, index: ids))
    without = await complete(parts, prompt(stop_token_ids=[end]))
    assert (without.sequences[0].text, without.sequences[0].stop_reason) == ("to the", end)
    assert without.sequences[0].token_ids == ids
    included = await complete(parts, prompt(stop_token_ids=[end], include_stop_str_in_output=True))
    assert included.sequences[0].text == "to the end"


async def test_sequences_of_one_request_end_on_their_own(start_scheduler, start_router, tokenizer):
    texts = ["first STOP never seen", "second goes on to its end", "third STOP"]
    scheduler = await start_scheduler(lambda submit, index: [*tokenizer.encode(texts[index]), 2])
    parts = await start_router(scheduler)
    whole = await complete(parts, prompt(n=3, stop=["STOP"]))
    assert [s.text for s in whole.sequences] == ["first ", "second goes on to its end", "third "]
    assert whole.usage.completion_tokens == sum(len(s.token_ids) for s in whole.sequences)


async def test_closing_the_iterator_aborts_at_the_scheduler(start_scheduler, start_router, tokenizer):
    scheduler = await start_scheduler(lambda submit, index: tokenizer.encode(" on and") * 1000)
    parts = await start_router(scheduler)
    async with aclosing(parts.pipeline.generate(prompt(max_tokens=2000))) as events:
        await anext(events)
        assert scheduler.num_live_rows == 1
    await eventually(lambda: scheduler.num_live_rows == 0)
    assert parts.pipeline.num_inflight == 0


async def test_cancelling_the_task_aborts_at_the_scheduler(start_scheduler, start_router, tokenizer):
    scheduler = await start_scheduler(lambda submit, index: tokenizer.encode(" on and") * 1000)
    parts = await start_router(scheduler)
    task = asyncio.create_task(complete(parts, prompt(max_tokens=2000)))
    await eventually(lambda: scheduler.num_live_rows == 1)
    task.cancel()
    await asyncio.gather(task, return_exceptions=True)
    await eventually(lambda: scheduler.num_live_rows == 0)
    assert parts.pipeline.num_inflight == 0


async def test_a_slow_reader_is_cut_off_with_bounded_memory(start_scheduler, start_router, tokenizer, monkeypatch):
    monkeypatch.setattr("router.scheduler_client.MAX_PENDING_WEIGHT", 50)
    scheduler = await start_scheduler(lambda submit, index: tokenizer.encode(" on and") * 1000)
    parts = await start_router(scheduler)
    events = parts.pipeline.generate(prompt(max_tokens=2000))
    await anext(events)
    await eventually(lambda: bool(scheduler.aborts))
    with pytest.raises(OverloadedError.__base__, match="too slowly"):
        async for _ in events:
            pass
    assert scheduler.num_live_rows == 0


async def test_more_requests_than_allowed_are_refused(start_scheduler, start_router, says):
    parts = await start_router(await start_scheduler(says("hi")), max_inflight_requests=1)
    prepared = await parts.pipeline.prepare(prompt())
    with pytest.raises(OverloadedError) as refusal:
        await parts.pipeline.prepare(prompt())
    assert refusal.value.retry_after_ms > 0
    parts.pipeline.discard(prepared)
    del prepared
    assert (await complete(parts, prompt())).sequences[0].text == "hi"


async def test_a_prepared_request_that_is_forgotten_gives_its_place_back(start_scheduler, start_router, says):
    parts = await start_router(await start_scheduler(says("hi")), max_inflight_requests=1)
    for _ in range(3):
        unused = parts.pipeline.stream(await parts.pipeline.prepare(prompt()))
        await unused.aclose()
        del unused
    assert parts.pipeline.num_inflight == 0


async def test_prompts_that_do_not_fit_are_refused_with_both_numbers(start_scheduler, start_router, says):
    parts = await start_router(await start_scheduler(says("hi"), max_model_len=32))
    with pytest.raises(ContextLengthError, match=r"40 tokens.*context length is 32") as error:
        await complete(parts, GenerationRequest(SamplingParams(), prompt_token_ids=[5] * 40))
    assert error.value.field == "prompt"
    with pytest.raises(ContextLengthError, match=r"context length is 32 tokens.*20 prompt.*max_tokens 16 are 36"):
        await complete(parts, GenerationRequest(SamplingParams(max_tokens=16), prompt_token_ids=[5] * 20))
    with pytest.raises(ContextLengthError, match="context length"):
        await complete(parts, prompt("x" * 100_000))
    assert (await complete(parts, prompt("A", max_tokens=31))).usage.prompt_tokens == 1


async def test_an_absent_max_tokens_is_clamped_or_is_the_rest_of_the_context(start_scheduler, start_router, says):
    scheduler = await start_scheduler(says("hi"), max_model_len=64)
    parts = await start_router(scheduler)
    request = chat()
    request.max_tokens_absent = True
    usage = (await complete(parts, request)).usage
    assert scheduler.submits[-1].sampling.max_tokens == 64 - usage.prompt_tokens
    await complete(parts, GenerationRequest(SamplingParams(), prompt_token_ids=[5] * 60, max_tokens_absent=True))
    assert scheduler.submits[-1].sampling.max_tokens == 4
    await complete(parts, GenerationRequest(SamplingParams(), prompt_token_ids=[5] * 8, max_tokens_absent=True))
    assert scheduler.submits[-1].sampling.max_tokens == 16


@pytest.mark.parametrize(
    ("request_", "field"),
    [
        (prompt(temperature=float("nan")), "temperature"),
        (prompt(top_p=0.0), "top_p"),
        (prompt(logit_bias={49152: 1.0}), "logit_bias"),
        (GenerationRequest(SamplingParams(), prompt_token_ids=[49152]), "prompt"),
        (GenerationRequest(SamplingParams(), prompt_token_ids=[]), "prompt"),
        (GenerationRequest(SamplingParams(), prompt_text=""), "prompt"),
        (GenerationRequest(SamplingParams(), prompt_text="bad \ud800"), "prompt"),
        (GenerationRequest(SamplingParams(), messages=[]), "messages"),
        (GenerationRequest(SamplingParams(), messages=[{"role": "king", "content": "x"}]), "messages[0].role"),
        (GenerationRequest(SamplingParams(), messages=[{"role": "user", "content": 3}]), "messages[0].content"),
        (GenerationRequest(SamplingParams()), "prompt"),
    ],
)
async def test_bad_input_names_its_field_and_reaches_no_scheduler(start_scheduler, start_router, says, request_, field):
    scheduler = await start_scheduler(says("hi"))
    parts = await start_router(scheduler)
    with pytest.raises(InvalidRequestError) as error:
        await parts.pipeline.prepare(request_)
    assert error.value.field == field
    assert not scheduler.submits
    assert parts.pipeline.num_inflight == 0


async def test_an_unknown_model_is_not_found_and_an_empty_one_is_the_default(start_scheduler, start_router, says):
    parts = await start_router(await start_scheduler(says("hi")), served_model_name=["a", "b"])
    for name, served in [("", "a"), ("a", "a"), ("b", "b")]:
        request = prompt()
        request.model = name
        assert (await complete(parts, request)).model == served
    request.model = "c"
    with pytest.raises(ModelNotFoundError, match="served: a, b"):
        await parts.pipeline.prepare(request)


async def test_without_a_scheduler_a_request_waits_shortly_and_is_then_unavailable(start_router, monkeypatch):
    monkeypatch.setattr("router.pipeline.ADMISSION_WAIT_S", 0.05)
    parts = await start_router()
    with pytest.raises(UnavailableError, match="no scheduler is ready"):
        await parts.pipeline.prepare(prompt())
    assert parts.pipeline.status()["missing"] == ["scheduler"]


async def test_a_request_waits_for_a_scheduler_that_is_about_to_be_ready(start_scheduler, start_router, says):
    scheduler = await start_scheduler(says("hi"), ready=False)
    parts = await start_router(scheduler)
    assert parts.pipeline.status()["missing"] == ["worker"]
    task = asyncio.create_task(complete(parts, prompt()))
    await eventually(lambda: parts.pipeline.num_inflight == 1)
    scheduler.hello.ready = True
    from pagemill.v1 import scheduler_pb2

    scheduler.say(scheduler_pb2.SchedulerMessage(hello=scheduler.hello))
    assert (await task).sequences[0].text == "hi"
    assert parts.pipeline.status()["ready"]


async def test_a_scheduler_of_another_model_is_not_used(start_scheduler, start_router, says, monkeypatch):
    monkeypatch.setattr("router.pipeline.ADMISSION_WAIT_S", 0.05)
    parts = await start_router(await start_scheduler(says("hi"), vocab_size=1000))
    with pytest.raises(UnavailableError):
        await parts.pipeline.prepare(prompt())
    assert parts.pipeline.status()["missing"] == ["scheduler with this router's model"]


async def test_a_request_past_its_deadline_ends_and_is_aborted(start_scheduler, start_router, tokenizer):
    scheduler = await start_scheduler(lambda submit, index: tokenizer.encode(" on and") * 1000)
    scheduler.max_steps = 3
    parts = await start_router(scheduler)
    request = prompt(max_tokens=1000)
    request.timeout_s = 0.3
    with pytest.raises(DeadlineError):
        await complete(parts, request)
    await eventually(lambda: scheduler.num_live_rows == 0)
    assert scheduler.submits[0].deadline_unix_ns > 0


async def test_while_draining_running_streams_finish_and_new_requests_are_refused(start_scheduler, start_router, says):
    scheduler = await start_scheduler(says("a text of some tokens"))
    scheduler.max_steps = 2
    parts = await start_router(scheduler)
    task = asyncio.create_task(complete(parts, prompt()))
    await eventually(lambda: scheduler.num_steps == 2)
    parts.pipeline.begin_drain()
    assert not parts.pipeline.status()["ready"]
    with pytest.raises(UnavailableError):
        await parts.pipeline.prepare(prompt())
    assert not await parts.pipeline.wait_idle(0.01)
    scheduler.max_steps = None
    assert await parts.pipeline.wait_idle(10)
    assert (await task).sequences[0].text == "a text of some tokens"


async def test_the_seed_is_always_set_and_the_clients_own_is_kept(start_scheduler, start_router, says):
    scheduler = await start_scheduler(says("hi"))
    parts = await start_router(scheduler)
    for seed in (None, None, 7):
        await complete(parts, prompt(seed=seed))
    seeds = [s.sampling.seed for s in scheduler.submits]
    assert seeds[0] != seeds[1] and seeds[2] == 7 and all(s.sampling.HasField("seed") for s in scheduler.submits)


async def test_tenants_and_salts_have_separate_prefix_caches(start_scheduler, start_router, says):
    scheduler = await start_scheduler(says("hi"))
    parts = await start_router(scheduler)
    for tenant, salt in [("", ""), ("a", ""), ("", "a"), ("ab", "c"), ("a", "bc")]:
        request = prompt()
        request.tenant, request.cache_salt = tenant, salt
        await complete(parts, request)
    salts = [s.cache_salt for s in scheduler.submits]
    assert salts[0] == b"" and len(set(salts)) == 5
