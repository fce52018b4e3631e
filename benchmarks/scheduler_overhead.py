"""Cost of a step outside the model, for a growing number of running sequences.

Without options: the core alone (`schedule` + `update`), two steps in flight, no worker. With `--wire`: a scheduler
process and a worker process that costs nothing, over real gRPC on loopback, timed end to end per step.
"""

from __future__ import annotations

import argparse
import asyncio
import gc
import json
import os
import statistics
import subprocess
import sys
import time
from collections import deque
from pathlib import Path

import grpc.aio

from pagemill.rpc import aio_channel
from pagemill.sampling_params import SamplingParams
from pagemill.step import StepPlan, StepResult, WorkerCapacity
from pagemill.v1 import common_pb2, scheduler_pb2, scheduler_pb2_grpc
from scheduler.admission import SchedulerLimits
from scheduler.scheduler import Scheduler
from scheduler.sequence import NewRequest

BLOCK_SIZE = 16


def answer(plan: StepPlan) -> StepResult:
    return StepResult(plan.epoch, plan.step, [7] * sum(plan.sample))


def time_core(num_running: int, num_steps: int) -> tuple[float, float, float]:
    """Median milliseconds of (schedule, update, both) per step with all sequences decoding."""
    blocks_each = 64
    capacity = WorkerCapacity(num_running * blocks_each, BLOCK_SIZE, num_running, 4096, 49152, 1 << 16)
    limits = SchedulerLimits(1 << 16, num_running, num_running + 1, 1 << 30)
    scheduler = Scheduler(capacity, limits)
    for handle in range(num_running):
        # Different lengths, as in life: every step some sequences fill a block.
        prompt = [handle % 1000, *range(3, 20 + handle % BLOCK_SIZE)]
        scheduler.add_request(NewRequest(handle, prompt, SamplingParams(max_tokens=900, seed=handle), [2]))
    in_flight: deque[StepResult] = deque()
    schedule_ns, update_ns = [], []
    for step in range(num_steps + 50):
        t0 = time.perf_counter_ns()
        plan = scheduler.schedule()
        t1 = time.perf_counter_ns()
        assert plan is not None
        in_flight.append(answer(plan))
        if len(in_flight) < 2:
            continue
        result = in_flight.popleft()
        t2 = time.perf_counter_ns()
        scheduler.update(result)
        t3 = time.perf_counter_ns()
        if step >= 50:
            schedule_ns.append(t1 - t0)
            update_ns.append(t3 - t2)
    both = [a + b for a, b in zip(schedule_ns, update_ns, strict=True)]
    return tuple(statistics.median(x) / 1e6 for x in (schedule_ns, update_ns, both))  # type: ignore[return-value]


# The whole loop: scheduler process, worker process without cost, and this process as the router.

WARM_UP_STEPS = 200


def worker_main(address: str, num_running: int, num_steps: int) -> None:
    """A worker that answers each step at once, over the real worker's stream; prints its timings as JSON."""
    from worker.link import SchedulerStream
    from worker.wire import hello_to_proto, plan_from_proto, result_to_proto

    capacity = WorkerCapacity(num_running * 256, BLOCK_SIZE, num_running, 4096, 49152, 8192)
    hello = hello_to_proto(capacity, worker_id="zero", model="zero", fingerprint="zero", device="none")
    stream = SchedulerStream(address, hello)
    stream.attached()
    period_ns, own_ns, last_ns = [], [], 0
    while len(period_ns) < num_steps + WARM_UP_STEPS:
        message = stream.receive(60.0)
        assert message is not None
        t0 = time.perf_counter_ns()
        plan = plan_from_proto(message.step)
        stream.send(result_to_proto(answer(plan)))
        t1 = time.perf_counter_ns()
        if plan.num_rows == num_running and not plan.new_sequences:
            period_ns.append(t0 - last_ns)
            own_ns.append(t1 - t0)
        last_ns = t0
    periods = sorted(period_ns[WARM_UP_STEPS:])
    print(
        json.dumps(
            {
                "median_ms": statistics.median(periods) / 1e6,
                "mean_ms": statistics.fmean(periods) / 1e6,
                "p99_ms": periods[len(periods) * 99 // 100] / 1e6,
                "worker_ms": statistics.median(own_ns[WARM_UP_STEPS:]) / 1e6,
            }
        ),
        flush=True,
    )
    os._exit(0)  # the stream goes on for ever


def cpu_seconds(pid: int) -> float:
    """CPU time that a process has used, all threads together."""
    fields = Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def time_wire(num_running: int, num_steps: int) -> dict[str, float]:
    """Milliseconds per step of the whole loop."""
    command = [sys.executable, "-m", "pagemill.cli", "scheduler", "--port", "0", "--max-num-seqs", str(num_running)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as scheduler:
        assert scheduler.stdout is not None
        address = f"127.0.0.1:{json.loads(scheduler.stdout.readline().split(' ', 1)[1])['grpc_port']}"
        arguments = ["--worker", address, "--running", str(num_running), "--steps", str(num_steps)]
        started_s = cpu_seconds(scheduler.pid)
        with subprocess.Popen([sys.executable, __file__, *arguments], stdout=subprocess.PIPE, text=True) as worker:
            output = asyncio.run(_play_router(address, num_running, worker))
        timed: dict[str, float] = json.loads(output)
        timed["scheduler_cpu_ms"] = (cpu_seconds(scheduler.pid) - started_s) * 1e3 / (num_steps + WARM_UP_STEPS)
        scheduler.terminate()
    return timed


async def _play_router(address: str, num_running: int, worker: subprocess.Popen[str]) -> str:
    """Submit requests, read their tokens, and return what the worker printed when it was done."""
    reader = asyncio.create_task(asyncio.to_thread(worker.communicate))
    async with aio_channel(address) as channel:
        call = scheduler_pb2_grpc.SchedulerStub(channel).Session()
        await call.write(scheduler_pb2.RouterMessage(hello=scheduler_pb2.RouterHello(router_id="bench")))
        for handle in range(num_running):
            sampling = common_pb2.SamplingParams(max_tokens=4000, seed=handle)
            prompt = [handle, *range(3, 20 + handle % BLOCK_SIZE)]
            submit = scheduler_pb2.Submit(handle=handle, token_ids=prompt, sampling=sampling)
            await call.write(scheduler_pb2.RouterMessage(submit=submit))
        drain = asyncio.create_task(_drain(call))
        output, _ = await reader
        drain.cancel()
        call.cancel()
    return output


async def _drain(call: grpc.aio.StreamStreamCall) -> None:
    while await call.read() is not grpc.aio.EOF:
        pass


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--running", type=int, nargs="+", help="default: 64 256 1024 4096; with --wire: 64 256")
    parser.add_argument("--steps", type=int, default=300)
    parser.add_argument("--wire", action="store_true", help="whole loop over gRPC with a worker process of no cost")
    parser.add_argument("--worker", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.worker:
        worker_main(args.worker, args.running[0], args.steps)
    elif args.wire:
        print(
            f"{'running':>8} {'median ms':>10} {'mean ms':>8} {'p99 ms':>7} {'worker ms':>10} {'scheduler cpu ms':>17}"
        )
        for num_running in args.running or [64, 256]:
            timed = time_wire(num_running, max(args.steps, 2000))
            columns = (
                timed["median_ms"],
                timed["mean_ms"],
                timed["p99_ms"],
                timed["worker_ms"],
                timed["scheduler_cpu_ms"],
            )
            print("{:8d} {:10.3f} {:8.3f} {:7.3f} {:10.3f} {:17.3f}".format(num_running, *columns))
    else:
        print(f"{'running':>8} {'schedule ms':>12} {'update ms':>10} {'both ms':>8} {'us / row':>9}")
        for num_running in args.running or [64, 256, 1024, 4096]:
            gc.collect()
            schedule_ms, update_ms, both_ms = time_core(num_running, args.steps)
            per_row_us = both_ms * 1000 / num_running
            print(f"{num_running:8d} {schedule_ms:12.3f} {update_ms:10.3f} {both_ms:8.3f} {per_row_us:9.3f}")


if __name__ == "__main__":
    main()
