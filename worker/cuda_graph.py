"""Decode steps as CUDA graphs: the launches of a forward pass recorded once per padded number of rows."""

from __future__ import annotations

import bisect
import gc
import logging
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass

import torch

from worker.kernels import AttentionPlan

logger = logging.getLogger(__name__)

# Numbers of rows that are recorded: the distance between them is what a step computes for nothing at most.
_SMALLEST = (1, 2, 4)
_STEPS = ((256, 8), (512, 16), (1024, 32))

# What a recorded launch holds of a plan: where its buffers lie, and which kernels run.
PlanState = tuple[int, tuple[int, bool, bool]]


def graph_sizes(max_rows: int) -> list[int]:
    """Padded numbers of rows up to max_rows, which is the last one unless it exceeds 1024."""
    sizes = [size for size in _SMALLEST if size < max_rows]
    at = 0
    for end, distance in _STEPS:
        while at + distance <= end and at + distance < max_rows:
            at += distance
            sizes.append(at)
    if max_rows <= _STEPS[-1][0]:
        sizes.append(max_rows)
    return sizes


def _state(plans: Mapping[int, AttentionPlan]) -> tuple[PlanState, ...]:
    return tuple([(plan.num_reallocations, plan.flags) for plan in plans.values()])


@dataclass(slots=True)
class _Recorded:
    graph: torch.cuda.CUDAGraph
    plans: tuple[PlanState, ...]


class DecodeGraphs:
    """Graphs by padded number of rows; they share one memory pool, largest first.

    Attributes:
        num_fallbacks: decode steps that no graph fitted, and that ran launch by launch.
        num_bytes: device memory that the graphs took.
        seconds: that recording took.
    """

    def __init__(self) -> None:
        self._sizes: list[int] = []
        self._recorded: dict[int, _Recorded] = {}
        self.num_fallbacks = 0
        self.num_bytes = 0
        self.seconds = 0.0

    def __len__(self) -> int:
        return len(self._recorded)

    def padded_rows(self, rows: int) -> int | None:
        """The least recorded number of rows that holds `rows`; None where there is none."""
        at = bisect.bisect_left(self._sizes, rows)
        return self._sizes[at] if at < len(self._sizes) else None

    def record(
        self,
        sizes: list[int],
        plans: Mapping[int, AttentionPlan],
        plan_rows: Callable[[int], None],
        run: Callable[[int], None],
        stream: torch.cuda.Stream,
    ) -> None:
        """Record all sizes.

        Args:
            plans: the attention plans that `run` reads, by window.
            plan_rows: makes the plans of a decode step of so many rows, outside of the graph.
            run: launches such a step. It must not allocate device memory once it has run, nor wait for the device.
            stream: to record on, not the current one. Libraries keep work memory for each stream that they have seen.
        """
        started = time.monotonic()
        free_before = torch.cuda.mem_get_info()[0]
        pool = torch.cuda.graph_pool_handle()
        stream.wait_stream(torch.cuda.current_stream())
        # A collection while recording could free device memory, which a recording does not survive.
        collects = gc.isenabled()
        gc.collect()
        gc.disable()
        try:
            with torch.cuda.stream(stream):
                for size in sorted(sizes, reverse=True):
                    plan_rows(size)
                    run(size)  # loads kernels and picks algorithms, which cannot be recorded
                    stream.synchronize()
                    graph = torch.cuda.CUDAGraph()
                    graph.capture_begin(pool=pool, capture_error_mode="thread_local")
                    try:
                        run(size)
                    finally:
                        graph.capture_end()
                    self._recorded[size] = _Recorded(graph, _state(plans))
        finally:
            if collects:
                gc.enable()
        torch.cuda.current_stream().wait_stream(stream)
        torch.cuda.synchronize()
        self._sizes = sorted(self._recorded)
        self.num_bytes = max(0, free_before - torch.cuda.mem_get_info()[0])
        self.seconds = time.monotonic() - started

    def log(self) -> None:
        """Say what was recorded."""
        largest = self._sizes[-1] if self._sizes else 0
        mebibytes = self.num_bytes / (1 << 20)
        logger.info(
            "%d CUDA graphs of 1 to %d rows: %.1f s, %.0f MiB, %.1f MiB each",
            len(self),
            largest,
            self.seconds,
            mebibytes,
            mebibytes / max(1, len(self)),
        )

    def replay(self, padded_rows: int, plans: Mapping[int, AttentionPlan]) -> bool:
        """Launch a recorded step; False, counted, where the plans are not as they were when it was recorded."""
        recorded = self._recorded[padded_rows]
        if _state(plans) != recorded.plans:
            self.num_fallbacks += 1
            return False
        recorded.graph.replay()
        return True
