"""Between the records of the gRPC client and the messages of `Inference`: the client's one translation."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from numbers import Integral
from typing import Any

from pagemill.errors import InvalidRequestError
from pagemill.outputs import (
    CompletionOutput,
    FinishReasonName,
    PositionLogprobs,
    RequestMetrics,
    RequestOutput,
    position_logprobs,
)
from pagemill.sampling_params import SamplingParams, to_proto
from pagemill.v1 import common_pb2, inference_pb2

ChatTurn = Mapping[str, Any]
"""An OpenAI-style message: role, content, and optionally name, tool_calls, tool_call_id."""


class RequestBuilder:
    """Python values to request messages, and the bad ones to errors before a call is made."""

    def __init__(self, model: str) -> None:
        self._model = _text(model, "model")

    def generate(
        self,
        prompt: str | Sequence[int],
        sampling_params: SamplingParams | None,
        request_id: str,
        priority: int,
        cache_salt: str,
        *,
        final_only: bool,
    ) -> inference_pb2.GenerateRequest:
        request = inference_pb2.GenerateRequest(
            model=self._model,
            sampling=_sampling(sampling_params),
            request_id=_text(request_id, "request_id"),
            priority=_priority(priority),
            cache_salt=_text(cache_salt, "cache_salt"),
            final_only=final_only,
        )
        if isinstance(prompt, str):
            request.text = _text(prompt, "prompt")
        elif not isinstance(prompt, Iterable) or isinstance(prompt, bytes | Mapping):
            raise InvalidRequestError(
                f"prompt is {type(prompt).__name__}, must be a text or a list of token ids", field="prompt"
            )
        else:
            request.token_ids.ids.extend(_checked_ids(prompt, "prompt"))
        return request

    def chat(
        self,
        messages: Sequence[ChatTurn],
        sampling_params: SamplingParams | None,
        request_id: str,
        priority: int,
        cache_salt: str,
        *,
        final_only: bool,
    ) -> inference_pb2.ChatRequest:
        if not isinstance(messages, Iterable) or isinstance(messages, str | bytes | Mapping):
            raise InvalidRequestError(
                f"messages is {type(messages).__name__}, must be a list of messages", field="messages"
            )
        return inference_pb2.ChatRequest(
            model=self._model,
            messages=[_chat_message(at, turn) for at, turn in enumerate(messages)],
            sampling=_sampling(sampling_params),
            request_id=_text(request_id, "request_id"),
            priority=_priority(priority),
            cache_salt=_text(cache_salt, "cache_salt"),
            final_only=final_only,
        )

    def tokenize(self, text: str, add_special_tokens: bool) -> inference_pb2.TokenizeRequest:
        return inference_pb2.TokenizeRequest(
            model=self._model, text=_text(text, "text"), add_special_tokens=add_special_tokens
        )

    def detokenize(self, token_ids: Sequence[int], skip_special_tokens: bool) -> inference_pb2.DetokenizeRequest:
        return inference_pb2.DetokenizeRequest(
            model=self._model,
            token_ids=_checked_ids(token_ids, "token_ids"),
            skip_special_tokens=skip_special_tokens,
        )


class ResponseReader:
    """Response messages of one call to deltas."""

    def __init__(self, request: inference_pb2.GenerateRequest | inference_pb2.ChatRequest) -> None:
        is_text = isinstance(request, inference_pb2.GenerateRequest) and request.WhichOneof("prompt") == "text"
        self._prompt: str | None = request.text if is_text else None

    def read(self, response: inference_pb2.GenerateResponse) -> RequestOutput:
        output = RequestOutput(
            request_id=response.request_id,
            prompt=self._prompt,
            prompt_token_ids=list(response.prompt_token_ids),
            outputs=[_completion(delta) for delta in response.deltas],
        )
        if response.HasField("prompt_logprobs"):
            output.prompt_logprobs = [None, *_logprobs(output.prompt_token_ids[1:], response.prompt_logprobs)]
        if response.HasField("usage"):
            output.finished = True
            output.num_cached_tokens = response.usage.cached_tokens
            output.metrics = _metrics(response.timings)
        return output


_FINISH_REASONS: dict[int, FinishReasonName] = {
    common_pb2.FINISH_REASON_STOP: "stop",
    common_pb2.FINISH_REASON_LENGTH: "length",
    common_pb2.FINISH_REASON_ABORT: "abort",
    common_pb2.FINISH_REASON_ERROR: "error",
}


def _completion(delta: inference_pb2.SequenceDelta) -> CompletionOutput:
    token_ids = list(delta.token_ids)
    output = CompletionOutput(
        index=delta.index,
        text=delta.text,
        token_ids=token_ids,
        finish_reason=_FINISH_REASONS.get(delta.finish_reason),
    )
    if delta.HasField("logprobs"):
        output.logprobs = _logprobs(token_ids, delta.logprobs)
        output.cumulative_logprob = sum(delta.logprobs.chosen)
    which = delta.WhichOneof("stop_reason")
    if which is not None:
        output.stop_reason = getattr(delta, which)
    return output


def _logprobs(token_ids: Sequence[int], columns: common_pb2.LogprobColumns) -> list[PositionLogprobs]:
    return position_logprobs(
        token_ids, columns.chosen, columns.ranks, columns.num_top, columns.top_ids, columns.top_logprobs
    )


def _metrics(timings: common_pb2.Timings) -> RequestMetrics:
    def seconds(unix_ns: int) -> float | None:
        return unix_ns / 1e9 if unix_ns else None

    return RequestMetrics(
        arrival_time=timings.arrival_unix_ns / 1e9,
        first_scheduled_time=seconds(timings.scheduled_unix_ns),
        first_token_time=seconds(timings.first_token_unix_ns),
        finished_time=seconds(timings.finished_unix_ns),
    )


def _sampling(params: SamplingParams | None) -> common_pb2.SamplingParams | None:
    if params is None:
        return None  # left out of the message, so that the router's defaults hold
    if not isinstance(params, SamplingParams):
        raise InvalidRequestError(
            f"sampling_params is {type(params).__name__}, must be SamplingParams", field="sampling_params"
        )
    params.validate()
    for stop in params.stop_strings:
        _text(stop, "stop")
    return to_proto(params)


def _text(value: object, field: str) -> str:
    """A string that a message can hold."""
    if not isinstance(value, str):
        raise InvalidRequestError(f"{field} must be a string, not {type(value).__name__}", field=field)
    try:
        value.encode()
    except UnicodeEncodeError:
        raise InvalidRequestError(f"{field} is no valid Unicode text: it holds lone surrogates", field=field) from None
    return value


def _priority(value: object) -> int:
    if isinstance(value, bool) or not isinstance(value, int) or not -(1 << 31) <= value < 1 << 31:
        raise InvalidRequestError(f"priority is {value!r:.80}, must be a 32-bit integer", field="priority")
    return value


def _checked_ids(token_ids: Iterable[int], field: str) -> list[int]:
    if not isinstance(token_ids, Iterable) or isinstance(token_ids, str | bytes | Mapping):
        raise InvalidRequestError(f"{field} is {type(token_ids).__name__}, must be a list of token ids", field=field)
    ids = list(token_ids)
    for at, token_id in enumerate(ids):
        if isinstance(token_id, bool) or not isinstance(token_id, Integral) or not 0 <= token_id < 1 << 32:
            raise InvalidRequestError(f"{field}[{at}] must be a token id, not {token_id!r:.80}", field=f"{field}[{at}]")
    return [int(token_id) for token_id in ids]


def _chat_message(at: int, turn: ChatTurn) -> inference_pb2.ChatMessage:
    where = f"messages[{at}]"
    if not isinstance(turn, Mapping):
        raise InvalidRequestError(f"{where} is {type(turn).__name__}, must be a map with role and content", field=where)
    role, content = turn.get("role"), turn.get("content")
    if not role:
        raise InvalidRequestError(f"{where}.role must be a string", field=f"{where}.role")
    message = inference_pb2.ChatMessage(
        role=_text(role, f"{where}.role"),
        name=_text(turn.get("name") or "", f"{where}.name"),
        tool_calls_json=_tool_calls(turn.get("tool_calls"), f"{where}.tool_calls"),
        tool_call_id=_text(turn.get("tool_call_id") or "", f"{where}.tool_call_id"),
    )
    if content is not None:
        message.content = _text(content, f"{where}.content")
    return message


def _tool_calls(calls: object, field: str) -> str:
    try:
        return json.dumps(calls) if calls else ""
    except (TypeError, ValueError, RecursionError):
        raise InvalidRequestError(f"{field} cannot be written as JSON", field=field) from None
