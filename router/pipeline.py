"""From a client's request to text: the one way that HTTP and gRPC share."""

from __future__ import annotations

from collections.abc import AsyncIterator
from typing import Any

from router.generation import (
    CompletedSequence,
    CompleteOutput,
    FinishReason,
    GenerationRequest,
    ModelCard,
    PreparedRequest,
    StreamEvent,
    TextDelta,
    Timings,
    Usage,
)

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


class Pipeline:
    """Validate, render, tokenize, look into the cache, pick a scheduler, detokenize."""

    async def prepare(self, request: GenerationRequest) -> PreparedRequest:
        """Do all checks and the tokenization; nothing is submitted yet.

        A prepared request counts against max_inflight_requests until stream() or complete() ends or discard() is called.

        Raises:
            InvalidRequestError, ContextLengthError, ModelNotFoundError, OverloadedError, UnavailableError.
        """
        raise NotImplementedError

    def stream(self, prepared: PreparedRequest) -> AsyncIterator[StreamEvent]:
        """Events in order. Closing the iterator, or cancelling its task, aborts the request and frees its blocks.

        Raises (from the iterator): PagemillError; what was delivered before stays valid.
        """
        raise NotImplementedError

    async def complete(self, prepared: PreparedRequest) -> CompleteOutput:
        """All of the answer at once; cancelling aborts."""
        raise NotImplementedError

    def discard(self, prepared: PreparedRequest) -> None:
        """Give a prepared request back that will not be run (another prompt of the same HTTP call failed)."""
        raise NotImplementedError

    def generate(self, request: GenerationRequest) -> AsyncIterator[StreamEvent]:
        """prepare() and stream() in one: bad input raises before the first event."""
        raise NotImplementedError

    async def tokenize(self, text: str, *, model: str = "", add_special_tokens: bool = True) -> list[int]:
        """Token ids of a text."""
        raise NotImplementedError

    async def tokenize_chat(self, request: GenerationRequest) -> list[int]:
        """Token ids of the rendered conversation of `request`."""
        raise NotImplementedError

    async def detokenize(self, token_ids: list[int], *, model: str = "", skip_special_tokens: bool = False) -> str:
        """Text of token ids; bytes that are no UTF-8 become U+FFFD."""
        raise NotImplementedError

    def token_bytes(self, token_id: int) -> bytes:
        """Bytes of one token, special tokens by their name; may be a part of a character."""
        raise NotImplementedError

    def token_text(self, token_id: int) -> str:
        """Text of one token; bytes that are no UTF-8 alone become U+FFFD."""
        raise NotImplementedError

    def models(self) -> list[ModelCard]:
        """Served models: one entry per served name, the first is the default."""
        raise NotImplementedError

    def check_model(self, model: str) -> str:
        """The served name for what a client asked for. Raises ModelNotFoundError."""
        raise NotImplementedError

    @property
    def max_model_len(self) -> int:
        """Context length in tokens."""
        raise NotImplementedError

    def status(self) -> dict[str, Any]:
        """Readiness: {"ready": bool, "missing": [str, ...], "draining": bool, "degraded": [str, ...], "schedulers": {...}}."""
        raise NotImplementedError
