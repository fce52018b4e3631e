"""Requests that wait for a worker to be attached. Lives on the event loop."""

from __future__ import annotations

import time

from pagemill.errors import DeadlineError, OverloadedError, PagemillError, UnavailableError
from scheduler.scheduler import RETRY_AFTER_MS
from scheduler.sequence import DeliveredTokens, FinishedSequence, FinishReason, NewRequest, Timings, Usage
from scheduler.session import RouterSession

# How long a request without deadline waits for a worker to come.
MAX_PARKED_S = 600.0
# What was running before may exceed the bounds by this factor: the loss of a worker must not end streams.
_RESUMED_FACTOR = 2

Key = tuple[RouterSession, int]


class ParkedRequests:
    """Bounded in number and prompt tokens, in order of arrival."""

    def __init__(self, max_requests: int, max_tokens: int) -> None:
        self._max_requests = max_requests
        self._max_tokens = max_tokens
        self._requests: dict[Key, tuple[NewRequest, float]] = {}
        self._num_tokens = 0

    def __len__(self) -> int:
        return len(self._requests)

    def __contains__(self, key: Key) -> bool:
        return key in self._requests

    def park(self, key: Key, request: NewRequest) -> None:
        """Take in a request.

        Raises:
            OverloadedError: a bound is reached.
        """
        factor = _RESUMED_FACTOR if request.delivered else 1
        num_tokens = self._num_tokens + len(request.token_ids)
        if len(self) >= self._max_requests * factor or (len(self) and num_tokens > self._max_tokens * factor):
            raise OverloadedError("no worker is attached and the queue is full", retry_after_ms=RETRY_AFTER_MS)
        self._requests[key] = request, time.monotonic()
        self._num_tokens = num_tokens

    def remove(self, key: Key) -> None:
        """Forget a request, if it is here."""
        entry = self._requests.pop(key, None)
        if entry is not None:
            self._num_tokens -= len(entry[0].token_ids)

    def take_all(self) -> dict[Key, NewRequest]:
        """All of them; none is left."""
        taken = {key: request for key, (request, _) in self._requests.items()}
        self._requests, self._num_tokens = {}, 0
        return taken

    def expired(self) -> list[tuple[Key, PagemillError]]:
        """Those that have waited too long, and why each is to end. They stay."""
        now_s, now_ns = time.monotonic(), time.time_ns()
        expired: list[tuple[Key, PagemillError]] = []
        for key, (request, since_s) in self._requests.items():
            if request.deadline_unix_ns and request.deadline_unix_ns <= now_ns:
                expired.append((key, DeadlineError("the request's deadline passed while no worker was attached")))
            elif now_s - since_s > MAX_PARKED_S:
                expired.append((key, UnavailableError("no worker came", retry_after_ms=RETRY_AFTER_MS)))
        return expired

    def abort(self, key: Key, index: int | None) -> list[FinishedSequence]:
        """As `abort_waiting`; the request stays."""
        return abort_waiting(self._requests[key][0], index)


def abort_waiting(request: NewRequest, index: int | None) -> list[FinishedSequence]:
    """End a request that no engine has, or one of its sequences; what ended. The last one of the request has usage."""
    outputs = [request.delivered.setdefault(number, DeliveredTokens()) for number in range(request.params.n)]
    ended: list[FinishedSequence] = []
    for number, output in enumerate(outputs):
        if output.finished or index not in (None, number):
            continue
        output.finished = True
        ended.append(FinishedSequence(request.handle, number, FinishReason.ABORT))
    if ended and all(output.finished for output in outputs):
        num_tokens = sum(len(output.token_ids) for output in outputs)
        ended[-1].usage = Usage(len(request.token_ids), request.cached_tokens or 0, num_tokens)
        ended[-1].timings = Timings(
            request.arrival_unix_ns, request.scheduled_unix_ns, request.first_token_unix_ns, time.time_ns()
        )
    return ended
