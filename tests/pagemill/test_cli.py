"""The command line as a person meets it: help, errors in one line, exit codes."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest

from pagemill import __version__
from pagemill.commands import chat
from pagemill.commands.chat import _is_turn as is_turn
from pagemill.commands.endpoint import parse_ask_options

SERVICES = ["serve", "router", "scheduler", "worker"]
COMMANDS = [*SERVICES, "chat", "complete", "top", "config", "bench", "doctor", "version"]


ASK = {"max_tokens": 5, "temperature": 1.0, "top_p": 1.0, "seed": None}
DEFAULTS = ASK | {"address": "127.0.0.1:1", "url": None, "model": "", "api_key": ""}


def pagemill(*arguments: str, env: dict[str, str] | None = None, stdin: str = "") -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "pagemill.cli", *arguments]
    environment = os.environ | (env or {})
    return subprocess.run(command, input=stdin, capture_output=True, text=True, timeout=90, env=environment)


def closed_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def test_help_lists_every_command() -> None:
    text = pagemill("--help").stdout
    assert all(f"  {command} " in text for command in COMMANDS)


@pytest.mark.parametrize("command", COMMANDS)
def test_every_command_has_help(command: str) -> None:
    run = pagemill(command, "--help")
    assert run.returncode == 0
    assert "Usage: pagemill" in run.stdout


def test_the_version_is_the_packages() -> None:
    assert pagemill("version").stdout.strip() == __version__
    assert pagemill("--version").stdout.strip() == f"pagemill {__version__}"


@pytest.mark.parametrize(
    ("arguments", "hint"),
    [
        (("serv",), "serve"),
        (("serve", "--htp-port", "1"), "--http-port"),
        (("config", "routr"), "router"),
    ],
)
def test_a_typing_error_gets_a_hint_and_exit_code_2(arguments: tuple[str, ...], hint: str) -> None:
    run = pagemill(*arguments)
    assert run.returncode == 2
    assert hint in run.stderr


@pytest.mark.parametrize(
    ("arguments", "code", "words"),
    [
        (("router", "--http-port", "x"), 2, "--http-port"),
        (("serve", "--num-workers", "0"), 2, "--num-workers"),
        (("serve", "--config-file", "/no/such.yaml"), 2, "/no/such.yaml"),
        (("serve", "./no/such/model", "--http-port", "0", "--grpc-port", "0"), 1, "./no/such/model"),
        (("complete", "x", "--top-p", "nan"), 1, "top_p"),
        (("complete", "x", "--url", "ftp://x"), 2, "--url"),
    ],
)
def test_an_error_is_one_line_with_its_exit_code(arguments: tuple[str, ...], code: int, words: str) -> None:
    run = pagemill(*arguments)
    assert run.returncode == code
    assert words in run.stderr
    assert run.stderr.count("\n") == 1
    assert run.stderr.startswith("pagemill: error: ")


@pytest.mark.parametrize("way", ["--address", "--url"])
def test_talking_to_nobody_names_the_address(way: str) -> None:
    address = f"127.0.0.1:{closed_port()}"
    run = pagemill("chat", way, address if way == "--address" else f"http://{address}", stdin="hello\n")
    assert run.returncode == 1
    assert address in run.stderr
    assert run.stdout == ""


@pytest.mark.parametrize("way", ["--address", "--url"])
def test_a_chat_without_a_turn_still_says_that_nobody_is_there(way: str) -> None:
    address = f"127.0.0.1:{closed_port()}"
    run = pagemill("chat", way, address if way == "--address" else f"http://{address}")
    assert run.returncode == 1
    assert address in run.stderr


def test_an_http_port_given_as_grpc_address_gets_a_hint() -> None:
    with ThreadingHTTPServer(("127.0.0.1", 0), BaseHTTPRequestHandler) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        address = f"127.0.0.1:{server.server_port}"
        run = pagemill("chat", "--address", address)
        server.shutdown()
    assert run.returncode == 1
    assert f"use --url http://{address}" in run.stderr
    assert "--url takes" in pagemill("chat", "--address", f"http://{address}").stderr


def test_commands_of_a_chat_never_reach_the_model(capsys: pytest.CaptureFixture[str]) -> None:
    conversation = chat.Conversation(parse_ask_options(DEFAULTS), "")
    lines = ("/help", "/nonsense", "/", "/reset", "", "/etc/hosts", "/ a")
    assert [line for line in lines if is_turn(line, conversation)] == ["/etc/hosts", "/ a"]
    shown = capsys.readouterr().err.splitlines()
    assert "/reset" in shown[0]
    assert "/exit" in shown[0]
    assert shown[1:] == ["unknown command; /reset, /exit, /help"] * 2


def test_two_models_are_one_too_many() -> None:
    run = pagemill("serve", "a", "--model", "b")
    assert run.returncode == 2
    assert "two models" in run.stderr


def test_config_shows_what_a_command_would_run_with(tmp_path: Path) -> None:
    file = tmp_path / "pagemill.yaml"
    file.write_text("router: {api_key: hunter2, grpc_port: 7}\n")
    run = pagemill("config", "router", "--http-port", "9", "--config-file", str(file), "--json")
    values = json.loads(run.stdout)["router"]
    assert values["http_port"] == {"value": 9, "origin": "command line --http-port"}
    assert values["grpc_port"] == {"value": 7, "origin": f"{file}: router.grpc_port"}
    assert values["api_key"]["value"] == "********"
    assert values["log_level"]["origin"] == "default"
    table = pagemill("config", "--config-file", str(file)).stdout
    assert all(name in table for name in ("router", "scheduler", "worker", "serve", "restart", "block_size"))
    assert "hunter2" not in table


def test_config_serve_takes_what_serve_takes_and_shows_all_sections() -> None:
    run = pagemill("config", "serve", "--http-port", "9000", "--max-num-seqs", "7", "--json")
    values = json.loads(run.stdout)
    assert list(values) == ["router", "scheduler", "worker", "serve"]
    assert values["router"]["http_port"] == {"value": 9000, "origin": "command line --http-port"}
    assert values["scheduler"]["max_num_seqs"]["value"] == values["worker"]["max_num_seqs"]["value"] == 7


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("router: {api_key: 5}\n", "router.api_key"),
        ("worker: {block_size: 7}\n", "worker.block_size"),
        ("router: {api_key: [a=x, b=x]}\n", "two tenants have the same key"),
    ],
)
def test_config_serve_refuses_what_serve_refuses(tmp_path: Path, text: str, words: str) -> None:
    file = tmp_path / "pagemill.yaml"
    file.write_text(text)
    shown, served = (pagemill(*command, "--config-file", str(file)) for command in (("config", "serve"), ("serve",)))
    assert shown.returncode == served.returncode == 2
    assert words in shown.stderr
    assert shown.stderr == served.stderr


def test_the_doctor_finds_what_is_needed_here_and_says_what_is_not() -> None:
    run = pagemill("doctor")
    assert run.returncode == 0, run.stdout
    for what in ("python", "torch", "kernels", "cuda", "cuda kernels", "redis", "demo model", "ports"):
        assert what in run.stdout
    assert "instruction set" in run.stdout


def test_the_doctor_fails_where_the_kernels_cannot_be_used() -> None:
    run = pagemill("doctor", env={"PAGEMILL_CPU_ISA": "nonsense"})
    assert run.returncode == 1
    assert "MISSING  kernels" in run.stdout


def test_a_reader_that_goes_away_is_no_traceback() -> None:
    script = f"{sys.executable} -m pagemill.cli config | head -n 1"
    run = subprocess.run(["bash", "-c", script], capture_output=True, text=True, timeout=60)
    assert "Traceback" not in run.stderr
