"""What serving costs outside the model, with all processes in the loop.

Scheduler and router as they are in production, a worker whose model takes a given time and no computation, and load
generators in processes of their own that keep a number of streams running. Printed is the CPU time of each process, per
step or output token; for one stream, how long a step plan takes to follow a result, and a token to reach the client.

    python benchmarks/serving_overhead.py [--edges sse grpc whole] [--streams 256 1024] [--step-ms 50] [--seconds 10]
"""

from __future__ import annotations

import argparse
import asyncio
import functools
import json
import os
import select
import socket
import statistics
import subprocess
import sys
import time
import urllib.request
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

NUM_SLOTS = 1024
BLOCK_SIZE = 16
# Ids of common words in the demo model's vocabulary: text as it is in life, one word a token.
WORDS = [260, 314, 282, 253, 284, 276, 338, 411, 418, 339, 327, 335, 355, 429, 347, 392]


# The worker: plans in, tokens out after a while.


def worker_main(address: str, step_ms: float, token_us: float, vocab_size: int) -> int:
    """Answer each step after `step_ms` and `token_us` for each prompt token; prints its clock readings at the end."""
    from pagemill.step import StepPlan, StepResult, WorkerCapacity
    from worker.link import SchedulerStream, StreamEndedError
    from worker.wire import hello_to_proto, plan_from_proto, result_to_proto

    came_s: dict[int, float] = {}

    class TimedStream(SchedulerStream):
        def _deliver(self, item: Any) -> bool:
            if getattr(item, "step", None) is not None:
                came_s[item.step.step] = time.monotonic()
            return super()._deliver(item)

    capacity = WorkerCapacity(1 << 16, BLOCK_SIZE, NUM_SLOTS, 8192, vocab_size, 8192)
    stream = TimedStream(
        address, hello_to_proto(capacity, worker_id="idle", model="idle", fingerprint="idle", device="none")
    )
    stream.attached()
    print("pagemill-ready {}", flush=True)
    sent_s: dict[int, float] = {}
    turns_ms: list[float] = []
    answer_s: list[float] = []
    free_at = time.monotonic()

    def execute(plan: StepPlan) -> StepResult:
        nonlocal free_at
        num_prompt_tokens = sum(plan.num_tokens) - len(plan.num_tokens)
        free_at = max(free_at, time.monotonic()) + step_ms / 1e3 + num_prompt_tokens * token_us / 1e6
        if (left := free_at - time.monotonic()) > 0:
            time.sleep(left)
        tokens = [WORDS[(plan.step + row) % len(WORDS)] for row in range(sum(plan.sample))]
        return StepResult(plan.epoch, plan.step, tokens)

    try:
        while True:
            message = stream.receive(1.0)
            if message is None:
                continue
            if message.WhichOneof("message") != "step":
                break
            plan = plan_from_proto(message.step)
            came, before = came_s.pop(plan.step), sent_s.pop(plan.step - 2, None)
            # A plan that came before the result had nothing to wait for.
            if before is not None and came > before and not plan.new_sequences:
                turns_ms.append((came - before) * 1e3)
            result = execute(plan)
            sent_s[plan.step] = time.monotonic()
            if plan.num_rows == 1 and plan.sample[0]:
                answer_s.append(sent_s[plan.step])
            stream.send(result_to_proto(result))
    except (StreamEndedError, KeyboardInterrupt):
        pass
    print(json.dumps({"turns_ms": turns_ms[-2000:], "answer_s": answer_s}), flush=True)
    os._exit(0)


# Load generators.


@dataclass(slots=True)
class _Connection:
    sock: socket.socket
    tail: bytes = b""


def load_sse(port: int, num_streams: int, prompt: list[int], max_tokens: int, once: bool) -> list[float]:
    """Keep `num_streams` streams running over keep-alive connections until killed; `once`: one each, with clock."""
    body = json.dumps(
        {"prompt": prompt, "max_tokens": max_tokens, "stream": True, "ignore_eos": True, "temperature": 0.7}
    )
    request = (
        f"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\nContent-Length: {len(body)}\r\n"
        f"\r\n{body}"
    ).encode()
    connections: dict[int, _Connection] = {}
    poll = select.epoll()
    for _ in range(num_streams):
        sock = socket.create_connection(("127.0.0.1", port))
        sock.sendall(request)
        connections[sock.fileno()] = _Connection(sock)
        poll.register(sock.fileno(), select.EPOLLIN)
    times: list[float] = []
    while connections:
        for number, _ in poll.poll():
            connection = connections[number]
            data = connection.sock.recv(1 << 16)
            if not data:
                raise SystemExit("the router closed a connection")
            times += [time.monotonic()] * (once * data.count(b"data: {"))
            connection.tail = (connection.tail + data)[-64:]
            if b"data: [DONE]" in connection.tail and connection.tail.endswith(b"0\r\n\r\n"):
                connection.tail = b""
                if once:
                    poll.unregister(number)
                    connections.pop(number).sock.close()
                else:
                    connection.sock.sendall(request)
    return times


def load_grpc(
    port: int, num_streams: int, prompt: list[int], max_tokens: int, once: bool, *, final_only: bool = False
) -> list[float]:
    """The same over gRPC; messages are counted and not read. `final_only`: each answer is one message."""
    from pagemill.rpc import aio_channel
    from pagemill.v1 import common_pb2, inference_pb2

    request = inference_pb2.GenerateRequest(
        token_ids=inference_pb2.TokenIds(ids=prompt),
        sampling=common_pb2.SamplingParams(max_tokens=max_tokens, temperature=0.7, ignore_eos=True),
        final_only=final_only,
    ).SerializeToString()
    times: list[float] = []

    async def stream(channel: Any) -> None:
        call = channel.unary_stream("/pagemill.v1.Inference/Generate")
        while True:
            async for _ in call(request):
                times.append(time.monotonic()) if once else None
            if once:
                return

    async def all_streams() -> None:
        async with aio_channel(f"127.0.0.1:{port}") as channel:
            await asyncio.gather(*(stream(channel) for _ in range(num_streams)))

    asyncio.run(all_streams())
    return times


LOADS: dict[str, Callable[[int, int, list[int], int, bool], list[float]]] = {
    "sse": load_sse,
    "grpc": load_grpc,
    "whole": functools.partial(load_grpc, final_only=True),
}

# The measurement.


def wait_ready(process: subprocess.Popen[str]) -> dict[str, Any]:
    assert process.stdout is not None
    for line in process.stdout:
        if line.startswith("pagemill-ready "):
            ready: dict[str, Any] = json.loads(line.split(" ", 1)[1])
            return ready
    raise SystemExit(f"{process.args!r} ended before it was ready")


def cpu_s(pid: int) -> float:
    """CPU time that a process has used, all threads together."""
    fields = Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def counters(metrics_port: int) -> tuple[float, float, float]:
    """Steps, tokens and running sequences, as the scheduler counts them."""
    with urllib.request.urlopen(f"http://127.0.0.1:{metrics_port}/metrics", timeout=10) as response:
        values = dict(line.rsplit(" ", 1) for line in response.read().decode().splitlines() if line[:1] != "#")
    return (
        float(values["pagemill:scheduler_steps_total"]),
        float(values["pagemill:inter_token_latency_seconds_count"]),
        float(values["pagemill:num_requests_running"]),
    )


class Server:
    """The processes, started and ended together."""

    def __init__(self, stack: ExitStack, args: argparse.Namespace, step_ms: float, prompt_token_us: float) -> None:
        self._stack = stack
        command = [sys.executable, "-m", "pagemill.cli", "scheduler", "--port", "0", "--metrics-port", "0"]
        command += ["--max-num-seqs", str(NUM_SLOTS), "--max-num-batched-tokens", "8192"]
        self.scheduler = self.start(command)
        ready = wait_ready(self.scheduler)
        address, self.metrics_port = f"127.0.0.1:{ready['port']}", ready["metrics_port"]
        command = [sys.executable, "-m", "pagemill.cli", "router", "--scheduler", address, "--http-port", "0"]
        command += ["--grpc-port", "0", "--log-level", "WARNING", "--max-inflight-requests", "4096"]
        if args.model:
            command += ["--model", args.model]
        self.router = self.start(command)
        self.ready = wait_ready(self.router)
        command = [sys.executable, __file__, "--worker", address, str(step_ms), str(prompt_token_us), "49152"]
        self.worker = self.start(command)
        wait_ready(self.worker)

    def start(self, command: list[str]) -> subprocess.Popen[str]:
        process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
        self._stack.callback(self._end, process)
        return process

    @staticmethod
    def _end(process: subprocess.Popen[str]) -> None:
        process.kill()
        process.wait()


def load_command(args: argparse.Namespace, edge: str, port: int, num_streams: int, *options: str) -> list[str]:
    shape = [str(args.input_len), str(args.output_len)]
    return [sys.executable, __file__, "--load", edge, str(port), str(num_streams), *shape, *options]


def measure_load(args: argparse.Namespace, edge: str, num_streams: int) -> str:
    """One line: steps and tokens in a second, then CPU time."""
    with ExitStack() as stack:
        server = Server(stack, args, args.step_ms, args.prompt_token_us)
        port = server.ready["http_port" if edge == "sse" else "grpc_port"]
        share = -(-num_streams // args.load_processes)
        loads = [server.start(load_command(args, edge, port, share)) for _ in range(args.load_processes)]
        pids = [p.pid for p in (server.scheduler, server.worker, server.router)]
        time.sleep(args.warm_up)
        started, before, cpu = time.monotonic(), counters(server.metrics_port), [cpu_s(p) for p in pids]
        loads_cpu = sum(cpu_s(p.pid) for p in loads)
        time.sleep(args.seconds)
        after, spent = counters(server.metrics_port), [cpu_s(p) - c for p, c in zip(pids, cpu, strict=True)]
        wall, loads_spent = time.monotonic() - started, sum(cpu_s(p.pid) for p in loads) - loads_cpu
    steps, tokens = after[0] - before[0], after[1] - before[1]
    return (
        f"{edge:>5} {num_streams:8d} {after[2]:8.0f} {wall * 1e3 / steps:9.2f} {tokens / wall:9.0f}"
        f" {spent[0] * 1e3 / steps:13.2f} {spent[1] * 1e3 / steps:10.2f} {spent[2] * 1e6 / tokens:12.1f}"
        f" {loads_spent * 1e6 / tokens:10.1f}"
    )


def measure_one(args: argparse.Namespace, edge: str) -> str:
    """One line: latencies of a lone stream."""
    with ExitStack() as stack:
        server = Server(stack, args, args.one_step_ms, 0)
        port = server.ready["http_port" if edge == "sse" else "grpc_port"]
        for _ in range(2):  # the first warms up
            load = server.start(load_command(args, edge, port, 1, "--once"))
            got = json.loads(load.communicate()[0])
        server.scheduler.terminate()
        told = json.loads(server.worker.communicate()[0].strip().splitlines()[-1])
    sent, turns = told["answer_s"], sorted(told["turns_ms"])
    delays = sorted((b - a) * 1e3 for a, b in zip(sent[-args.output_len :], got, strict=False))
    return (
        f"{edge:>5} {statistics.median(turns):11.2f} {turns[len(turns) * 99 // 100]:9.2f}"
        f" {statistics.median(delays):17.2f} {delays[len(delays) * 99 // 100]:9.2f}"
    )


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "--edges",
        nargs="+",
        choices=list(LOADS),
        default=list(LOADS),
        help="streams over HTTP, streams over gRPC, whole answers over gRPC",
    )
    parser.add_argument("--streams", type=int, nargs="*", default=[256, 1024], help="streams running at once")
    parser.add_argument("--input-len", type=int, default=512)
    parser.add_argument("--output-len", type=int, default=256)
    parser.add_argument("--step-ms", type=float, default=50, help="time of a step")
    parser.add_argument("--prompt-token-us", type=float, default=0, help="time of a prompt token, on top")
    parser.add_argument("--one-step-ms", type=float, default=4, help="time of a step of a lone stream")
    parser.add_argument("--seconds", type=float, default=10)
    parser.add_argument("--warm-up", type=float, default=6)
    parser.add_argument("--load-processes", type=int, default=1)
    parser.add_argument("--model", default="", help="whose tokenizer the router uses; default: the demo model")
    parser.add_argument("--worker", nargs=4, help=argparse.SUPPRESS)
    parser.add_argument("--load", nargs=5, help=argparse.SUPPRESS)
    parser.add_argument("--once", action="store_true", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.worker:
        address, step_ms, token_us, vocab_size = args.worker
        return worker_main(address, float(step_ms), float(token_us), int(vocab_size))
    if args.load:
        edge, (port, num_streams, input_len, output_len) = args.load[0], map(int, args.load[1:])
        load = LOADS[edge]
        prompt = [WORDS[(7 * i) % len(WORDS)] for i in range(input_len)]
        print(json.dumps(load(port, num_streams, prompt, output_len, args.once)))
        return 0
    if args.streams:
        print(
            f"{'edge':>5} {'streams':>8} {'running':>8} {'ms / step':>9} {'tokens/s':>9} {'scheduler ms':>13}"
            f" {'worker ms':>10} {'router us':>12} {'client us':>10}   (CPU: a step, a step, a token, a token)"
        )
    for edge in args.edges:
        for num_streams in args.streams:
            print(measure_load(args, edge, num_streams), flush=True)
    streamed = [edge for edge in args.edges if edge != "whole"]
    if streamed:
        print(f"{'edge':>5} {'turn ms p50':>11} {'p99':>9} {'to client ms p50':>17} {'p99':>9}   (one stream)")
    for edge in streamed:
        print(measure_one(args, edge), flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
