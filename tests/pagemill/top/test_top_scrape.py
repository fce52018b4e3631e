"""Addresses, and what is said of processes that do not answer as they should."""

from __future__ import annotations

import contextlib
import socket
import threading
from collections.abc import Iterator

import pytest
from top_processes import RouterProcess, SchedulerProcess, WorkerProcess, http_server

from pagemill.errors import ConfigError
from pagemill.top.deployment import Deployment
from pagemill.top.scrape import AwayError, parse, parse_address, scrape


@pytest.mark.parametrize(
    ("text", "host", "port", "path"),
    [
        ("127.0.0.1:9100", "127.0.0.1", 9100, "/metrics"),
        ("http://router:8000", "router", 8000, "/metrics"),
        ("http://router:8000/", "router", 8000, "/metrics"),
        ("http://router:8000/v1", "router", 8000, "/metrics"),
        ("http://router:8000/metrics", "router", 8000, "/metrics"),
        ("https://host/llm", "host", 443, "/llm/metrics"),
        ("http://host", "host", 80, "/metrics"),
        ("[::1]:9100", "::1", 9100, "/metrics"),
    ],
)
def test_addresses(text: str, host: str, port: int, path: str) -> None:
    address = parse_address(text)
    assert (address.host, address.port, address.path, address.given) == (host, port, path, text)


@pytest.mark.parametrize(
    "text",
    ["", "localhost", "ftp://host:1", "host:0", "host:99999", "host:x", "http://", ":80", "[::1", "a b:1", "a:1\n"],
)
def test_a_bad_address_is_refused_by_name(text: str) -> None:
    with pytest.raises(ConfigError, match="host:port") as caught:
        parse_address(text)
    assert repr(text) in caught.value.message
    assert "\n" not in caught.value.message


def test_an_address_with_a_password_is_refused_without_repeating_it() -> None:
    with pytest.raises(ConfigError, match="--api-key") as caught:
        parse_address("http://me:secret@host:8000")
    assert "secret" not in caught.value.message


@pytest.mark.parametrize(
    ("process", "kind"), [(RouterProcess, "router"), (SchedulerProcess, "scheduler"), (WorkerProcess, "worker")]
)
def test_what_a_process_is_is_seen_from_its_series(process: type, kind: str) -> None:
    assert parse(process().text(), 0.0).kind == kind


def reason(port: int, api_key: str = "", timeout_s: float = 5.0) -> str:
    with pytest.raises(AwayError) as caught:
        scrape(parse_address(f"127.0.0.1:{port}"), api_key, timeout_s)
    return str(caught.value)


@pytest.mark.parametrize(
    ("answer", "expected"),
    [
        ((500, b"broken"), "answers with status 500"),
        (b"<html>hello</html>", "answers, but not with Prometheus text"),
        (b"\xff\xfe", "answers, but not with Prometheus text"),
        (b"node_load1 0.5\n", "answers with metrics that are not those of a router, scheduler or worker"),
        (b"# " + b"x" * (9 << 20), "answers with more than 8 MiB"),
    ],
)
def test_answers_that_are_no_metrics(answer: bytes | tuple[int, bytes], expected: str) -> None:
    with http_server(lambda: answer) as port:
        assert reason(port) == expected


def test_a_router_that_wants_a_key() -> None:
    with http_server(RouterProcess().text, api_key="right") as port:
        assert reason(port) == "wants an API key; --api-key gives one"
        assert reason(port, "wrong") == "refuses the API key"
        assert scrape(parse_address(f"127.0.0.1:{port}"), "right", 5.0).kind == "router"


@contextlib.contextmanager
def raw_server(sent: list[bytes], pause_s: float = 0.0) -> Iterator[int]:
    """Sends the pieces to each connection whatever it asks, a pause before each, and closes it."""
    done = threading.Event()

    def answer(connection: socket.socket) -> None:
        with connection, contextlib.suppress(OSError):
            connection.recv(65536)
            for piece in sent:
                if done.wait(pause_s):
                    return
                connection.sendall(piece)

    def accept() -> None:
        with contextlib.suppress(OSError):
            while True:
                threading.Thread(target=answer, args=(listener.accept()[0],), daemon=True).start()

    with socket.create_server(("127.0.0.1", 0)) as listener:
        thread = threading.Thread(target=accept, daemon=True)
        thread.start()
        try:
            yield listener.getsockname()[1]
        finally:
            done.set()
            listener.shutdown(socket.SHUT_RDWR)
            thread.join()


def test_ports_that_do_not_speak_http() -> None:
    with raw_server([b"\x00\x00\x12\x04\x00\x00\x00\x00\x00"]) as port:
        assert reason(port) == "does not speak HTTP; is this a gRPC port?"
    with raw_server([]) as port:
        assert reason(port) == "closed the connection"
    with socket.create_server(("127.0.0.1", 0)) as listener:
        port = listener.getsockname()[1]
    assert reason(port) == "connection refused"


def test_a_process_that_hangs_is_given_up() -> None:
    with raw_server([b"never"], pause_s=60) as port:
        assert reason(port, timeout_s=0.2) == "no answer within 0.2 s"


@pytest.mark.parametrize("length", [b"Content-Length: 4000\r\n", b""], ids=["length known", "length unknown"])
def test_an_answer_that_trickles_in_is_given_up_as_a_whole(length: bytes) -> None:
    with raw_server([b"HTTP/1.1 200 OK\r\n" + length + b"\r\n", *[b"#\n"] * 2000], pause_s=0.02) as port:
        assert reason(port, timeout_s=0.3) == "no answer within 0.3 s"


def test_an_address_goes_away_and_comes_back_by_itself() -> None:
    router, worker = RouterProcess(), WorkerProcess()
    with http_server(worker.text) as worker_port:
        with http_server(router.text) as port:
            addresses = [parse_address(f"127.0.0.1:{p}") for p in (port, worker_port)]
            addresses.append(parse_address(f"http://127.0.0.1:{port}/"))
            deployment = Deployment(addresses, "", timeout_s=5.0)
            first = deployment.look()
            assert (len(first.routers), len(first.workers), first.away, first.interval_s) == (1, 1, [], None)
        second = deployment.look()
        assert (second.routers, [(away.address, away.reason) for away in second.away]) == (
            [],
            [(f"127.0.0.1:{port}", "connection refused")],
        )
        assert second.workers[0].steps_per_s == 0.0
        # The same router again, as after a failure of the network, then one that was started anew.
        router.serve("OK", num_tokens=4, first_token_s=0.1, step_s=0.01)
        with http_server(router.text, port):
            third = deployment.look()
            assert third.away == []
            # One request in a time that is no longer than the longest one of the frame.
            assert third.routers[0].requests_per_s >= 1 / third.interval_s
        with http_server(RouterProcess().text, port):
            fourth = deployment.look()
            assert (fourth.routers[0].requests_per_s, fourth.routers[0].requests_total) == (0.0, 0)
    assert deployment.look().is_empty
