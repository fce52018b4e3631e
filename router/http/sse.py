"""Server-sent events: the ASGI response, and the bytes of one stream's chunks.

A chunk costs a few string joins: everything that does not change within a stream is put into JSON once.
"""

from __future__ import annotations

import contextlib
import json
import logging
from collections.abc import AsyncGenerator
from json.encoder import encode_basestring_ascii as json_string
from typing import Any, Protocol

from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from pagemill.errors import PagemillError
from pagemill.step import TokenLogprobs
from router.generation import StreamEvent, TextDelta, Usage
from router.http.disconnect import CancelOnDisconnect
from router.http.errors import ClientDisconnected, error_object, unexpected_error
from router.http.middleware import SEND_BODY

logger = logging.getLogger(__name__)

DONE = b"data: [DONE]\n\n"


def usage_object(usage: Usage) -> dict[str, Any]:
    """Token counts as OpenAI clients read them."""
    return {
        "prompt_tokens": usage.prompt_tokens,
        "completion_tokens": usage.completion_tokens,
        "total_tokens": usage.prompt_tokens + usage.completion_tokens,
        "prompt_tokens_details": {"cached_tokens": usage.cached_tokens},
    }


class Choices(Protocol):
    """How one API spells the choices of its chunks, as JSON text."""

    def opening(self, index: int) -> list[str]:
        """Choices sent before the first text of a sequence: the role, or the echoed prompt."""
        ...

    def frame(self, index: int) -> tuple[str, str]:
        """What stands before and after the JSON string of a plain text delta."""
        ...

    def text(self, delta: TextDelta) -> str:
        """A choice with text and log-probabilities or token ids."""
        ...

    def finish(self, delta: TextDelta) -> str:
        """The last choice of a sequence; it holds what no text followed."""
        ...


class ChunkWriter:
    """Events of one HTTP stream to bytes: each event becomes one write.

    Tokens whose text is not complete yet wait here, so that no chunk is empty.

    Args:
        envelope: the fields of every chunk before `choices`.
        choices: the API's spelling.
        detailed: log-probabilities or token ids were asked for.
        include_usage: chunks have `usage`, null except in an extra last chunk.
    """

    def __init__(self, envelope: dict[str, Any], choices: Choices, *, detailed: bool, include_usage: bool) -> None:
        self._head = "data: " + json.dumps(envelope, separators=(",", ":"))[:-1] + ',"choices":['
        self._tail = '],"usage":null}\n\n' if include_usage else "]}\n\n"
        self._choices = choices
        self._detailed = detailed
        self._include_usage = include_usage
        self._frames: dict[int, tuple[str, str]] = {}
        self._pending: dict[int, TextDelta] = {}
        self._usage = Usage()

    def write(self, event: StreamEvent, first_index: int = 0) -> bytes:
        """Bytes of one event, empty where it brings nothing to show; `first_index` is added to its indexes."""
        out: list[str] = []
        for delta in event.deltas:
            index = delta.index + first_index
            frame = self._frames.get(index) or self._open(index, out)
            if self._detailed:
                delta = self._take(index, delta)
                if delta.text:
                    out += (self._head, self._choices.text(delta), self._tail)
                    delta = TextDelta(index, finish_reason=delta.finish_reason, stop_reason=delta.stop_reason)
                elif delta.finish_reason is None:
                    self._pending[index] = delta
            elif delta.text:
                out += (frame[0], json_string(delta.text), frame[1])
            if delta.finish_reason is not None:
                delta.index = index
                out += (self._head, self._choices.finish(delta), self._tail)
        if event.usage is not None:
            self._usage.prompt_tokens += event.usage.prompt_tokens
            self._usage.cached_tokens += event.usage.cached_tokens
            self._usage.completion_tokens += event.usage.completion_tokens
        return "".join(out).encode()

    def close(self) -> bytes:
        """Bytes after the last event."""
        if not self._include_usage:
            return DONE
        return f'{self._head}],"usage":{json.dumps(usage_object(self._usage))}}}\n\n'.encode() + DONE

    def _open(self, index: int, out: list[str]) -> tuple[str, str]:
        for choice in self._choices.opening(index):
            out += (self._head, choice, self._tail)
        before, after = self._choices.frame(index)
        frame = self._frames[index] = (self._head + before, after + self._tail)
        return frame

    def _take(self, index: int, delta: TextDelta) -> TextDelta:
        """The delta together with tokens that waited for their text; never the pipeline's own record."""
        taken = self._pending.pop(index, None) or TextDelta(index)
        taken.text = delta.text
        taken.token_ids += delta.token_ids
        if delta.logprobs is not None:
            taken.logprobs = taken.logprobs or TokenLogprobs()
            taken.logprobs.extend(delta.logprobs)
        taken.finish_reason, taken.stop_reason = delta.finish_reason, delta.stop_reason
        return taken


def error_event(error: PagemillError) -> bytes:
    """An error after the stream began; nothing follows it, not even [DONE]."""
    return f"data: {json.dumps(error_object(error), separators=(',', ':'))}\n\n".encode()


class EventStream(Response):
    """Sends byte strings as they come and closes their source when the client hangs up.

    `send` waits while the client's socket is full, so that a slow reader holds up its own source alone: what waits is
    in the pipeline's bounded buffer.

    Args:
        first: what to send first.
        chunks: what follows, already started; empty strings are left out. Closed in every case.
        request_id: named to the client where a bug ends the stream.
    """

    media_type = "text/event-stream"

    def __init__(self, first: bytes, chunks: AsyncGenerator[bytes], request_id: str) -> None:
        super().__init__(
            headers={"cache-control": "no-cache", "x-accel-buffering": "no"},
            media_type="text/event-stream",
        )
        del self.headers["content-length"]
        self._first = first
        self._chunks = chunks
        self._request_id = request_id

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """The ASGI call."""
        with contextlib.suppress(ClientDisconnected):
            async with CancelOnDisconnect(receive), contextlib.aclosing(self._chunks):
                await send({"type": "http.response.start", "status": self.status_code, "headers": self.raw_headers})
                if self._first:
                    await send({"type": "http.response.body", "body": self._first, "more_body": True})
                await self._send_chunks(scope.get("state", {}).get(SEND_BODY, send))
                await send({"type": "http.response.body", "body": b"", "more_body": False})

    async def _send_chunks(self, send: Send) -> None:
        try:
            async for chunk in self._chunks:
                if chunk:
                    await send({"type": "http.response.body", "body": chunk, "more_body": True})
        except PagemillError as error:
            await send({"type": "http.response.body", "body": error_event(error), "more_body": True})
        except Exception:
            logger.exception("stream of request %s failed", self._request_id)
            body = error_event(unexpected_error(self._request_id))
            await send({"type": "http.response.body", "body": body, "more_body": True})


async def first_chunk(chunks: AsyncGenerator[bytes]) -> bytes:
    """Waits for the first chunk, so that what fails before it is an HTTP error and not a broken stream.

    Closes the source where it fails.
    """
    try:
        return await anext(chunks, b"")
    except BaseException:
        await chunks.aclose()
        raise
