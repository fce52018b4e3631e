"""One session per scheduler: connect, demultiplex, reconnect. All of it runs on the router's event loop."""

from __future__ import annotations

import asyncio
import logging
from collections import deque
from collections.abc import Callable

import grpc
import grpc.aio

from pagemill.errors import OverloadedError, PagemillError, SlowConsumerError, UnavailableError
from pagemill.rpc import aio_channel
from pagemill.v1 import scheduler_pb2, scheduler_pb2_grpc
from router.metrics import SchedulerLoad
from router.routing import Candidate
from router.wire import (
    DeliveredSequence,
    RequestUpdate,
    SchedulerRequest,
    abort_message,
    hello_message,
    read_output,
    submit_message,
)

_log = logging.getLogger(__name__)

BACKOFF_FIRST_S = 0.1
BACKOFF_MOST_S = 2.0
HELLO_TIMEOUT_S = 5.0
WRITE_TIMEOUT_S = 10.0
# Load reports come every second: a session that is silent for this long is dead, whatever TCP says.
SILENCE_TIMEOUT_S = 20.0
MAX_QUEUED_SENDS = 4096
# Output that may be on its way from a scheduler. While the router is behind, what waits at the scheduler is joined, and
# so cheaper to handle; what is on its way already is not, and each message of it would be a step late.
RECEIVE_WINDOW_BYTES = 1 << 16
# Numbers (tokens, alternatives) that wait for a client who does not read; beyond this the request is cancelled.
MAX_PENDING_WEIGHT = 1 << 16
# Prefix keys remembered per scheduler, so that a peer can not fill the router's memory.
MAX_PREFIX_HASHES = 1 << 20


class SessionLost(Exception):
    """The session ended while a request was on it."""


class RequestChannel:
    """What one request on one session receives. One task reads.

    Updates merge while nobody reads: memory follows tokens, not messages.

    Args:
        handle: number of the request on its session.
        batch_tokens: after the first update, `get` waits until so many tokens came, or something other than tokens:
            what is not streamed need not be looked at token by token.
    """

    __slots__ = ("_batch_weight", "_is_due", "_lost", "_pending", "_waiter", "_weight", "handle")

    def __init__(self, handle: int, batch_tokens: int = 1) -> None:
        self.handle = handle
        self._batch_weight = batch_tokens
        self._pending: RequestUpdate | None = None
        self._weight = batch_tokens  # so that the first update is due at once
        self._is_due = False
        self._lost = False
        self._waiter: asyncio.Future[None] | None = None

    def put(self, update: RequestUpdate) -> bool:
        """Take an update; False where the buffer is full and the request must be cancelled."""
        self._weight += update.weight
        if self._weight > MAX_PENDING_WEIGHT:
            self._pending = None
            self.fail(SlowConsumerError("the client read its stream too slowly"))
            return False
        if self._pending is None:
            self._pending = update
        else:
            self._pending.merge(update)
        if self._weight >= self._batch_weight or update.ends or update.usage is not None or update.error is not None:
            self._wake()
        return True

    def _wake(self) -> None:
        self._is_due = True
        waiter, self._waiter = self._waiter, None
        if waiter is not None and not waiter.done():
            waiter.set_result(None)

    def fail(self, error: PagemillError) -> None:
        """End the request with an error, behind what is pending."""
        if self._pending is None:
            self._pending = RequestUpdate()
        self._pending.error = error
        self._wake()

    def lose(self) -> None:
        """The session is gone; what is pending can still be read."""
        self._lost = True
        self._wake()

    async def get(self) -> RequestUpdate:
        """All that came since the last call; waits for something to come.

        Raises:
            SessionLost: the session ended and nothing is left.
        """
        while not self._is_due:
            self._waiter = asyncio.get_running_loop().create_future()
            await self._waiter
        update = self._pending
        if update is None:
            raise SessionLost
        self._pending, self._weight, self._is_due = None, 0, self._lost
        return update


class SchedulerLink:
    """The session to one scheduler address, for as long as the router lives.

    Args:
        address: host:port of the scheduler.
        router_id, version: what the hello says.
        on_change: called when readiness may have changed.
    """

    def __init__(self, address: str, router_id: str, version: str, on_change: Callable[[], None]) -> None:
        self.address = address
        self.hello: scheduler_pb2.SchedulerHello | None = None
        self.load = scheduler_pb2.LoadReport()
        self._hello_message = hello_message(router_id, version)
        self._on_change = on_change
        self._prefix_hashes: set[int] = set()
        self._channels: dict[int, RequestChannel] = {}
        self._outgoing: deque[scheduler_pb2.RouterMessage] = deque()
        self._has_outgoing = asyncio.Event()
        self._was_connected = False

    @property
    def connected(self) -> bool:
        return self.hello is not None

    def candidate(self) -> Candidate:
        """This scheduler as routing sees it."""
        hello = self.hello
        if hello is None:
            return Candidate(self.address)
        return Candidate(
            address=self.address,
            model_fingerprint=hello.model_fingerprint,
            ready=hello.ready,
            draining=hello.draining,
            max_model_len=hello.max_model_len,
            block_size=hello.block_size,
            running=self.load.running,
            waiting=self.load.waiting,
            own_inflight=len(self._channels),
            prefix_hashes=self._prefix_hashes,
        )

    def load_sample(self) -> SchedulerLoad:
        """This scheduler as metrics see it."""
        load = self.load
        return SchedulerLoad(
            scheduler=(self.hello.scheduler_id if self.hello else "") or self.address,
            connected=self.connected,
            running=load.running,
            waiting=load.waiting,
            kv_blocks_used=max(0, load.total_blocks - load.free_blocks),
            kv_blocks_total=load.total_blocks,
            workers=load.workers,
            preemptions=load.preemptions,
        )

    def submit(
        self, handle: int, request: SchedulerRequest, delivered: list[DeliveredSequence], batch_tokens: int = 1
    ) -> RequestChannel:
        """Send a request. The caller gives the handle back with `release`.

        Raises:
            UnavailableError: there is no session now.
            OverloadedError: the scheduler does not take messages fast enough.
        """
        if not self.connected:
            raise UnavailableError(f"scheduler {self.address} is away")
        if len(self._outgoing) >= MAX_QUEUED_SENDS:
            raise OverloadedError(f"scheduler {self.address} takes requests too slowly", retry_after_ms=1000)
        channel = self._channels[handle] = RequestChannel(handle, batch_tokens)
        self._send(submit_message(handle, request, delivered))
        return channel

    def abort_sequence(self, handle: int, index: int) -> None:
        """End one sequence of a request; the others go on."""
        if handle in self._channels:
            self._send(abort_message(handle, index))

    def release(self, handle: int, *, finished: bool) -> None:
        """Forget a request; one that has not finished is aborted at the scheduler."""
        if self._channels.pop(handle, None) is not None and not finished:
            self._send(abort_message(handle))

    def _send(self, message: scheduler_pb2.RouterMessage) -> None:
        # Only submissions are counted against the bound: there is at most one abort for each live sequence.
        if self.connected:
            self._outgoing.append(message)
            self._has_outgoing.set()

    async def run(self) -> None:
        """Hold a session, again and again, until cancelled."""
        backoff = BACKOFF_FIRST_S
        while True:
            self._was_connected = False
            try:
                await self._session()
                reason = "the scheduler ended the session"
            except (grpc.aio.AioRpcError, TimeoutError, ValueError, SessionLost) as error:
                details = error.details() if isinstance(error, grpc.aio.AioRpcError) else str(error)
                reason = " ".join((details or type(error).__name__).split())
            except Exception:  # a bug must not end the link for good
                _log.exception("session with scheduler %s failed", self.address)
                reason = "internal error"
            finally:
                num_requests = self._drop_session()
            if self._was_connected:
                backoff = BACKOFF_FIRST_S
                _log.warning(
                    "lost scheduler %s (%s); requests that go on elsewhere: %d", self.address, reason, num_requests
                )
            await asyncio.sleep(backoff)
            backoff = min(BACKOFF_MOST_S, backoff * 2)

    async def _session(self) -> None:
        async with aio_channel(self.address, receive_window_bytes=RECEIVE_WINDOW_BYTES) as channel:
            call = scheduler_pb2_grpc.SchedulerStub(channel).Session()  # type: ignore[no-untyped-call]
            try:
                async with asyncio.timeout(HELLO_TIMEOUT_S):
                    await call.write(self._hello_message)
                    first = await call.read()
                if first is grpc.aio.EOF or first.WhichOneof("message") != "hello":
                    raise ValueError("the first message of the session was no hello")
                self._take_hello(first.hello)
                self._was_connected = True
                _log.info("connected to scheduler %s", self.address)
                await self._exchange(call)
            finally:
                call.cancel()

    async def _exchange(self, call: grpc.aio.StreamStreamCall) -> None:
        """Read and write until either side fails; the failure of one ends the other."""
        tasks = [asyncio.create_task(self._read(call)), asyncio.create_task(self._write(call))]
        try:
            done, _ = await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
            for task in done:
                task.result()
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)

    async def _write(self, call: grpc.aio.StreamStreamCall) -> None:
        while True:
            await self._has_outgoing.wait()
            while self._outgoing:
                async with asyncio.timeout(WRITE_TIMEOUT_S):
                    await call.write(self._outgoing.popleft())
            self._has_outgoing.clear()

    async def _read(self, call: grpc.aio.StreamStreamCall) -> None:
        while True:
            async with asyncio.timeout(SILENCE_TIMEOUT_S):
                message = await call.read()
            if message is grpc.aio.EOF:
                return
            kind = message.WhichOneof("message")
            if kind == "output":
                self._take_output(message.output)
            elif kind == "load":
                self._take_load(message.load)
            elif kind == "hello":
                self._take_hello(message.hello)

    def _take_output(self, output: scheduler_pb2.StepOutput) -> None:
        for handle, update in read_output(output).items():
            channel = self._channels.get(handle)
            # Output of a request that was just aborted is still under way for a step or two.
            if channel is not None and not channel.put(update):
                self.release(handle, finished=False)

    def _take_load(self, load: scheduler_pb2.LoadReport) -> None:
        self.load = load
        if load.prefix_hashes_reset:
            self._prefix_hashes.clear()
        self._prefix_hashes.difference_update(load.prefix_hashes_evicted)
        room = MAX_PREFIX_HASHES - len(self._prefix_hashes)
        self._prefix_hashes.update(load.prefix_hashes_added[:room])

    def _take_hello(self, hello: scheduler_pb2.SchedulerHello) -> None:
        self.hello = hello
        self._on_change()

    def _drop_session(self) -> int:
        """Forget what the session brought; returns how many requests were on it."""
        channels, self._channels = self._channels, {}
        self.hello = None
        self.load = scheduler_pb2.LoadReport()
        self._prefix_hashes = set()
        self._outgoing.clear()
        self._has_outgoing.clear()
        for channel in channels.values():
            channel.lose()
        if self._was_connected:
            self._on_change()
        return len(channels)
