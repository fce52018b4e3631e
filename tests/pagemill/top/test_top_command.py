"""The command itself: frames for people and programs, exit codes, Ctrl-C."""

from __future__ import annotations

import contextlib
import functools
import io
import json
import os
import pty
import select
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from typing import Any

import pytest
from rich.console import Console
from top_processes import RouterProcess, SchedulerProcess, WorkerProcess, http_server

from pagemill.top.deployment import Away, Deployment
from pagemill.top.scrape import parse_address
from pagemill.top.view import render
from router.metrics import SchedulerLoad

TOP = [sys.executable, "-m", "pagemill.cli", "top", "--interval", "0.1"]
LOAD = SchedulerLoad("10.0.0.7:50052", True, running=3, waiting=2, kv_blocks_used=95, kv_blocks_total=100, workers=1)


@pytest.fixture()
def router_port() -> Iterator[int]:
    router = RouterProcess(LOAD)
    for _ in range(3):
        router.serve("OK", num_tokens=8, first_token_s=0.1, step_s=0.01)
    with http_server(router.text) as port:
        yield port


def run(*arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run([*TOP, *arguments], capture_output=True, text=True, timeout=60)


def test_a_snapshot_for_programs(router_port: int) -> None:
    done = run("--json", f"127.0.0.1:{router_port}", "127.0.0.1:1")
    assert (done.returncode, done.stderr) == (0, "")
    frame = json.loads(done.stdout)
    assert frame["interval_s"] >= 0.1
    router = frame["routers"][0]
    assert (router["requests_total"], router["output_tokens_total"], router["requests_per_s"]) == (3, 24, 0.0)
    assert (frame["schedulers"][0]["address"], frame["schedulers"][0]["kv_use"]) == ("10.0.0.7:50052", 0.95)
    assert frame["away"] == [{"address": "127.0.0.1:1", "reason": "connection refused"}]


def test_one_plain_frame_for_a_pipe(router_port: int) -> None:
    done = run("--once", f"http://127.0.0.1:{router_port}", "127.0.0.1:1")
    assert (done.returncode, done.stderr) == (0, "")
    assert "\x1b" not in done.stdout
    assert f"127.0.0.1:{router_port} " in done.stdout
    assert "95/100" in done.stdout
    assert "127.0.0.1:1  away: connection refused" in done.stdout


def test_exit_code_1_where_nothing_answers() -> None:
    done = run("--once", "127.0.0.1:1")
    assert (done.returncode, done.stderr) == (1, "")
    assert "away: connection refused" in done.stdout


@pytest.mark.parametrize(
    "arguments", [("ftp://host:1",), ("127.0.0.1:8000", "nonsense"), ("--interval", "nan"), ("--api-key", "a\nb")]
)
def test_a_bad_command_line_is_one_line_and_exit_code_2(arguments: tuple[str, ...]) -> None:
    done = run(*arguments)
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr.startswith("pagemill: error: ")
    assert done.stderr.count("\n") == 1


def start(address: str, *options: str, **streams: Any) -> subprocess.Popen[Any]:
    """The command as a shell starts it in the foreground, also where the tests were started to ignore ctrl-C."""
    hears_ctrl_c = functools.partial(signal.signal, signal.SIGINT, signal.SIG_DFL)
    return subprocess.Popen([*TOP, *options, address], preexec_fn=hears_ctrl_c, **streams)


def test_frames_follow_each_other_in_a_pipe_until_ctrl_c(router_port: int) -> None:
    top = start(f"127.0.0.1:{router_port}", stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    assert top.stdout is not None
    headlines = 0
    while headlines < 3:
        line = top.stdout.readline()
        assert line, "ended by itself"
        headlines += line.startswith("pagemill top")
    top.send_signal(signal.SIGINT)
    _, errors = top.communicate(timeout=30)
    assert (top.returncode, errors) == (0, "")


def test_ctrl_c_does_not_wait_for_an_address_that_hangs() -> None:
    with socket.create_server(("127.0.0.1", 0)) as silent:
        address = f"127.0.0.1:{silent.getsockname()[1]}"
        top = start(address, "--timeout", "600", stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
        connection, _ = silent.accept()
        with connection:
            assert connection.recv(4) == b"GET "
            top.send_signal(signal.SIGINT)
            assert top.communicate(timeout=60) == ("", "")
    assert top.returncode == 0


def test_a_terminal_is_given_back_after_ctrl_c(router_port: int) -> None:
    ours, theirs = pty.openpty()
    environment = os.environ | {"TERM": "xterm", "COLUMNS": "150", "LINES": "40"}
    top = start(f"127.0.0.1:{router_port}", stdin=theirs, stdout=theirs, stderr=theirs, env=environment)
    os.close(theirs)
    shown = b""
    deadline_s = time.monotonic() + 60
    while shown.count(b"rates over") < 2:
        assert time.monotonic() < deadline_s, shown
        shown += _read(ours)
    top.send_signal(signal.SIGINT)
    while top.poll() is None:
        assert time.monotonic() < deadline_s, "ctrl-C did not end it"
        shown += _read(ours)
    with contextlib.suppress(OSError):
        shown += _read(ours)
    os.close(ours)
    assert top.returncode == 0
    # Entered and left the alternate screen; nothing was complained of.
    assert shown.count(b"\x1b[?1049h") == shown.count(b"\x1b[?1049l") == 1
    assert b"Traceback" not in shown


def _read(descriptor: int) -> bytes:
    """What a terminal shows within a moment."""
    ready, _, _ = select.select([descriptor], [], [], 0.05)
    try:
        return os.read(descriptor, 65536) if ready else b""
    except OSError:
        return b""


def test_a_frame_of_all_kinds_fits_a_terminal_and_shows_every_figure() -> None:
    router, scheduler, worker = RouterProcess(LOAD), SchedulerProcess(), WorkerProcess()
    scheduler.totals.blocks_total = 400
    with http_server(router.text) as r, http_server(scheduler.text) as s, http_server(worker.text) as w:
        deployment = Deployment([parse_address(f"127.0.0.1:{port}") for port in (r, s, w)], "", 5.0)
        deployment.look()
        router.serve("INTERNAL", num_tokens=9, first_token_s=0.1, step_s=0.003)
        router.metrics.cache_hits.labels("tokens").inc(3)
        router.metrics.cache_misses.labels("tokens").inc(1)
        scheduler.totals.steps, scheduler.totals.query_tokens, scheduler.totals.hit_tokens = 40, 100, 37
        worker.step(num_tokens=1, step_ms=12, gap_ms=4, replay=True)
        frame = deployment.look()
    frame.away.append(Away("[red]host:1", "[bold]reason"))
    out = io.StringIO()
    Console(file=out, width=80).print(render(frame))
    text = out.getvalue()
    assert "…" not in text
    for shown in (
        "37%",
        "0/400",
        "25%",
        "100%",
        " 12 ",
        "115/149",
        "3.5/5.0",
        "-/75%",
        "[red]host:1  away: [bold]reason",
    ):
        assert shown in text, shown
    # The scheduler tells of itself, so the router's account of it is left out.
    assert "10.0.0.7" not in text
    assert max(map(len, text.splitlines())) <= 80
