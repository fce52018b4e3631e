"""Where a decode step of the worker spends its time, beside the least that memory and arithmetic allow.

Run `python benchmarks/worker_step.py --rows 1 64`. Runs a real model (the demo model unless told otherwise) on plans of
random tokens; nothing is sent over a network.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any
from unittest import mock

import numpy as np
import torch

from pagemill.config import WorkerSettings
from pagemill.demo_model import demo_model_path
from pagemill.step import NewSequence, SlotSampling, StepPlan
from worker import kernels
from worker.kernels._native import load_native
from worker.kernels.program import Program
from worker.model_runner import ModelRunner
from worker.models.llama import LlamaForCausalLM

_C = load_native()
BLOCK_SIZE = 16
MAX_STEP_TOKENS = 2048


@dataclass
class KernelTimes:
    """Nanoseconds per step of each kind of kernel."""

    steps: list[dict[str, int]] = field(default_factory=list)

    def add(self, name: str, elapsed_ns: int) -> None:
        self.steps[-1][name] = self.steps[-1].get(name, 0) + elapsed_ns

    def least_ms(self) -> dict[str, float]:
        return {name: min(step[name] for step in self.steps) * 1e-6 for name in self.steps[0]}


@contextmanager
def timed_kernels(times: KernelTimes) -> Iterator[None]:
    """Measure every kernel of a step."""

    def run(program: Program, inputs: Any) -> None:
        for name, elapsed_ns in program.time(inputs).items():
            times.add(name, elapsed_ns)

    def timed(name: str, function: Any) -> Any:
        def call(*args: Any, **kwargs: Any) -> None:
            started_ns = time.perf_counter_ns()
            function(*args, **kwargs)
            times.add(name, time.perf_counter_ns() - started_ns)

        return call

    with (
        mock.patch.object(Program, "run", run),
        mock.patch.object(LlamaForCausalLM, "compute_logits", timed("head", LlamaForCausalLM.compute_logits)),
        mock.patch.object(kernels, "sample", timed("sample", kernels.sample)),
    ):
        yield


@contextmanager
def no_kernels() -> Iterator[None]:
    """Everything of a step but its kernels. All rows draw token 0."""

    def sample(logits: torch.Tensor, batch: Any, out_ids: torch.Tensor, out_status: torch.Tensor, **_: Any) -> None:
        out_ids.zero_()
        out_status.zero_()

    with (
        mock.patch.object(_C.Program, "run", lambda *_: None),
        mock.patch.object(LlamaForCausalLM, "compute_logits", lambda *_: None),
        mock.patch.object(kernels, "sample", sample),
    ):
        yield


class Decode:
    """Sequences of `context` tokens each, and one more token for all of them per call."""

    def __init__(self, runner: ModelRunner, epoch: int, rows: int, context: int, steps: int) -> None:
        self._runner, self._epoch, self._rows, self._step = runner, epoch, rows, 0
        runner.begin_epoch(epoch)
        blocks = -(-(context + steps) // BLOCK_SIZE)
        random = np.random.default_rng(0)
        sequences = [
            NewSequence(
                slot=slot,
                token_ids=random.integers(0, runner.capacity.vocab_size, context).tolist(),
                num_prompt_tokens=context,
                num_computed_tokens=0,
                block_ids=list(range(slot * blocks, (slot + 1) * blocks)),
                sampling=SlotSampling(temperature=0.0),
            )
            for slot in range(rows)
        ]
        at_once = max(1, MAX_STEP_TOKENS // context)
        for first in range(0, rows, at_once):
            part = sequences[first : first + at_once]
            self._execute([s.slot for s in part], context, part)

    def _execute(self, slots: list[int], num_tokens: int, new_sequences: list[NewSequence]) -> None:
        plan = StepPlan(
            epoch=self._epoch,
            step=self._step,
            new_sequences=new_sequences,
            slots=slots,
            num_tokens=[num_tokens] * len(slots),
            sample=[True] * len(slots),
        )
        self._step += 1
        self._runner.execute(plan)

    def step_ms(self) -> float:
        started_ns = time.perf_counter_ns()
        self._execute(list(range(self._rows)), 1, [])
        return (time.perf_counter_ns() - started_ns) * 1e-6


def measure(runner: ModelRunner, rows: int, context: int, steps: int) -> dict[str, float]:
    """The least of all steps in milliseconds, as other work only adds: whole steps, kernels by kind, Python alone."""
    decode = Decode(runner, rows, rows, context, 3 * steps)
    result = {"step": min(decode.step_ms() for _ in range(steps))}
    times = KernelTimes()
    with timed_kernels(times):
        for _ in range(steps):
            times.steps.append({})
            decode.step_ms()
    result |= times.least_ms()
    with no_kernels():
        result["python"] = min(decode.step_ms() for _ in range(steps))
    return result


def floor_ms(runner: ModelRunner, rows: int, context: int) -> dict[str, float]:
    """What this machine's memory and multipliers need at least for the products and the cache of one step."""
    model = runner.model
    # The embedding table is held beside the packed head, and a step reads few of its rows.
    weight_bytes = model.weight_bytes - model.vocab_size * model.hidden_size * runner.dtype.itemsize
    kv_bytes = rows * context * runner.capacity.kv_bytes_per_token
    bandwidth = max(_C.probe_read_bandwidth(256 << 20, 1) for _ in range(20))
    result = {"floor: weights": weight_bytes / bandwidth * 1e3, "floor: KV": kv_bytes / bandwidth * 1e3}
    peak = max(_C.probe_bf16_peak() for _ in range(5)) * kernels.num_threads()
    if peak and runner.dtype is torch.bfloat16:
        result["floor: arithmetic"] = rows * weight_bytes / peak * 1e3  # 2 operations a weight of 2 bytes
    print(f"bandwidth {bandwidth * 1e-9:.1f} GB/s, bfloat16 peak {peak * 1e-9:.0f} GFLOP/s")
    return result


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", default=str(demo_model_path()))
    parser.add_argument("--dtype", default="bfloat16")
    parser.add_argument("--threads", type=int, default=kernels.num_threads())
    parser.add_argument("--rows", type=int, nargs="+", default=[1, 64])
    parser.add_argument("--context", type=int, default=128)
    parser.add_argument("--steps", type=int, default=50)
    args = parser.parse_args()
    torch.set_num_threads(1)
    blocks = -(-(args.context + 3 * args.steps) // BLOCK_SIZE) * max(args.rows)
    settings = WorkerSettings(
        model=args.model,
        dtype=args.dtype,
        num_threads=args.threads,
        block_size=BLOCK_SIZE,
        num_blocks=blocks,
        max_num_seqs=max(args.rows),
        max_num_batched_tokens=MAX_STEP_TOKENS,
    )
    runner = ModelRunner(settings)
    print(f"{runner.model_name}, {args.dtype}, {args.threads} threads, {kernels.cpu_isa()}, context {args.context}")
    columns = {
        rows: measure(runner, rows, args.context, args.steps) | floor_ms(runner, rows, args.context)
        for rows in args.rows
    }
    print(f"{'ms a step':20}" + "".join(f"{rows:>6} rows" for rows in args.rows))
    for name in columns[args.rows[0]]:
        print(f"{name:20}" + "".join(f"{columns[rows][name]:>11.3f}" for rows in args.rows))


if __name__ == "__main__":
    main()
