"""A client of the OpenAI completions API that costs little: one protocol object on bare asyncio transports.

A piece of an answer is looked at for a few bytes and its time is noted; JSON is read at the end of an answer, where the
counts are. Connections are kept and used again.
"""

from __future__ import annotations

import asyncio
import json
import ssl
import time
from contextlib import suppress
from typing import Any, Protocol, cast
from urllib.parse import urlsplit

from pagemill.bench.records import Answer
from pagemill.errors import ConfigError, UnavailableError

_HEAD_END = b"\r\n\r\n"
# A piece that ends nothing; servers differ in the space.
_UNFINISHED = (b'"finish_reason":null', b'"finish_reason": null')
_MAX_HEAD_BYTES = 64 << 10


class HttpClient:
    """Streams completions from one server. Belongs to one event loop.

    Args:
        base_url: such as http://127.0.0.1:8000, with or without /v1.
        model: served name.
        api_key: sent as a bearer token where not empty.
        keep_token_ids: ask for the ids of the answer, which Pagemill and vLLM send along.

    Raises:
        ConfigError: the address is none.
    """

    def __init__(self, base_url: str, model: str, api_key: str = "", *, keep_token_ids: bool = False) -> None:
        parts = urlsplit(base_url)
        if parts.scheme not in ("http", "https") or not parts.hostname:
            raise ConfigError(f"--base-url is {base_url!r}, must be like http://127.0.0.1:8000", field="base_url")
        self._host, self._port = parts.hostname, parts.port or (443 if parts.scheme == "https" else 80)
        self._ssl = ssl.create_default_context() if parts.scheme == "https" else None
        self._netloc = parts.netloc
        self._prefix = parts.path.rstrip("/").removesuffix("/v1") + "/v1"
        self._authorization = f"Authorization: Bearer {api_key}\r\n" if api_key else ""
        self._model = model
        self._keep_token_ids = keep_token_ids
        self._idle: list[_Connection] = []

    async def ask(self, prompt: list[int], num_output_tokens: int) -> Answer:
        """One completion to its end; failures are in the answer."""
        body: dict[str, Any] = {
            "model": self._model, "prompt": prompt, "max_tokens": num_output_tokens, "temperature": 0,
            "ignore_eos": True, "stream": True, "stream_options": {"include_usage": True},
        }  # fmt: skip
        if self._keep_token_ids:
            body["return_token_ids"] = True
        payload = self._request("POST", "/completions", json.dumps(body).encode())
        answer = Answer(len(prompt), num_output_tokens, time.perf_counter())
        exchange = _Completion(answer, keep_token_ids=self._keep_token_ids)
        try:
            await self._exchange(payload, exchange)
        except (OSError, UnavailableError) as err:
            answer.fail("connection", str(err))
        answer.end_s = answer.end_s or time.perf_counter()
        answer.check_length()
        return answer

    async def get(self, path: str) -> Any:
        """JSON document of a path below /v1.

        Raises:
            UnavailableError: nothing answers there, or with another status than 200.
        """
        document = _Document()
        try:
            await self._exchange(self._request("GET", path, b""), document)
            if document.status == 200:
                return json.loads(document.body)
        except (OSError, ValueError, UnavailableError) as err:
            raise UnavailableError(f"the server at {self._netloc} cannot be reached: {err}") from err
        raise UnavailableError(f"the server at {self._netloc} answered {path} with status {document.status}")

    async def prepare(self, num_connections: int) -> None:
        """Open so many connections and keep them. Raises UnavailableError where nothing answers."""
        try:
            self._idle += await asyncio.gather(*(self._connect() for _ in range(num_connections)))
        except OSError as err:
            raise UnavailableError(f"the server at {self._netloc} cannot be reached: {err}") from err

    async def close(self) -> None:
        for connection in self._idle:
            connection.close()
        self._idle.clear()

    def _request(self, method: str, path: str, body: bytes) -> bytes:
        head = (
            f"{method} {self._prefix}{path} HTTP/1.1\r\nHost: {self._netloc}\r\n{self._authorization}"
            f"Content-Type: application/json\r\nContent-Length: {len(body)}\r\n\r\n"
        )
        return head.encode() + body

    async def _exchange(self, payload: bytes, receiver: _Receiver) -> None:
        while self._idle:
            connection = self._idle.pop()
            if connection.is_open:
                with suppress(_ClosedUnused):
                    return await self._use(connection, payload, receiver)
        return await self._use(await self._connect(), payload, receiver)

    async def _connect(self) -> _Connection:
        loop = asyncio.get_running_loop()
        _, connection = await loop.create_connection(_Connection, self._host, self._port, ssl=self._ssl)
        return connection

    async def _use(self, connection: _Connection, payload: bytes, receiver: _Receiver) -> None:
        try:
            await connection.exchange(payload, receiver)
        except BaseException:
            connection.close()
            raise
        if connection.is_open:
            self._idle.append(connection)


class _ClosedUnused(UnavailableError):
    """A kept connection was closed by the server before it answered anything: the request may be sent again."""


class _Receiver(Protocol):
    """Takes a response in."""

    def begin(self, status: int) -> None: ...

    def feed(self, data: bytes, now_s: float) -> None: ...

    def finish(self) -> None: ...


class _Document(_Receiver):
    """A response as a whole."""

    def __init__(self) -> None:
        self.status = 0
        self.body = b""

    def begin(self, status: int) -> None:
        self.status = status

    def feed(self, data: bytes, now_s: float) -> None:
        self.body += data

    def finish(self) -> None:
        pass


class _Completion(_Receiver):
    """Server-sent events of one completion, into an `Answer`."""

    def __init__(self, answer: Answer, *, keep_token_ids: bool) -> None:
        self._answer = answer
        self._keep_token_ids = keep_token_ids
        self._status = 0
        self._rest = b""
        self._is_complete = False

    def begin(self, status: int) -> None:
        self._status = status

    def feed(self, data: bytes, now_s: float) -> None:
        self._rest += data
        if self._status != 200:
            return
        *events, self._rest = self._rest.split(b"\n\n")
        for event in events:
            if event.startswith(b"data:"):
                self._event(event[5:].lstrip(), now_s)

    def _event(self, payload: bytes, now_s: float) -> None:
        if not self._keep_token_ids and (_UNFINISHED[0] in payload or _UNFINISHED[1] in payload):
            self._answer.arrivals_s.append(now_s)
        elif payload == b"[DONE]":
            self._is_complete = True
        else:
            self._document(json.loads(payload), now_s)

    def _document(self, chunk: dict[str, Any], now_s: float) -> None:
        answer = self._answer
        if "error" in chunk:
            answer.fail(*_error_of(chunk, 500))
            return
        for choice in chunk.get("choices") or ():
            token_ids = choice.get("token_ids")
            if choice.get("text") or token_ids:
                answer.arrivals_s.append(now_s)
            if self._keep_token_ids:
                answer.token_ids += token_ids or ()
            if choice.get("finish_reason") is not None:
                answer.end_s = now_s
        if usage := chunk.get("usage"):
            answer.num_output_tokens = int(usage["completion_tokens"])
            answer.num_cached_tokens = int((usage.get("prompt_tokens_details") or {}).get("cached_tokens") or 0)

    def finish(self) -> None:
        if self._status != 200:
            try:
                document = json.loads(self._rest)
            except ValueError:
                document = {}
            self._answer.fail(*_error_of(document, self._status))
        elif not self._is_complete:
            self._answer.fail("broken_off", "the stream ended before data: [DONE]")
        if not self._answer.error and not self._answer.arrivals_s:
            # Tokens without any text, such as special ones alone, come with the end.
            self._answer.arrivals_s.append(self._answer.end_s)


def _error_of(document: Any, status: int) -> tuple[str, str]:
    """Kind and sentence of an error that the server reports."""
    error = document.get("error") if isinstance(document, dict) else None
    message = error.get("message") if isinstance(error, dict) else None
    return f"http_{status}", str(message or f"the server answered with status {status}")


class _Connection(asyncio.Protocol):
    """HTTP/1.1 on one transport, one exchange at a time."""

    def __init__(self) -> None:
        self._transport: asyncio.Transport | None = None
        self._receiver: _Receiver | None = None
        self._ended: asyncio.Future[None] | None = None
        self._buffer = b""
        self._remaining: int | None = None  # bytes of a body of known length; None is chunked or until the end
        self._is_chunked = False
        self._in_body = False
        self._num_exchanges = 0

    @property
    def is_open(self) -> bool:
        return self._transport is not None and not self._transport.is_closing()

    async def exchange(self, payload: bytes, receiver: _Receiver) -> None:
        """Send a request and take its response in.

        Raises:
            UnavailableError: the connection broke before the response was complete.
        """
        assert self._transport is not None
        self._receiver, self._buffer, self._in_body = receiver, b"", False
        self._ended = asyncio.get_running_loop().create_future()
        self._transport.write(payload)
        await self._ended
        self._num_exchanges += 1

    def close(self) -> None:
        if self._transport is not None:
            self._transport.close()

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.Transport, transport)  # uvloop's is no subclass

    def data_received(self, data: bytes) -> None:
        now_s = time.perf_counter()
        if self._receiver is None:
            self.close()  # nothing was asked for
            return
        self._buffer = self._buffer + data if self._buffer else data
        try:
            if not self._in_body and not self._read_head():
                return
            self._read_body(now_s)
        except (ValueError, KeyError, TypeError) as err:
            self._end(UnavailableError(f"the response cannot be read: {err}"))
            self.close()

    def connection_lost(self, exc: Exception | None) -> None:
        if self._receiver is None:
            return
        if self._in_body and not self._is_chunked and self._remaining is None:
            self._end(None)  # a body without a length ends with its connection
        elif self._num_exchanges and not self._in_body and not self._buffer:
            self._end(_ClosedUnused("the connection was closed"))
        else:
            self._end(UnavailableError(f"the connection broke: {exc or 'closed by the server'}"))

    def _read_head(self) -> bool:
        end = self._buffer.find(_HEAD_END)
        if end < 0:
            if len(self._buffer) > _MAX_HEAD_BYTES:
                raise ValueError("its head does not end")
            return False
        lines = self._buffer[:end].decode("latin-1").split("\r\n")
        self._buffer = self._buffer[end + len(_HEAD_END) :]
        version, status, *_ = lines[0].split(" ")
        if not version.startswith("HTTP/1."):
            raise ValueError(f"{lines[0]!r:.80} is no HTTP/1.1")
        headers = {name.lower(): value.strip() for name, _, value in (line.partition(":") for line in lines[1:])}
        self._is_chunked = headers.get("transfer-encoding", "").lower() == "chunked"
        self._remaining = int(headers["content-length"]) if "content-length" in headers else None
        self._in_body = True
        assert self._receiver is not None
        self._receiver.begin(int(status))
        return True

    def _read_body(self, now_s: float) -> None:
        if self._is_chunked:
            self._read_chunks(now_s)
            return
        assert self._receiver is not None
        data = self._buffer if self._remaining is None else self._buffer[: self._remaining]
        self._buffer = self._buffer[len(data) :]
        if data:
            self._receiver.feed(data, now_s)
        if self._remaining is not None:
            self._remaining -= len(data)
            if self._remaining == 0:
                self._end(None)

    def _read_chunks(self, now_s: float) -> None:
        assert self._receiver is not None
        data, at = self._buffer, 0
        while (line_end := data.find(b"\r\n", at)) >= 0:
            size = int(data[at:line_end].partition(b";")[0], 16)
            chunk_end = line_end + 2 + size
            if len(data) < chunk_end + 2:
                break
            if size == 0:  # no trailers: no server of completions sends any
                self._buffer = b""
                self._end(None)
                return
            self._receiver.feed(data[line_end + 2 : chunk_end], now_s)
            at = chunk_end + 2
        self._buffer = data[at:]

    def _end(self, error: Exception | None) -> None:
        receiver, self._receiver = self._receiver, None
        if self._ended is None or self._ended.done():
            return
        if error is not None:
            self._ended.set_exception(error)
            return
        if receiver is not None:
            receiver.finish()
        self._ended.set_result(None)
