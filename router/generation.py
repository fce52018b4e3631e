"""Records that cross the router's pipeline: what an edge (HTTP, gRPC) asks for and what it gets back."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, Literal

from opentelemetry.trace import Span

from pagemill.sampling_params import SamplingParams
from pagemill.step import TokenLogprobs

FinishReason = Literal["stop", "length", "abort", "error"]


@dataclass(slots=True)
class GenerationRequest:
    """What a client asks for. Exactly one of prompt_text, prompt_token_ids and messages is set.

    With `max_tokens_absent` the client named no max_tokens: `sampling.max_tokens` is then replaced by the rest of the
    context for a conversation, and clamped to it for a prompt. A max_tokens that the client named must fit.
    """

    sampling: SamplingParams
    max_tokens_absent: bool = False
    model: str = ""  # empty: the router's own model
    prompt_text: str | None = None
    prompt_token_ids: list[int] | None = None
    messages: list[dict[str, Any]] | None = None  # OpenAI style: role, content, name, tool_calls, tool_call_id
    request_id: str = ""  # the client's name for the request, need not be unique; empty draws one
    priority: int = 0  # smaller runs sooner
    cache_salt: str = ""
    tenant: str = ""
    traceparent: str = ""  # of the caller; empty: none
    timeout_s: float | None = None  # None: request_timeout_s of the settings, which also is the most
    tools: list[dict[str, Any]] | None = None
    add_generation_prompt: bool = True
    chat_template_kwargs: dict[str, Any] = field(default_factory=dict)


@dataclass(slots=True)
class Usage:
    """Token counts of one request; completion_tokens are summed over its sequences."""

    prompt_tokens: int = 0
    cached_tokens: int = 0
    completion_tokens: int = 0


@dataclass(slots=True)
class Timings:
    """Unix nanoseconds; 0 where it did not happen."""

    arrival_unix_ns: int = 0
    scheduled_unix_ns: int = 0
    first_token_unix_ns: int = 0
    finished_unix_ns: int = 0


@dataclass(slots=True)
class TextDelta:
    """What is new in one sequence. Text of a token may come with a later delta; finish_reason is set in the last."""

    index: int
    text: str = ""
    token_ids: list[int] = field(default_factory=list)
    logprobs: TokenLogprobs | None = None  # one entry per token of token_ids
    finish_reason: FinishReason | None = None
    stop_reason: str | int | None = None  # the stop string or stop token id that ended the sequence


@dataclass(slots=True)
class StreamEvent:
    """One message of a stream: at most one delta per sequence."""

    deltas: list[TextDelta] = field(default_factory=list)
    usage: Usage | None = None  # last event only
    timings: Timings | None = None  # last event only
    prompt_token_ids: list[int] | None = None  # first event only
    prompt_logprobs: TokenLogprobs | None = None  # first event only; entries for prompt tokens 1, 2, ...


@dataclass(slots=True)
class CompletedSequence:
    """All of one sequence: its deltas, joined."""

    index: int
    text: str = ""
    token_ids: list[int] = field(default_factory=list)
    logprobs: TokenLogprobs | None = None
    finish_reason: FinishReason = "stop"
    stop_reason: str | int | None = None


@dataclass(slots=True)
class CompleteOutput:
    """All of one request. `sequences` are ordered by index."""

    request_id: str
    model: str
    prompt_token_ids: list[int]
    sequences: list[CompletedSequence]
    usage: Usage
    timings: Timings
    prompt_logprobs: TokenLogprobs | None = None
    from_cache: bool = False  # answered by the response cache


class InflightSlot:
    """One place of max_inflight_requests. Given back once, at the latest when nobody refers to it any more."""

    __slots__ = ("_give_back",)

    def __init__(self, give_back: Callable[[], None]) -> None:
        self._give_back: Callable[[], None] | None = give_back

    def release(self) -> None:
        """Give the place back; a second call does nothing."""
        give_back, self._give_back = self._give_back, None
        if give_back is not None:
            give_back()

    def __del__(self) -> None:
        self.release()


@dataclass(slots=True)
class PreparedRequest:
    """A request that passed all checks: tokenized, within the context length, its sampling resolved.

    `sampling` has max_tokens and seed set. `explicit_seed` says whether the client gave the seed. `cached_output` is
    the answer, where the response cache has it.
    """

    request: GenerationRequest
    request_id: str
    model: str
    prompt_token_ids: list[int]
    sampling: SamplingParams
    explicit_seed: bool
    arrival_unix_ns: int
    deadline_unix_ns: int
    slot: InflightSlot
    span: Span
    traceparent: str = ""  # of `span`; empty where the trace is off
    tokens_from_cache: bool = False
    cached_output: CompleteOutput | None = None
    response_key: str = ""  # where the answer is to be kept; empty: nowhere


@dataclass(slots=True, frozen=True)
class ModelCard:
    """One served name."""

    id: str
    max_model_len: int  # tokens; 0 while unknown
    created: int  # unix seconds
