"""What `pagemill bench serve` was asked for: loads on one server, one row each."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal

from pagemill.bench.arrivals import ClosedLoop, Schedule, random_arrivals
from pagemill.bench.serving import Objective
from pagemill.bench.workloads import (
    ChatLengths,
    FixedLengths,
    MultiTurn,
    SharedPrefixes,
    TokenSource,
    Workload,
    longest_sequence,
)
from pagemill.errors import ConfigError

NUM_REQUESTS = 200
WorkloadName = Literal["fixed", "chat", "shared-prefix", "multi-turn"]

_UNBOUNDED_LEN = 1 << 20
_DEFAULT_CONCURRENCY = "16"


@dataclass(frozen=True, slots=True)
class LoadPoint:
    """One load: `rate` conversations a second, or `concurrency` of them at once; the other one is None."""

    rate: float | None
    concurrency: int | None

    @property
    def name(self) -> str:
        return f"{self.rate:g} a second" if self.rate is not None else f"{self.concurrency} at once"

    @property
    def at(self) -> float:
        """Place on the axis of a plot."""
        return self.rate if self.rate is not None else float(self.concurrency or 0)


@dataclass(frozen=True, slots=True)
class LoadPlan:
    """The options of the command, by their names.

    Attributes:
        num_requests: conversations of each load; None is a default, or what the duration holds.
        duration_s: no conversation begins later; None is no bound.
        warm_up: requests before the first load.
    """

    workload: WorkloadName
    input_len: int
    output_len: int
    length_sigma: float
    prefix_len: int | None
    num_prefixes: int
    turns: int
    pause_s: float
    request_rate: str | None
    burstiness: float
    concurrency: str | None
    num_requests: int | None
    duration_s: float | None
    warm_up: int
    timeout_s: float
    slo_ttft_ms: float | None
    slo_tpot_ms: float | None
    seed: int

    def check(self) -> None:
        """Raises ConfigError for options that contradict each other or cannot be read."""
        if self.request_rate is not None and self.concurrency is not None:
            raise ConfigError(
                "--request-rate is an open loop, --concurrency a closed one: give one of them", field="concurrency"
            )
        if self.duration_s is not None and any(math.isinf(point.at) for point in self.points):
            raise ConfigError("--request-rate inf is all at once and has no --duration", field="duration")
        if self.prefix_len is not None and self.prefix_len > self.input_len:
            raise ConfigError(
                f"--prefix-len {self.prefix_len} is over --input-len {self.input_len}", field="prefix_len"
            )

    @property
    def points(self) -> list[LoadPoint]:
        """The loads, in the order in which they were written."""
        if self.request_rate is not None:
            return [LoadPoint(rate, None) for rate in _rates(self.request_rate)]
        return [LoadPoint(None, count) for count in _counts(self.concurrency or _DEFAULT_CONCURRENCY)]

    @property
    def axis(self) -> str:
        """What `LoadPoint.at` is."""
        return "conversations at once" if self.request_rate is None else "conversations a second"

    @property
    def objective(self) -> Objective:
        limits = (self.slo_ttft_ms, self.slo_tpot_ms)
        return Objective(*(None if limit is None else limit / 1e3 for limit in limits))

    @property
    def count(self) -> int | None:
        """Conversations of each load; None where the duration decides."""
        if self.num_requests is not None:
            return self.num_requests
        return None if self.duration_s is not None else NUM_REQUESTS

    @property
    def most_at_once(self) -> int:
        """Requests that may wait at a server, for the bounds of one that is started for this."""
        return max([self.count or 0, *(point.concurrency or 0 for point in self.points)])

    def make_workload(self, tokens: TokenSource, max_model_len: int) -> Workload:
        """The conversations.

        Args:
            max_model_len: the server's; 0 where it is not known.

        Raises:
            ConfigError: a sequence would be longer than the model's context.
        """
        made = self._workload(tokens, max_model_len or _UNBOUNDED_LEN)
        if max_model_len and longest_sequence(made) > max_model_len:
            raise ConfigError(
                f"sequences of {longest_sequence(made)} tokens do not fit the model's context of {max_model_len}",
                field="input_len",
            )
        return made

    def _workload(self, tokens: TokenSource, max_model_len: int) -> Workload:
        if self.workload == "chat":
            return ChatLengths(tokens, self.input_len, self.output_len, self.length_sigma, max_model_len)
        if self.workload == "shared-prefix":
            prefix_len = self.prefix_len or self.input_len * 3 // 4
            return SharedPrefixes(tokens, self.input_len, self.output_len, prefix_len, self.num_prefixes)
        if self.workload == "multi-turn":
            return MultiTurn(tokens, self.input_len, self.output_len, self.turns, self.pause_s)
        return FixedLengths(tokens, self.input_len, self.output_len)

    def schedule(self, point: LoadPoint, seed: int) -> Schedule:
        """When the conversations of a load begin."""
        duration_s = self.duration_s or math.inf
        if point.concurrency is not None:
            return ClosedLoop(point.concurrency, self.count, duration_s)
        assert point.rate is not None
        return random_arrivals(point.rate, self.burstiness, seed, count=self.count, duration_s=duration_s)


def _rates(text: str) -> list[float]:
    try:
        rates = [float(word) for word in text.replace(",", " ").split()]
    except ValueError:
        rates = []
    if not rates or not all(rate > 0 for rate in rates):
        raise ConfigError(f"--request-rate is {text!r}, must be rates such as 8,16,24 or inf", field="request_rate")
    return rates


def _counts(text: str) -> list[int]:
    words = text.replace(",", " ").split()
    if not words or not all(word.isdecimal() and int(word) > 0 for word in words):
        raise ConfigError(f"--concurrency is {text!r}, must be numbers such as 1,16,64", field="concurrency")
    return [int(word) for word in words]
