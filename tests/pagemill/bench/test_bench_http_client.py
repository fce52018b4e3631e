"""The client of the load generator against servers of all kinds: what it counts, times and calls a failure."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager

import pytest

from pagemill.bench.http_client import HttpClient
from pagemill.errors import ConfigError, UnavailableError

HEAD = b"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\n"
Reply = Callable[[asyncio.StreamWriter], Awaitable[None]]


class Peer:
    """A server whose connections answer each request with the same reply."""

    def __init__(self, reply: Reply) -> None:
        self._reply = reply
        self.requests: list[tuple[str, dict]] = []
        self.num_connections = 0

    async def serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.num_connections += 1
        try:
            while True:
                head = (await reader.readuntil(b"\r\n\r\n")).decode()
                length = next(line for line in head.split("\r\n") if line.lower().startswith("content-length"))
                body = await reader.readexactly(int(length.partition(":")[2]))
                self.requests.append((head, json.loads(body) if body else {}))
                await self._reply(writer)
        except (asyncio.IncompleteReadError, ConnectionError):
            pass
        finally:
            writer.close()


@asynccontextmanager
async def talking(reply: Reply, **options: bool) -> AsyncIterator[tuple[HttpClient, Peer]]:
    peer = Peer(reply)
    server = await asyncio.start_server(peer.serve, "127.0.0.1", 0)
    port = server.sockets[0].getsockname()[1]
    client = HttpClient(f"http://127.0.0.1:{port}", "m", "key", **options)
    try:
        yield client, peer
    finally:
        await client.close()
        server.close()


def event(**chunk: object) -> bytes:
    return b"data: " + json.dumps(chunk).encode() + b"\n\n"


def token(text: str = "a", finish: str | None = None, **more: object) -> bytes:
    return event(choices=[{"index": 0, "text": text, "finish_reason": finish, **more}])


def usage(count: int, cached: int = 0) -> bytes:
    return event(choices=[], usage={"completion_tokens": count, "prompt_tokens_details": {"cached_tokens": cached}})


DONE = b"data: [DONE]\n\n"


def chunk(data: bytes) -> bytes:
    return b"%x\r\n%s\r\n" % (len(data), data)


def chunked(*pieces: bytes, slice_len: int = 1 << 20, pause_s: float = 0.0) -> Reply:
    """A chunked response in which each piece is a chunk, written in slices that end anywhere."""

    async def reply(writer: asyncio.StreamWriter) -> None:
        data = HEAD + b"Transfer-Encoding: chunked\r\n\r\n" + b"".join(map(chunk, pieces)) + b"0\r\n\r\n"
        for at in range(0, len(data), slice_len):
            writer.write(data[at : at + slice_len])
            await writer.drain()
            await asyncio.sleep(pause_s)

    return reply


@pytest.mark.parametrize("slice_len", [1, 7, 1 << 20])
async def test_an_answer_is_counted_however_its_bytes_are_cut(slice_len: int) -> None:
    reply = chunked(token("x"), token("y") + token("z"), token("", "length") + usage(3, 2) + DONE, slice_len=slice_len)
    async with talking(reply) as (client, peer):
        answer = await client.ask([5, 6, 7, 8], 3)
        again = await client.ask([5, 6], 3)
    assert (answer.error, answer.num_output_tokens, answer.num_cached_tokens) == ("", 3, 2)
    assert len(answer.arrivals_s) == 3
    assert answer.start_s <= answer.arrivals_s[0] <= answer.arrivals_s[-1] <= answer.end_s
    assert (again.error, len(again.arrivals_s)) == ("", 3)
    assert peer.num_connections == 1, "a connection is used again"
    head, body = peer.requests[0]
    assert head.startswith("POST /v1/completions HTTP/1.1")
    assert "Authorization: Bearer key" in head
    assert body["prompt"] == [5, 6, 7, 8]
    assert (body["max_tokens"], body["temperature"], body["ignore_eos"], body["stream"]) == (3, 0, True, True)


async def test_pieces_have_the_times_at_which_they_come() -> None:
    async def reply(writer: asyncio.StreamWriter) -> None:
        writer.write(HEAD + b"Transfer-Encoding: chunked\r\n\r\n")
        for piece in (token(), token(), token("", "length") + usage(2) + DONE):
            await asyncio.sleep(0.05)
            writer.write(chunk(piece))
        writer.write(b"0\r\n\r\n")

    async with talking(reply) as (client, _):
        answer = await client.ask([1], 2)
    assert answer.first_token_s >= 0.045
    assert answer.arrivals_s[1] - answer.arrivals_s[0] >= 0.03
    assert answer.per_token_s == answer.arrivals_s[1] - answer.arrivals_s[0]


async def test_a_last_piece_may_hold_text_and_the_end() -> None:
    async with talking(chunked(token(), token("b", "length"), usage(2), DONE)) as (client, _):
        answer = await client.ask([1], 2)
    assert (answer.error, len(answer.arrivals_s)) == ("", 2)


async def test_token_ids_are_kept_where_they_are_asked_for() -> None:
    reply = chunked(
        token("a", token_ids=[3, 4]), token("", token_ids=[9]), token("", "length", token_ids=[]), usage(3), DONE
    )
    async with talking(reply, keep_token_ids=True) as (client, peer):
        answer = await client.ask([1], 3)
    assert (answer.error, answer.token_ids) == ("", [3, 4, 9])
    assert len(answer.arrivals_s) == 2
    assert peer.requests[0][1]["return_token_ids"] is True


async def test_another_length_is_a_failure() -> None:
    async with talking(chunked(token(), token("", "length"), usage(1), DONE)) as (client, _):
        answer = await client.ask([1], 2)
    assert answer.error == "wrong_length"
    assert answer.reason == "an answer has 1 tokens, 2 were asked for"


@pytest.mark.parametrize("with_length", [True, False])
async def test_a_status_is_a_failure_of_its_kind_with_the_servers_reason(with_length: bool) -> None:
    body = json.dumps({"error": {"message": "the queue is full"}}).encode()

    async def reply(writer: asyncio.StreamWriter) -> None:
        length = b"Content-Length: %d\r\n" % len(body) if with_length else b"Connection: close\r\n"
        writer.write(b"HTTP/1.1 429 Too Many Requests\r\n" + length + b"\r\n" + body)
        await writer.drain()
        if not with_length:
            writer.close()

    async with talking(reply) as (client, _):
        answer = await client.ask([1], 2)
    assert (answer.error, answer.reason) == ("http_429", "the queue is full")


async def test_an_error_within_a_stream_is_a_failure() -> None:
    async with talking(chunked(token(), event(error={"message": "lost"}))) as (client, _):
        answer = await client.ask([1], 2)
    assert (answer.error, answer.reason) == ("http_500", "lost")


async def test_a_stream_without_its_end_is_a_failure() -> None:
    async with talking(chunked(token())) as (client, _):
        answer = await client.ask([1], 1)
    assert answer.error == "broken_off"


async def test_a_connection_that_breaks_is_a_failure() -> None:
    async def reply(writer: asyncio.StreamWriter) -> None:
        writer.write(HEAD + b"Transfer-Encoding: chunked\r\n\r\n" + chunk(token()))
        await writer.drain()
        writer.close()

    async with talking(reply) as (client, _):
        answer = await client.ask([1], 2)
    assert answer.error == "connection"
    assert "broke" in answer.reason


async def test_what_is_no_http_is_a_failure() -> None:
    async def reply(writer: asyncio.StreamWriter) -> None:
        writer.write(b"hello there\r\n\r\n")

    async with talking(reply) as (client, _):
        answer = await client.ask([1], 2)
    assert answer.error == "connection"
    assert "no HTTP/1.1" in answer.reason


async def test_a_kept_connection_that_the_server_closed_is_replaced() -> None:
    good = chunked(token("a", "length"), usage(1), DONE)

    async def reply(writer: asyncio.StreamWriter) -> None:
        await good(writer)
        await asyncio.sleep(0.05)
        writer.close()

    async with talking(reply) as (client, peer):
        first = await client.ask([1], 1)
        await asyncio.sleep(0.2)
        second = await client.ask([1], 1)
    assert (first.error, second.error) == ("", "")
    assert peer.num_connections == 2


async def test_nobody_there_is_a_failure_of_the_request_and_an_error_of_a_question() -> None:
    client = HttpClient("http://127.0.0.1:9", "m")
    assert (await client.ask([1], 1)).error == "connection"
    for question in (client.get("/models"), client.prepare(1)):
        with pytest.raises(UnavailableError, match="cannot be reached"):
            await question


async def test_documents_are_read_whole_and_other_statuses_refused() -> None:
    async def reply(writer: asyncio.StreamWriter) -> None:
        writer.write(b"HTTP/1.1 200 OK\r\nContent-Length: 13\r\n\r\n" + b'{"data": [1]}')

    async with talking(reply) as (client, _):
        assert await client.get("/models") == {"data": [1]}

    async def refusal(writer: asyncio.StreamWriter) -> None:
        writer.write(b"HTTP/1.1 401 Unauthorized\r\nContent-Length: 0\r\n\r\n")

    async with talking(refusal) as (client, _):
        with pytest.raises(UnavailableError, match="status 401"):
            await client.get("/models")


def test_an_address_that_is_none_is_refused() -> None:
    for address in ("127.0.0.1:8000", "ftp://host", "http://"):
        with pytest.raises(ConfigError, match="must be like http://"):
            HttpClient(address, "m")
