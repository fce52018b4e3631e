"""Cost of a step outside the model: schedule, wire, batch building and the way back of sampled tokens.

A scheduler process and a worker process, both as they are in production, over gRPC on loopback; the worker's model does
nothing, so that what a step takes is overhead alone. This process plays the router.

    python benchmarks/step_overhead.py [--running 64] [--seconds 10]
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import subprocess
import sys
import tempfile
import time
import urllib.request
from collections.abc import Mapping
from pathlib import Path
from typing import Any

VOCAB_SIZE = 512
CONFIG = {
    "architectures": ["NothingForCausalLM"],
    "model_type": "nothing",
    "vocab_size": VOCAB_SIZE,
    "max_position_embeddings": 1 << 16,
}


def run_worker(model: str, scheduler: str) -> int:
    """The real worker with a model that costs nothing: its logits are one constant row per token."""
    import torch

    from pagemill.config import WorkerSettings
    from worker.app import run
    from worker.batch import StepBatch
    from worker.kv_cache import KVCache, KVSpec
    from worker.layers.context import LayerContext
    from worker.loader import WeightReader
    from worker.models import register

    class NothingForCausalLM:
        kv_spec = KVSpec(1, 1, 64)
        vocab_size, hidden_size, weight_bytes, max_positions = VOCAB_SIZE, 8, 0, 1 << 16
        kv_depends_on_prompt_length = False
        optional_weights: frozenset[str] = frozenset()

        def __init__(self, config: Mapping[str, Any], context: LayerContext) -> None:
            self._dtype = context.dtype

        def load_weights(self, weights: WeightReader) -> None:
            return

        def allocate(self, max_tokens: int, num_positions: int) -> None:
            self._hidden = torch.zeros((max_tokens, self.hidden_size), dtype=self._dtype)

        def forward(self, batch: StepBatch, cache: KVCache) -> torch.Tensor:
            return self._hidden[: batch.num_tokens]

        def compute_logits(self, hidden: torch.Tensor, logits: torch.Tensor) -> None:
            logits.zero_()

    register("NothingForCausalLM", NothingForCausalLM)
    settings = WorkerSettings(
        model=model, scheduler=scheduler, load_format="dummy", metrics_port=0, num_blocks=1 << 16, dtype="float32"
    )
    return run(settings)


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


def num_steps(metrics_port: int) -> float:
    with urllib.request.urlopen(f"http://127.0.0.1:{metrics_port}/metrics", timeout=10) as response:
        text = response.read().decode()
    return float(next(line for line in text.splitlines() if line.startswith("pagemill:worker_steps_total")).split()[-1])


async def measure(address: str, num_running: int, seconds: float, metrics_port: int, pids: list[int]) -> list[float]:
    """Milliseconds a step: wall, then CPU of each process."""
    from pagemill.rpc import aio_channel
    from pagemill.v1 import common_pb2, scheduler_pb2, scheduler_pb2_grpc

    async with aio_channel(address) as channel:
        call = scheduler_pb2_grpc.SchedulerStub(channel).Session()
        await call.write(scheduler_pb2.RouterMessage(hello=scheduler_pb2.RouterHello(router_id="bench")))
        for handle in range(num_running):
            sampling = common_pb2.SamplingParams(max_tokens=60000, seed=handle, temperature=0, ignore_eos=True)
            submit = scheduler_pb2.Submit(handle=handle, token_ids=range(3, 20 + handle), sampling=sampling)
            await call.write(scheduler_pb2.RouterMessage(submit=submit))

        async def read_all() -> None:
            async for _ in call:
                pass

        reader = asyncio.create_task(read_all())
        await asyncio.sleep(2)
        started, steps, cpu = (
            time.monotonic(),
            await asyncio.to_thread(num_steps, metrics_port),
            [cpu_s(p) for p in pids],
        )
        await asyncio.sleep(seconds)
        steps = await asyncio.to_thread(num_steps, metrics_port) - steps
        wall = time.monotonic() - started
        spent = [cpu_s(p) - before for p, before in zip(pids, cpu, strict=True)]
        reader.cancel()
        call.cancel()
    return [1e3 * x / steps for x in (wall, *spent)]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--running", type=int, nargs="+", default=[64, 256], help="sequences running at once")
    parser.add_argument("--seconds", type=float, default=10)
    parser.add_argument("--worker", nargs=2, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.worker:
        return run_worker(*args.worker)
    print(f"{'running':>8} {'wall ms / step':>15} {'scheduler CPU ms':>17} {'worker CPU ms':>14}")
    for num_running in args.running:
        with tempfile.TemporaryDirectory() as model:
            (Path(model) / "config.json").write_text(json.dumps(CONFIG))
            command = [sys.executable, "-m", "pagemill.cli", "scheduler", "--port", "0", "--max-num-seqs", "1024"]
            with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as scheduler:
                address = f"127.0.0.1:{wait_ready(scheduler)['port']}"
                command = [sys.executable, __file__, "--worker", model, address]
                with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as worker:
                    metrics_port = wait_ready(worker)["metrics_port"]
                    pids = [scheduler.pid, worker.pid]
                    row = asyncio.run(measure(address, num_running, args.seconds, metrics_port, pids))
                    worker.terminate()
                scheduler.terminate()
        print("{:8d} {:15.3f} {:17.3f} {:14.3f}".format(num_running, *row))
    return 0


if __name__ == "__main__":
    sys.exit(main())
