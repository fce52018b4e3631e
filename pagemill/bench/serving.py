"""What a load on a server comes to: percentiles of latencies, throughput, goodput, failures by kind."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

from pagemill.bench.load import LoadResult
from pagemill.bench.percentiles import Distribution
from pagemill.bench.records import Answer


@dataclass(frozen=True, slots=True)
class Objective:
    """Latencies that a request has to keep to count as good; None asks for nothing.

    `per_token_s` is the mean time of each token after the first.
    """

    first_token_s: float | None = None
    per_token_s: float | None = None

    @property
    def is_set(self) -> bool:
        return self.first_token_s is not None or self.per_token_s is not None

    def is_met(self, answer: Answer) -> bool:
        """Whether a request succeeded and kept to it."""
        if answer.error:
            return False
        if self.first_token_s is not None and answer.first_token_s > self.first_token_s:
            return False
        per_token_s = answer.per_token_s
        return self.per_token_s is None or per_token_s is None or per_token_s <= self.per_token_s


@dataclass(slots=True)
class LoadSamples:
    """Latencies of the requests that succeeded, in seconds, one entry each; `between_s` has one per piece."""

    first_token_s: list[float]
    between_s: list[float]
    per_token_s: list[float]
    whole_s: list[float]

    @staticmethod
    def of(answers: Sequence[Answer]) -> LoadSamples:
        succeeded = [answer for answer in answers if not answer.error]
        return LoadSamples(
            [answer.first_token_s for answer in succeeded],
            [
                later - earlier
                for answer in succeeded
                for earlier, later in zip(answer.arrivals_s, answer.arrivals_s[1:], strict=False)
            ],
            [per_token_s for answer in succeeded if (per_token_s := answer.per_token_s) is not None],
            [answer.whole_s for answer in succeeded],
        )


def load_columns(result: LoadResult, samples: LoadSamples, objective: Objective) -> dict[str, object]:
    """Figures of one load, for its row. Rates are over the time from the first request to the last answer's end."""
    succeeded = [answer for answer in result.answers if not answer.error]
    kinds = Counter(answer.error for answer in result.answers if answer.error)
    num_input = sum(answer.num_input_tokens for answer in succeeded)
    columns: dict[str, object] = {
        "num_requests": len(result.answers),
        "num_failed": len(result.answers) - len(succeeded),
        "failures": " ".join(f"{kind}={count}" for kind, count in sorted(kinds.items())),
        "elapsed_s": result.elapsed_s,
        "requests_per_second": len(succeeded) / result.elapsed_s,
        "output_tokens_per_second": sum(answer.num_output_tokens for answer in succeeded) / result.elapsed_s,
        "input_tokens_per_second": num_input / result.elapsed_s,
        "cached_share": sum(answer.num_cached_tokens for answer in succeeded) / num_input if num_input else 0.0,
        "late_ms_p99": Distribution.of(answer.late_s for answer in result.answers).p99 * 1e3,
        "client_cpu_share": result.client_cpu_share,
        **Distribution.of(samples.first_token_s).columns("ttft_ms", 1e3),
        **Distribution.of(samples.between_s).columns("itl_ms", 1e3),
        **Distribution.of(samples.per_token_s).columns("tpot_ms", 1e3),
        **Distribution.of(samples.whole_s).columns("e2e_ms", 1e3),
    }
    if objective.is_set:
        num_good = sum(map(objective.is_met, result.answers))
        columns["goodput_requests_per_second"] = num_good / result.elapsed_s
        columns["goodput_share"] = num_good / len(result.answers)
    return columns
