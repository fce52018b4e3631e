"""A prepared request while it runs: its events, accounted for, with everything given back at the end."""

from __future__ import annotations

from collections.abc import Callable
from typing import Self

from router.accounting import RequestAccount, outcome_of
from router.answer_stream import AnswerStream, replay
from router.generation import PreparedRequest, StreamEvent
from router.metrics import RouterMetrics
from router.prompt_cache import PromptCache


class RunningRequest:
    """Iterate over the events once and close it in any case, as `contextlib.aclosing` does.

    An iterator rather than a generator: a token passes here, and each generator on its way costs as much as its text.

    Args:
        prepared: the request.
        open_answer: submits it.
        cache: takes the answer, where it may be kept.
        metrics: of the router.
    """

    def __init__(
        self,
        prepared: PreparedRequest,
        open_answer: Callable[[], AnswerStream],
        cache: PromptCache,
        metrics: RouterMetrics,
    ) -> None:
        self._prepared = prepared
        self._open_answer = open_answer
        self._cache = cache
        self._metrics = metrics
        self._account: RequestAccount | None = None
        self._answer: AnswerStream | None = None
        self._has_ended = False

    def __aiter__(self) -> Self:
        return self

    async def __anext__(self) -> StreamEvent:
        """The next event.

        Raises:
            PagemillError: the request failed; what was delivered before stays valid.
        """
        if self._has_ended:
            raise StopAsyncIteration
        try:
            event = await self._next()
            if event is not None:
                assert self._account is not None
                self._account.observe(event)
                if event.usage is not None:
                    self._keep_answer()
                return event
        except BaseException as error:
            self._end(outcome_of(error))
            raise
        self._end("OK")
        raise StopAsyncIteration

    async def _next(self) -> StreamEvent | None:
        if self._account is not None:
            return await self._answer.next() if self._answer is not None else None
        self._account = RequestAccount(self._prepared, self._metrics)
        if self._prepared.cached_output is not None:
            return replay(self._prepared, self._prepared.cached_output)
        self._answer = self._open_answer()
        return await self._answer.next()

    def _keep_answer(self) -> None:
        if self._answer is not None and (output := self._answer.cacheable_output()) is not None:
            self._cache.put_response(self._prepared.response_key, output)

    async def aclose(self) -> None:
        """End the request; one that has not finished is aborted and its blocks are freed."""
        if not self._has_ended:
            self._end("CANCELLED")

    def _end(self, outcome: str) -> None:
        self._has_ended = True
        try:
            if self._answer is not None:
                self._answer.close()
            if self._account is not None:
                self._account.end(outcome)
            else:
                self._prepared.span.end()
        finally:
            self._prepared.slot.release()
