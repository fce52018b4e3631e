"""One process that makes load: it runs its share of the conversations and notes what becomes of each request."""

from __future__ import annotations

import asyncio
import gc
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from multiprocessing.connection import Connection
from typing import Any

from pagemill.bench.arrivals import ClosedLoop, Rounds, Schedule
from pagemill.bench.records import Answer
from pagemill.bench.targets import LoadClient, Target
from pagemill.bench.workloads import Workload
from pagemill.errors import PagemillError
from pagemill.open_files import allow_most_open_files
from pagemill.process_guard import die_with_parent

_REPORT_INTERVAL_S = 0.2


@dataclass(frozen=True, slots=True)
class Share:
    """What one of several processes does.

    Attributes:
        number, num_processes: which one it is; of an open loop it takes every `num_processes`-th conversation.
        concurrency: conversations that it may run at once in a closed loop.
        num_connections: connections that it opens before the start.
        timeout_s: of each request.
    """

    target: Target
    workload: Workload
    schedule: Schedule
    number: int
    num_processes: int
    concurrency: int
    num_connections: int
    timeout_s: float


@dataclass(slots=True)
class Finished:
    """The last message of a process: every answer, and what making the load cost it."""

    answers: list[Answer]
    cpu_s: float
    wall_s: float


def run_shares(next_conversation: Any, connection: Connection, parent_pid: int) -> None:
    """Entry of the process: it runs each `Share` that it is sent, until the connection closes.

    For each it sends "ready", waits for the time to start at, sends the number of ended requests now and then, and a
    `Finished`; a PagemillError instead where it cannot go on.

    Args:
        next_conversation: a shared counter from which the processes of a closed loop take their conversations.
        connection: to the parent.
        parent_pid: the process ends when this one does.
    """
    die_with_parent(parent_pid)
    allow_most_open_files()
    # What is allocated lives to the end of its load; a collection within would only hold answers up.
    gc.disable()
    while True:
        try:
            share: Share = connection.recv()
        except EOFError:
            return
        try:
            _event_loop_for(share)(_Load(share, next_conversation, connection).run())
        except PagemillError as err:
            connection.send(err)
        gc.collect()


def _event_loop_for(share: Share) -> Callable[..., Any]:
    """uvloop for HTTP where it is installed; gRPC's own poller is made for asyncio's loop."""
    if share.target.backend == "http":
        try:
            import uvloop
        except ImportError:
            return asyncio.run
        return uvloop.run  # type: ignore[no-any-return, unused-ignore]
    return asyncio.run


class _Load:
    """The conversations of one process."""

    def __init__(self, share: Share, next_conversation: Any, connection: Connection) -> None:
        self._share = share
        self._next_conversation = next_conversation
        self._connection = connection
        self._answers: list[Answer] = []
        self._client: LoadClient | None = None

    async def run(self) -> None:
        workload = self._share.workload
        self._client = self._share.target.client(keep_token_ids=workload.num_turns > 1)
        await self._client.prepare(self._share.num_connections)
        self._connection.send("ready")
        start_s: float = await asyncio.to_thread(self._connection.recv)
        cpu_start_s = time.process_time()
        await asyncio.sleep(max(0.0, start_s - time.perf_counter()))
        reporter = asyncio.create_task(self._report())
        try:
            if isinstance(self._share.schedule, ClosedLoop):
                await self._closed_loop(self._share.schedule, start_s)
            elif isinstance(self._share.schedule, Rounds):
                await self._rounds(self._share.schedule)
            else:
                await self._open_loop(self._share.schedule.times_s, start_s)
        finally:
            reporter.cancel()
            await self._client.close()
        cpu_s, wall_s = time.process_time() - cpu_start_s, time.perf_counter() - start_s
        self._connection.send(Finished(self._answers, cpu_s, wall_s))

    async def _report(self) -> None:
        while True:
            await asyncio.sleep(_REPORT_INTERVAL_S)
            self._connection.send(len(self._answers))

    async def _closed_loop(self, schedule: ClosedLoop, start_s: float) -> None:
        end_s = start_s + schedule.duration_s

        async def slot() -> None:
            for index in self._taken(schedule.num_conversations):
                if time.perf_counter() >= end_s:
                    return
                await self._converse(index, time.perf_counter())

        await asyncio.gather(*(slot() for _ in range(self._share.concurrency)))

    def _taken(self, most: int | None) -> Iterator[int]:
        while True:
            with self._next_conversation.get_lock():
                index = self._next_conversation.value
                self._next_conversation.value += 1
            if most is not None and index >= most:
                return
            yield int(index)

    async def _rounds(self, schedule: Rounds) -> None:
        for first in range(0, schedule.num_rounds * schedule.batch_size, schedule.batch_size):
            now_s = time.perf_counter()
            await asyncio.gather(*(self._converse(first + at, now_s) for at in range(schedule.batch_size)))

    async def _open_loop(self, times_s: tuple[float, ...], start_s: float) -> None:
        running = []
        for index in range(self._share.number, len(times_s), self._share.num_processes):
            due_s = start_s + times_s[index]
            delay_s = due_s - time.perf_counter()
            if delay_s > 0:
                await asyncio.sleep(delay_s)
            running.append(asyncio.create_task(self._converse(index, due_s)))
        await asyncio.gather(*running)

    async def _converse(self, index: int, due_s: float) -> None:
        """All turns of one conversation; a failure ends it."""
        said: list[int] = []
        for turn in self._share.workload.conversation(index).turns:
            if turn.pause_s:
                await asyncio.sleep(turn.pause_s)
                due_s += turn.pause_s
            said += turn.token_ids
            answer = await self._ask(said, turn.num_output_tokens)
            answer.late_s = answer.start_s - due_s
            self._answers.append(answer)
            if answer.error:
                return
            said += answer.token_ids
            answer.token_ids = []
            due_s = time.perf_counter()

    async def _ask(self, prompt: list[int], num_output_tokens: int) -> Answer:
        assert self._client is not None
        start_s = time.perf_counter()
        try:
            async with asyncio.timeout(self._share.timeout_s):
                answer = await self._client.ask(prompt, num_output_tokens)
        except TimeoutError:
            answer = Answer(len(prompt), num_output_tokens, start_s, end_s=time.perf_counter())
            answer.fail("timeout", f"no complete answer within {self._share.timeout_s:g} s")
        if not answer.error and self._share.workload.num_turns > 1 and len(answer.token_ids) != num_output_tokens:
            answer.fail("no_token_ids", "the server sends no token ids of the answer, which further turns need")
        return answer
