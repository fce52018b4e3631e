"""The step loop of one worker: a thread that owns a scheduler core.

Thread rules: only the engine's thread touches the core; others may read its counters and its prefix index.
Commands and results come in by one queue; plans and outputs go to the event loop, one call per turn.
"""

from __future__ import annotations

import asyncio
import logging
import queue
import threading
import time
from collections import deque
from collections.abc import Callable, Hashable
from dataclasses import dataclass, field
from typing import Protocol

from pagemill.errors import PagemillError, UnavailableError
from pagemill.v1 import worker_pb2
from scheduler.metrics import EngineObserver
from scheduler.scheduler import Scheduler
from scheduler.sequence import NewRequest, OwnerOutput, RequestFailure, StepOutputs, Timings
from scheduler.wire import plan_to_proto, result_from_proto

_log = logging.getLogger(__name__)

STEPS_IN_FLIGHT = 2
_POLL_S = 0.25


@dataclass(slots=True)
class CacheChanges:
    """What happened to a core's prefix cache since the last report. `whole`: `added` is all there is."""

    added: list[int] = field(default_factory=list)
    evicted: list[int] = field(default_factory=list)
    whole: bool = False


@dataclass(slots=True)
class Turn:
    """What one turn of the loop brought."""

    messages: list[worker_pb2.StepMessage] = field(default_factory=list)
    outputs: list[tuple[int, StepOutputs]] = field(default_factory=list)  # (step, outputs), in order
    cache_changes: CacheChanges | None = None
    num_commands: int = 0  # commands that were carried out
    became_idle: bool = False  # nothing runs, waits or is in flight any more


class EngineEvents(Protocol):
    """Where an engine reports, on the event loop's thread and in order."""

    def on_turn(self, engine: Engine, turn: Turn) -> None:
        """Plans to send and outputs to deliver."""

    def on_stopped(self, engine: Engine, requests: list[NewRequest], error: PagemillError | None) -> None:
        """The thread has ended; `requests` are those that can go on elsewhere. No other call follows."""


class Engine:
    """Drives one core with up to two steps in flight.

    Args:
        core: the scheduler core; owned by the engine from `start` on.
        events: told about everything, on `loop`.
        worker_timeout_s: a step without result for longer stops the engine with an error.
        checks_integrity: verify block accounting whenever idle.
    """

    def __init__(
        self,
        core: Scheduler,
        observer: EngineObserver,
        events: EngineEvents,
        loop: asyncio.AbstractEventLoop,
        *,
        worker_timeout_s: float,
        checks_integrity: bool,
    ) -> None:
        self.core = core
        self._observer = observer
        self._events = events
        self._loop = loop
        self._worker_timeout_s = worker_timeout_s
        self._checks_integrity = checks_integrity
        # Unbounded as a queue; bounded by who fills it: results by the steps in flight, additions by `num_commands`,
        # aborts by live requests.
        self._inbox: queue.SimpleQueue[worker_pb2.StepResult | NewRequest | Callable[[], None]] = queue.SimpleQueue()
        self._sent_s: deque[float] = deque()
        self._turn = Turn()
        self._is_stopping = False
        self._stop_error: PagemillError | None = None
        self._was_busy = False
        self._thread = threading.Thread(target=self._run, name=f"engine-{core.epoch}", daemon=True)
        self.num_commands = 0  # on their way; kept by the event loop's thread

    # Called from the event loop's thread.

    @property
    def load(self) -> int:
        """Sequences running and waiting, and commands on their way."""
        return self.core.num_running + self.core.num_waiting + self.num_commands

    def start(self) -> None:
        self._thread.start()

    def result(self, result: worker_pb2.StepResult) -> None:
        self._inbox.put(result)

    def add(self, request: NewRequest) -> None:
        self.num_commands += 1
        self._inbox.put(request)

    def abort(self, owner: Hashable, handle: int, index: int | None) -> None:
        self._command(lambda: self._ignore(self.core.abort(handle, index, owner=owner)))

    def abort_owner(self, owner: Hashable) -> None:
        self._command(lambda: self._ignore(self.core.abort_owner(owner)))

    def report_cache(self) -> None:
        """Ask for the changes of the prefix cache."""
        self._command(self._report_cache)

    def stop(self, error: PagemillError | None = None) -> None:
        """End the thread after what is queued before; `on_stopped` follows."""

        def command() -> None:
            self._is_stopping = True
            self._stop_error = error

        self._command(command)

    def unprocessed_requests(self) -> list[NewRequest]:
        """Additions that came too late for the thread. To be called once it has stopped."""
        requests: list[NewRequest] = []
        while True:
            try:
                item = self._inbox.get_nowait()
            except queue.Empty:
                return requests
            if isinstance(item, NewRequest):
                requests.append(item)

    def _command(self, command: Callable[[], None]) -> None:
        self.num_commands += 1
        self._inbox.put(command)

    # The engine's thread.

    def _run(self) -> None:
        try:
            while not self._is_stopping:
                self._take_turn()
            requests = self.core.export_requests()
        except PagemillError as error:
            self._stop_error = error
            requests = self.core.export_requests()
        except Exception:
            # Nobody knows what was delivered: these requests cannot go on without a lost or repeated token.
            _log.exception("the scheduler core of epoch %d failed", self.core.epoch)
            self._stop_error = PagemillError("internal error in the scheduler")
            self._fail_all(self._stop_error)
            requests = []
        if self.core.has_outputs:
            self._turn.outputs.append((0, self.core.take_outputs()))
        self._post_turn()
        self._post(self._events.on_stopped, self, requests, self._stop_error)

    def _take_turn(self) -> None:
        core, inbox = self.core, self._inbox
        try:
            item = inbox.get(timeout=_POLL_S if core.num_requests or self._sent_s else None)
            while True:
                if isinstance(item, worker_pb2.StepResult):
                    self._take_result(item)
                else:
                    self._turn.num_commands += 1
                    if isinstance(item, NewRequest):
                        self._add(item)
                    else:
                        item()
                item = inbox.get_nowait()
        except queue.Empty:
            pass
        if self._is_stopping:
            return
        while core.num_in_flight < STEPS_IN_FLIGHT and (plan := core.schedule()) is not None:
            self._sent_s.append(time.monotonic())
            self._turn.messages.append(plan_to_proto(plan))
        if core.has_outputs:
            self._turn.outputs.append((0, core.take_outputs()))
        self._note_idleness()
        self._post_turn()
        if self._sent_s and time.monotonic() - self._sent_s[0] > self._worker_timeout_s:
            raise UnavailableError(f"the worker sent no result for {self._worker_timeout_s:g} s")

    def _take_result(self, result: worker_pb2.StepResult) -> None:
        outputs = self.core.update(result_from_proto(result))
        self._sent_s.popleft()
        if self._sent_s:
            # The next step began when this one ended, not when it was sent.
            self._sent_s[0] = time.monotonic()
        self._turn.outputs.append((result.step, outputs))

    def _note_idleness(self) -> None:
        is_busy = bool(self.core.num_requests or self._sent_s)
        if self._was_busy and not is_busy:
            self._turn.became_idle = True
            self._observer.idle()
            if self._checks_integrity:
                self.core.check_integrity()
        self._was_busy = is_busy

    def _add(self, request: NewRequest) -> None:
        try:
            self.core.add_request(request)
        except PagemillError as error:
            self._observer.request_refused(error.grpc_code)
            self._fail(request.owner, request.handle, error)

    def _fail(self, owner: Hashable, handle: int, error: PagemillError) -> None:
        output = OwnerOutput(failures=[RequestFailure(handle, error, Timings(0, 0, 0, 0))])
        self._turn.outputs.append((0, {owner: output}))

    def _fail_all(self, error: PagemillError) -> None:
        for request in self.core.export_requests():
            self._fail(request.owner, request.handle, error)

    def _report_cache(self) -> None:
        added, evicted, overflowed = self.core.blocks.journal.take()
        if overflowed:
            added, evicted = self.core.blocks.cached_short_keys(self.core.capacity.num_blocks), []
        self._turn.cache_changes = CacheChanges(added, evicted, overflowed)

    @staticmethod
    def _ignore(_: object) -> None:
        pass

    def _post_turn(self) -> None:
        turn = self._turn
        if turn.messages or turn.outputs or turn.num_commands or turn.became_idle:
            self._turn = Turn()
            self._post(self._events.on_turn, self, turn)

    def _post(self, call: Callable[..., None], *args: object) -> None:
        try:
            self._loop.call_soon_threadsafe(call, *args)
        except RuntimeError:
            # The loop is closed: the process is on its way out and nobody listens any more.
            self._is_stopping = True
