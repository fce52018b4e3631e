"""Between the messages of `Inference` and the pipeline's records: the one translation on this edge."""

from __future__ import annotations

import json
import math
from typing import Any

from pagemill.errors import InvalidRequestError
from pagemill.sampling_params import SamplingParams, from_proto
from pagemill.v1 import common_pb2, inference_pb2
from router.generation import (
    CompleteOutput,
    GenerationRequest,
    ModelCard,
    PreparedRequest,
    StreamEvent,
    TextDelta,
    Timings,
    Usage,
)
from router.wire import FINISH_REASON_NUMBERS, write_logprobs


def read_generate(message: inference_pb2.GenerateRequest) -> GenerationRequest:
    """The record of a GenerateRequest.

    Raises:
        InvalidRequestError: it has no prompt, or a number that is none.
    """
    kind = message.WhichOneof("prompt")
    if kind is None:
        raise InvalidRequestError("either text or token_ids is needed", field="prompt")
    return GenerationRequest(
        sampling=_sampling(message.sampling),
        max_tokens_absent=not message.sampling.HasField("max_tokens"),
        model=message.model,
        prompt_text=message.text if kind == "text" else None,
        prompt_token_ids=list(message.token_ids.ids) if kind == "token_ids" else None,
        request_id=message.request_id,
        priority=message.priority,
        cache_salt=message.cache_salt,
    )


def read_chat(message: inference_pb2.ChatRequest) -> GenerationRequest:
    """The record of a ChatRequest.

    Raises:
        InvalidRequestError: tool calls are no JSON, or a number is none.
    """
    return GenerationRequest(
        sampling=_sampling(message.sampling),
        max_tokens_absent=not message.sampling.HasField("max_tokens"),
        model=message.model,
        messages=[_read_turn(turn, f"messages[{i}]") for i, turn in enumerate(message.messages)],
        request_id=message.request_id,
        priority=message.priority,
        cache_salt=message.cache_salt,
    )


def _sampling(message: common_pb2.SamplingParams) -> SamplingParams:
    # A float32 of the wire widens to a double with noise in its last digits, which is not what the client meant.
    sampling = from_proto(message)
    for name in ("temperature", "top_p", "min_p", "presence_penalty", "frequency_penalty", "repetition_penalty"):
        setattr(sampling, name, _shortest(getattr(sampling, name)))
    sampling.logit_bias = {token_id: _shortest(bias) for token_id, bias in sampling.logit_bias.items()}
    return sampling


def _shortest(value: float) -> float:
    return float(f"{value:.7g}") if math.isfinite(value) else value


def _read_turn(turn: inference_pb2.ChatMessage, path: str) -> dict[str, Any]:
    message: dict[str, Any] = {"role": turn.role, "content": turn.content if turn.HasField("content") else None}
    if turn.name:
        message["name"] = turn.name
    if turn.tool_call_id:
        message["tool_call_id"] = turn.tool_call_id
    if turn.tool_calls_json:
        try:
            message["tool_calls"] = json.loads(turn.tool_calls_json)
        except ValueError as error:
            field = f"{path}.tool_calls_json"
            raise InvalidRequestError(f"{field} is no valid JSON: {error}", field=field) from None
    return message


class ResponseWriter:
    """Response messages of one call."""

    def __init__(self, prepared: PreparedRequest) -> None:
        self._request_id = prepared.request_id
        self._model = prepared.model

    def event(self, event: StreamEvent) -> inference_pb2.GenerateResponse:
        """One message per event."""
        response = inference_pb2.GenerateResponse(
            request_id=self._request_id,
            model=self._model,
            deltas=[_delta(d) for d in event.deltas],
            prompt_token_ids=event.prompt_token_ids or (),
        )
        if event.prompt_logprobs is not None:
            response.prompt_logprobs.CopyFrom(write_logprobs(event.prompt_logprobs))
        if event.usage is not None:
            response.usage.CopyFrom(_usage(event.usage))
        if event.timings is not None:
            response.timings.CopyFrom(_timings(event.timings))
        return response

    def whole(self, output: CompleteOutput) -> inference_pb2.GenerateResponse:
        """The whole answer as one message."""
        deltas = [
            TextDelta(s.index, s.text, s.token_ids, s.logprobs, s.finish_reason, s.stop_reason)
            for s in output.sequences
        ]
        return self.event(
            StreamEvent(deltas, output.usage, output.timings, output.prompt_token_ids, output.prompt_logprobs)
        )


def _delta(delta: TextDelta) -> inference_pb2.SequenceDelta:
    message = inference_pb2.SequenceDelta(index=delta.index, text=delta.text, token_ids=delta.token_ids)
    if delta.finish_reason is not None:
        message.finish_reason = FINISH_REASON_NUMBERS[delta.finish_reason]  # type: ignore[assignment]
    if isinstance(delta.stop_reason, str):
        message.stop_string = delta.stop_reason
    elif delta.stop_reason is not None:
        message.stop_token_id = delta.stop_reason
    if delta.logprobs is not None:
        message.logprobs.CopyFrom(write_logprobs(delta.logprobs))
    return message


def _usage(usage: Usage) -> common_pb2.Usage:
    return common_pb2.Usage(
        prompt_tokens=usage.prompt_tokens,
        cached_tokens=usage.cached_tokens,
        completion_tokens=usage.completion_tokens,
    )


def _timings(timings: Timings) -> common_pb2.Timings:
    return common_pb2.Timings(
        arrival_unix_ns=timings.arrival_unix_ns,
        scheduled_unix_ns=timings.scheduled_unix_ns,
        first_token_unix_ns=timings.first_token_unix_ns,
        finished_unix_ns=timings.finished_unix_ns,
    )


def write_models(cards: list[ModelCard]) -> inference_pb2.ListModelsResponse:
    """All served models."""
    return inference_pb2.ListModelsResponse(
        models=[
            inference_pb2.Model(id=card.id, max_model_len=card.max_model_len, created_unix_s=card.created)
            for card in cards
        ]
    )
