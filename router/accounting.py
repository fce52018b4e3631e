"""What the end of a request leaves behind: its metrics, its span and one line of log."""

from __future__ import annotations

import asyncio
import logging
import time

from opentelemetry import trace

from pagemill.errors import PagemillError
from router.generation import PreparedRequest, StreamEvent
from router.metrics import RouterMetrics

_log = logging.getLogger("router.requests")

_CODE_NAMES = {
    3: "INVALID_ARGUMENT",
    4: "DEADLINE_EXCEEDED",
    5: "NOT_FOUND",
    6: "ALREADY_EXISTS",
    8: "RESOURCE_EXHAUSTED",
    9: "FAILED_PRECONDITION",
    10: "ABORTED",
    14: "UNAVAILABLE",
    16: "UNAUTHENTICATED",
}


def outcome_of(error: BaseException) -> str:
    """Name of the canonical code of what ended a request."""
    if isinstance(error, asyncio.CancelledError | GeneratorExit):
        return "CANCELLED"
    return _CODE_NAMES.get(error.grpc_code, "INTERNAL") if isinstance(error, PagemillError) else "INTERNAL"


class RequestAccount:
    """Accounts for one request: observe every event, end it once."""

    def __init__(self, prepared: PreparedRequest, metrics: RouterMetrics) -> None:
        self._prepared = prepared
        self._metrics = metrics
        self._num_tokens = 0
        self._num_unfinished = prepared.sampling.n
        self._cached_tokens = 0
        self._has_last_event = False
        self._last_tokens_s: dict[int, float] = {}  # by sequence index
        metrics.prompt_tokens.inc(len(prepared.prompt_token_ids))
        metrics.request_prompt_tokens.observe(len(prepared.prompt_token_ids))

    def observe(self, event: StreamEvent) -> None:
        """Account for the tokens of an event, as it is delivered."""
        now = time.monotonic()
        num_before = self._num_tokens
        for delta in event.deltas:
            if delta.finish_reason is not None:
                self._num_unfinished -= 1
                self._metrics.finished.labels(delta.finish_reason).inc()
            count = len(delta.token_ids)
            if not count:
                continue
            if not self._num_tokens:
                self._metrics.time_to_first_token.observe((time.time_ns() - self._prepared.arrival_unix_ns) / 1e9)
            before = self._last_tokens_s.get(delta.index)
            if before is not None:
                self._metrics.inter_token_latency.observe((now - before) / count, count)
            self._last_tokens_s[delta.index] = now
            self._num_tokens += count
        # As they come, not at the end: the rate of an output that takes minutes is to be seen meanwhile.
        if self._num_tokens > num_before:
            self._metrics.generation_tokens.inc(self._num_tokens - num_before)
        if event.usage is not None:
            self._cached_tokens = event.usage.cached_tokens
            self._has_last_event = True

    def end(self, outcome: str) -> None:
        """The request is over; `outcome` is the name of a canonical code.

        A client that leaves after the last event did not cancel anything.
        """
        outcome = "OK" if self._has_last_event else outcome
        prepared, metrics = self._prepared, self._metrics
        seconds = (time.time_ns() - prepared.arrival_unix_ns) / 1e9
        metrics.requests.labels(outcome).inc()
        metrics.request_generation_tokens.observe(self._num_tokens)
        if self._num_unfinished:
            metrics.finished.labels("abort" if outcome == "CANCELLED" else "error").inc(self._num_unfinished)
        metrics.request_latency.observe(seconds)
        from_cache = prepared.cached_output is not None
        span = prepared.span
        span.set_attribute("pagemill.outcome", outcome)
        span.set_attribute("pagemill.prompt_tokens", len(prepared.prompt_token_ids))
        span.set_attribute("pagemill.completion_tokens", self._num_tokens)
        span.set_attribute("pagemill.response_from_cache", from_cache)
        with trace.use_span(span):
            _log.info(
                "request ended",
                extra={
                    "request_id": prepared.request_id,
                    "outcome": outcome,
                    "prompt_tokens": len(prepared.prompt_token_ids),
                    "cached_tokens": self._cached_tokens,
                    "completion_tokens": self._num_tokens,
                    "prompt_cache": "response" if from_cache else "tokens" if prepared.tokens_from_cache else "miss",
                    "seconds": round(seconds, 4),
                },
            )
        span.end()
