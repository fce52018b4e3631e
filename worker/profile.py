"""A profile of a few steps, asked for by the scheduler."""

from __future__ import annotations

import logging

from pagemill.step import StepPlan, StepResult

logger = logging.getLogger(__name__)


class StepProfile:
    """Adds up where the time of `num_steps` steps goes and logs one line at the end."""

    def __init__(self, num_steps: int) -> None:
        self._num_steps = num_steps
        self._steps = 0
        self._rows = 0
        self._tokens = 0
        self._forward_ns = 0
        self._sample_ns = 0
        self._gap_ns = 0
        self._replays = 0

    def add(self, plan: StepPlan, result: StepResult) -> bool:
        """Count a step; True when the profile is complete."""
        self._steps += 1
        self._rows += plan.num_rows
        self._tokens += sum(plan.num_tokens)
        self._forward_ns += result.forward_ns
        self._sample_ns += result.sample_ns
        self._gap_ns += result.gap_ns
        self._replays += result.is_replay
        if self._steps < self._num_steps:
            return False
        logger.info(
            "profile of %d steps, %d of them CUDA graphs: %.1f rows, %.1f tokens, forward %.3f ms, sampling %.3f ms, "
            "gap %.3f ms a step",
            self._steps,
            self._replays,
            self._rows / self._steps,
            self._tokens / self._steps,
            self._forward_ns / self._steps * 1e-6,
            self._sample_ns / self._steps * 1e-6,
            self._gap_ns / self._steps * 1e-6,
        )
        return True
