"""From a client's request to text: the one way that HTTP and gRPC share.

Everything runs on one event loop; only long texts are tokenized on threads.
"""

from __future__ import annotations

import asyncio
import logging
import secrets
import time
import uuid
from collections.abc import AsyncGenerator
from contextlib import aclosing
from dataclasses import replace
from typing import Any

from opentelemetry import trace
from opentelemetry.trace import Span

from pagemill.config import RouterSettings
from pagemill.errors import InvalidRequestError, ModelNotFoundError, OverloadedError, UnavailableError
from pagemill.sampling_params import SamplingParams
from pagemill.telemetry import context_from_traceparent, inject_traceparent, tracer
from router.accounting import outcome_of
from router.answer_stream import AnswerStream
from router.chat import ChatRenderer
from router.detokenizer import detokenize
from router.generation import (
    CompletedSequence,
    CompleteOutput,
    FinishReason,
    GenerationRequest,
    InflightSlot,
    ModelCard,
    PreparedRequest,
    StreamEvent,
    TextDelta,
    Timings,
    Usage,
)
from router.metrics import RouterMetrics
from router.prompt_cache import PromptCache, is_deterministic, response_key
from router.prompts import ContextLimits, PromptReader
from router.running_request import RunningRequest
from router.scheduler_pool import ADMISSION_WAIT_S, SchedulerPool
from router.text_stream import DeltaJoiner
from router.tokenizer import Tokenizer, TokenizerPool

__all__ = [
    "CompleteOutput",
    "CompletedSequence",
    "FinishReason",
    "GenerationRequest",
    "ModelCard",
    "Pipeline",
    "PreparedRequest",
    "StreamEvent",
    "TextDelta",
    "Timings",
    "Usage",
]

_log = logging.getLogger(__name__)
# Nobody sees the tokens of an answer that is not streamed one by one: they are looked at so many at once.
UNSTREAMED_BATCH_TOKENS = 64
_tracer = tracer("router.pipeline")


class Pipeline:
    """Validate, render, tokenize, look into the cache, pick a scheduler, detokenize.

    Args:
        settings: limits and names.
        tokenizer: of the model.
        renderer: its chat templates.
        schedulers: sessions to the schedulers; owned by the caller, as is `cache`.
        cache: the prompt cache.
        metrics: of the router.
        model_names: served names, the default first.
        config: the model's configuration; its context length holds until a scheduler tells its own.
    """

    def __init__(
        self,
        settings: RouterSettings,
        *,
        tokenizer: Tokenizer,
        renderer: ChatRenderer,
        schedulers: SchedulerPool,
        cache: PromptCache,
        metrics: RouterMetrics,
        model_names: list[str],
        config: dict[str, Any],
    ) -> None:
        self._settings = settings
        self._tokenizer = tokenizer
        self._tokenizers = TokenizerPool(tokenizer, settings.tokenizer_threads)
        self._vocab_size = int(config.get("vocab_size") or tokenizer.vocab_size)
        self._config_max_len = int(config.get("max_position_embeddings") or 0)
        self._prompts = PromptReader(self._tokenizers, renderer, cache, self._vocab_size)
        self._schedulers = schedulers
        self._cache = cache
        self._metrics = metrics
        self._model_names = model_names
        self._created = int(time.time())
        self._inflight = 0
        self._idle = asyncio.Event()
        self._idle.set()
        self._draining = False

    async def prepare(self, request: GenerationRequest) -> PreparedRequest:
        """Do all checks and the tokenization, and ask the response cache; nothing is submitted yet.

        A prepared request counts against max_inflight_requests until stream() or complete() ends or discard() is
        called.

        Raises:
            InvalidRequestError: the request can never succeed; `field` names the culprit.
            ContextLengthError: it does not fit; the message has both numbers.
            ModelNotFoundError: no such model.
            OverloadedError: too many requests at once.
            UnavailableError: no scheduler became ready in a few seconds, or the router is draining.
        """
        arrival_unix_ns = time.time_ns()
        request_id = request.request_id or f"req-{uuid.uuid4().hex}"
        span = _tracer.start_span(
            "router.request",
            context=context_from_traceparent(request.traceparent),
            attributes={"pagemill.request_id": request_id},
        )
        try:
            return await self._prepare(request, request_id, arrival_unix_ns, span)
        except BaseException as error:
            outcome = outcome_of(error)
            self._metrics.requests.labels(outcome).inc()
            span.set_attribute("pagemill.outcome", outcome)
            span.end()
            raise

    async def _prepare(
        self, request: GenerationRequest, request_id: str, arrival_unix_ns: int, span: Span
    ) -> PreparedRequest:
        slot = self._acquire_slot()
        try:
            model = self.check_model(request.model)
            sampling = self._checked_sampling(request)
            parent = trace.set_span_in_context(span)
            ids, from_cache = await self._prompts.token_ids(request, self._limits(), parent)
            self._limits().resolve(request, sampling, len(ids))
            await self._schedulers.wait_ready(ADMISSION_WAIT_S)
            # A scheduler may have told a shorter context than the model's files did.
            sampling = self._limits().resolve(request, sampling, len(ids))
            timeout_s = min(request.timeout_s or self._settings.request_timeout_s, self._settings.request_timeout_s)
            prepared = PreparedRequest(
                request=request,
                request_id=request_id,
                model=model,
                prompt_token_ids=ids,
                sampling=replace(sampling, seed=secrets.randbits(63) if sampling.seed is None else sampling.seed),
                explicit_seed=sampling.seed is not None,
                arrival_unix_ns=arrival_unix_ns,
                deadline_unix_ns=arrival_unix_ns + int(timeout_s * 1e9),
                slot=slot,
                span=span,
                traceparent=inject_traceparent(span),
                tokens_from_cache=from_cache,
            )
            await self._ask_response_cache(prepared)
        except BaseException:
            slot.release()
            raise
        return prepared

    def _acquire_slot(self) -> InflightSlot:
        if self._draining:
            raise UnavailableError("the router is shutting down", retry_after_ms=1000)
        if self._inflight >= self._settings.max_inflight_requests:
            raise OverloadedError(f"{self._inflight} requests are running, which is the limit", retry_after_ms=1000)
        self._inflight += 1
        self._idle.clear()
        self._metrics.inflight.set(self._inflight)
        return InflightSlot(self._release_slot)

    def _release_slot(self) -> None:
        self._inflight -= 1
        self._metrics.inflight.set(self._inflight)
        if self._inflight == 0:
            self._idle.set()

    def _checked_sampling(self, request: GenerationRequest) -> SamplingParams:
        sampling = request.sampling
        if request.max_tokens_absent:
            # The default says nothing about what the client wants: it must not make min_tokens invalid.
            lowest = sampling.min_tokens if isinstance(sampling.min_tokens, int) else 1
            sampling = replace(sampling, max_tokens=max(SamplingParams().max_tokens, lowest))
        sampling.validate(self._vocab_size)
        return sampling

    def _limits(self) -> ContextLimits:
        served = self._schedulers.served_model()
        return ContextLimits(self.max_model_len, served.kv_capacity_tokens)

    async def _ask_response_cache(self, prepared: PreparedRequest) -> None:
        fingerprint = self._schedulers.served_model().fingerprint
        if not fingerprint or not is_deterministic(prepared):
            return
        key = response_key(
            prepared,
            tokenizer_fingerprint=self._tokenizer.fingerprint,
            model_fingerprint=fingerprint,
            eos_token_ids=self._tokenizer.eos_token_ids,
        )
        parent = trace.set_span_in_context(prepared.span)
        with _tracer.start_as_current_span("router.cache", context=parent) as span:
            prepared.cached_output = await self._cache.get_response(key)
            span.set_attribute("pagemill.cache.kind", "response")
            span.set_attribute("pagemill.cache.hit", prepared.cached_output is not None)
        if prepared.cached_output is None:
            prepared.response_key = key

    def stream(self, prepared: PreparedRequest) -> RunningRequest:
        """Events in order, the last one with usage. Closing it, or cancelling its task, aborts the request and frees
        its blocks.

        Raises (from the iterator): PagemillError; what was delivered before stays valid.
        """
        return self._run(prepared, batch_tokens=1)

    def _run(self, prepared: PreparedRequest, *, batch_tokens: int) -> RunningRequest:
        def open_answer() -> AnswerStream:
            return AnswerStream(prepared, self._tokenizer, self._schedulers, batch_tokens=batch_tokens)

        return RunningRequest(prepared, open_answer, self._cache, self._metrics)

    async def complete(self, prepared: PreparedRequest) -> CompleteOutput:
        """All of the answer at once, equal to the joined stream; cancelling aborts."""
        joiner = DeltaJoiner()
        output = CompleteOutput(
            request_id=prepared.request_id,
            model=prepared.model,
            prompt_token_ids=prepared.prompt_token_ids,
            sequences=[],
            usage=Usage(),
            timings=Timings(),
            from_cache=prepared.cached_output is not None,
        )
        async with aclosing(self._run(prepared, batch_tokens=UNSTREAMED_BATCH_TOKENS)) as events:
            async for event in events:
                for delta in event.deltas:
                    joiner.add(delta)
                output.prompt_logprobs = event.prompt_logprobs or output.prompt_logprobs
                output.usage = event.usage or output.usage
                output.timings = event.timings or output.timings
        output.sequences = joiner.joined()
        return output

    def discard(self, prepared: PreparedRequest) -> None:
        """Give a prepared request back that will not be run (another prompt of the same call failed)."""
        prepared.slot.release()
        prepared.span.end()

    async def generate(self, request: GenerationRequest) -> AsyncGenerator[StreamEvent]:
        """prepare() and stream() in one: bad input raises before the first event."""
        async with aclosing(self.stream(await self.prepare(request))) as events:
            async for event in events:
                yield event

    async def tokenize(self, text: str, *, model: str = "", add_special_tokens: bool = True) -> list[int]:
        """Token ids of a text."""
        self.check_model(model)
        return await self._tokenizers.encode(text, add_special_tokens=add_special_tokens)

    async def tokenize_chat(self, request: GenerationRequest) -> list[int]:
        """Token ids of the rendered conversation of `request`, however long."""
        self.check_model(request.model)
        ids, _ = await self._prompts.token_ids(request, None, trace.set_span_in_context(trace.INVALID_SPAN))
        return ids

    async def detokenize(self, token_ids: list[int], *, model: str = "", skip_special_tokens: bool = False) -> str:
        """Text of token ids; bytes that are no UTF-8 become U+FFFD.

        Raises:
            InvalidRequestError: an id is outside of the vocabulary.
        """
        self.check_model(model)
        for position, token_id in enumerate(token_ids):
            if not 0 <= token_id < self._vocab_size:
                raise InvalidRequestError(
                    f"token {position} is {token_id}, which is no id in a vocabulary of {self._vocab_size}",
                    field="token_ids",
                )
        return detokenize(self._tokenizer.table, token_ids, skip_special_tokens=skip_special_tokens)

    def token_bytes(self, token_id: int) -> bytes:
        """Bytes of one token, special tokens by their name; may be a part of a character."""
        return self._tokenizer.token_bytes(token_id)

    def token_text(self, token_id: int) -> str:
        """Text of one token; bytes that are no UTF-8 alone become U+FFFD."""
        return self.token_bytes(token_id).decode("utf-8", "replace")

    def models(self) -> list[ModelCard]:
        """Served models: one entry per served name, the first is the default."""
        return [ModelCard(name, self.max_model_len, self._created) for name in self._model_names]

    def check_model(self, model: str) -> str:
        """The served name for what a client asked for; empty is the default.

        Raises:
            ModelNotFoundError: none of that name.
        """
        if not model:
            return self._model_names[0]
        if model not in self._model_names:
            shown = model if len(model) <= 100 else model[:97] + "..."
            raise ModelNotFoundError(
                f"model {shown!r} is not served here; served: {', '.join(self._model_names)}", field="model"
            )
        return model

    @property
    def max_model_len(self) -> int:
        """Context length in tokens: what the schedulers told, else what the model's files say."""
        return self._schedulers.served_model().max_model_len or self._config_max_len

    @property
    def num_inflight(self) -> int:
        """Requests being served."""
        return self._inflight

    def status(self) -> dict[str, Any]:
        """Readiness, as `ready`, `missing`, `draining`, `degraded`, and `schedulers` (a word by address).

        `missing` names what keeps requests from being served, `degraded` what they can do without; neither has
        addresses.
        """
        links = self._schedulers.links
        missing: list[str] = []
        if not self._schedulers.is_ready:
            if not any(link.connected for link in links):
                missing.append("scheduler")
            elif self._schedulers.mismatches():
                missing.append("scheduler with this router's model")
            else:
                missing.append("worker")
        away = [link for link in links if not link.connected]
        degraded = ["prompt cache (redis)"] if self._cache.is_degraded else []
        if away and len(away) < len(links):
            degraded.append(f"{len(away)} of {len(links)} schedulers")
        return {
            "ready": not missing and not self._draining,
            "missing": missing,
            "draining": self._draining,
            "degraded": degraded,
            "schedulers": {
                link.address: "away" if link.hello is None else "ready" if link.hello.ready else "waiting for a worker"
                for link in links
            },
        }

    def begin_drain(self) -> None:
        """Refuse new requests; running ones go on."""
        self._draining = True

    async def wait_idle(self, timeout_s: float) -> bool:
        """Wait until no request is left; False where some are after the time."""
        try:
            async with asyncio.timeout(timeout_s):
                await self._idle.wait()
        except TimeoutError:
            return False
        return True

    def close(self) -> None:
        """End the tokenizer's threads."""
        self._tokenizers.close()
