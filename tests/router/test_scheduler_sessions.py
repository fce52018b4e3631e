"""Sessions to schedulers: losses, resumption, refusals, load reports."""

from __future__ import annotations

import asyncio
import logging
from typing import Any

import pytest
from router_helpers import collect, complete, eventually, prompt, text_of

from pagemill.block_hash import block_hashes, short_key
from pagemill.errors import InvalidRequestError, OverloadedError, PagemillError, UnavailableError
from pagemill.step import TokenLogprobs
from pagemill.v1 import common_pb2, scheduler_pb2
from router.wire import RequestUpdate, SequenceEnd, read_output

LONG = "The stream goes on over the loss of its scheduler, with no lost and no repeated token, žluťoučký 👩‍👩‍👧 end."


def error(code: int, message: str = "no") -> common_pb2.Error:
    return common_pb2.Error(code=code, message=message, retry_after_ms=250)


async def test_a_stream_goes_on_at_a_restarted_scheduler(
    start_scheduler: Any, start_router: Any, says: Any, tokenizer: Any
) -> None:
    scheduler = await start_scheduler(says(LONG))
    scheduler.max_steps = 7
    parts = await start_router(scheduler)
    task = asyncio.create_task(collect(parts, prompt(logprobs=1, stop=["never there"])))
    await eventually(lambda: scheduler.num_steps == 7)
    await scheduler.restart()
    scheduler.max_steps = None
    events = await task
    assert text_of(events) == LONG
    ids = [i for e in events for d in e.deltas for i in d.token_ids]
    assert ids == [*tokenizer.encode(LONG), 2]
    assert len(scheduler.submits) == 2
    first, second = scheduler.submits
    assert list(second.delivered[0].token_ids) == ids[:7]
    assert (second.sampling, second.token_ids, second.deadline_unix_ns) == (
        first.sampling,
        first.token_ids,
        first.deadline_unix_ns,
    )
    assert parts.metrics.registry.get_sample_value("pagemill:resubmissions_total") == 1


async def test_a_stream_goes_on_at_another_scheduler(start_scheduler: Any, start_router: Any, says: Any) -> None:
    schedulers = [await start_scheduler(says(LONG)) for _ in range(2)]
    for scheduler in schedulers:
        scheduler.max_steps = 5
    parts = await start_router(*schedulers)
    task = asyncio.create_task(complete(parts, prompt()))
    await eventually(lambda: any(s.num_steps == 5 for s in schedulers))
    first, other = sorted(schedulers, key=lambda s: -s.num_steps)
    other.max_steps = None
    first.drop_sessions()
    assert (await task).sequences[0].text == LONG
    assert len(other.submits) == 1 and other.submits[0].delivered


def warnings(caplog: pytest.LogCaptureFixture) -> list[str]:
    return [r.getMessage() for r in caplog.records if r.levelno >= logging.WARNING]


async def test_a_lost_scheduler_is_one_line_however_many_streams_it_had(
    start_scheduler: Any, start_router: Any, says: Any, caplog: pytest.LogCaptureFixture
) -> None:
    scheduler = await start_scheduler(says(LONG))
    scheduler.max_steps = 5
    parts = await start_router(scheduler)
    tasks = [asyncio.create_task(complete(parts, prompt())) for _ in range(20)]
    await eventually(lambda: len(scheduler.submits) == 20 and scheduler.num_steps == 5)
    await scheduler.restart()
    scheduler.max_steps = None
    assert {(await task).sequences[0].text for task in tasks} == {LONG}
    (line,) = warnings(caplog)
    assert line.startswith(f"lost scheduler {scheduler.address} (") and line.endswith("go on elsewhere: 20")
    assert "\n" not in line


async def test_requests_given_up_for_one_reason_are_one_line(
    start_scheduler: Any, start_router: Any, says: Any, caplog: pytest.LogCaptureFixture
) -> None:
    scheduler = await start_scheduler(says("hi"))
    scheduler.refuse = [error(14, "worker lost")] * 8
    parts = await start_router(scheduler)
    answers = await asyncio.gather(*(complete(parts, prompt()) for _ in range(8)))
    assert {a.sequences[0].text for a in answers} == {"hi"}
    await eventually(lambda: len(warnings(caplog)) == 1)
    assert warnings(caplog)[0].endswith("go on elsewhere: 8 (worker lost)")


async def test_sequences_that_ended_before_the_loss_are_not_run_again(
    start_scheduler: Any, start_router: Any, tokenizer: Any
) -> None:
    texts = ["short", "stops HERE and is cut", LONG]
    scheduler = await start_scheduler(lambda submit, index: [*tokenizer.encode(texts[index]), 2])
    scheduler.max_steps = 12
    parts = await start_router(scheduler)
    task = asyncio.create_task(complete(parts, prompt(n=3, stop=["HERE"])))
    await eventually(lambda: scheduler.num_steps == 12)
    await eventually(lambda: len(scheduler.aborts) == 1)
    await scheduler.restart()
    scheduler.max_steps = None
    whole = await task
    assert [s.text for s in whole.sequences] == ["short", "stops ", LONG]
    assert [(d.index, d.finished) for d in scheduler.submits[1].delivered] == [(0, True), (1, True), (2, False)]
    assert whole.usage.completion_tokens == sum(len(s.token_ids) for s in whole.sequences)


async def test_a_stream_never_goes_on_with_other_weights(start_scheduler: Any, start_router: Any, says: Any) -> None:
    old = await start_scheduler(says(LONG))
    old.max_steps = 3
    parts = await start_router(old)
    task = asyncio.create_task(complete(parts, prompt()))
    await eventually(lambda: old.num_steps == 3)
    old.hello.model_fingerprint = "weights-2"
    await old.restart()
    await eventually(lambda: parts.schedulers.is_ready)
    await asyncio.sleep(0)
    assert len(old.submits) == 1 and not task.done()
    old.hello.model_fingerprint = "weights-1"
    old.max_steps = None
    await old.restart()
    assert (await task).sequences[0].text == LONG


async def test_a_loss_that_never_ends_ends_the_request(start_scheduler: Any, start_router: Any, says: Any) -> None:
    scheduler = await start_scheduler(says(LONG))
    scheduler.refuse = [error(14, "worker lost")] * 50
    parts = await start_router(scheduler)
    with pytest.raises(UnavailableError, match="worker lost"):
        await complete(parts, prompt())
    assert 2 < len(scheduler.submits) < 20


async def test_an_unavailable_scheduler_is_tried_again(start_scheduler: Any, start_router: Any, says: Any) -> None:
    scheduler = await start_scheduler(says("hi"))
    scheduler.refuse = [error(14), error(14)]
    parts = await start_router(scheduler)
    assert (await complete(parts, prompt())).sequences[0].text == "hi"


async def test_refusals_reach_the_client_with_code_and_retry_hint(
    start_scheduler: Any, start_router: Any, says: Any
) -> None:
    scheduler = await start_scheduler(says("hi"))
    parts = await start_router(scheduler)
    cases: list[tuple[int, type[PagemillError]]] = [(8, OverloadedError), (3, InvalidRequestError), (13, PagemillError)]
    for code, kind in cases:
        scheduler.refuse = [error(code, "refused")]
        with pytest.raises(kind, match="refused") as refusal:
            await complete(parts, prompt())
        assert refusal.value.retry_after_ms == 250
    assert (await complete(parts, prompt())).sequences[0].text == "hi"


async def test_an_overloaded_scheduler_gives_way_to_another(start_scheduler: Any, start_router: Any, says: Any) -> None:
    full, free = await start_scheduler(says("hi")), await start_scheduler(says("hi"))
    full.refuse = [error(8)] * 100
    parts = await start_router(full, free)
    for _ in range(8):
        assert (await complete(parts, prompt())).sequences[0].text == "hi"


async def test_a_draining_scheduler_gets_no_new_requests(start_scheduler: Any, start_router: Any, says: Any) -> None:
    leaving, staying = await start_scheduler(says("hi"), draining=True), await start_scheduler(says("hi"))
    parts = await start_router(leaving, staying)
    for _ in range(5):
        await complete(parts, prompt())
    assert not leaving.submits and len(staying.submits) == 5


async def test_load_reports_become_metrics_and_routing_hints(
    start_scheduler: Any, start_router: Any, says: Any, tokenizer: Any
) -> None:
    schedulers = [
        await start_scheduler(says("hi"), scheduler_id="one"),
        await start_scheduler(says("hi"), scheduler_id="two"),
    ]
    parts = await start_router(*schedulers)
    text = "A long shared prefix of a prompt. " * 40
    keys = [short_key(k) for k in block_hashes(tokenizer.encode(text), 16)]
    report = scheduler_pb2.LoadReport(
        running=3, waiting=2, free_blocks=10, total_blocks=64, workers=1, preemptions=5, prefix_hashes_added=keys
    )
    schedulers[1].say(scheduler_pb2.SchedulerMessage(load=report))

    def value(name: str) -> float | None:
        return parts.metrics.registry.get_sample_value(name, {"scheduler": "two"})

    await eventually(lambda: value("pagemill:num_requests_running") == 3)
    assert value("pagemill:num_requests_waiting") == 2
    assert value("pagemill:kv_blocks_used") == 54 and value("pagemill:kv_blocks_total") == 64
    assert value("pagemill:preemptions_total") == 5
    report.running = report.waiting = 0
    schedulers[1].say(scheduler_pb2.SchedulerMessage(load=report))
    await eventually(lambda: value("pagemill:num_requests_running") == 0)
    for _ in range(4):
        await complete(parts, prompt(text))
    assert len(schedulers[1].submits) == 4
    evicted = scheduler_pb2.LoadReport(prefix_hashes_evicted=keys)
    schedulers[1].say(scheduler_pb2.SchedulerMessage(load=evicted))
    await eventually(lambda: not parts.schedulers.links[1].candidate().prefix_hashes)


async def test_many_requests_share_one_session_without_mixing(
    start_scheduler: Any, start_router: Any, tokenizer: Any
) -> None:
    scheduler = await start_scheduler(lambda submit, index: list(submit.token_ids) + [2])
    parts = await start_router(scheduler)
    texts = [f"request number {i} says what only it says {i * 7919}" for i in range(64)]
    answers = await asyncio.gather(*(complete(parts, prompt(text)) for text in texts))
    assert [a.sequences[0].text for a in answers] == texts
    assert len(scheduler.sessions) == 1
    assert parts.pipeline.num_inflight == 0


async def test_streams_cut_at_random_leave_nothing_behind(
    start_scheduler: Any, start_router: Any, tokenizer: Any
) -> None:
    scheduler = await start_scheduler(lambda submit, index: tokenizer.encode(" on and") * 500)
    parts = await start_router(scheduler)

    async def cut(after: int) -> None:
        events = parts.pipeline.generate(prompt(max_tokens=900, n=1 + after % 2))
        for _ in range(after):
            await anext(events)
        await events.aclose()

    await asyncio.gather(*(cut(i % 11) for i in range(200)))
    await eventually(lambda: scheduler.num_live_rows == 0)
    assert parts.pipeline.num_inflight == 0
    assert not parts.schedulers.links[0]._channels


def test_merged_updates_lose_nothing() -> None:
    first, second = RequestUpdate(), RequestUpdate()
    first.add_run(0, [1, 2], TokenLogprobs([0.1, 0.2], [1, 1]))
    second.add_run(0, [3], TokenLogprobs([0.3], [1]))
    second.add_run(1, [9], None)
    second.ends[1] = SequenceEnd("stop", 9)
    first.merge(second)
    assert first.runs[0].token_ids == [1, 2, 3] and first.runs[0].logprobs is not None
    assert first.runs[0].logprobs.chosen == [0.1, 0.2, 0.3]
    assert first.runs[1].token_ids == [9] and first.ends == {1: SequenceEnd("stop", 9)}


def test_columns_that_do_not_fit_are_refused() -> None:
    with pytest.raises(ValueError, match="differ in length"):
        read_output(scheduler_pb2.StepOutput(handles=[1], indexes=[0], counts=[2], token_ids=[5]))
