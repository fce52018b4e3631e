"""Cost of a step outside the model, for a growing number of running sequences.

Without options: the core alone (`schedule` + `update`), two steps in flight, no worker. With `--wire`: a scheduler process
and a worker process that costs nothing, over real gRPC on loopback, timed end to end per step.
"""

from __future__ import annotations

import argparse
import gc
import statistics
import time
from collections import deque

from pagemill.sampling_params import SamplingParams
from pagemill.step import StepPlan, StepResult, WorkerCapacity
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


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--running", type=int, nargs="+", default=[64, 256, 1024, 4096])
    parser.add_argument("--steps", type=int, default=300)
    parser.add_argument("--wire", action="store_true", help="whole loop over gRPC with a worker process of no cost")
    args = parser.parse_args()
    if args.wire:
        raise SystemExit("not built yet")
    print(f"{'running':>8} {'schedule ms':>12} {'update ms':>10} {'both ms':>8} {'us / row':>9}")
    for num_running in args.running:
        gc.collect()
        schedule_ms, update_ms, both_ms = time_core(num_running, args.steps)
        per_row_us = both_ms * 1000 / num_running
        print(f"{num_running:8d} {schedule_ms:12.3f} {update_ms:10.3f} {both_ms:8.3f} {per_row_us:9.3f}")


if __name__ == "__main__":
    main()
