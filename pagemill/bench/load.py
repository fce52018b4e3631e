"""Load on a server from processes that do nothing else, so that what is measured is the server."""

from __future__ import annotations

import math
import multiprocessing
import os
import time
from collections.abc import Callable
from dataclasses import dataclass
from multiprocessing.connection import Connection, wait
from multiprocessing.context import SpawnProcess
from types import TracebackType
from typing import Any, Self

from pagemill.bench.arrivals import ClosedLoop, OpenLoop, Rounds, Schedule
from pagemill.bench.load_process import Finished, Share, run_shares
from pagemill.bench.records import WRONG_LENGTH, Answer
from pagemill.bench.targets import Target
from pagemill.bench.workloads import Workload
from pagemill.cpu_cores import available_cores
from pagemill.errors import PagemillError

# Between the word that all are ready and the first request.
_HEAD_START_S = 0.05
_START_TIMEOUT_S = 120.0
_STOP_TIMEOUT_S = 10.0
# Opened in advance by each process of an open loop; more are opened when they are needed.
_SPARE_CONNECTIONS = 16


@dataclass(slots=True)
class LoadResult:
    """What came of one load.

    Attributes:
        answers: of all requests, failed ones included, in no order.
        elapsed_s: from the first request to the end of the last answer.
        client_cpu_share: CPU time over wall time of the busiest process that made the load; near 1 it held things up.
    """

    answers: list[Answer]
    elapsed_s: float
    client_cpu_share: float

    def require_all(self) -> None:
        """Raises PagemillError where any request failed, with the first reason."""
        failed = [answer for answer in self.answers if answer.error]
        if failed:
            kinds = ", ".join(sorted({answer.error for answer in failed}))
            raise PagemillError(
                f"{len(failed)} of {len(self.answers)} requests failed ({kinds}); the first: {failed[0].reason}"
            )

    def require_lengths(self) -> None:
        """Raises PagemillError where an answer is not exactly as long as was asked for."""
        wrong = [answer for answer in self.answers if answer.error == WRONG_LENGTH]
        if wrong:
            raise PagemillError(f"{len(wrong)} of {len(self.answers)} answers: {wrong[0].reason}")


def default_num_processes() -> int:
    """A quarter of the cores, at most four."""
    return max(1, min(4, available_cores() // 4))


class LoadProcesses:
    """Processes that make load, one load after the other. A context manager: they are gone when it is left.

    Args:
        count: how many; a load with fewer conversations at once takes fewer.
    """

    def __init__(self, count: int = 1) -> None:
        self._count = count
        self._context = multiprocessing.get_context("spawn")
        # From this the processes of a closed loop take their conversations.
        self._next_conversation: Any = self._context.Value("q", 0)
        self._processes: list[SpawnProcess] = []
        self._connections: list[Connection] = []

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._stop(_STOP_TIMEOUT_S if error is None else 0.0)

    def run(
        self,
        target: Target,
        workload: Workload,
        schedule: Schedule,
        *,
        timeout_s: float = 600.0,
        on_progress: Callable[[int], None] = lambda count: None,
    ) -> LoadResult:
        """Run all conversations of a schedule.

        Args:
            timeout_s: of each request; a later one counts as failed.
            on_progress: gets the number of requests that have ended.

        Raises:
            PagemillError: a process died or cannot reach the server, or there was nothing to do.
        """
        shares = _shares(target, workload, schedule, self._count, timeout_s)
        try:
            finished = self._run(shares, on_progress)
        except PagemillError:
            # The others wait for what will not come; the next load begins with new ones.
            self._stop(0.0)
            raise
        answers = [answer for part in finished for answer in part.answers]
        if not answers:
            raise PagemillError("the load has no request: its rate or its duration is too small")
        elapsed_s = max(answer.end_s for answer in answers) - min(answer.start_s for answer in answers)
        return LoadResult(answers, elapsed_s, max(part.cpu_s / part.wall_s for part in finished))

    def _run(self, shares: list[Share], on_progress: Callable[[int], None]) -> list[Finished]:
        self._start(len(shares))
        self._next_conversation.value = 0
        connections = self._connections[: len(shares)]
        for connection, share in zip(connections, shares, strict=True):
            _send(connection, share)
        _wait_ready(connections)
        start_s = time.perf_counter() + _HEAD_START_S
        for connection in connections:
            _send(connection, start_s)
        return _gather(connections, on_progress)

    def _stop(self, timeout_s: float) -> None:
        """End all processes, which have so long to end by themselves."""
        for connection in self._connections:
            connection.close()
        for process in self._processes:
            process.join(timeout_s)
            if process.is_alive():
                process.kill()
                process.join()
        self._connections, self._processes = [], []

    def _start(self, count: int) -> None:
        """Start processes up to so many."""
        while len(self._processes) < count:
            ours, theirs = self._context.Pipe()
            arguments = (self._next_conversation, theirs, os.getpid())
            process = self._context.Process(target=run_shares, args=arguments, daemon=True)
            process.start()
            theirs.close()
            self._processes.append(process)
            self._connections.append(ours)


def _shares(
    target: Target, workload: Workload, schedule: Schedule, num_processes: int, timeout_s: float
) -> list[Share]:
    """What each process does. The slots of a closed loop are dealt out; rounds begin together, so in one process."""
    if isinstance(schedule, Rounds):
        return [Share(target, workload, schedule, 0, 1, 0, schedule.batch_size, timeout_s)]
    if isinstance(schedule, OpenLoop):
        count = max(1, min(num_processes, len(schedule.times_s)))
        return [Share(target, workload, schedule, at, count, 0, _SPARE_CONNECTIONS, timeout_s) for at in range(count)]
    count = min(num_processes, schedule.concurrency)
    slots = [schedule.concurrency // count + (at < schedule.concurrency % count) for at in range(count)]
    return [Share(target, workload, schedule, at, count, slots[at], slots[at], timeout_s) for at in range(count)]


def _wait_ready(connections: list[Connection]) -> None:
    for connection in connections:
        if not connection.poll(_START_TIMEOUT_S):
            raise PagemillError(f"a process that makes the load was not ready within {_START_TIMEOUT_S:.0f} s")
        _receive(connection)


def _gather(connections: list[Connection], on_progress: Callable[[int], None]) -> list[Finished]:
    counts = dict.fromkeys(connections, 0)
    finished: dict[Connection, Finished] = {}
    while len(finished) < len(connections):
        for connection in wait([each for each in connections if each not in finished]):
            assert isinstance(connection, Connection)
            message = _receive(connection)
            if isinstance(message, Finished):
                finished[connection] = message
                message = len(message.answers)
            counts[connection] = message
        on_progress(sum(counts.values()))
    return list(finished.values())


def _send(connection: Connection, message: object) -> None:
    try:
        connection.send(message)
    except OSError as err:
        raise PagemillError("a process that makes the load died") from err


def _receive(connection: Connection) -> Any:
    try:
        message = connection.recv()
    except (EOFError, OSError) as err:
        raise PagemillError("a process that makes the load died") from err
    if isinstance(message, PagemillError):
        raise message
    return message


def num_requests(workload: Workload, schedule: Schedule) -> int | None:
    """Requests of a load that goes well; None where its duration decides."""
    if isinstance(schedule, ClosedLoop):
        if schedule.num_conversations is None or math.isfinite(schedule.duration_s):
            return None
        return schedule.num_conversations * workload.num_turns
    if isinstance(schedule, Rounds):
        return schedule.batch_size * schedule.num_rounds * workload.num_turns
    return len(schedule.times_s) * workload.num_turns
