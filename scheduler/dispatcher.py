"""Brings requests of all routers to the workers, and moves them when a worker is lost. Lives on the event loop.

Every live request is in one of three places: with an engine, parked while no worker is attached, or on its way from an
engine that stops (its placement has no engine; aborts wait with the placement).
"""

from __future__ import annotations

import asyncio
import itertools
import logging
import time
from dataclasses import dataclass, field
from typing import Protocol

from pagemill.block_hash import block_hashes
from pagemill.config import SchedulerSettings
from pagemill.errors import (
    AbortedError,
    DesyncError,
    DuplicateRequestError,
    OverloadedError,
    PagemillError,
    UnavailableError,
)
from pagemill.v1 import scheduler_pb2, worker_pb2
from scheduler.cache_directory import CacheDirectory
from scheduler.engine import Engine, Turn
from scheduler.metrics import CoreTotals
from scheduler.parking import Key, ParkedRequests, abort_waiting
from scheduler.scheduler import RETRY_AFTER_MS
from scheduler.sequence import (
    NewRequest,
    OwnerOutput,
    RequestFailure,
    Timings,
)
from scheduler.session import MAX_BACKLOG, RouterSession
from scheduler.wire import hello_to_proto, load_to_proto

_log = logging.getLogger(__name__)

# Prompt tokens that a sequence on a worker weighs, when a worker is chosen.
LOAD_WEIGHT_TOKENS = 256


class WorkerPort(Protocol):
    """The stream to one worker."""

    engine: Engine
    hello: worker_pb2.WorkerHello
    is_draining: bool

    def send(self, message: worker_pb2.StepMessage) -> None:
        """Queue a message to the worker."""

    def stopped(self, error: PagemillError | None) -> None:
        """The engine has ended."""


@dataclass(slots=True)
class _Placement:
    """Where a live request is."""

    engine: Engine | None = None
    aborts: list[int | None] = field(default_factory=list)  # to be carried out once it has an engine again


class Dispatcher:
    """All live requests, sessions and workers of a scheduler process."""

    def __init__(self, settings: SchedulerSettings, scheduler_id: str) -> None:
        self._settings = settings
        self._scheduler_id = scheduler_id
        self._sessions: set[RouterSession] = set()
        self._workers: dict[Engine, WorkerPort] = {}
        self._placements: dict[Key, _Placement] = {}
        self._parked = ParkedRequests(settings.max_queued_requests, settings.max_queued_tokens)
        self._last_fingerprint = ""
        self.model_name = ""  # as the worker that came last calls it; "" before there was one
        self._retired = CoreTotals()
        self._directory = CacheDirectory()
        self.is_draining = False
        self.idle = asyncio.Event()  # draining, and no live request is left

    # Workers.

    def check_worker(self, hello: worker_pb2.WorkerHello) -> None:
        """Refuse a worker that would give other tokens than those attached.

        Raises:
            DesyncError: its model differs.
            UnavailableError: the scheduler is going away.
        """
        if self.is_draining:
            raise UnavailableError("the scheduler is draining")
        for worker in self._workers.values():
            mine, other = hello.model_fingerprint, worker.hello.model_fingerprint
            if mine != other or hello.vocab_size != worker.hello.vocab_size:
                raise DesyncError(
                    f"worker {hello.worker_id} serves model {hello.model!r} (fingerprint {mine}), but the workers of "
                    f"this scheduler serve {worker.hello.model!r} (fingerprint {other})"
                )

    def add_worker(self, worker: WorkerPort) -> None:
        """A worker is attached: parked requests go to it."""
        self._workers[worker.engine] = worker
        _log.info("worker %s attached, epoch %d", worker.hello.worker_id, worker.engine.core.epoch)
        self._announce()
        is_other_model = self._last_fingerprint not in ("", worker.hello.model_fingerprint)
        self._last_fingerprint = worker.hello.model_fingerprint
        self.model_name = worker.hello.model
        for key, request in self._parked.take_all().items():
            if is_other_model and request.scheduled_unix_ns:
                # What another model began, this one cannot continue.
                self._fail(key, UnavailableError("the model changed while the request waited for a worker"))
            else:
                self._place(request)

    def stop_worker(self, worker: WorkerPort, error: PagemillError | None) -> None:
        """A worker leaves or is lost: no more steps for it. Its requests move once its engine has stopped."""
        if not worker.is_draining:
            worker.is_draining = True
            worker.engine.stop(error)
            self._announce()

    def profile_workers(self, num_steps: int) -> None:
        """Have each worker log where the time of its next steps goes."""
        _log.info("profiling %d steps of each of %d workers", num_steps, len(self._workers))
        for worker in self._workers.values():
            worker.send(worker_pb2.StepMessage(profile=worker_pb2.Profile(num_steps=num_steps)))

    def on_turn(self, engine: Engine, turn: Turn) -> None:
        """Send plans, hand out tokens."""
        worker = self._workers[engine]
        engine.num_commands -= turn.num_commands
        for message in turn.messages:
            worker.send(message)
        for step, outputs in turn.outputs:
            for owner, output in outputs.items():
                assert isinstance(owner, RouterSession)
                self._deliver(owner, output, step)
        if turn.cache_changes is not None:
            self._directory.apply(engine, turn.cache_changes)
        if turn.became_idle:
            # Load that is over must not steer requests away, nor alarm anybody, until the next tick.
            self._report_load([], [])

    def on_stopped(self, engine: Engine, requests: list[NewRequest], error: PagemillError | None) -> None:
        """Move the requests of an engine that has ended."""
        worker = self._workers.pop(engine)
        self._retired.add_counters(engine.core.counters)
        self._directory.drop(engine)
        _log.info("worker %s detached, %d requests move", worker.hello.worker_id, len(requests))
        worker.is_draining = True
        self._announce()
        for request in [*requests, *engine.unprocessed_requests()]:
            assert isinstance(request.owner, RouterSession)
            placement = self._placements.get((request.owner, request.handle))
            if placement is None:
                continue  # its session ended meanwhile
            placement.engine = None
            self._place(request)
        worker.stopped(error)

    # Sessions.

    def add_session(self, session: RouterSession) -> None:
        self._sessions.add(session)
        session.put_hello(self.hello())
        load = load_to_proto(self.totals(), self._directory.all_keys(), [])
        load.prefix_hashes_reset = True
        session.put_load(load)

    def remove_session(self, session: RouterSession) -> None:
        """A router is gone: all its requests end."""
        self._sessions.discard(session)
        session.close(AbortedError("the session ended"))
        session.backlog.clear()
        for handle in session.handles:
            key = session, handle
            del self._placements[key]
            self._parked.remove(key)
        session.handles.clear()
        for engine in self._workers:
            engine.abort_owner(session)
        self._note_idleness()

    def submit(self, request: NewRequest) -> None:
        """Take in a request; what is wrong with it is told in-band."""
        session = request.owner
        assert isinstance(session, RouterSession)
        key = session, request.handle
        if key in self._placements or request.handle in session.backlog:
            # The live request keeps its handle, so the error must not end it.
            _log.warning("router %s submitted handle %d twice", session.router_id, request.handle)
            session.close(DuplicateRequestError(f"handle {request.handle} is live already", field="handle"))
            return
        if self.is_draining:
            self._refuse(request, UnavailableError("the scheduler is draining", retry_after_ms=RETRY_AFTER_MS))
            return
        bound = session.max_inflight_requests
        if bound and len(session.handles) >= bound:
            if len(session.backlog) >= MAX_BACKLOG:
                self._refuse(request, OverloadedError("too many requests wait", retry_after_ms=RETRY_AFTER_MS))
            else:
                session.backlog[request.handle] = request
            return
        session.handles.add(request.handle)
        self._placements[key] = _Placement()
        self._place(request)

    def abort(self, session: RouterSession, handle: int, index: int | None) -> None:
        """End a request or one of its sequences, wherever it is."""
        key = session, handle
        placement = self._placements.get(key)
        if placement is None:
            self._abort_held_back(session, handle, index)
        elif key in self._parked:
            self._deliver(session, OwnerOutput(finished=self._parked.abort(key, index)), 0)
        elif placement.engine is None:
            placement.aborts.append(index)
        elif index not in placement.aborts:
            placement.aborts.append(index)
            placement.engine.abort(session, handle, index)

    def _abort_held_back(self, session: RouterSession, handle: int, index: int | None) -> None:
        request = session.backlog.get(handle)
        if request is None:
            return
        ended = abort_waiting(request, index)
        if any(sequence.request_finished for sequence in ended):
            del session.backlog[handle]
        self._deliver(session, OwnerOutput(finished=ended), 0)

    # Placing.

    def _place(self, request: NewRequest) -> None:
        """Give a request to the best worker, or park it."""
        session = request.owner
        assert isinstance(session, RouterSession)
        key = session, request.handle
        placement = self._placements[key]
        engine = self._choose(request)
        if engine is None:
            try:
                self._parked.park(key, request)
            except OverloadedError as error:
                self._fail(key, error)
        elif engine.num_commands > 2 * self._settings.max_queued_requests + engine.core.limits.max_num_seqs:
            self._fail(key, OverloadedError("too many requests arrive at once", retry_after_ms=RETRY_AFTER_MS))
        else:
            placement.engine = engine
            engine.add(request)
            for index in placement.aborts:
                engine.abort(session, request.handle, index)
            return
        aborts, placement.aborts = placement.aborts, []
        for index in aborts:
            self.abort(session, request.handle, index)

    def _choose(self, request: NewRequest) -> Engine | None:
        """The worker with the least work in front of the request, tokens found in its cache taken off."""
        engines = [engine for engine, worker in self._workers.items() if not worker.is_draining]
        if len(engines) <= 1:
            return engines[0] if engines else None
        keys: dict[int, list[bytes]] = {}

        def cost(engine: Engine) -> int:
            size = engine.core.capacity.block_size
            if size not in keys:
                keys[size] = block_hashes(request.token_ids, size, request.cache_salt)
            return engine.load * LOAD_WEIGHT_TOKENS - engine.core.blocks.count_cached(keys[size]) * size

        return min(engines, key=cost)

    def _fail(self, key: Key, error: PagemillError) -> None:
        failure = RequestFailure(key[1], error, Timings(0, 0, 0, 0))
        self._deliver(key[0], OwnerOutput(failures=[failure]), 0)

    @staticmethod
    def _refuse(request: NewRequest, error: PagemillError) -> None:
        assert isinstance(request.owner, RouterSession)
        failure = RequestFailure(request.handle, error, Timings(0, 0, 0, 0))
        request.owner.put_output(OwnerOutput(failures=[failure]), 0)

    def _deliver(self, session: RouterSession, output: OwnerOutput, step: int) -> None:
        session.put_output(output, step)
        ended = [f.handle for f in output.finished if f.request_finished]
        ended += [f.handle for f in output.failures]
        for handle in ended:
            if handle in session.handles:
                session.handles.discard(handle)
                del self._placements[session, handle]
                self._parked.remove((session, handle))
        while session.backlog and len(session.handles) < session.max_inflight_requests:
            self.submit(session.backlog.pop(next(iter(session.backlog))))
        self._note_idleness()

    def _note_idleness(self) -> None:
        if self.is_draining and self.num_requests == 0:
            self.idle.set()

    # State.

    @property
    def num_requests(self) -> int:
        """Live requests, those held back by flow control included."""
        return len(self._placements) + sum(len(s.backlog) for s in self._sessions)

    @property
    def is_ready(self) -> bool:
        return not self.is_draining and any(not w.is_draining for w in self._workers.values())

    def start_draining(self) -> None:
        """Refuse new requests and tell everybody."""
        self.is_draining = True
        self._note_idleness()
        self._announce()

    def tick(self) -> None:
        """Once a second: expire what is parked, report load."""
        for key, error in self._parked.expired():
            self._fail(key, error)
        for engine in self._workers:
            engine.report_cache()
        added, evicted = self._directory.take_changes()
        self._report_load(added, evicted)

    def totals(self) -> CoreTotals:
        """Sums over all workers, those that are gone included. Safe from other threads."""
        totals = CoreTotals()
        for name, value in vars(self._retired).items():
            setattr(totals, name, value)
        for engine in list(self._workers):
            core = engine.core
            totals.running += core.num_running
            totals.waiting += core.num_waiting
            totals.blocks_used += core.blocks.num_used
            totals.blocks_total += core.capacity.num_blocks
            totals.workers += 1
            totals.add_counters(core.counters)
        totals.waiting += len(self._parked)
        return totals

    def hello(self) -> scheduler_pb2.SchedulerHello:
        """What this scheduler serves now."""
        workers = [w.hello for w in self._workers.values() if not w.is_draining]
        return hello_to_proto(self._scheduler_id, workers, ready=self.is_ready, draining=self.is_draining)

    def _announce(self) -> None:
        for session in self._sessions:
            session.put_hello(self.hello())
        self._report_load([], [])

    def _report_load(self, added: list[int], evicted: list[int]) -> None:
        totals = self.totals()
        for session in self._sessions:
            # One message each: a session may join several that wait.
            session.put_load(load_to_proto(totals, added, evicted))

    def end(self) -> None:
        """The process is about to end: workers finish what is queued, sessions close."""
        drain = worker_pb2.StepMessage(drain=worker_pb2.Drain())
        for worker in list(self._workers.values()):
            worker.send(drain)
            self.stop_worker(worker, None)
        for session in list(self._sessions):
            session.close(UnavailableError("the scheduler is going away", retry_after_ms=RETRY_AFTER_MS))


def epochs() -> itertools.count[int]:
    """Numbers for worker streams that a restarted scheduler does not repeat."""
    return itertools.count(time.time_ns() // 1_000_000)
