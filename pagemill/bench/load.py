"""Load on a server from processes that do nothing else, so that what is measured is the server."""

from __future__ import annotations

import contextlib
import math
import multiprocessing
import os
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from multiprocessing.connection import Connection, wait
from multiprocessing.context import SpawnProcess
from typing import Any

from pagemill.bench.arrivals import ClosedLoop, OpenLoop, Rounds, Schedule
from pagemill.bench.load_process import Finished, Share, run_share
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


def run_load(
    target: Target,
    workload: Workload,
    schedule: Schedule,
    *,
    num_processes: int = 1,
    timeout_s: float = 600.0,
    on_progress: Callable[[int], None] = lambda count: None,
) -> LoadResult:
    """Run all conversations of a schedule.

    Args:
        num_processes: processes that make the load.
        timeout_s: of each request; a later one counts as failed.
        on_progress: gets the number of requests that have ended.

    Raises:
        PagemillError: a process that makes the load died, or there was nothing to do.
    """
    shares = _shares(target, workload, schedule, num_processes, timeout_s)
    with _started(shares) as connections:
        _wait_ready(connections)
        start_s = time.perf_counter() + _HEAD_START_S
        for connection in connections:
            connection.send(start_s)
        finished = _gather(connections, on_progress)
    answers = [answer for part in finished for answer in part.answers]
    if not answers:
        raise PagemillError("the load has no request: its rate or its duration is too small")
    elapsed_s = max(answer.end_s for answer in answers) - min(answer.start_s for answer in answers)
    return LoadResult(answers, elapsed_s, max(part.cpu_s / part.wall_s for part in finished))


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


@contextlib.contextmanager
def _started(shares: list[Share]) -> Iterator[list[Connection]]:
    """One process per share, all gone afterwards."""
    context = multiprocessing.get_context("spawn")
    counter: Any = context.Value("q", 0)
    processes: list[SpawnProcess] = []
    connections: list[Connection] = []
    try:
        for share in shares:
            ours, theirs = context.Pipe()
            process = context.Process(target=run_share, args=(share, counter, theirs, os.getpid()), daemon=True)
            process.start()
            theirs.close()
            processes.append(process)
            connections.append(ours)
        yield connections
        for process in processes:
            process.join(_STOP_TIMEOUT_S)
    finally:
        for process in processes:
            if process.is_alive():
                process.kill()
                process.join(_STOP_TIMEOUT_S)
        for connection in connections:
            connection.close()


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


def _receive(connection: Connection) -> Any:
    try:
        return connection.recv()
    except (EOFError, OSError) as err:
        raise PagemillError("a process that makes the load died") from err


def num_requests(workload: Workload, schedule: Schedule) -> int | None:
    """Requests of a load that goes well; None where its duration decides."""
    if isinstance(schedule, ClosedLoop):
        if schedule.num_conversations is None or math.isfinite(schedule.duration_s):
            return None
        return schedule.num_conversations * workload.num_turns
    if isinstance(schedule, Rounds):
        return schedule.batch_size * schedule.num_rounds * workload.num_turns
    return len(schedule.times_s) * workload.num_turns
