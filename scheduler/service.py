"""The gRPC face: sessions of routers, streams of workers."""

from __future__ import annotations

import asyncio
import logging
import time
from typing import Any, TypeAlias

import grpc
import grpc.aio

from pagemill.config import SchedulerSettings
from pagemill.errors import DesyncError, InvalidRequestError, PagemillError
from pagemill.rpc import abort_with
from pagemill.v1 import scheduler_pb2_grpc, worker_pb2
from scheduler.admission import SchedulerLimits
from scheduler.dispatcher import Dispatcher, epochs
from scheduler.engine import Engine
from scheduler.metrics import EngineObserver, SchedulerMetrics
from scheduler.scheduler import Scheduler
from scheduler.session import RouterSession
from scheduler.wire import capacity_from_hello, request_from_proto
from scheduler.worker_link import WorkerLink, failure_of

_log = logging.getLogger(__name__)

SERVICE_NAME = "pagemill.v1.Scheduler"
HELLO_TIMEOUT_S = 10.0

Context: TypeAlias = grpc.aio.ServicerContext[Any, Any]


class SchedulerServicer(scheduler_pb2_grpc.SchedulerServicer):
    """Session and AttachWorker over one dispatcher."""

    def __init__(
        self, settings: SchedulerSettings, scheduler_id: str, dispatcher: Dispatcher, metrics: SchedulerMetrics
    ) -> None:
        self._settings = settings
        self._scheduler_id = scheduler_id
        self._dispatcher = dispatcher
        self._metrics = metrics
        self._epochs = epochs()

    async def Session(self, _: object, context: Context) -> None:
        """One router, until it hangs up, falls behind, or the scheduler goes away."""
        hello = await _first_message(context, "hello")
        session = RouterSession(hello.hello.router_id)
        _log.info("router %s connected", session.router_id)
        self._dispatcher.add_session(session)
        reader = asyncio.create_task(self._read_session(session, context))
        writer = asyncio.create_task(_write_session(session, context))
        try:
            ends: set[asyncio.Future[Any]] = {reader, writer, session.closed}
            await asyncio.wait(ends, return_when=asyncio.FIRST_COMPLETED)
            end = session.closed.result() if session.closed.done() else failure_of(reader)
            if end is not None:
                await abort_with(context, end)
        finally:
            for task in (reader, writer):
                task.cancel()
            self._dispatcher.remove_session(session)
            _log.info("router %s disconnected", session.router_id)

    async def _read_session(self, session: RouterSession, context: Context) -> None:
        while (message := await context.read()) is not grpc.aio.EOF:
            kind = message.WhichOneof("message")
            if kind == "submit":
                self._dispatcher.submit(request_from_proto(message.submit, session, time.time_ns()))
            elif kind == "abort":
                abort = message.abort
                index = abort.index if abort.HasField("index") else None
                self._dispatcher.abort(session, abort.handle, index)
            elif kind == "flow_control":
                session.max_inflight_requests = message.flow_control.max_inflight_requests
            elif kind == "hello":
                raise DesyncError("a second hello came on the session")

    async def AttachWorker(self, _: object, context: Context) -> None:
        """One worker, until it leaves, fails or is lost."""
        hello = (await _first_message(context, "hello")).hello
        try:
            capacity = capacity_from_hello(hello)
            self._dispatcher.check_worker(hello)
        except PagemillError as error:
            _log.warning("worker %s refused: %s", hello.worker_id, error.message)
            await abort_with(context, error)
        settings = self._settings
        limits = SchedulerLimits(
            max_num_batched_tokens=_smaller(settings.max_num_batched_tokens, capacity.max_step_tokens),
            max_num_seqs=_smaller(settings.max_num_seqs, capacity.num_slots),
            max_queued_requests=settings.max_queued_requests,
            max_queued_tokens=settings.max_queued_tokens,
            enable_prefix_caching=settings.enable_prefix_caching,
        )
        observer = EngineObserver(self._metrics)
        core = Scheduler(capacity, limits, epoch=next(self._epochs), observer=observer)
        engine = Engine(
            core,
            observer,
            self._dispatcher,
            asyncio.get_running_loop(),
            worker_timeout_s=settings.worker_timeout_s,
            checks_integrity=settings.check_integrity,
        )
        link = WorkerLink(engine, hello, self._dispatcher)
        link.send(
            worker_pb2.StepMessage(
                attached=worker_pb2.Attached(
                    epoch=core.epoch,
                    scheduler_id=self._scheduler_id,
                    max_num_batched_tokens=limits.max_num_batched_tokens,
                    max_num_seqs=limits.max_num_seqs,
                )
            )
        )
        engine.start()
        self._dispatcher.add_worker(link)
        end = await link.serve(context)
        if end is not None:
            _log.warning("worker %s lost: %s", hello.worker_id, end.message)
            await abort_with(context, end)


def _smaller(setting: int | None, held: int) -> int:
    """What the worker holds, where no smaller number is set."""
    return held if setting is None else min(setting, held)


async def _first_message(context: Context, kind: str) -> Any:
    """The first message of a stream, which has to be a hello and has to come soon."""
    try:
        async with asyncio.timeout(HELLO_TIMEOUT_S):
            message = await context.read()
    except TimeoutError:
        await abort_with(context, InvalidRequestError(f"no hello came within {HELLO_TIMEOUT_S:g} s", field=kind))
    if message is grpc.aio.EOF or message.WhichOneof("message") != kind:
        await abort_with(context, InvalidRequestError("the first message must be a hello", field=kind))
    return message


async def _write_session(session: RouterSession, context: Context) -> None:
    while True:
        for message in await session.next_messages():
            await context.write(message)
