"""Sampling state by slot, and the draw of a step's tokens from logits by the native sampler."""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt
import torch

from pagemill.step import SlotSampling, TokenLogprobs
from worker import kernels
from worker.slots import IntArray, LongArray, SlotTable
from worker.step_buffers import Results, Staging, aligned
from worker.step_device import StepDevice

_BoolArray = npt.NDArray[np.bool_]
_FloatArray = npt.NDArray[np.float32]

_NO_IDS: IntArray = np.zeros(0, dtype=np.int32)
_NO_VALUES: _FloatArray = np.zeros(0, dtype=np.float32)
# Below it, as for the kernels, a temperature means the largest logit.
_GREEDY_BELOW = 1e-5
# Columns of a row in the staging buffer, in ints, at most: those of `stage` and where the drawn id goes.
_INTS_PER_ROW = 17
_NUM_COLUMNS = 14


def staged_sampling_ints(num_rows: int) -> int:
    """Room that the columns of so many rows take in a staging buffer at most."""
    return _NUM_COLUMNS * aligned(1) + _INTS_PER_ROW * aligned(num_rows)


@dataclass(slots=True)
class LogprobArrays:
    """What the native kernels write about R rows where log-probabilities are asked for, on the device.

    Attributes:
        num_top: alternatives per row.
    """

    num_top: int
    logprobs: torch.Tensor  # float32 [R]
    ranks: torch.Tensor  # int32 [R]
    top_ids: torch.Tensor | None = None  # int32 [R, num_top]
    top_logprobs: torch.Tensor | None = None  # float32 [R, num_top]

    @staticmethod
    def allocate(rows: int, num_top: int, device: torch.device) -> LogprobArrays:
        """For num_top alternatives per row; 0 is the chosen token alone."""
        arrays = LogprobArrays(
            num_top,
            torch.empty(rows, dtype=torch.float32, device=device),
            torch.empty(rows, dtype=torch.int32, device=device),
        )
        if num_top > 0:
            arrays.top_ids = torch.empty((rows, num_top), dtype=torch.int32, device=device)
            arrays.top_logprobs = torch.empty((rows, num_top), dtype=torch.float32, device=device)
        return arrays

    def rows(self, first: int, stop: int) -> LogprobArrays:
        """Views of some rows."""
        top_ids, top_logprobs = self.top_ids, self.top_logprobs
        return LogprobArrays(
            self.num_top,
            self.logprobs[first:stop],
            self.ranks[first:stop],
            None if top_ids is None else top_ids[first:stop],
            None if top_logprobs is None else top_logprobs[first:stop],
        )

    def download(self, device: StepDevice) -> LogprobArrays:
        """The same in host memory, complete at the device's next mark."""
        top_ids, top_logprobs = self.top_ids, self.top_logprobs
        return LogprobArrays(
            self.num_top,
            device.download(self.logprobs),
            device.download(self.ranks),
            None if top_ids is None else device.download(top_ids),
            None if top_logprobs is None else device.download(top_logprobs),
        )

    def run(self, first: int, stop: int, num_top: int) -> TokenLogprobs:
        """Rows first..stop - 1 of arrays in host memory, as a run with num_top alternatives each."""
        run = TokenLogprobs(self.logprobs[first:stop].tolist(), self.ranks[first:stop].tolist(), num_top)
        if num_top and self.top_ids is not None and self.top_logprobs is not None:
            run.top_ids = self.top_ids[first:stop, :num_top].flatten().tolist()
            run.top_logprobs = self.top_logprobs[first:stop, :num_top].flatten().tolist()
        return run


@dataclass(slots=True)
class StagedDraws:
    """The parameters of a step's draws, R rows.

    Attributes:
        columns: fields of `SamplingBatch` on the device, each [R]; without those that hold their default in all rows.
        bias: (row, ids, values) of rows with a logit bias.
        masked: (row, ids) of rows that may not draw some ids.
        history_indices: int64 [R] on the device, where the drawn ids go in the flat history.
        num_logprobs: int32 [R], alternatives asked for; -1 is none.
    """

    num_rows: int
    columns: dict[str, torch.Tensor]
    history_indices: torch.Tensor
    num_logprobs: IntArray
    bias: list[tuple[int, IntArray, _FloatArray]] = field(default_factory=list)
    masked: list[tuple[int, IntArray]] = field(default_factory=list)


class Sampler:
    """Sampling parameters of all slots in columns. Only rows with biases or masks cost a loop.

    Args:
        table: lengths and histories of the slots.
        vocab_size: columns of the logits.
        max_rows: most rows of logits in one call.
        device: where the logits lie.
    """

    def __init__(self, table: SlotTable, vocab_size: int, max_rows: int, device: StepDevice) -> None:
        slots = table.num_slots
        self._table = table
        self._vocab_size = vocab_size
        self._max_rows = max_rows
        self._device = device
        self._temperature = np.ones(slots, dtype=np.float32)
        self._top_k = np.zeros(slots, dtype=np.int32)
        self._top_p = np.ones(slots, dtype=np.float32)
        self._min_p = np.zeros(slots, dtype=np.float32)
        self._seed = np.zeros(slots, dtype=np.uint64)
        self._presence = np.zeros(slots, dtype=np.float32)
        self._frequency = np.zeros(slots, dtype=np.float32)
        self._repetition = np.ones(slots, dtype=np.float32)
        self._min_tokens = np.zeros(slots, dtype=np.int32)
        self._num_logprobs = np.full(slots, -1, dtype=np.int32)
        self._penalized: _BoolArray = np.zeros(slots, dtype=np.bool_)
        self._biased: _BoolArray = np.zeros(slots, dtype=np.bool_)
        # Valid where min_tokens > 0 and _biased; overwritten by the slot's next sequence.
        self._masked_ids: dict[int, IntArray] = {}
        self._bias: dict[int, tuple[IntArray, _FloatArray]] = {}
        self._history = table.store.history.view(-1)
        self._workspace_num_top = 0
        self._workspace = self._make_workspace(0)

    def _make_workspace(self, num_top: int) -> torch.Tensor | None:
        return kernels.sampling_workspace(
            self._max_rows, self._vocab_size, torch.float32, self._device.torch_device, num_top=num_top
        )

    def workspace(self, num_top: int) -> torch.Tensor | None:
        """What `kernels.sample` and `kernels.token_logprobs` need; grows with the alternatives asked for."""
        if num_top > self._workspace_num_top:
            self._workspace = self._make_workspace(num_top)
            self._workspace_num_top = num_top
        return self._workspace

    def enter(self, slot: int, sampling: SlotSampling) -> None:
        """Take over the parameters of a sequence that enters a slot."""
        self._temperature[slot] = sampling.temperature
        self._top_k[slot] = min(sampling.top_k, self._vocab_size)
        self._top_p[slot] = sampling.top_p
        self._min_p[slot] = sampling.min_p
        self._seed[slot] = sampling.seed
        self._presence[slot] = sampling.presence_penalty
        self._frequency[slot] = sampling.frequency_penalty
        self._repetition[slot] = sampling.repetition_penalty
        self._num_logprobs[slot] = min(sampling.num_logprobs, self._vocab_size)
        self._penalized[slot] = bool(
            sampling.presence_penalty or sampling.frequency_penalty or sampling.repetition_penalty != 1.0
        )
        masked = self._in_vocabulary(sampling.masked_until_min_tokens)
        self._min_tokens[slot] = sampling.min_tokens if len(masked) else 0
        self._masked_ids[slot] = masked
        bias_ids = self._in_vocabulary(list(sampling.logit_bias))
        self._biased[slot] = len(bias_ids) > 0
        values = np.array([sampling.logit_bias[int(i)] for i in bias_ids], dtype=np.float32)
        self._bias[slot] = (bias_ids, values)

    def _in_vocabulary(self, token_ids: list[int]) -> IntArray:
        return np.array([i for i in token_ids if 0 <= i < self._vocab_size], dtype=np.int32)

    def stage(self, slots: IntArray, staging: Staging) -> StagedDraws:
        """Add what the draws of `slots`, int32 [R], read to a step's inputs; all their known tokens are computed."""
        known = self._table.num_known[slots]
        columns: dict[str, torch.Tensor] = {}
        temperature = self._temperature[slots]
        if (temperature >= _GREEDY_BELOW).any():
            columns["temperature"] = staging.column(temperature)
            columns["seeds"] = staging.column(self._seed[slots].view(np.int64))
            columns["positions"] = staging.column(known.astype(np.int64))
            filters: tuple[tuple[str, IntArray | _FloatArray, float], ...] = (
                ("top_k", self._top_k, 0),
                ("top_p", self._top_p, 1),
                ("min_p", self._min_p, 0),
            )
            for name, of_slots, off in filters:
                values = of_slots[slots]
                if (values != off).any():
                    columns[name] = staging.column(values)
        if self._penalized[slots].any():
            columns |= self._stage_penalties(slots, known, staging)
        staged = StagedDraws(
            len(slots), columns, staging.column(self._table.next_history_indices(slots)), self._num_logprobs[slots]
        )
        biased = self._biased[slots]
        if biased.any():
            staged.bias = [(row, *self._bias[int(slots[row])]) for row in np.flatnonzero(biased).tolist()]
        masked = known - self._table.num_prompt[slots] < self._min_tokens[slots]
        if masked.any():
            staged.masked = [(row, self._masked_ids[int(slots[row])]) for row in np.flatnonzero(masked).tolist()]
        return staged

    def _stage_penalties(self, slots: IntArray, known: IntArray, staging: Staging) -> dict[str, torch.Tensor]:
        """Prompt and output of a row are ranges of the flat history; rows without penalties have empty ones."""
        penalized = self._penalized[slots]
        starts = slots * np.int32(self._table.max_model_len)
        prompt_ends = starts + self._table.num_prompt[slots]
        ranges = {
            "prompt_offsets": starts,
            "prompt_ends": prompt_ends,
            "output_offsets": prompt_ends,
            "output_ends": starts + known,
        }
        columns = {name: staging.column(np.where(penalized, values, 0)) for name, values in ranges.items()}
        columns["presence_penalty"] = staging.column(self._presence[slots])
        columns["frequency_penalty"] = staging.column(self._frequency[slots])
        columns["repetition_penalty"] = staging.column(self._repetition[slots])
        return columns

    def draw(
        self, staged: StagedDraws, first: int, logits: torch.Tensor, results: Results, logprobs: LogprobArrays | None
    ) -> None:
        """Launch the draws of some rows of a step.

        Args:
            first: row of the step whose logits come first.
            logits: float32 [R, vocab_size].
            results: gets ids and status in the rows from `first`; the ids go to the histories too.
            logprobs: of all rows of the step; None where no row asks.
        """
        stop = first + logits.shape[0]
        is_whole = stop - first == staged.num_rows
        columns = staged.columns if is_whole else {name: c[first:stop] for name, c in staged.columns.items()}
        columns = columns | self._lists(staged, first, stop)
        if "prompt_offsets" in columns:
            columns |= {"prompt_ids": self._history, "output_ids": self._history}
        token_ids = results.token_ids[first:stop]
        arrays = None if logprobs is None else logprobs.rows(first, stop)
        kernels.sample(
            logits,
            kernels.SamplingBatch(**columns),
            token_ids,
            results.status[first:stop],
            out_logprobs=None if arrays is None else arrays.logprobs,
            out_ranks=None if arrays is None else arrays.ranks,
            out_top_ids=None if arrays is None else arrays.top_ids,
            out_top_logprobs=None if arrays is None else arrays.top_logprobs,
            workspace=self.workspace(0 if arrays is None else arrays.num_top),
        )
        indices = staged.history_indices if is_whole else staged.history_indices[first:stop]
        kernels.scatter(self._history, indices, token_ids)

    def _lists(self, staged: StagedDraws, first: int, stop: int) -> dict[str, torch.Tensor]:
        """Biases and masked ids of rows first..stop - 1, end to end."""
        upload, lists = self._device.upload, dict[str, torch.Tensor]()
        bias = [each for each in staged.bias if first <= each[0] < stop]
        if bias:
            offsets, ids = _join(stop - first, first, [(row, ids) for row, ids, _ in bias])
            lists["bias_offsets"], lists["bias_ids"] = upload(offsets), upload(ids)
            lists["bias_values"] = upload(np.concatenate([values for _, _, values in bias]))
        masked = [each for each in staged.masked if first <= each[0] < stop]
        if masked:
            offsets, ids = _join(stop - first, first, masked)
            lists["masked_offsets"], lists["masked_ids"] = upload(offsets), upload(ids)
        return lists

    def prompt_logprobs(
        self, logits: torch.Tensor, token_ids: torch.Tensor, num_top: int
    ) -> tuple[torch.Tensor, LogprobArrays]:
        """Launch the log-probabilities of given tokens, int64 [R]: status, int32 [R], and what else is written."""
        place = self._device.torch_device
        status = torch.empty(len(token_ids), dtype=torch.int32, device=place)
        arrays = LogprobArrays.allocate(len(token_ids), num_top, place)
        kernels.token_logprobs(
            logits,
            token_ids,
            arrays.logprobs,
            arrays.ranks,
            status,
            arrays.top_ids,
            arrays.top_logprobs,
            workspace=self.workspace(num_top),
        )
        return status, arrays


def _join(num_rows: int, first: int, lists: list[tuple[int, IntArray]]) -> tuple[IntArray, IntArray]:
    """Offsets [num_rows + 1] and ids end to end of the lists that some of the rows first, first + 1, ... have."""
    lengths: LongArray = np.zeros(num_rows + 1, dtype=np.int64)
    lengths[[1 + row - first for row, _ in lists]] = [len(ids) for _, ids in lists]
    return np.cumsum(lengths).astype(np.int32), np.concatenate([ids for _, ids in lists])
