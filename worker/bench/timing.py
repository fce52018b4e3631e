"""Seconds of one call: the median over repetitions, each long enough to be measured."""

from __future__ import annotations

import statistics
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import torch

from worker.bench.case import Call, Candidate

# A graph of more launches than this takes longer to build than it helps.
_MAX_CAPTURED = 512


@dataclass(frozen=True, slots=True)
class Timing:
    """`method`: graph (replays of a CUDA graph), launches (between two events) or clock (of the host)."""

    seconds: float
    method: str


class Timer(Protocol):
    def time(self, candidate: Candidate) -> Timing: ...


class OnceTimer:
    """Runs each call once, for a dry run."""

    def time(self, candidate: Candidate) -> Timing:
        begin = time.perf_counter()
        for call in candidate.calls:
            call()
        return Timing((time.perf_counter() - begin) / len(candidate.calls), "clock")


class CpuTimer:
    """Median of `repetitions` runs of at least `target_s` each, by the host's clock."""

    def __init__(self, target_s: float, repetitions: int) -> None:
        self._target_s = target_s
        self._repetitions = repetitions

    def time(self, candidate: Candidate) -> Timing:
        calls = candidate.calls
        for call in calls[:3]:
            call()
        begin = time.perf_counter()
        for call in calls[:3]:
            call()
        one = max((time.perf_counter() - begin) / min(len(calls), 3), 1e-7)
        rounds = max(1, round(self._target_s / (one * len(calls))))
        samples = []
        for _ in range(self._repetitions):
            begin = time.perf_counter()
            for _ in range(rounds):
                for call in calls:
                    call()
            samples.append((time.perf_counter() - begin) / (rounds * len(calls)))
        return Timing(statistics.median(samples), "clock")


class CudaTimer:
    """Median of `repetitions` runs of about `target_s` each, between CUDA events: graph replays where possible."""

    def __init__(self, target_s: float, repetitions: int) -> None:
        self._target_s = target_s
        self._repetitions = repetitions

    def time(self, candidate: Candidate) -> Timing:
        calls = candidate.calls
        warm_up = calls[:3]
        self._elapsed(warm_up, 1)
        one = max(self._elapsed(warm_up, 1) / len(warm_up), 1e-6)
        # Enough launches that what starts a replay does not count, in whole rounds over the rotated memory.
        rounds = max(1, min(_MAX_CAPTURED // len(calls), round(self._target_s / (one * len(calls)))))
        graph = self._capture(calls, rounds) if candidate.is_capturable else None
        if graph is None:
            samples = [self._elapsed(calls, rounds) / (rounds * len(calls)) for _ in range(self._repetitions)]
            return Timing(statistics.median(samples), "launches")
        num_calls = rounds * len(calls)
        replay = max(self._elapsed([graph.replay], 1), 1e-6)
        replays = max(1, round(self._target_s / replay))
        samples = [self._elapsed([graph.replay], replays) / (replays * num_calls) for _ in range(self._repetitions)]
        graph.reset()
        return Timing(statistics.median(samples), "graph")

    @staticmethod
    def _capture(calls: Sequence[Call], rounds: int) -> torch.cuda.CUDAGraph | None:
        """None where the calls cannot be captured: a library may refuse it, and says so in many ways."""
        stream = torch.cuda.Stream()
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            calls[0]()
        torch.cuda.current_stream().wait_stream(stream)
        graph = torch.cuda.CUDAGraph()
        try:
            with torch.cuda.graph(graph):
                for _ in range(rounds):
                    for call in calls:
                        call()
        except (RuntimeError, ValueError):
            torch.cuda.synchronize()
            return None
        return graph

    @staticmethod
    def _elapsed(calls: Sequence[Call], rounds: int) -> float:
        begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        begin.record()
        for _ in range(rounds):
            for call in calls:
                call()
        end.record()
        end.synchronize()
        return begin.elapsed_time(end) / 1e3
