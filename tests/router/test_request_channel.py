"""What one request gets from its session: at once or in batches, nothing lost, the end never late."""

from __future__ import annotations

import asyncio

import pytest

from pagemill.errors import DeadlineError, SlowConsumerError
from router.generation import Usage
from router.scheduler_client import MAX_PENDING_WEIGHT, RequestChannel, SessionLost
from router.wire import RequestUpdate, SequenceEnd, TokenRun


def tokens(*token_ids: int) -> RequestUpdate:
    return RequestUpdate({0: TokenRun(list(token_ids))})


def ids(update: RequestUpdate) -> list[int]:
    return update.runs[0].token_ids


async def is_waiting(task: asyncio.Task[RequestUpdate]) -> bool:
    for _ in range(3):
        await asyncio.sleep(0)
    return not task.done()


async def test_each_token_is_there_at_once() -> None:
    channel = RequestChannel(1)
    for token in range(3):
        reader = asyncio.create_task(channel.get())
        assert await is_waiting(reader)
        channel.put(tokens(token))
        assert ids(await reader) == [token]


async def test_what_comes_while_nobody_reads_is_joined() -> None:
    channel = RequestChannel(1)
    for token in range(5):
        channel.put(tokens(token))
    assert ids(await channel.get()) == [0, 1, 2, 3, 4]


async def test_a_batch_is_waited_for_but_the_first_token_is_not() -> None:
    channel = RequestChannel(1, batch_tokens=3)
    channel.put(tokens(0))
    assert ids(await channel.get()) == [0]
    reader = asyncio.create_task(channel.get())
    channel.put(tokens(1))
    channel.put(tokens(2))
    assert await is_waiting(reader)
    channel.put(tokens(3))
    assert ids(await reader) == [1, 2, 3]


@pytest.mark.parametrize(
    "last",
    [
        RequestUpdate(ends={0: SequenceEnd("stop")}),
        RequestUpdate(usage=Usage(1, 0, 2)),
        RequestUpdate(error=DeadlineError("late")),
    ],
)
async def test_an_end_does_not_wait_for_a_batch(last: RequestUpdate) -> None:
    channel = RequestChannel(1, batch_tokens=64)
    channel.put(tokens(0))
    await channel.get()
    channel.put(tokens(1))
    channel.put(last)
    update = await channel.get()
    assert ids(update) == [1]
    assert (update.ends, update.usage, update.error) == (last.ends, last.usage, last.error)


async def test_a_lost_session_is_told_after_what_came_before_it() -> None:
    channel = RequestChannel(1, batch_tokens=64)
    channel.put(tokens(0))
    await channel.get()
    channel.put(tokens(1))
    channel.lose()
    assert ids(await channel.get()) == [1]
    for _ in range(2):
        with pytest.raises(SessionLost):
            await channel.get()


async def test_a_reader_that_was_cancelled_loses_nothing() -> None:
    channel = RequestChannel(1)
    reader = asyncio.create_task(channel.get())
    assert await is_waiting(reader)
    reader.cancel()
    channel.put(tokens(7))
    assert ids(await channel.get()) == [7]


async def test_more_than_may_wait_ends_the_request() -> None:
    channel = RequestChannel(1)
    update = tokens(*range(MAX_PENDING_WEIGHT))
    assert channel.put(tokens(1)) and not channel.put(update)
    assert isinstance((await channel.get()).error, SlowConsumerError)
