"""The router as a process: start, both faces, readiness, drain, and what it says when it cannot start."""

from __future__ import annotations

import asyncio
import itertools
import json
import signal
import socket
import sys
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from typing import Any

import grpc.aio
import httpx
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha import reflection_pb2, reflection_pb2_grpc
from router_helpers import eventually

from pagemill.config import RouterSettings
from pagemill.rpc import aio_channel
from pagemill.v1 import common_pb2, inference_pb2, inference_pb2_grpc

PROGRAM = """
import asyncio, sys
from pagemill.config import RouterSettings
from router.app import run
sys.exit(asyncio.run(run(RouterSettings.model_validate_json(sys.argv[1]))))
"""
START_DEADLINE_S = 60


class RouterProcess:
    """One router in its own process."""

    def __init__(self, process: asyncio.subprocess.Process, ready: dict[str, Any]) -> None:
        self.process = process
        self.http = f"http://127.0.0.1:{ready['http_port']}"
        self.grpc = f"127.0.0.1:{ready['grpc_port']}"
        self.ready = ready


async def spawn(**settings: Any) -> asyncio.subprocess.Process:
    defaults: dict[str, Any] = {"http_port": 0, "grpc_port": 0, "scheduler": []}
    text = RouterSettings(**(defaults | settings)).model_dump_json()
    return await asyncio.create_subprocess_exec(
        sys.executable, "-c", PROGRAM, text, stdout=asyncio.subprocess.PIPE, stderr=asyncio.subprocess.PIPE
    )


@pytest.fixture
async def start_process() -> AsyncIterator[Callable[..., Awaitable[RouterProcess]]]:
    started: list[asyncio.subprocess.Process] = []

    async def start(**settings: Any) -> RouterProcess:
        process = await spawn(**settings)
        started.append(process)
        assert process.stdout is not None
        line = (await asyncio.wait_for(process.stdout.readline(), START_DEADLINE_S)).decode()
        assert line.startswith("pagemill-ready "), line
        return RouterProcess(process, json.loads(line.removeprefix("pagemill-ready ")))

    yield start
    for process in started:
        if process.returncode is None:
            process.kill()
        await process.communicate()


async def health_becomes(channel: grpc.aio.Channel, status: int) -> None:
    """The health service follows the pipeline's readiness by polling it."""
    deadline = time.monotonic() + 30
    stub = health_pb2_grpc.HealthStub(channel)
    while (await stub.Check(health_pb2.HealthCheckRequest())).status != status:
        assert time.monotonic() < deadline
        await asyncio.sleep(0.01)


async def reflected_services(channel: grpc.aio.Channel) -> set[str]:
    stub = reflection_pb2_grpc.ServerReflectionStub(channel)
    call = stub.ServerReflectionInfo(iter([reflection_pb2.ServerReflectionRequest(list_services="")]))
    response = await call.read()
    call.cancel()
    return {s.name for s in response.list_services_response.service}


async def readiness_becomes(router: RouterProcess, status_code: int) -> None:
    deadline = time.monotonic() + 30
    async with httpx.AsyncClient(base_url=router.http) as client:
        for _ in itertools.count():
            if (await client.get("/health/ready")).status_code == status_code:
                return
            assert time.monotonic() < deadline
            await asyncio.sleep(0.01)


async def test_both_faces_serve_and_a_drain_finishes_streams(
    start_scheduler: Any, start_process: Any, tokenizer: Any
) -> None:
    scheduler = await start_scheduler(lambda submit, index: [*tokenizer.encode(" word") * 30, 2])
    router = await start_process(scheduler=[scheduler.address])
    assert router.ready["service"] == "router"
    await readiness_becomes(router, 200)
    async with httpx.AsyncClient(base_url=router.http, timeout=30) as client, aio_channel(router.grpc) as channel:
        body = {"model": "SmolLM2-135M-Instruct", "prompt": "go", "max_tokens": 40}
        answer = (await client.post("/v1/completions", json=body)).json()
        assert answer["choices"][0]["text"] == " word" * 30
        metrics = (await client.get("/metrics")).text
        assert 'pagemill:requests_total{code="OK"} 1.0' in metrics
        assert 'pagemill:num_requests_running{scheduler="fake"}' in metrics
        assert {"pagemill.v1.Inference", "grpc.health.v1.Health"} <= await reflected_services(channel)

        scheduler.max_steps = scheduler.num_steps + 5
        stub = inference_pb2_grpc.InferenceStub(channel)
        request = inference_pb2.GenerateRequest(text="go", sampling=common_pb2.SamplingParams(max_tokens=40))
        call = stub.Generate(request)
        messages = aiter(call)
        first = await anext(messages)
        await health_becomes(channel, health_pb2.HealthCheckResponse.SERVING)

        router.process.send_signal(signal.SIGTERM)
        await readiness_becomes(router, 503)
        await health_becomes(channel, health_pb2.HealthCheckResponse.NOT_SERVING)
        assert (await client.post("/v1/completions", json=body)).status_code == 503
        scheduler.max_steps = None
        rest = [m async for m in messages]
        text = "".join(d.text for m in [first, *rest] for d in m.deltas)
        assert text == " word" * 30 and rest[-1].HasField("usage")
    assert await asyncio.wait_for(router.process.wait(), 20) == 0


async def test_it_serves_health_before_a_scheduler_is_there_and_becomes_ready_by_itself(
    start_scheduler: Any, start_process: Any, says: Any
) -> None:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    router = await start_process(scheduler=[f"127.0.0.1:{port}"], redis_url="unix:///nonexistent/redis.sock")
    async with httpx.AsyncClient(base_url=router.http) as client, aio_channel(router.grpc) as channel:
        answer = await client.get("/health/ready")
        assert answer.status_code == 503 and answer.json()["missing"] == ["scheduler"]
        assert (await client.get("/health/live")).status_code == 200
        await health_becomes(channel, health_pb2.HealthCheckResponse.NOT_SERVING)
        scheduler = await start_scheduler(says("hi"))
        await scheduler.stop()
        await scheduler.start(port)
        await readiness_becomes(router, 200)
        answer = await client.get("/health/ready")
        assert answer.json()["degraded"] == ["prompt cache (redis)"]


FAILING_STARTS = """
import asyncio, json, sys
from pagemill.config import RouterSettings
from router.app import run
for settings in json.loads(sys.argv[1]):
    code = asyncio.run(run(RouterSettings(**{"http_port": 0, "grpc_port": 0, "scheduler": [], **settings})))
    print("code", code, file=sys.stderr, flush=True)
"""


async def test_a_start_that_can_not_succeed_says_why_in_one_line_and_has_a_code() -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        cases: list[tuple[dict[str, Any], int, str]] = [
            ({"model": "/nonexistent/model"}, 1, "/nonexistent/model"),
            ({"tokenizer": "/nonexistent/tok"}, 1, "/nonexistent/tok"),
            ({"chat_template": "nowhere.jinja"}, 2, "nowhere.jinja"),
            ({"chat_template": "{% for %}"}, 2, "no valid Jinja"),
            ({"http_port": port}, 1, str(port)),
            ({"grpc_port": port}, 1, str(port)),
        ]
        process = await asyncio.create_subprocess_exec(
            sys.executable,
            "-c",
            FAILING_STARTS,
            json.dumps([settings for settings, _, _ in cases]),
            stdout=asyncio.subprocess.PIPE,
            stderr=asyncio.subprocess.PIPE,
        )
        stdout, stderr = await asyncio.wait_for(process.communicate(), START_DEADLINE_S)
    assert not stdout
    # The gRPC library writes lines of its own about the port.
    lines = [line for line in stderr.decode().splitlines() if line.startswith(("pagemill", "code", "Trace", " "))]
    said = [(message, code) for message, code in zip(lines[::2], lines[1::2], strict=True)]
    assert len(said) == len(cases)
    for (message, code), (_, expected_code, expected) in zip(said, cases, strict=True):
        assert expected in message and code == f"code {expected_code}"


async def test_a_second_signal_ends_the_process_at_once(
    start_scheduler: Any, start_process: Any, tokenizer: Any
) -> None:
    scheduler = await start_scheduler(lambda submit, index: [*tokenizer.encode(" word") * 30, 2])
    scheduler.max_steps = 3
    router = await start_process(scheduler=[scheduler.address])
    await readiness_becomes(router, 200)
    async with aio_channel(router.grpc) as channel:
        request = inference_pb2.GenerateRequest(text="go", sampling=common_pb2.SamplingParams(max_tokens=40))
        call = inference_pb2_grpc.InferenceStub(channel).Generate(request)
        await call.read()
        router.process.send_signal(signal.SIGTERM)
        await readiness_becomes(router, 503)
        router.process.send_signal(signal.SIGTERM)
        assert await asyncio.wait_for(router.process.wait(), 20) == 1
        call.cancel()
    await eventually(lambda: scheduler.num_live_rows == 0)
