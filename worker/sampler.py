"""Sampling state by slot, and the draw of a step's tokens from logits by the native sampler."""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt
import torch

from pagemill.step import SlotSampling, TokenLogprobs
from worker import kernels
from worker.slots import IntArray, SlotTable

_BoolArray = npt.NDArray[np.bool_]


@dataclass(slots=True)
class Csr:
    """Lists of different lengths, end to end: those of row r are values[offsets[r] : offsets[r + 1]]."""

    offsets: IntArray
    values: IntArray

    @staticmethod
    def join(rows: list[IntArray]) -> Csr:
        """Join one array per row."""
        offsets = np.zeros(len(rows) + 1, dtype=np.int32)
        np.cumsum([len(row) for row in rows], out=offsets[1:])
        return Csr(offsets, np.concatenate(rows) if rows else _NO_IDS)


_NO_IDS: IntArray = np.zeros(0, dtype=np.int32)
_NO_VALUES: npt.NDArray[np.float32] = np.zeros(0, dtype=np.float32)


@dataclass(slots=True)
class LogprobArrays:
    """What the native kernels write about R rows: status always, the rest where log-probabilities are asked for."""

    status: torch.Tensor  # int32 [R]; not 0 where the logits are NaN or infinite
    logprobs: torch.Tensor | None = None  # float32 [R]
    ranks: torch.Tensor | None = None  # int32 [R]
    top_ids: torch.Tensor | None = None  # int32 [R, num_top]
    top_logprobs: torch.Tensor | None = None  # float32 [R, num_top]

    @staticmethod
    def allocate(rows: int, num_logprobs: int) -> LogprobArrays:
        """For num_logprobs alternatives per row; 0 is the chosen token alone, -1 nothing."""
        arrays = LogprobArrays(torch.empty(rows, dtype=torch.int32))
        if num_logprobs >= 0:
            arrays.logprobs = torch.empty(rows, dtype=torch.float32)
            arrays.ranks = torch.empty(rows, dtype=torch.int32)
        if num_logprobs > 0:
            arrays.top_ids = torch.empty((rows, num_logprobs), dtype=torch.int32)
            arrays.top_logprobs = torch.empty((rows, num_logprobs), dtype=torch.float32)
        return arrays

    def run(self, first: int, stop: int, num_top: int) -> TokenLogprobs:
        """Rows first..stop - 1 as a run with num_top alternatives each."""
        assert self.logprobs is not None
        assert self.ranks is not None
        run = TokenLogprobs(self.logprobs[first:stop].tolist(), self.ranks[first:stop].tolist(), num_top)
        if num_top and self.top_ids is not None and self.top_logprobs is not None:
            run.top_ids = self.top_ids[first:stop, :num_top].flatten().tolist()
            run.top_logprobs = self.top_logprobs[first:stop, :num_top].flatten().tolist()
        return run


def prompt_logprobs(logits: torch.Tensor, token_ids: npt.NDArray[np.int64], num_top: int) -> TokenLogprobs | None:
    """Log-probabilities of given tokens, one per row of logits; None where a row is NaN or infinite."""
    arrays = LogprobArrays.allocate(len(token_ids), num_top)
    assert arrays.logprobs is not None
    assert arrays.ranks is not None
    kernels.token_logprobs(
        logits,
        torch.from_numpy(token_ids),
        arrays.logprobs,
        arrays.ranks,
        arrays.status,
        arrays.top_ids,
        arrays.top_logprobs,
    )
    return None if arrays.status.any() else arrays.run(0, len(token_ids), num_top)


@dataclass(slots=True)
class Draws:
    """What one call drew, per row.

    Attributes:
        token_ids: int64 [R].
        failed: bool [R], the row's logits were NaN or infinite; its token id means nothing.
        logprobs: by row, for rows that asked.
    """

    token_ids: npt.NDArray[np.int64]
    failed: _BoolArray
    logprobs: dict[int, TokenLogprobs] = field(default_factory=dict)


class Sampler:
    """Sampling parameters of all slots in columns. Only rows with penalties, biases or masks cost a loop."""

    def __init__(self, table: SlotTable, vocab_size: int) -> None:
        slots = table.num_slots
        self._table = table
        self._vocab_size = vocab_size
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
        self._bias: dict[int, tuple[IntArray, npt.NDArray[np.float32]]] = {}

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

    def sample(self, logits: torch.Tensor, slots: IntArray) -> Draws:
        """Draw one token per row.

        Args:
            logits: [R, vocab_size].
            slots: int32 [R]; all known tokens of each slot are computed.
        """
        table = self._table
        known = table.num_known[slots]
        penalized = self._penalized[slots]
        biased = self._biased[slots]
        masked = known - table.num_prompt[slots] < self._min_tokens[slots]
        num_logprobs = self._num_logprobs[slots]
        most_logprobs = int(num_logprobs.max())
        lists: dict[str, torch.Tensor] = {}
        if penalized.any():
            lists |= self._penalties(slots, penalized)
        if biased.any():
            lists |= self._biases(slots, biased)
        if masked.any():
            lists |= self._masks(slots, masked)
        batch = kernels.SamplingBatch(
            temperature=torch.from_numpy(self._temperature[slots]),
            top_k=torch.from_numpy(self._top_k[slots]),
            top_p=torch.from_numpy(self._top_p[slots]),
            min_p=torch.from_numpy(self._min_p[slots]),
            seeds=torch.from_numpy(self._seed[slots]),
            positions=torch.from_numpy(known.astype(np.int64)),
            **lists,
        )
        columns = LogprobArrays.allocate(len(slots), most_logprobs)
        token_ids = torch.empty(len(slots), dtype=torch.int64)
        kernels.sample(
            logits,
            batch,
            token_ids,
            columns.status,
            out_logprobs=columns.logprobs,
            out_ranks=columns.ranks,
            out_top_ids=columns.top_ids,
            out_top_logprobs=columns.top_logprobs,
        )
        draws = Draws(token_ids.numpy(), columns.status.numpy() != 0)
        if most_logprobs >= 0:
            for row in np.flatnonzero((num_logprobs >= 0) & ~draws.failed).tolist():
                draws.logprobs[row] = columns.run(row, row + 1, int(num_logprobs[row]))
        return draws

    def _penalties(self, slots: IntArray, penalized: _BoolArray) -> dict[str, torch.Tensor]:
        table = self._table
        prompts, outputs = [_NO_IDS] * len(slots), [_NO_IDS] * len(slots)
        for row in np.flatnonzero(penalized).tolist():
            slot = slots[row]
            prompt_len = table.num_prompt[slot]
            prompts[row] = table.token_ids[slot, :prompt_len]
            outputs[row] = table.token_ids[slot, prompt_len : table.num_known[slot]]
        prompt, output = Csr.join(prompts), Csr.join(outputs)
        return {
            "presence_penalty": torch.from_numpy(self._presence[slots]),
            "frequency_penalty": torch.from_numpy(self._frequency[slots]),
            "repetition_penalty": torch.from_numpy(self._repetition[slots]),
            "prompt_offsets": torch.from_numpy(prompt.offsets),
            "prompt_ids": torch.from_numpy(prompt.values),
            "output_offsets": torch.from_numpy(output.offsets),
            "output_ids": torch.from_numpy(output.values),
        }

    def _biases(self, slots: IntArray, biased: _BoolArray) -> dict[str, torch.Tensor]:
        none = (_NO_IDS, _NO_VALUES)
        rows = [self._bias[int(slot)] if flag else none for slot, flag in zip(slots, biased, strict=True)]
        ids = Csr.join([row[0] for row in rows])
        values = np.concatenate([row[1] for row in rows])
        return {
            "bias_offsets": torch.from_numpy(ids.offsets),
            "bias_ids": torch.from_numpy(ids.values),
            "bias_values": torch.from_numpy(values),
        }

    def _masks(self, slots: IntArray, masked: _BoolArray) -> dict[str, torch.Tensor]:
        rows = [self._masked_ids[int(slot)] if flag else _NO_IDS for slot, flag in zip(slots, masked, strict=True)]
        ids = Csr.join(rows)
        return {"masked_offsets": torch.from_numpy(ids.offsets), "masked_ids": torch.from_numpy(ids.values)}
