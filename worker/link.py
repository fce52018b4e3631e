"""The stream to the scheduler: the worker dials, says hello, receives steps and sends results.

Threads: gRPC's own thread pulls messages to send from a bounded queue; a reader thread, one per stream, moves received
messages into a bounded queue; whoever owns the `SchedulerStream` takes them from there. A full queue stops the reader,
and with it, by HTTP/2 flow control, the scheduler.
"""

from __future__ import annotations

import queue
import random
import threading
from collections.abc import Callable, Iterator

import grpc

from pagemill.errors import PagemillError, UnavailableError
from pagemill.rpc import error_from_rpc, sync_channel
from pagemill.v1 import scheduler_pb2_grpc, worker_pb2

# The scheduler keeps two steps in flight; more than a few queued ones mean that it does not wait for results.
MAX_QUEUED_MESSAGES = 16
ATTACH_TIMEOUT_S = 10.0
_POLL_S = 0.2


class StreamEndedError(UnavailableError):
    """The stream is over; the message says why."""


class SchedulerStream:
    """One AttachWorker call.

    Args:
        address: host:port of the scheduler.
        hello: the first message.

    Raises nothing on creation: a scheduler that is away shows when messages are received.
    """

    def __init__(self, address: str, hello: worker_pb2.WorkerMessage) -> None:
        self._address = address
        self._closed = threading.Event()
        self._inbox: queue.Queue[worker_pb2.StepMessage | PagemillError] = queue.Queue(MAX_QUEUED_MESSAGES)
        self._outbox: queue.Queue[worker_pb2.WorkerMessage | None] = queue.Queue(4 * MAX_QUEUED_MESSAGES)
        self._outbox.put(hello)
        self._channel = sync_channel(address)
        stub = scheduler_pb2_grpc.SchedulerStub(self._channel)  # type: ignore[no-untyped-call]
        self._call = stub.AttachWorker(self._requests())
        self._reader = threading.Thread(target=self._read, name="scheduler-stream", daemon=True)
        self._reader.start()

    def _requests(self) -> Iterator[worker_pb2.WorkerMessage]:
        while (message := self._outbox.get()) is not None:
            yield message

    def _read(self) -> None:
        try:
            for message in self._call:
                if not self._deliver(message):
                    return
            end: PagemillError = StreamEndedError(f"scheduler {self._address} closed the stream")
        except grpc.RpcError as error:
            end = StreamEndedError(f"scheduler {self._address}: {error_from_rpc(error).message}")
        self._deliver(end)

    def _deliver(self, item: worker_pb2.StepMessage | PagemillError) -> bool:
        while not self._closed.is_set():
            try:
                self._inbox.put(item, timeout=_POLL_S)
            except queue.Full:
                continue
            return True
        return False

    def receive(self, timeout_s: float) -> worker_pb2.StepMessage | None:
        """The next message, or None where none came in time.

        Raises:
            StreamEndedError: the stream is over.
        """
        try:
            item = self._inbox.get(timeout=timeout_s)
        except queue.Empty:
            return None
        if isinstance(item, PagemillError):
            raise item
        return item

    def attached(self, timeout_s: float = ATTACH_TIMEOUT_S) -> worker_pb2.Attached:
        """The scheduler's answer to the hello.

        Raises:
            StreamEndedError: the scheduler is away, refused, or did not answer in time.
        """
        message = self.receive(timeout_s)
        if message is None:
            raise StreamEndedError(f"scheduler {self._address} did not answer within {timeout_s:g} s")
        if message.WhichOneof("message") != "attached":
            raise StreamEndedError(f"scheduler {self._address} sent {message.WhichOneof('message')} before attached")
        return message.attached

    def send(self, message: worker_pb2.WorkerMessage) -> None:
        """Queue a message.

        Raises:
            StreamEndedError: the queue stays full, so the scheduler reads no more.
        """
        try:
            self._outbox.put(message, timeout=ATTACH_TIMEOUT_S)
        except queue.Full:
            raise StreamEndedError(f"scheduler {self._address} takes no results") from None

    def close(self, *, flush_timeout_s: float = 0.0) -> None:
        """End the call. With a flush timeout, what is queued is sent first and the scheduler may end the stream."""
        try:
            self._outbox.put_nowait(None)
        except queue.Full:
            flush_timeout_s = 0.0
        if flush_timeout_s:
            self._reader.join(flush_timeout_s)
        self._closed.set()
        self._call.cancel()
        self._channel.close()
        self._drop_queued_requests()
        self._reader.join(_POLL_S * 5)

    def _drop_queued_requests(self) -> None:
        """Let gRPC's sending thread see the end even where it had not come to it."""
        while True:
            try:
                self._outbox.get_nowait()
            except queue.Empty:
                break
        self._outbox.put_nowait(None)


class Backoff:
    """Waits between attempts to attach: doubling from 0.1 s to 2 s, each drawn from the upper half of its range."""

    def __init__(self, wait: Callable[[float], bool], *, first_s: float = 0.1, longest_s: float = 2.0) -> None:
        """`wait(seconds)` sleeps, and returns True to give up."""
        self._wait = wait
        self._first_s = first_s
        self._longest_s = longest_s
        self._next_s = first_s

    def reset(self) -> None:
        """The last attempt succeeded."""
        self._next_s = self._first_s

    def sleep(self) -> bool:
        """Wait before the next attempt; True where the worker is to stop instead."""
        delay = self._next_s * random.uniform(0.5, 1.0)
        self._next_s = min(self._longest_s, self._next_s * 2)
        return self._wait(delay)
