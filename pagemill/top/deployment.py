"""Looking at all processes of a deployment at once, again and again."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from datetime import UTC, datetime
from typing import Any

from pagemill.top import figures
from pagemill.top.figures import RouterFigures, SchedulerFigures, WorkerFigures
from pagemill.top.rates import Change
from pagemill.top.scrape import Address, AwayError, Snapshot, scrape


@dataclass(frozen=True, slots=True)
class Away:
    """An address that gave no metrics, and why."""

    address: str
    reason: str


@dataclass(frozen=True, slots=True)
class Frame:
    """What one look found. `time` is ISO 8601 in UTC, `interval_s` the longest time that a rate in it is of."""

    time: str
    interval_s: float | None
    routers: list[RouterFigures]
    schedulers: list[SchedulerFigures]
    workers: list[WorkerFigures]
    away: list[Away]

    def to_json(self) -> dict[str, Any]:
        """The frame as plain dicts, lists, strings and numbers."""
        return asdict(self)

    @property
    def is_empty(self) -> bool:
        """No address answered."""
        return not (self.routers or self.schedulers or self.workers)


class Deployment:
    """The processes at some addresses. Keeps what each last told, so that a look can say what has happened since.

    Args:
        api_key: for routers that want one, "" for none.
        timeout_s: of one request.
    """

    def __init__(self, addresses: Sequence[Address], api_key: str, timeout_s: float) -> None:
        self._addresses = list(dict.fromkeys(addresses))
        self._api_key, self._timeout_s = api_key, timeout_s
        self._last: dict[Address, Snapshot] = {}

    def look(self) -> Frame:
        """Ask every process, all at the same time. An address that gives no metrics is away in this frame only."""
        answers: dict[Address, Snapshot | AwayError] = {}
        # Daemons, so that Ctrl-C need not wait for an address that hangs.
        threads = [threading.Thread(target=self._ask, args=(a, answers), daemon=True) for a in self._addresses]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        found: dict[Address, Change] = {}
        away: list[Away] = []
        for address in self._addresses:
            answer = answers[address]
            if isinstance(answer, AwayError):
                away.append(Away(address.given, str(answer)))
                continue
            found[address] = Change.between(self._last.get(address), answer)
            self._last[address] = answer
        return _frame(found, away)

    def _ask(self, address: Address, answers: dict[Address, Snapshot | AwayError]) -> None:
        try:
            answers[address] = scrape(address, self._api_key, self._timeout_s)
        except AwayError as err:
            answers[address] = err


def _frame(found: dict[Address, Change], away: list[Away]) -> Frame:
    routers, own, routed, workers = [], [], [], []
    for address, change in found.items():
        match change.current.kind:
            case "router":
                routers.append(figures.router_figures(address.given, change))
                routed += figures.schedulers_of_router(address.given, change)
            case "scheduler":
                own.append(figures.scheduler_figures(address.given, change))
            case "worker":
                workers.append(figures.worker_figures(address.given, change))
    return Frame(
        time=datetime.now(UTC).isoformat(timespec="milliseconds"),
        interval_s=max((change.seconds for change in found.values() if change.seconds is not None), default=None),
        routers=routers,
        schedulers=figures.merge_schedulers(own, routed),
        workers=workers,
        away=away,
    )
