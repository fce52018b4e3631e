"""Redis makes repeats faster and is never needed."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import socket
import subprocess
import tempfile
from pathlib import Path

import httpx
import pytest
from processes import Server, serve, start, wait_until

from pagemill.redis_server import find_redis_server

pytestmark = pytest.mark.e2e


def _redis(socket_path: Path) -> subprocess.Popen:
    command = [
        str(find_redis_server()),
        "--unixsocket",
        str(socket_path),
        "--port",
        "0",
        "--save",
        "",
        "--appendonly",
        "no",
    ]
    process = subprocess.Popen(command, stdout=subprocess.DEVNULL)

    def answers() -> bool:
        with contextlib.suppress(OSError), socket.socket(socket.AF_UNIX) as probe:
            probe.connect(str(socket_path))
            probe.sendall(b"PING\r\n")
            return probe.recv(16).startswith(b"+PONG")
        return False

    wait_until(answers, 10, "redis answers")
    return process


def _ask(server: Server, prompt: str) -> httpx.Response:
    body = {"prompt": prompt, "max_tokens": 6, "temperature": 0}
    return httpx.post(server.http_url + "/v1/completions", json=body, timeout=60)


def _degraded(server: Server) -> list[str]:
    return httpx.get(server.http_url + "/health/ready", timeout=10).json()["degraded"]


def _away_lines(server: Server) -> list[str]:
    lines = server.process.text().splitlines()
    return [line[line.index("the prompt cache") :] for line in lines if "the prompt cache is away" in line]


def test_a_burst_on_a_fresh_server_leaves_a_healthy_redis_in_use() -> None:
    with serve() as server:

        async def burst() -> list[int]:
            async with httpx.AsyncClient(base_url=server.http_url, timeout=60, limits=httpx.Limits()) as http:
                bodies = [{"prompt": f"Burst {i}:", "max_tokens": 2, "temperature": 0} for i in range(100)]
                answers = await asyncio.gather(*(http.post("/v1/completions", json=body) for body in bodies))
                return [answer.status_code for answer in answers]

        assert asyncio.run(burst()) == [200] * 100
        assert not _degraded(server)
        assert not _away_lines(server)


def test_a_repeated_deterministic_request_is_answered_without_the_engine(server: Server) -> None:
    first = _ask(server, "An answer worth keeping:")
    steps = server.metric("pagemill:scheduler_steps_total", of="scheduler")
    second = _ask(server, "An answer worth keeping:")
    assert second.json()["choices"] == first.json()["choices"]
    assert server.metric("pagemill:scheduler_steps_total", of="scheduler") == steps
    assert server.metric("pagemill:prompt_cache_hits_total") > 0


def test_OP09_killing_redis_under_load_fails_no_request_and_it_is_used_again_when_back() -> None:
    with tempfile.TemporaryDirectory() as folder:
        socket_path = Path(folder) / "redis.sock"
        redis = _redis(socket_path)
        try:
            with serve("--redis", "off", "--redis-url", f"unix://{socket_path}") as server:
                statuses: list[int] = []

                async def load() -> None:
                    async with httpx.AsyncClient(base_url=server.http_url, timeout=60) as http:

                        async def one(number: int) -> None:
                            body = {"prompt": f"Request {number % 7}:", "max_tokens": 6, "temperature": 0}
                            statuses.append((await http.post("/v1/completions", json=body)).status_code)

                        for round_number in range(12):
                            if round_number == 4:
                                redis.kill()
                                redis.wait()
                            await asyncio.gather(*(one(round_number * 8 + i) for i in range(8)))

                asyncio.run(load())
                assert statuses == [200] * 96
                assert httpx.get(server.http_url + "/health/ready", timeout=10).status_code == 200
                redis = _redis(socket_path)
                hits = server.metric("pagemill:prompt_cache_hits_total")

                def used_again() -> bool:
                    assert _ask(server, "Back again:").status_code == 200
                    return server.metric("pagemill:prompt_cache_hits_total") > hits

                wait_until(used_again, 15, "hits after the return of Redis")
        finally:
            redis.kill()
            redis.wait()


def test_OP09_a_router_starts_and_serves_with_redis_away() -> None:
    with serve("--redis", "off", "--redis-url", "redis://127.0.0.1:1") as server:
        assert _ask(server, "No cache here:").status_code == 200


def test_a_stopped_redis_that_hangs_costs_milliseconds_not_requests() -> None:
    with tempfile.TemporaryDirectory() as folder:
        socket_path = Path(folder) / "redis.sock"
        redis = _redis(socket_path)
        try:
            with serve("--redis", "off", "--redis-url", f"unix://{socket_path}") as server:
                assert _ask(server, "Warm").status_code == 200
                os.kill(redis.pid, signal.SIGSTOP)
                for number in range(5):
                    assert _ask(server, f"Hanging {number}").status_code == 200
                assert _degraded(server)
                os.kill(redis.pid, signal.SIGCONT)
                wait_until(lambda: not _degraded(server), 10, "Redis in use again")
                assert _away_lines(server) == ["the prompt cache is away: no answer in 20 ms"]
        finally:
            redis.kill()
            redis.wait()


def test_PX02_new_weights_under_the_same_name_get_no_old_answer(tmp_path: Path) -> None:
    """The worker is replaced by one with other weights; neither KV nor cached responses of the old one are used."""
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    from pagemill.demo_model import demo_model_path

    path = demo_model_path()
    other = tmp_path / "other"
    model = AutoModelForCausalLM.from_pretrained(path.parent, gguf_file=path.name, dtype=torch.float32)
    config = model.config.__class__(**{**model.config.to_dict(), "num_hidden_layers": 2})
    config.quantization_config = None
    del config.quantization_config
    AutoModelForCausalLM.from_config(config).save_pretrained(other)
    AutoTokenizer.from_pretrained(path.parent, gguf_file=path.name).save_pretrained(other)

    socket_path = tmp_path / "redis.sock"
    redis = _redis(socket_path)
    processes = []
    try:
        scheduler = start("scheduler", "--port", "0")
        address = f"127.0.0.1:{scheduler.ready['port']}"
        old = start("worker", str(path), "--scheduler", address)
        router = start(
            "router",
            *("--scheduler", address, "--served-model-name", "m", "--redis-url", f"unix://{socket_path}"),
            *("--http-port", "0", "--grpc-port", "0"),
        )
        processes = [router, old, scheduler]
        server = Server(router)
        wait_until(lambda: _is_ready(server), 30, "ready")
        prompt = "The weather in spring is mild and the days are longer, so that the birds"
        first, again = _ask(server, prompt).json(), _ask(server, prompt).json()
        assert first["choices"][0]["text"] == again["choices"][0]["text"]
        assert old.stop() == 0
        new = start("worker", str(other), "--scheduler", address)
        processes[1] = new
        wait_until(lambda: _is_ready(server), 30, "ready again")
        swapped = _ask(server, prompt).json()
        assert swapped["choices"][0]["text"] != first["choices"][0]["text"]
        assert not (swapped["usage"].get("prompt_tokens_details") or {}).get("cached_tokens")
    finally:
        for process in processes:
            process.stop()
        redis.kill()
        redis.wait()


def _is_ready(server: Server) -> bool:
    with contextlib.suppress(httpx.HTTPError):
        return httpx.get(server.http_url + "/health/ready", timeout=5).status_code == 200
    return False
