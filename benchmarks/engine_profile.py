"""Where a step's time goes, offline: device time, gaps, host time and kernels of decode steps and of prompts.

    python benchmarks/engine_profile.py MODEL [--rows 1,64,256] [--prompts 1000] [--load-format dummy] [--enforce-eager]

MODEL is a directory such as `pagemill bench make-model --shape llama-3-8b --out DIR` writes. For each number of rows it
runs that many prompts of --input-len to the end, and prints percentiles of the decode steps: the time from one result
to the next, the forward pass, sampling, and the device's gap before the step; then the host's milliseconds a step. On a
GPU `--kernels` adds a table of kernels, from torch's profiler, for the largest number of rows and for prompts.
"""

from __future__ import annotations

import argparse
import time
from collections import defaultdict
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch

from pagemill.engine_args import EngineArgs
from pagemill.garbage_collector import collecting_rarely
from pagemill.local_engine import LocalEngine
from pagemill.sampling_params import SamplingParams
from pagemill.step import StepPlan, StepResult

_NS_PER_MS = 1e6


@dataclass
class Record:
    """What was seen of the steps since `clear`."""

    results: list[tuple[float, StepResult]] = field(default_factory=list)  # with the seconds at which each was taken
    host_s: dict[str, float] = field(default_factory=lambda: defaultdict(float))

    def clear(self) -> None:
        self.results.clear()
        self.host_s.clear()

    def timed(self, name: str, function: Callable[..., Any]) -> Callable[..., Any]:
        """`function`, its time added to `name`."""

        def call(*args: Any, **options: Any) -> Any:
            started = time.perf_counter()
            try:
                return function(*args, **options)
            finally:
                self.host_s[name] += time.perf_counter() - started

        return call

    def watch(self, engine: LocalEngine) -> None:
        """See every step of the engine from now on, until it forgets all requests."""
        launch = engine._runner.launch

        def launch_watched(plan: StepPlan) -> Any:
            pending = launch(plan)
            result = pending.result

            def take() -> StepResult:
                taken = result()
                self.results.append((time.perf_counter(), taken))
                return taken

            pending.result = self.timed("result", take)
            return pending

        engine._runner.launch = self.timed("launch", launch_watched)  # type: ignore[method-assign]
        engine._events = self.timed("events", engine._events)  # type: ignore[method-assign]
        engine.scheduler.schedule = self.timed("schedule", engine.scheduler.schedule)  # type: ignore[method-assign]
        engine.scheduler.update = self.timed("update", engine.scheduler.update)  # type: ignore[method-assign]


def percentiles(values: list[float]) -> str:
    if not values:
        return "-"
    p50, p99 = np.percentile(values, [50, 99])
    return f"p50 {p50:.3f} p99 {p99:.3f} mean {np.mean(values):.3f}"


def add_prompts(engine: LocalEngine, rng: np.random.Generator, count: int, input_len: int, output_len: int) -> None:
    params = SamplingParams(max_tokens=output_len, temperature=0, ignore_eos=True)
    for _ in range(count):
        ids = rng.integers(10, engine.capacity.vocab_size, input_len).tolist()
        engine.add(engine.token_prompt(ids), params)


def run(engine: LocalEngine, record: Record, count: int) -> None:
    """Run what was added, and print what the steps took."""
    record.clear()
    started = time.perf_counter()
    while engine.has_work:
        engine.step()
    elapsed_s = time.perf_counter() - started
    decode = [result for _, result in record.results if result.is_decode]
    other = [result for _, result in record.results if not result.is_decode]
    pairs = zip(record.results, record.results[1:], strict=False)
    periods = [(at - before) * 1e3 for (before, _), (at, result) in pairs if result.is_decode]
    print(f"{count} requests: {elapsed_s:.3f} s, {count / elapsed_s:.2f} requests/s; {len(decode)} decode steps,")
    print(f"  {sum(result.is_replay for result in decode)} of them replayed, {len(other)} other steps")
    print(f"  decode, ms: from result to result {percentiles(periods)}")
    for name in ("forward_ns", "sample_ns", "gap_ns"):
        print(f"    {name[:-3]:8} {percentiles([getattr(result, name) / _NS_PER_MS for result in decode])}")
    sums = [sum(result.forward_ns for result in part) / 1e9 for part in (decode, other)]
    gap_s = sum(result.gap_ns for _, result in record.results) / 1e9
    print(f"  device, s: decode {sums[0]:.3f}, other steps {sums[1]:.3f}, gaps {gap_s:.3f}")
    num_steps = max(1, len(record.results))
    print("  host, ms a step: " + ", ".join(f"{k} {v / num_steps * 1e3:.3f}" for k, v in sorted(record.host_s.items())))


def print_kernels(engine: LocalEngine, skip: int, steps: int, what: str) -> None:
    """A table of the device's time by kernel over `steps` steps after `skip` of them."""
    from torch.profiler import ProfilerActivity, profile

    for _ in range(skip):
        engine.step()
    with profile(activities=[ProfilerActivity.CUDA]) as profiler:
        for _ in range(steps):
            engine.step()
        torch.cuda.synchronize()
    times: dict[str, list[float]] = defaultdict(list)
    for event in profiler.events():
        if event.device_time_total:
            times[event.name[:100]].append(event.device_time_total)
    print(f"kernels of {what}, us a step, launches a step, us each")
    for name, each in sorted(times.items(), key=lambda item: -sum(item[1]))[:20]:
        print(f"  {sum(each) / steps:10.1f} {len(each) / steps:6.1f} {sum(each) / len(each):9.2f}  {name}")
    engine.forget_all()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model")
    parser.add_argument("--rows", default="1,16,64,256")
    parser.add_argument("--input-len", type=int, default=512)
    parser.add_argument("--output-len", type=int, default=129)
    parser.add_argument("--prompts", type=int, default=0, help="also so many prompts of 512 in, 256 out, at once")
    parser.add_argument("--load-format", default="dummy")
    parser.add_argument("--max-num-batched-tokens", type=int)
    parser.add_argument("--enforce-eager", action="store_true")
    parser.add_argument("--kernels", action="store_true")
    args = parser.parse_args()
    engine = LocalEngine(
        EngineArgs(
            model=args.model,
            load_format=args.load_format,
            max_num_batched_tokens=args.max_num_batched_tokens,
            enforce_eager=args.enforce_eager,
        ).without_queue_bound()
    )
    rng, record = np.random.default_rng(0), Record()
    rows = [int(count) for count in args.rows.split(",")]
    with collecting_rarely():
        add_prompts(engine, rng, 2, 16, 4)
        while engine.has_work:
            engine.step()
        if args.kernels and torch.cuda.is_available():
            add_prompts(engine, rng, rows[-1], args.input_len, args.output_len)
            print_kernels(engine, args.output_len // 2, 10, f"decode steps of {rows[-1]} rows")
            add_prompts(engine, rng, 128, args.input_len, 8)
            print_kernels(engine, 2, 4, "prompts")
        record.watch(engine)
        for count in rows:
            add_prompts(engine, rng, count, args.input_len, args.output_len)
            run(engine, record, count)
        if args.prompts:
            add_prompts(engine, rng, args.prompts, 512, 256)
            run(engine, record, args.prompts)


if __name__ == "__main__":
    main()
