"""Latency: one batch at a time, again and again."""

from __future__ import annotations

import statistics
from collections.abc import Iterator
from dataclasses import dataclass

from pagemill.bench.arrivals import Rounds
from pagemill.bench.engines import FreshWorkloads, OfflineEngine
from pagemill.bench.load import LoadProcesses
from pagemill.bench.percentiles import Distribution
from pagemill.bench.targets import Target
from pagemill.engine_args import EngineArgs

_WARM_UP_ROUNDS = 2


@dataclass(frozen=True, slots=True)
class LatencyPlan:
    """Lengths, size of a batch, and how many batches are timed."""

    input_len: int
    output_len: int
    batch_size: int
    num_rounds: int


@dataclass(slots=True)
class LatencySamples:
    """Seconds: to the first token, per token after it (none where answers have one token), to the end."""

    backend: str
    model: str
    device: str
    first_token_s: list[float]
    per_token_s: list[float]
    whole_s: list[float]

    def columns(self, plan: LatencyPlan) -> dict[str, object]:
        """Figures of the row, in milliseconds."""
        return {
            "backend": self.backend,
            "device": self.device,
            **({"model": self.model} if self.model else {}),
            "input_len": plan.input_len,
            "output_len": plan.output_len,
            "batch_size": plan.batch_size,
            "num_rounds": plan.num_rounds,
            **Distribution.of(self.first_token_s).columns("ttft_ms", 1e3),
            **Distribution.of(self.per_token_s).columns("tpot_ms", 1e3),
            **Distribution.of(self.whole_s).columns("e2e_ms", 1e3),
        }


def offline_latency(args: EngineArgs, plan: LatencyPlan, workloads: FreshWorkloads) -> Iterator[LatencySamples]:
    """`pagemill.LLM`, which returns whole answers: the first token is timed by rounds of one token; to be run in a
    process of its own."""
    engine = OfflineEngine(args)
    samples = LatencySamples(engine.backend, engine.model, engine.device, [], [], [])

    def round_s(output_len: int) -> float:
        return engine.generate(workloads.make(plan.input_len, output_len), plan.batch_size, plan.batch_size)[0]

    for _ in range(_WARM_UP_ROUNDS):
        round_s(min(plan.output_len, 16))
    for _ in range(plan.num_rounds):
        samples.first_token_s.append(round_s(1))
        samples.whole_s.append(round_s(plan.output_len))
    if plan.output_len > 1:
        first_s = statistics.median(samples.first_token_s)
        samples.per_token_s = [(whole_s - first_s) / (plan.output_len - 1) for whole_s in samples.whole_s]
    engine.close()
    yield samples


def served_latency(target: Target, device: str, plan: LatencyPlan, workloads: FreshWorkloads) -> LatencySamples:
    """A server, by the times at which pieces of streams arrive."""
    samples = LatencySamples(target.backend, target.model, device, [], [], [])
    rounds = Rounds(plan.batch_size, _WARM_UP_ROUNDS + plan.num_rounds)
    with LoadProcesses() as processes:
        result = processes.run(target, workloads.make(plan.input_len, plan.output_len), rounds)
    result.require_all()
    # Answers come in the order in which they ended, so those of the first rounds come first.
    for answer in result.answers[_WARM_UP_ROUNDS * plan.batch_size :]:
        samples.first_token_s.append(answer.first_token_s)
        samples.whole_s.append(answer.whole_s)
        if answer.per_token_s is not None:
            samples.per_token_s.append(answer.per_token_s)
    return samples
