"""The stream of one attached worker: results in, plans out. Lives on the event loop's thread."""

from __future__ import annotations

import asyncio
import logging
from typing import Any

import grpc
import grpc.aio

from pagemill.errors import DesyncError, PagemillError, UnavailableError
from pagemill.v1 import worker_pb2
from scheduler.dispatcher import Dispatcher
from scheduler.engine import Engine

_log = logging.getLogger(__name__)

# A draining worker gets this long to close its stream.
DRAIN_TIMEOUT_S = 10.0


def failure_of(task: asyncio.Task[None]) -> PagemillError | None:
    """The deliberate error that ended a task; None where it goes on, was cancelled, or its stream broke."""
    if not task.done() or task.cancelled():
        return None
    error = task.exception()
    if error is None or isinstance(error, PagemillError):
        return error
    if not isinstance(error, grpc.RpcError | asyncio.CancelledError):
        _log.error("reading a stream failed", exc_info=error)
    return None


class WorkerLink:
    """One AttachWorker call after its hello."""

    def __init__(self, engine: Engine, hello: worker_pb2.WorkerHello, dispatcher: Dispatcher) -> None:
        self.engine = engine
        self.hello = hello
        self.is_draining = False
        self._dispatcher = dispatcher
        # Bounded by the steps in flight, plus attached and drain.
        self._outbox: asyncio.Queue[worker_pb2.StepMessage] = asyncio.Queue()
        self._stopped: asyncio.Future[PagemillError | None] = asyncio.get_running_loop().create_future()

    def send(self, message: worker_pb2.StepMessage) -> None:
        self._outbox.put_nowait(message)

    def stopped(self, error: PagemillError | None) -> None:
        if not self._stopped.done():
            self._stopped.set_result(error)

    async def serve(self, context: grpc.aio.ServicerContext[Any, Any]) -> PagemillError | None:
        """Carry messages until the worker leaves or fails; returns the error to end the stream with, if any."""
        reader = asyncio.create_task(self._read(context))
        writer = asyncio.create_task(self._write(context))
        error: PagemillError | None = UnavailableError("the stream ended")
        try:
            ends: set[asyncio.Future[Any]] = {reader, writer, self._stopped}
            await asyncio.wait(ends, return_when=asyncio.FIRST_COMPLETED)
            if self._stopped.done():
                error = self._stopped.result()
                if error is None:
                    # Drained: the worker finishes what it has and closes.
                    await asyncio.wait({reader}, timeout=DRAIN_TIMEOUT_S)
            else:
                error = failure_of(reader) or error
            return error
        finally:
            for task in (reader, writer):
                task.cancel()
            self._dispatcher.stop_worker(self, error)
            # Tokens that came before the end are delivered before its requests move.
            await asyncio.shield(self._stopped)

    async def _read(self, context: grpc.aio.ServicerContext[Any, Any]) -> None:
        while (message := await context.read()) is not grpc.aio.EOF:
            kind = message.WhichOneof("message")
            if kind == "result":
                self.engine.result(message.result)
            elif kind == "draining":
                _log.info("worker %s leaves: %s", self.hello.worker_id, message.draining.reason)
                self.send(worker_pb2.StepMessage(drain=worker_pb2.Drain()))
                self._dispatcher.stop_worker(self, None)
            elif kind == "hello":
                raise DesyncError("a second hello came on the stream")

    async def _write(self, context: grpc.aio.ServicerContext[Any, Any]) -> None:
        while True:
            await context.write(await self._outbox.get())
