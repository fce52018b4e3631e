"""What the generating routes share: the application's parts, and running several prompts of one call as one."""

from __future__ import annotations

import asyncio
import contextlib
import time
import uuid
from collections.abc import AsyncGenerator, AsyncIterator, Sequence
from dataclasses import dataclass
from typing import Any, Protocol, Self

from starlette.requests import Request

from pagemill.config import RouterSettings
from pagemill.outputs import PositionLogprobs, position_logprobs
from pagemill.step import TokenLogprobs
from router.generation import CompleteOutput, GenerationRequest, PreparedRequest, StreamEvent
from router.http.logprobs import TokenSpelling, finite, token_label
from router.http.schemas import SamplingBody
from router.pipeline import Pipeline
from router.running_request import RunningRequest

# Events that wait per prompt of one call; beyond, the prompt's own bounded buffer fills.
_EVENTS_PER_PROMPT = 2


@dataclass(frozen=True, slots=True)
class Serving:
    """The parts that routes work with."""

    pipeline: Pipeline
    settings: RouterSettings
    spelling: TokenSpelling


@dataclass(frozen=True, slots=True)
class Call:
    """One HTTP call: how its answer is named, and what it hands on to the pipeline."""

    answer_id: str
    created: int
    request_id: str
    traceparent: str
    tenant: str

    @classmethod
    def of(cls, request: Request, prefix: str) -> Call:
        """The call of an HTTP request. The answer's id is always new, whatever the client named its request."""
        return cls(
            answer_id=prefix + uuid.uuid4().hex,
            created=int(time.time()),
            request_id=request.state.request_id,
            traceparent=request.headers.get("traceparent", ""),
            tenant=request.state.tenant,
        )

    def envelope(self, kind: str, model: str) -> dict[str, Any]:
        """The fields of every answer and chunk before `choices`."""
        return {"id": self.answer_id, "object": kind, "created": self.created, "model": model}

    def generation(self, body: SamplingBody, max_tokens: int | None, logprobs: int | None) -> GenerationRequest:
        """The pipeline's request, still without a prompt."""
        return GenerationRequest(
            sampling=body.sampling_params(max_tokens, logprobs),
            max_tokens_absent=max_tokens is None,
            model=body.model or "",
            request_id=self.request_id,
            priority=body.priority,
            cache_salt=body.cache_salt or "",
            traceparent=self.traceparent,
            tenant=self.tenant,
        )


async def prepare_all(pipeline: Pipeline, requests: Sequence[GenerationRequest]) -> list[PreparedRequest]:
    """All of them or none: where one is refused, the others are given back."""
    prepared: list[PreparedRequest] = []
    try:
        for request in requests:
            prepared.append(await pipeline.prepare(request))
    except BaseException:
        for done in prepared:
            pipeline.discard(done)
        raise
    return prepared


async def complete_all(pipeline: Pipeline, prepared: Sequence[PreparedRequest]) -> list[CompleteOutput]:
    """Runs all at once; the first failure ends the others and is raised."""
    if len(prepared) == 1:
        return [await pipeline.complete(prepared[0])]
    tasks = [asyncio.create_task(pipeline.complete(each)) for each in prepared]
    try:
        return await asyncio.gather(*tasks)
    finally:
        await _end(tasks)


class NumberedEvents(Protocol):
    """Events of the prompts of one call, each with its prompt's number. Closing it ends all of them."""

    def __aiter__(self) -> AsyncIterator[tuple[int, StreamEvent]]: ...

    async def aclose(self) -> None:
        """End what still runs."""
        ...


def stream_all(pipeline: Pipeline, prepared: Sequence[PreparedRequest]) -> NumberedEvents:
    """Events of all prompts as they come. Closing it aborts all of them."""
    if len(prepared) == 1:
        return _OnePrompt(pipeline.stream(prepared[0]))
    return _interleaved([pipeline.stream(each) for each in prepared])


class _OnePrompt:
    """Events of the only prompt of a call."""

    def __init__(self, running: RunningRequest) -> None:
        self._running = running
        self.aclose = running.aclose

    def __aiter__(self) -> Self:
        return self

    async def __anext__(self) -> tuple[int, StreamEvent]:
        return 0, await self._running.__anext__()


async def _interleaved(streams: Sequence[RunningRequest]) -> AsyncGenerator[tuple[int, StreamEvent]]:
    queue: asyncio.Queue[tuple[int, StreamEvent | BaseException | None]] = asyncio.Queue(
        _EVENTS_PER_PROMPT * len(streams)
    )

    async def pump(number: int) -> None:
        try:
            async with contextlib.aclosing(streams[number]) as events:
                async for event in events:
                    await queue.put((number, event))
        except Exception as error:
            await queue.put((number, error))
        await queue.put((number, None))

    tasks = [asyncio.create_task(pump(number)) for number in range(len(streams))]
    try:
        running = len(tasks)
        while running:
            number, item = await queue.get()
            if isinstance(item, BaseException):
                raise item
            if item is None:
                running -= 1
            else:
                yield number, item
    finally:
        await _end(tasks)


async def _end(tasks: Sequence[asyncio.Task[Any]]) -> None:
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)


def prompt_logprobs_object(
    spelling: TokenSpelling, prompt_token_ids: Sequence[int], logprobs: TokenLogprobs | None
) -> list[dict[str, Any] | None] | None:
    """Log-probabilities of a prompt: null for its first token, then token id to log-probability, rank and text."""
    if logprobs is None:
        return None
    positions = position_logprobs(
        prompt_token_ids[1:],
        logprobs.chosen,
        logprobs.ranks,
        logprobs.num_top,
        logprobs.top_ids,
        logprobs.top_logprobs,
    )

    def named(position: PositionLogprobs) -> dict[str, Any]:
        return {
            str(token_id): {
                "logprob": finite(entry.logprob),
                "rank": entry.rank,
                "decoded_token": token_label(spelling.token_bytes(token_id)),
            }
            for token_id, entry in position.items()
        }

    return [None, *(named(position) for position in positions)]
