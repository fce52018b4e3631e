"""Which steps tell the worker whose traces they serve: first and last prompt chunk, then one step in many."""

from __future__ import annotations

from itertools import islice

from scheduler.sequence import Request

PERIOD_STEPS = 32
MAX_PERIODIC_LINKS = 8


class TraceLinks:
    """Live requests that are traced, by number."""

    def __init__(self) -> None:
        self._traced: dict[int, str] = {}

    def first_chunk(self, request: Request) -> list[str]:
        if not request.traceparent:
            return []
        self._traced[request.number] = request.traceparent
        return [request.traceparent]

    def last_chunk(self, request: Request, linked: list[str]) -> list[str]:
        if not request.traceparent or request.traceparent in linked:
            return []
        return [request.traceparent]

    def periodic(self, step: int, linked: list[str]) -> list[str]:
        """`linked`, and in every 32nd step some of all traced requests."""
        if not self._traced or step % PERIOD_STEPS:
            return linked
        return list(dict.fromkeys([*linked, *islice(self._traced.values(), MAX_PERIODIC_LINKS)]))

    def forget(self, request: Request) -> None:
        self._traced.pop(request.number, None)
