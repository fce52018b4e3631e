"""What the scheduler's choices cost: its core alone, with step times from a model of a GPU instead of a GPU.

A step takes the longer of reading the weights and computing its tokens, and then reads the keys and values of its rows.
Printed are requests a second, the mean rows of a step, tokens computed beside the fewest possible, and evictions.

    python benchmarks/scheduler_simulation.py [--model llama-2-7b] [--prompts 1000] [--input-len 512] [--output-len 256]
"""

from __future__ import annotations

import argparse
import random
from collections import deque
from dataclasses import dataclass

from pagemill.sampling_params import SamplingParams
from pagemill.step import StepPlan, StepResult, WorkerCapacity
from scheduler.admission import SchedulerLimits
from scheduler.scheduler import Scheduler
from scheduler.sequence import NewRequest

BLOCK_SIZE = 16
EOS, WORD = 2, 7


@dataclass(frozen=True)
class Gpu:
    """One H200 with a model in bfloat16: what a step of it takes, roughly."""

    weight_bytes: float
    kv_bytes_per_token: float
    pool_bytes: float
    bytes_per_s: float = 4.1e12
    flop_per_s: float = 0.62e15
    overhead_s: float = 0.8e-3

    def step_s(self, num_tokens: int, num_context: int) -> float:
        """Seconds of a step of `num_tokens` whose rows have `num_context` tokens of keys and values."""
        products_s = max(self.weight_bytes / self.bytes_per_s, num_tokens * self.weight_bytes / self.flop_per_s)
        return products_s + num_context * self.kv_bytes_per_token / self.bytes_per_s + self.overhead_s


GPUS = {"llama-3-8b": Gpu(16.1e9, 131072, 108e9), "llama-2-7b": Gpu(13.5e9, 524288, 110e9)}


class Worker:
    """Keeps lengths of slots and draws tokens that end outputs where they are to end."""

    def __init__(self, gpu: Gpu, output_lens: list[int]) -> None:
        self._gpu = gpu
        self._ends = output_lens
        self._slots: dict[int, tuple[int, int]] = {}  # (request, tokens computed)
        self.num_output = [0] * len(output_lens)
        self.num_steps = self.num_rows = self.num_tokens = 0

    def execute(self, plan: StepPlan) -> tuple[StepResult, float]:
        """A step's result and its seconds."""
        for slot in plan.released_slots:
            del self._slots[slot]
        for new in plan.new_sequences:
            self._slots[new.slot] = new.sampling.seed, new.num_computed_tokens
        sampled: list[int] = []
        for slot, count, sample in zip(plan.slots, plan.num_tokens, plan.sample, strict=True):
            handle, computed = self._slots[slot]
            self._slots[slot] = handle, computed + count
            if sample:
                self.num_output[handle] += 1
                sampled.append(EOS if self.num_output[handle] >= self._ends[handle] else WORD)
        num_tokens = sum(plan.num_tokens)
        self.num_steps += 1
        self.num_rows += plan.num_rows
        self.num_tokens += num_tokens
        seconds = self._gpu.step_s(num_tokens, sum(self._slots[slot][1] for slot in plan.slots))
        return StepResult(plan.epoch, plan.step, sampled), seconds


def simulate(args: argparse.Namespace) -> str:
    """Run all prompts, that come at once, and describe how it went."""
    gpu = GPUS[args.model]
    num_blocks = int(gpu.pool_bytes / gpu.kv_bytes_per_token / BLOCK_SIZE)
    capacity = WorkerCapacity(num_blocks, BLOCK_SIZE, args.max_num_seqs, 1 << 15, 1 << 16, args.max_num_batched_tokens)
    limits = SchedulerLimits(args.max_num_batched_tokens, args.max_num_seqs, args.prompts + 1, 1 << 30)
    core, draw = Scheduler(capacity, limits), random.Random(1)
    ends = [args.output_len] * args.prompts
    if args.natural:
        ends = [max(1, min(4 * args.output_len, round(draw.expovariate(1 / args.output_len)))) for _ in ends]
    most = max(ends) if args.natural else args.output_len
    for handle in range(args.prompts):
        prompt = [3 + (31 * handle + 7 * i) % 40000 for i in range(args.input_len)]
        params = SamplingParams(max_tokens=most, seed=handle, ignore_eos=not args.natural)
        core.add_request(NewRequest(handle, prompt, params, [EOS]))
    worker, clock_s = Worker(gpu, ends), 0.0
    in_flight: deque[tuple[StepResult, float]] = deque()
    while True:
        while len(in_flight) < 2 and (plan := core.schedule()) is not None:
            in_flight.append(worker.execute(plan))
        if not in_flight:
            break
        result, seconds = in_flight.popleft()
        clock_s += seconds
        core.update(result)
    core.check_integrity()
    fewest = args.prompts * (args.input_len - 1) + sum(ends)
    rows = worker.num_rows / worker.num_steps
    return (
        f"{args.prompts / clock_s:.2f} requests/s, {clock_s:.1f} s, {rows:.0f} rows a step, "
        f"{worker.num_tokens / fewest:.3f} of the fewest tokens, {core.counters.preemptions} evictions"
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", choices=sorted(GPUS), default="llama-2-7b")
    parser.add_argument("--prompts", type=int, default=1000)
    parser.add_argument("--input-len", type=int, default=512)
    parser.add_argument("--output-len", type=int, default=256)
    parser.add_argument("--natural", action="store_true", help="outputs end by themselves, --output-len on average")
    parser.add_argument("--max-num-seqs", type=int, default=1024)
    parser.add_argument("--max-num-batched-tokens", type=int, default=8192)
    print(simulate(parser.parse_args()))


if __name__ == "__main__":
    main()
