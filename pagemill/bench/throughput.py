"""Throughput: how long many answers of one length take, and what a decode step takes among them."""

from __future__ import annotations

import statistics
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

from pagemill.bench.engines import Engine, FreshWorkloads
from pagemill.bench.percentiles import Distribution

_WARM_UP_PROMPTS = 8
_WARM_UP_OUTPUT = 16
# The time to the first token is short and varies: more runs of it cost little.
_FEWEST_FIRST_TOKEN_RUNS = 3


@dataclass(frozen=True, slots=True)
class Case:
    """One thing to measure.

    Attributes:
        num_prompts: prompts in all.
        at_once: most of them running at a time.
        with_steps: also take the time of a decode step, from batches of `at_once` prompts.
    """

    input_len: int
    output_len: int
    num_prompts: int
    at_once: int
    with_steps: bool


@dataclass(slots=True)
class Measurement:
    """One case on one engine. Seconds; `first_token_s` is until all prompts of a batch have their first token."""

    backend: str
    model: str
    device: str
    case: Case
    elapsed_s: list[float]
    first_token_s: list[float] = field(default_factory=list)
    batch_s: list[float] = field(default_factory=list)
    stream_first_token: Distribution | None = None

    def columns(self) -> dict[str, object]:
        """Figures of the row; rates are of the median of all runs."""
        case, elapsed_s = self.case, statistics.median(self.elapsed_s)
        columns: dict[str, object] = {
            "backend": self.backend,
            "device": self.device,
            **({"model": self.model} if self.model else {}),
            "input_len": case.input_len,
            "output_len": case.output_len,
            "num_prompts": case.num_prompts,
            "batch_size": case.at_once,
            "elapsed_s": elapsed_s,
            "requests_per_second": case.num_prompts / elapsed_s,
            "output_tokens_per_second": case.num_prompts * case.output_len / elapsed_s,
            "total_tokens_per_second": case.num_prompts * (case.input_len + case.output_len) / elapsed_s,
            "elapsed_s_each": " ".join(f"{value:.4g}" for value in self.elapsed_s),
        }
        if self.first_token_s:
            first_s = statistics.median(self.first_token_s)
            batch_s = statistics.median(self.batch_s)
            columns["first_token_ms"] = first_s * 1e3
            columns["prefill_tokens_per_second"] = case.at_once * case.input_len / first_s
            columns["ms_per_step"] = (batch_s - first_s) / (case.output_len - 1) * 1e3
        if self.stream_first_token is not None:
            columns |= {
                "ttft_ms_p50": self.stream_first_token.p50 * 1e3,
                "ttft_ms_p99": self.stream_first_token.p99 * 1e3,
            }
        return columns


def measure(engine: Engine, cases: Sequence[Case], workloads: FreshWorkloads, repeats: int) -> Iterator[Measurement]:
    """Warm the engine up, then one measurement per case, each of `repeats` runs with prompts of its own."""
    warm_up = cases[0]
    for count in (min(_WARM_UP_PROMPTS, warm_up.num_prompts), 1):
        workload = workloads.make(warm_up.input_len, min(_WARM_UP_OUTPUT, warm_up.output_len))
        engine.generate(workload, count, count)
    for case in cases:
        yield _measure_case(engine, case, workloads, repeats)


def _measure_case(engine: Engine, case: Case, workloads: FreshWorkloads, repeats: int) -> Measurement:
    made = Measurement(engine.backend, engine.model, engine.device, case, [])
    first_tokens_s: list[float] = []

    def run(output_len: int, count: int) -> tuple[float, list[float]]:
        elapsed_s, *first_s = engine.generate(workloads.make(case.input_len, output_len), count, case.at_once)
        return elapsed_s, first_s

    if case.with_steps:
        for _ in range(max(repeats, _FEWEST_FIRST_TOKEN_RUNS)):
            made.first_token_s.append(run(1, case.at_once)[0])
    for _ in range(repeats):
        elapsed_s, first_s = run(case.output_len, case.num_prompts)
        made.elapsed_s.append(elapsed_s)
        first_tokens_s += first_s
        if case.with_steps:
            is_one_batch = case.num_prompts == case.at_once
            made.batch_s.append(elapsed_s if is_one_batch else run(case.output_len, case.at_once)[0])
    if first_tokens_s:
        made.stream_first_token = Distribution.of(first_tokens_s)
    return made


def offline(args: object, cases: Sequence[Case], workloads: FreshWorkloads, repeats: int) -> Iterator[Measurement]:
    """Measurements of `pagemill.LLM` with these `EngineArgs`; to be run in a process of its own."""
    from pagemill.bench.engines import OfflineEngine
    from pagemill.engine_args import EngineArgs

    assert isinstance(args, EngineArgs)
    engine = OfflineEngine(args)
    try:
        yield from measure(engine, cases, workloads, repeats)
    finally:
        engine.close()
