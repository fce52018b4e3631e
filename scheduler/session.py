"""What goes to one router: merged while it is slow, bounded, never out of order. Lives on the event loop's thread."""

from __future__ import annotations

import asyncio

from pagemill.errors import PagemillError, SlowConsumerError
from pagemill.v1 import scheduler_pb2
from scheduler.sequence import FinishedSequence, NewRequest, OwnerOutput, RequestFailure
from scheduler.wire import output_to_proto

# Tokens and log-probability entries that may wait for a router. Far beyond what a slow second brings, far below what
# hurts: a router that is this far behind is stuck.
MAX_PENDING_ITEMS = 1 << 18
MAX_BACKLOG = 4096


class RouterSession:
    """Outgoing side of one session, and the requests held back by its flow control."""

    def __init__(self, router_id: str) -> None:
        self.router_id = router_id
        self.handles: set[int] = set()  # live requests handed to an engine or parked
        self.backlog: dict[int, NewRequest] = {}  # by handle, in order of arrival
        self.max_inflight_requests = 0  # 0 is no bound
        self.closed: asyncio.Future[PagemillError] = asyncio.get_running_loop().create_future()
        self._output: OwnerOutput | None = None
        self._output_step = 0
        self._num_pending = 0
        self._hello: scheduler_pb2.SchedulerHello | None = None
        self._load: scheduler_pb2.LoadReport | None = None
        self._wakeup = asyncio.Event()

    def put_output(self, output: OwnerOutput, step: int) -> None:
        """Take what a step brought; joins what still waits."""
        if self.closed.done():
            return
        self._num_pending += _num_items(output)
        if self._num_pending > MAX_PENDING_ITEMS:
            self.close(SlowConsumerError("the router reads its session too slowly"))
            return
        if self._output is None:
            self._output = output
        else:
            _merge(self._output, output)
        self._output_step = max(self._output_step, step)
        self._wakeup.set()

    def fail_request(self, handle: int, error: PagemillError, failure: RequestFailure) -> None:
        """Tell that one request failed before an engine had it."""
        self.put_output(OwnerOutput(failures=[failure]), 0)

    def put_finished(self, finished: FinishedSequence) -> None:
        self.put_output(OwnerOutput(finished=[finished]), 0)

    def put_hello(self, hello: scheduler_pb2.SchedulerHello) -> None:
        """The latest state replaces one that was not sent yet."""
        self._hello = hello
        self._wakeup.set()

    def put_load(self, load: scheduler_pb2.LoadReport) -> None:
        """The latest load replaces one that was not sent yet; its cache changes are joined."""
        waiting = self._load
        if waiting is not None and not load.prefix_hashes_reset:
            load.prefix_hashes_reset = waiting.prefix_hashes_reset
            evicted = set(load.prefix_hashes_evicted)
            added = [key for key in waiting.prefix_hashes_added if key not in evicted]
            load.prefix_hashes_added.extend(added)
            again = set(load.prefix_hashes_added)
            load.prefix_hashes_evicted.extend(key for key in waiting.prefix_hashes_evicted if key not in again)
        self._load = load
        self._wakeup.set()

    def close(self, error: PagemillError) -> None:
        """End the session with an error."""
        if not self.closed.done():
            self.closed.set_result(error)

    async def next_messages(self) -> list[scheduler_pb2.SchedulerMessage]:
        """All that waits to be sent; waits for something to come."""
        await self._wakeup.wait()
        self._wakeup.clear()
        messages = []
        if self._hello is not None:
            messages.append(scheduler_pb2.SchedulerMessage(hello=self._hello))
        if self._output is not None:
            messages.append(output_to_proto(self._output, self._output_step))
        if self._load is not None:
            messages.append(scheduler_pb2.SchedulerMessage(load=self._load))
        self._hello = self._output = self._load = None
        self._num_pending = 0
        return messages


def _num_items(output: OwnerOutput) -> int:
    columns = [*output.logprobs.values(), *(entry for _, entry in output.prompt_logprobs)]
    return (
        len(output.handles)
        + len(output.finished)
        + len(output.failures)
        + sum(len(c.chosen) * (1 + c.num_top) for c in columns)
    )


def _merge(into: OwnerOutput, output: OwnerOutput) -> None:
    start = len(into.handles)
    into.handles += output.handles
    into.indexes += output.indexes
    into.token_ids += output.token_ids
    into.logprobs.update((start + run, columns) for run, columns in output.logprobs.items())
    into.finished += output.finished
    into.failures += output.failures
    into.prompt_logprobs += output.prompt_logprobs
