"""All schedulers of a router, and requests that outlive the loss of any of them."""

from __future__ import annotations

import asyncio
import itertools
import logging
import os
import random
import socket
import time
from dataclasses import dataclass, field

from pagemill import __version__
from pagemill.errors import DeadlineError, OverloadedError, PagemillError, UnavailableError
from router import routing
from router.metrics import RouterMetrics, SchedulerLoad
from router.scheduler_client import RequestChannel, SchedulerLink, SessionLost
from router.wire import DeliveredSequence, RequestUpdate, SchedulerRequest

_log = logging.getLogger(__name__)

# A new request waits this long for a scheduler to be ready; a running stream waits longer, since a restarted
# scheduler first has to get its worker back.
ADMISSION_WAIT_S = 3.0
RESUME_WAIT_S = 120.0
# Losses in a row without a single new token: then the request itself is suspected.
MAX_FRUITLESS_LOSSES = 5
# Requests that a scheduler gives up in this time for one reason are one line of the log.
GIVEN_UP_LOG_S = 1.0


@dataclass(slots=True, frozen=True)
class ServedModel:
    """What the connected schedulers serve, in the narrowest terms. Zero and empty are unknown."""

    max_model_len: int = 0  # tokens
    kv_capacity_tokens: int = 0
    vocab_size: int = 0
    fingerprint: str = ""  # empty where schedulers differ


@dataclass(slots=True)
class _Delivered:
    """What the client has of one request: what a resubmission starts from."""

    num_sequences: int
    token_ids: dict[int, list[int]] = field(default_factory=dict)
    finished: set[int] = field(default_factory=set)

    def add(self, update: RequestUpdate) -> None:
        for index, run in update.runs.items():
            known = self.token_ids.get(index)
            if known is None:
                self.token_ids[index] = run.token_ids.copy()
            else:
                known += run.token_ids
        if update.ends:
            self.finished.update(update.ends)

    def sequences(self) -> list[DeliveredSequence]:
        indexes = sorted(self.token_ids.keys() | self.finished)
        return [DeliveredSequence(i, self.token_ids.get(i, []), i in self.finished) for i in indexes]

    @property
    def all_finished(self) -> bool:
        return len(self.finished) >= self.num_sequences


class GivenUpLog:
    """Counts requests that schedulers gave up by themselves, and logs one line for many."""

    def __init__(self) -> None:
        self._counts: dict[tuple[str, str], int] = {}

    def add(self, address: str, reason: str) -> None:
        """A request was given up at `address` and goes on elsewhere."""
        if not self._counts:
            asyncio.get_running_loop().call_later(GIVEN_UP_LOG_S, self.flush)
        self._counts[address, reason] = self._counts.get((address, reason), 0) + 1

    def flush(self) -> None:
        """Log what was counted."""
        counts, self._counts = self._counts, {}
        for (address, reason), count in counts.items():
            _log.warning("scheduler %s gave up requests that go on elsewhere: %d (%s)", address, count, reason)


class SchedulerPool:
    """Keeps one session per address and routes requests over them.

    Args:
        addresses: host:port of each scheduler.
        metrics: counters of the router.
        vocab_size: of the router's model; schedulers of another size are not used. 0 takes any.
    """

    def __init__(self, addresses: list[str], metrics: RouterMetrics, *, vocab_size: int = 0) -> None:
        router_id = f"{socket.gethostname()}-{os.getpid()}"
        self._metrics = metrics
        self._given_up = GivenUpLog()
        self._vocab_size = vocab_size
        self._changed = asyncio.Event()
        self.links = [SchedulerLink(a, router_id, __version__, self._on_change) for a in dict.fromkeys(addresses)]
        self._tasks: list[asyncio.Task[None]] = []
        self._handles = itertools.count(1)
        self._rng = random.Random()

    def start(self) -> None:
        """Begin to connect."""
        self._tasks = [asyncio.create_task(link.run(), name=f"scheduler {link.address}") for link in self.links]

    async def close(self) -> None:
        """End all sessions; their requests are aborted by it."""
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        self._given_up.flush()

    def loads(self) -> list[SchedulerLoad]:
        """Load of each scheduler."""
        return [link.load_sample() for link in self.links]

    def candidates(self) -> list[routing.Candidate]:
        """Schedulers whose model fits the router's; the others are left out."""
        return [link.candidate() for link in self.links if self._fits(link)]

    def mismatches(self) -> list[str]:
        """One sentence for each scheduler that serves another model."""
        return [
            f"scheduler {link.address} has {link.hello.vocab_size} token ids, this router's model {self._vocab_size}"
            for link in self.links
            if link.hello is not None and not self._fits(link)
        ]

    def _fits(self, link: SchedulerLink) -> bool:
        theirs = link.hello.vocab_size if link.hello is not None else 0
        return not (self._vocab_size and theirs and theirs != self._vocab_size)

    @property
    def is_ready(self) -> bool:
        return any(c.ready and not c.draining for c in self.candidates())

    def served_model(self) -> ServedModel:
        """Limits that hold on every ready scheduler."""
        hellos = [link.hello for link in self.links if link.hello is not None and link.hello.ready and self._fits(link)]
        fingerprints = {h.model_fingerprint for h in hellos}
        return ServedModel(
            max_model_len=min((h.max_model_len for h in hellos if h.max_model_len), default=0),
            kv_capacity_tokens=min((h.kv_capacity_tokens for h in hellos if h.kv_capacity_tokens), default=0),
            vocab_size=min((h.vocab_size for h in hellos if h.vocab_size), default=0),
            fingerprint=fingerprints.pop() if len(fingerprints) == 1 else "",
        )

    def _on_change(self) -> None:
        self._changed.set()

    def count_resubmission(self) -> None:
        """A stream lost its scheduler and goes on."""
        self._metrics.resubmissions.inc()

    def note_given_up(self, link: SchedulerLink, error: PagemillError) -> None:
        """A scheduler that stays connected gave a request up."""
        self._given_up.add(link.address, error.message)

    async def wait_ready(self, timeout_s: float) -> None:
        """Wait until a scheduler is ready.

        Raises:
            UnavailableError: none is within the time.
        """
        try:
            async with asyncio.timeout(timeout_s):
                while not self.is_ready:
                    self._changed.clear()
                    await self._changed.wait()
        except TimeoutError:
            raise UnavailableError("no scheduler is ready", retry_after_ms=1000) from None

    def submit(self, request: SchedulerRequest, *, batch_tokens: int = 1) -> RoutedStream:
        """A stream for a request; nothing is sent before its first update is asked for.

        With `batch_tokens`, updates after the first one may bring up to so many tokens at once.
        """
        return RoutedStream(self, request, batch_tokens)

    async def open(
        self,
        request: SchedulerRequest,
        delivered: list[DeliveredSequence],
        excluded: frozenset[str],
        fingerprint: str,
        batch_tokens: int,
    ) -> tuple[SchedulerLink, RequestChannel]:
        """Pick a scheduler and hand the request to it. Used by `RoutedStream`."""
        deadline_s = (request.deadline_unix_ns - time.time_ns()) / 1e9
        wait_s = min(RESUME_WAIT_S if delivered or excluded else ADMISSION_WAIT_S, max(0.0, deadline_s))
        routed = routing.RoutedRequest(request.token_ids, request.cache_salt, fingerprint, excluded)
        give_up = time.monotonic() + wait_s
        while True:
            await self.wait_ready(max(0.0, give_up - time.monotonic()))
            chosen = routing.pick(self.candidates(), routed, self._rng)
            if chosen is not None:
                link = next(link for link in self.links if link.address == chosen.address)
                return link, link.submit(next(self._handles), request, delivered, batch_tokens)
            await self._wait_change(give_up - time.monotonic())

    async def _wait_change(self, timeout_s: float) -> None:
        self._changed.clear()
        try:
            async with asyncio.timeout(timeout_s):
                await self._changed.wait()
        except TimeoutError:
            raise UnavailableError("no scheduler serves the weights that this stream began with") from None

    def has_alternative(self, excluded: frozenset[str]) -> bool:
        """A ready scheduler exists outside of `excluded`."""
        return any(c.ready and not c.draining and c.address not in excluded for c in self.candidates())


@dataclass(slots=True)
class _Session:
    """A request at one scheduler."""

    link: SchedulerLink
    channel: RequestChannel
    deadline: asyncio.TimerHandle  # one for the session rather than for each update: most requests have hundreds


class RoutedStream:
    """One request's updates, over as many sessions as it takes: no token is lost or repeated.

    Call `next` until it answers None, then or earlier `close`. `abort_sequence` ends one sequence.
    """

    def __init__(self, pool: SchedulerPool, request: SchedulerRequest, batch_tokens: int) -> None:
        self._pool = pool
        self._request = request
        self._batch_tokens = batch_tokens
        self._delivered = _Delivered(request.sampling.n)
        self._session: _Session | None = None
        self._error: PagemillError | None = None  # came along with an update, to be told after it
        self._has_ended = False
        self._excluded: frozenset[str] = frozenset()
        self._fingerprint = ""
        self._fruitless_losses = 0

    def abort_sequence(self, index: int, num_delivered: int) -> None:
        """End a sequence at its first `num_delivered` tokens; what comes of it later is dropped."""
        self._delivered.finished.add(index)
        self._delivered.token_ids[index] = self._delivered.token_ids.get(index, [])[:num_delivered]
        if self._session is not None:
            self._session.link.abort_sequence(self._session.channel.handle, index)

    def close(self) -> None:
        """End the request, wherever it is; one that has not finished is aborted. A second call does nothing."""
        self._has_ended = True
        self._leave(finished=False)

    async def next(self) -> RequestUpdate | None:
        """Updates in order; the last has usage, unless all sequences were ended by `abort_sequence`.

        None: nothing is left to come.

        Raises:
            PagemillError: the request failed, its deadline passed, or no scheduler could go on with it.
        """
        while not self._has_ended:
            session = self._session
            if session is None:
                if self._delivered.all_finished:
                    break
                session = await self._open()
            try:
                update = await self._receive(session.channel)
            except SessionLost:
                await self._on_loss(UnavailableError(f"scheduler {session.link.address} was lost"), finished=False)
            except (UnavailableError, OverloadedError) as error:
                self._check_continuable(error, session.link)
                self._pool.note_given_up(session.link, error)
                await self._on_loss(error, finished=True)
            except PagemillError as error:
                self._leave(finished=not isinstance(error, DeadlineError))
                raise
            else:
                if update.usage is not None:
                    self._has_ended = True
                    self._leave(finished=True)
                return update
        return None

    async def _receive(self, channel: RequestChannel) -> RequestUpdate:
        if self._error is not None:
            error, self._error = self._error, None
            raise error
        update = await channel.get()
        if update.error is not None:
            if not update.runs:
                raise update.error
            self._error, update.error = update.error, None
        delivered = self._delivered
        if delivered.finished:
            self._drop_ended(update)
        if update.runs or update.ends:
            self._fruitless_losses = 0
            self._excluded = frozenset()
        delivered.add(update)
        return update

    @property
    def _remaining_s(self) -> float:
        return (self._request.deadline_unix_ns - time.time_ns()) / 1e9

    async def _open(self) -> _Session:
        try:
            link, channel = await self._pool.open(
                self._request, self._delivered.sequences(), self._excluded, self._fingerprint, self._batch_tokens
            )
        except UnavailableError:
            if self._remaining_s <= 0:
                raise DeadlineError("the request ran past its deadline") from None
            raise
        if link.hello is not None and not self._fingerprint:
            self._fingerprint = link.hello.model_fingerprint
        timer = asyncio.get_running_loop().call_later(
            self._remaining_s, channel.fail, DeadlineError("the request ran past its deadline")
        )
        self._session = _Session(link, channel, timer)
        return self._session

    def _leave(self, *, finished: bool) -> None:
        session, self._session = self._session, None
        if session is not None:
            session.deadline.cancel()
            session.link.release(session.channel.handle, finished=finished)

    def _drop_ended(self, update: RequestUpdate) -> None:
        for index in self._delivered.finished & (update.runs.keys() | update.ends.keys()):
            update.runs.pop(index, None)
            update.ends.pop(index, None)

    def _check_continuable(self, error: PagemillError, link: SchedulerLink) -> None:
        """Raise the error of a scheduler that is overloaded, where nobody else would take the request."""
        if not isinstance(error, OverloadedError) or self._delivered.token_ids:
            return
        if not self._pool.has_alternative(self._excluded | {link.address}):
            self._leave(finished=True)
            raise error

    async def _on_loss(self, error: PagemillError, *, finished: bool) -> None:
        assert self._session is not None
        self._excluded |= {self._session.link.address}
        self._leave(finished=finished)
        self._fruitless_losses += 1
        if self._fruitless_losses > MAX_FRUITLESS_LOSSES:
            raise error
        self._pool.count_resubmission()
        _log.debug("request goes on elsewhere: %s", error.message, extra={"request_id": self._request.request_id})
        await asyncio.sleep(min(1.0, 0.05 * 2**self._fruitless_losses))
