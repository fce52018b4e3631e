"""A step between its launch and its result: what is still on the device, and how it becomes a `StepResult`."""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt
import torch

from pagemill.step import PromptChunkLogprobs, SlotFailure, StepResult, TokenLogprobs
from worker.sampler import LogprobArrays
from worker.slots import IntArray
from worker.step_buffers import Results
from worker.step_device import Mark

_NAN_MESSAGE = "the model produced NaN or infinite logits"
OUT_OF_MEMORY_MESSAGE = "out of memory in the step that computed this request"


@dataclass(slots=True)
class PendingChunk:
    """Prompt log-probabilities of one row, in host memory once the step is done.

    Attributes:
        slot: of the row.
        first_position: of the first token that has one.
        parts: status and arrays of consecutive tokens.
    """

    slot: int
    first_position: int
    parts: list[tuple[torch.Tensor, LogprobArrays]] = field(default_factory=list)


@dataclass(slots=True)
class Draws:
    """Sampled rows of a step, in host memory once the step is done.

    Attributes:
        slots: int32 [R].
        results: status and ids.
        num_logprobs: int32 [R], alternatives that each row asked for; -1 is none.
        logprobs: of all rows; None where no row asked.
    """

    slots: IntArray
    results: Results
    num_logprobs: IntArray
    logprobs: LogprobArrays | None = None


@dataclass(slots=True)
class StepMarks:
    """Points in the device's work: the end of the step before (None where nothing continues), and of this step."""

    before: Mark | None
    begin: Mark
    forward_end: Mark | None = None
    end: Mark | None = None


class PendingStep:
    """A launched step. Results are to be asked for in the order of the launches, each once.

    Args:
        result: epoch and step; the rest is filled in.
        slots: int32 [B], slots of all rows.
        failed: bool [S], slots whose sequence has failed; shared with the runner.
        marks: None for a step without rows.
    """

    def __init__(
        self, result: StepResult, slots: IntArray, failed: npt.NDArray[np.bool_], marks: StepMarks | None
    ) -> None:
        self._result = result
        self._slots = slots
        self._failed = failed
        self.marks = marks
        self.draws: Draws | None = None
        self.chunks: list[PendingChunk] = []
        self.ran_out_of_memory = False

    def note_forward(self, is_replay: bool, end: Mark) -> None:
        """The forward pass was launched, as the replay of a graph or not, and ends at a mark."""
        assert self.marks is not None
        self._result.is_replay = is_replay
        self.marks.forward_end = end

    @property
    def is_done(self) -> bool:
        """Whether `result` would return without a wait."""
        return self.marks is None or self.marks.end is None or self.marks.end.is_reached

    def result(self) -> StepResult:
        """Wait for the device; what the step brought."""
        result = self._result
        if self.marks is None:
            return result
        self._take_times(self.marks)
        if self.ran_out_of_memory:
            self._fail_all()
            return result
        for chunk in self.chunks:
            self._finish_chunk(chunk)
        if self.draws is not None:
            self._finish_draws(self.draws)
        return result

    def _take_times(self, marks: StepMarks) -> None:
        assert marks.end is not None
        marks.end.wait()
        result = self._result
        forward_end = marks.forward_end or marks.end
        result.forward_ns = forward_end.ns_since(marks.begin)
        result.sample_ns = marks.end.ns_since(forward_end)
        if marks.before is not None:
            result.gap_ns = marks.begin.ns_since(marks.before)

    def _fail(self, slots: IntArray, message: str) -> None:
        """Mark slots as failed, and report those that were not."""
        for slot in slots[~self._failed[slots]].tolist():
            self._result.failures.append(SlotFailure(slot, message))
        self._failed[slots] = True

    def _fail_all(self) -> None:
        self._result.ran_out_of_memory = True
        self._fail(self._slots, OUT_OF_MEMORY_MESSAGE)
        if self.draws is not None:
            self._result.sampled_token_ids = [0] * len(self.draws.slots)

    def _finish_chunk(self, chunk: PendingChunk) -> None:
        if self._failed[chunk.slot]:
            return
        if any(bool(status.any()) for status, _ in chunk.parts):
            self._fail(np.array([chunk.slot], dtype=np.int32), _NAN_MESSAGE)
            return
        columns = TokenLogprobs()
        for status, arrays in chunk.parts:
            columns.extend(arrays.run(0, len(status), arrays.num_top))
        self._result.prompt_logprobs.append(PromptChunkLogprobs(chunk.slot, chunk.first_position, columns))

    def _finish_draws(self, draws: Draws) -> None:
        count = len(draws.slots)
        token_ids = draws.results.host_token_ids[:count]
        failed = (draws.results.host_status[:count] != 0) | self._failed[draws.slots]
        if failed.any():
            token_ids = np.where(failed, 0, token_ids)
            self._fail(draws.slots[failed], _NAN_MESSAGE)
        self._result.sampled_token_ids = token_ids.tolist()
        if draws.logprobs is not None:
            for row in np.flatnonzero((draws.num_logprobs >= 0) & ~failed).tolist():
                run = draws.logprobs.run(row, row + 1, int(draws.num_logprobs[row]))
                self._result.logprobs[row] = run


def is_out_of_memory(error: BaseException) -> bool:
    """Whether an error of a step says that memory ran out, of the host or of a device."""
    if isinstance(error, MemoryError | torch.OutOfMemoryError):
        return True
    # torch has no type of its own for host memory and for the workspaces of cuBLAS.
    reasons = ("out of memory", "can't allocate memory", "CUBLAS_STATUS_ALLOC_FAILED")
    return isinstance(error, RuntimeError) and any(reason in str(error) for reason in reasons)
