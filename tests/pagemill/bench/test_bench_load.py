"""Load from processes of their own on a server that notes what it is asked."""

from __future__ import annotations

import json
import multiprocessing
import threading
import time
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import pytest

from pagemill.bench.arrivals import ClosedLoop, OpenLoop, Rounds
from pagemill.bench.load import LoadProcesses, num_requests
from pagemill.bench.targets import HttpTarget, served_model
from pagemill.bench.workloads import FixedLengths, MultiTurn, TokenSource
from pagemill.errors import PagemillError, UnavailableError

TOKENS = TokenSource(1000, 3)
ANSWER_ID = 5


@pytest.fixture(scope="module")
def processes() -> Iterator[LoadProcesses]:
    with LoadProcesses(2) as made:
        yield made


class Handler(BaseHTTPRequestHandler):
    """Answers after `server.delay_s` with tokens of one id."""

    protocol_version = "HTTP/1.1"

    def do_GET(self) -> None:
        self._send(json.dumps({"data": [{"id": "first", "max_model_len": 64}, {"id": "second"}]}).encode())

    def do_POST(self) -> None:
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        server = self.server
        with server.lock:
            server.bodies.append((time.perf_counter(), body))
            server.running += 1
            server.most_running = max(server.most_running, server.running)
            if len(server.bodies) >= server.num_awaited:
                server.enough.set()
        if server.num_awaited:
            server.enough.wait(60)
        time.sleep(server.delay_s)
        with server.lock:
            server.running -= 1
        count = body["max_tokens"]
        choice = {"index": 0, "text": "a", "finish_reason": None, "token_ids": [ANSWER_ID]}
        events = [json.dumps({"choices": [choice]})] * count
        events += [json.dumps({"choices": [choice | {"text": "", "finish_reason": "length", "token_ids": []}]})]
        events += [json.dumps({"choices": [], "usage": {"completion_tokens": count}}), "[DONE]"]
        self._send("".join(f"data: {event}\n\n" for event in events).encode())

    def _send(self, body: bytes) -> None:
        self.send_response(200)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, *args: object) -> None:
        pass


class NotingServer(ThreadingHTTPServer):
    daemon_threads = True

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), Handler)
        self.lock = threading.Lock()
        self.bodies: list[tuple[float, dict]] = []
        self.running = self.most_running = 0
        self.delay_s = 0.02
        # Nothing is answered before so many requests have come.
        self.num_awaited = 0
        self.enough = threading.Event()

    @property
    def target(self) -> HttpTarget:
        return HttpTarget(f"http://127.0.0.1:{self.server_address[1]}", "first")


@pytest.fixture()
def server() -> Iterator[NotingServer]:
    made = NotingServer()
    thread = threading.Thread(target=made.serve_forever, daemon=True)
    thread.start()
    yield made
    made.enough.set()
    made.shutdown()
    made.server_close()


def test_a_closed_loop_runs_each_conversation_once_and_no_more_than_asked_at_a_time(
    server: NotingServer, processes: LoadProcesses
) -> None:
    counts: list[int] = []
    workload, schedule = FixedLengths(TOKENS, 6, 3), ClosedLoop(3, 12)
    result = processes.run(server.target, workload, schedule, on_progress=counts.append)
    result.require_all()
    assert num_requests(workload, schedule) == len(result.answers) == counts[-1] == 12
    assert server.most_running == 3
    prompts = sorted(body["prompt"] for _, body in server.bodies)
    assert prompts == sorted(workload.conversation(index).turns[0].token_ids for index in range(12))
    assert result.elapsed_s >= 4 * server.delay_s
    assert 0 < result.client_cpu_share < 1


def test_a_duration_ends_a_closed_loop(server: NotingServer, processes: LoadProcesses) -> None:
    workload, schedule = FixedLengths(TOKENS, 6, 3), ClosedLoop(2, None, 0.3)
    result = processes.run(server.target, workload, schedule)
    result.require_all()
    assert num_requests(workload, schedule) is None
    assert len(result.answers) == len(server.bodies) >= 2


def test_an_open_loop_begins_at_its_times_however_many_run(server: NotingServer, processes: LoadProcesses) -> None:
    server.num_awaited = 4
    result = processes.run(server.target, FixedLengths(TOKENS, 6, 3), OpenLoop((0.0, 0.1, 0.2, 0.3)))
    result.require_all()
    assert server.most_running == 4
    assert min(answer.late_s for answer in result.answers) > -0.01, "none is sent before its time"


def test_rounds_begin_together_and_do_not_overlap(server: NotingServer, processes: LoadProcesses) -> None:
    result = processes.run(server.target, FixedLengths(TOKENS, 6, 3), Rounds(3, 2))
    result.require_all()
    first, second = result.answers[:3], result.answers[3:]
    assert max(answer.end_s for answer in first) <= min(answer.start_s for answer in second)
    assert server.most_running == 3


def test_turns_send_all_that_was_said(server: NotingServer, processes: LoadProcesses) -> None:
    workload = MultiTurn(TOKENS, 4, 2, 3)
    result = processes.run(server.target, workload, ClosedLoop(1, 1))
    result.require_all()
    said: list[int] = []
    for (_, body), turn in zip(server.bodies, workload.conversation(0).turns, strict=True):
        said += turn.token_ids
        assert body["prompt"] == said
        said += [ANSWER_ID] * 2
    assert [answer.num_input_tokens for answer in result.answers] == [4, 10, 16]


def test_a_request_that_takes_too_long_has_failed(server: NotingServer, processes: LoadProcesses) -> None:
    server.num_awaited = 3
    result = processes.run(server.target, FixedLengths(TOKENS, 6, 3), OpenLoop((0.0, 0.0)), timeout_s=0.1)
    assert [answer.error for answer in result.answers] == ["timeout"] * 2
    with pytest.raises(PagemillError, match=r"2 of 2 requests failed \(timeout\); the first: no complete answer"):
        result.require_all()


def test_a_load_of_nothing_is_refused(server: NotingServer, processes: LoadProcesses) -> None:
    with pytest.raises(PagemillError, match="has no request"):
        processes.run(server.target, FixedLengths(TOKENS, 6, 3), OpenLoop(()))


def test_a_process_that_cannot_reach_the_server_is_an_error_and_goes_on(
    server: NotingServer, processes: LoadProcesses
) -> None:
    with pytest.raises(UnavailableError, match="cannot be reached"):
        processes.run(HttpTarget("http://127.0.0.1:9", "m"), FixedLengths(TOKENS, 6, 3), ClosedLoop(1, 1))
    processes.run(server.target, FixedLengths(TOKENS, 6, 3), ClosedLoop(1, 1)).require_all()


def test_a_process_that_dies_is_an_error(server: NotingServer) -> None:
    before = set(multiprocessing.active_children())
    with LoadProcesses() as processes:
        processes.run(server.target, FixedLengths(TOKENS, 6, 3), ClosedLoop(1, 1)).require_all()
        for process in set(multiprocessing.active_children()) - before:
            process.kill()
        with pytest.raises(PagemillError, match="makes the load died"):
            processes.run(server.target, FixedLengths(TOKENS, 6, 3), ClosedLoop(1, 1))


def test_the_model_is_the_servers_first_or_the_named_one(server: NotingServer) -> None:
    unnamed = HttpTarget(server.target.base_url)
    assert (served_model(unnamed).name, served_model(unnamed).max_model_len) == ("first", 64)
    second = served_model(HttpTarget(server.target.base_url, "second"))
    assert (second.name, second.max_model_len) == ("second", 0)
    with pytest.raises(UnavailableError, match="no model 'third'"):
        served_model(HttpTarget(server.target.base_url, "third"))
