"""One request's way from submission to its last event."""

from __future__ import annotations

import asyncio
import time

from pagemill.errors import PagemillError
from pagemill.step import TokenLogprobs
from router.generation import CompleteOutput, PreparedRequest, StreamEvent, TextDelta, Timings, Usage
from router.prompts import scheduler_salt
from router.scheduler_pool import RoutedStream, SchedulerPool
from router.text_stream import DeltaJoiner, RequestText, TextRules
from router.tokenizer import Tokenizer
from router.wire import RequestUpdate, SchedulerRequest

# After a stop string ended the last sequence, the scheduler's account of the request (cached tokens, timings) comes
# with its next step. It is worth waiting for, but not for long.
FINAL_ACCOUNT_WAIT_S = 1.0


class AnswerStream:
    """Submits a prepared request and turns what comes back into events.

    Call `next` until it answers None, then or earlier `close`.

    Args:
        prepared: the request.
        tokenizer: of its model.
        schedulers: who may run it.
        batch_tokens: how many tokens an event may wait for; a stream waits for none.
    """

    def __init__(
        self, prepared: PreparedRequest, tokenizer: Tokenizer, schedulers: SchedulerPool, *, batch_tokens: int = 1
    ) -> None:
        self._prepared = prepared
        request = prepared.request
        rules = TextRules.of(
            tokenizer.table,
            prepared.sampling,
            tokenizer.eos_token_ids,
            # A completion goes on where the prompt ends; the turn of a conversation is a text by itself.
            continues_text=request.messages is None,
        )
        self._text = RequestText(rules)
        self._routed: RoutedStream = schedulers.submit(
            SchedulerRequest(
                request_id=prepared.request_id,
                token_ids=prepared.prompt_token_ids,
                sampling=prepared.sampling,
                eos_token_ids=tokenizer.eos_token_ids,
                priority=request.priority,
                deadline_unix_ns=prepared.deadline_unix_ns,
                cache_salt=scheduler_salt(request),
                traceparent=prepared.traceparent,
                tenant=request.tenant,
            ),
            # A stop string has to be seen as it comes, or the sequence runs on for nothing.
            batch_tokens=1 if rules.stops else batch_tokens,
        )
        self._joiner = DeltaJoiner() if prepared.response_key else None  # whole answers are kept for the cache alone
        self._prompt_logprobs: TokenLogprobs | None = None
        self._is_first = True
        self._usage: Usage | None = None
        self._timings = Timings()

    async def next(self) -> StreamEvent | None:
        """Events in order; None after the last, which has usage.

        Raises:
            PagemillError: the request failed.
        """
        while self._usage is None:
            update = await (self._last_update() if self._text.finished else self._routed.next())
            if update is None:
                return self._event([], self._account(0, Timings(finished_unix_ns=time.time_ns())))
            event = self._take(update)
            if event is not None:
                return event
        return None

    def close(self) -> None:
        """End the request; one that has not finished is aborted. A second call does nothing."""
        self._routed.close()

    async def _last_update(self) -> RequestUpdate | None:
        """The scheduler's account; None where it is not worth waiting for."""
        try:
            async with asyncio.timeout(FINAL_ACCOUNT_WAIT_S):
                return await self._routed.next()
        except TimeoutError:
            return None

    def _take(self, update: RequestUpdate) -> StreamEvent | None:
        deltas = self._text.feed(update)
        for delta in deltas:
            if isinstance(delta.stop_reason, str):
                self._routed.abort_sequence(delta.index, self._text.sequences[delta.index].num_tokens)
            if self._joiner is not None:
                self._joiner.add(delta)
        self._prompt_logprobs = self._prompt_logprobs or update.prompt_logprobs
        usage: Usage | None = None
        if update.usage is not None:
            if not self._text.finished:
                raise PagemillError("the scheduler ended the request before its sequences ended")
            usage = self._account(update.usage.cached_tokens, update.timings or Timings())
        if not deltas and usage is None:
            return None
        return self._event(deltas, usage)

    def _account(self, cached_tokens: int, timings: Timings) -> Usage:
        # Counted here: the scheduler's count may include tokens sampled behind a stop string.
        self._usage = Usage(len(self._prepared.prompt_token_ids), cached_tokens, self._text.num_tokens)
        self._timings = timings
        return self._usage

    def _event(self, deltas: list[TextDelta], usage: Usage | None) -> StreamEvent:
        event = StreamEvent(deltas, usage, self._timings if usage is not None else None)
        if self._is_first:
            self._is_first = False
            event.prompt_token_ids = self._prepared.prompt_token_ids
            event.prompt_logprobs = self._prompt_logprobs
        return event

    def cacheable_output(self) -> CompleteOutput | None:
        """The whole answer, once it came to its natural end; None before, and where no cache wants it."""
        if self._joiner is None or self._usage is None:
            return None
        if any(s.finish_reason not in ("stop", "length") for s in self._joiner.sequences.values()):
            return None
        return CompleteOutput(
            request_id=self._prepared.request_id,
            model=self._prepared.model,
            prompt_token_ids=self._prepared.prompt_token_ids,
            sequences=self._joiner.joined(),
            usage=self._usage,
            timings=self._timings,
            prompt_logprobs=self._prompt_logprobs,
        )


def replay(prepared: PreparedRequest, cached: CompleteOutput) -> StreamEvent:
    """A cached answer as one event."""
    now = time.time_ns()
    return StreamEvent(
        deltas=[
            TextDelta(s.index, s.text, s.token_ids, s.logprobs, s.finish_reason, s.stop_reason)
            for s in cached.sequences
        ],
        usage=cached.usage,
        timings=Timings(prepared.arrival_unix_ns, 0, now, now),
        prompt_token_ids=prepared.prompt_token_ids,
        prompt_logprobs=cached.prompt_logprobs,
    )
