"""From a step plan and the slots to the tensors of one forward pass, without a Python loop over sequences."""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np
import torch

from pagemill.errors import DesyncError
from pagemill.step import StepPlan
from worker.kernels import AttentionPlan
from worker.slots import IntArray, SlotTable


@dataclass(slots=True)
class StepBatch:
    """Inputs of one forward pass over T tokens in B rows.

    The tensors share memory with `BatchBuilder`'s buffers and live until the next build.

    Attributes:
        num_tokens: T.
        slots: int32 [B], slot of each row.
        starts: int32 [B], position of each row's first token.
        counts: int32 [B], tokens of each row.
        token_ids: int32 [T].
        positions: int32 [T].
        slot_mapping: int64 [T], block * block_size + offset where each token's KV goes.
        prompt_lens: int32 [B], prompt tokens of each row's sequence.
        block_table: int32 [S, max_blocks] of all slots.
        seq_slots: int32 [B], slots as a tensor.
        query_start: int32 [B + 1], first token of each row; the last entry is T.
        context_lens: int32 [B], tokens of each row's sequence up to and including this step's.
        max_count: the largest of counts.
        attention_plans: the step's attention plan for each window that the model has; empty on a CPU.
    """

    num_tokens: int
    slots: IntArray
    starts: IntArray
    counts: IntArray
    prompt_lens: IntArray
    token_ids: torch.Tensor
    positions: torch.Tensor
    slot_mapping: torch.Tensor
    block_table: torch.Tensor
    seq_slots: torch.Tensor
    query_start: torch.Tensor
    context_lens: torch.Tensor
    max_count: int
    attention_plans: dict[int, AttentionPlan] = field(default_factory=dict)


class BatchBuilder:
    """Builds step batches in preallocated buffers."""

    def __init__(self, table: SlotTable, max_tokens: int) -> None:
        rows = table.num_slots
        self._table = table
        self._max_tokens = max_tokens
        self._token_ids = np.zeros(max_tokens, dtype=np.int32)
        self._positions = np.zeros(max_tokens, dtype=np.int32)
        self._slot_mapping = np.zeros(max_tokens, dtype=np.int64)
        self._slots = np.zeros(rows, dtype=np.int32)
        self._query_start = np.zeros(rows + 1, dtype=np.int32)
        self._context_lens = np.zeros(rows, dtype=np.int32)
        self._token_ids_t = torch.from_numpy(self._token_ids)
        self._positions_t = torch.from_numpy(self._positions)
        self._slot_mapping_t = torch.from_numpy(self._slot_mapping)
        self._slots_t = torch.from_numpy(self._slots)
        self._query_start_t = torch.from_numpy(self._query_start)
        self._block_table_t = torch.from_numpy(table.block_table)
        self._context_lens_t = torch.from_numpy(self._context_lens)

    def build(self, plan: StepPlan, slots: IntArray) -> StepBatch:
        """Tensors of the plan's rows; `num_computed` of the slots is not advanced.

        Raises:
            DesyncError: the plan computes tokens that are unknown, have no block, or are more than the worker holds.
        """
        table, rows = self._table, len(slots)
        counts = np.array(plan.num_tokens, dtype=np.int32)
        if len(counts) != rows or len(plan.sample) != rows:
            raise DesyncError(f"{rows} rows, but {len(counts)} token counts and {len(plan.sample)} sample flags")
        starts = table.num_computed[slots]
        ends = starts + counts
        if (counts < 1).any():
            raise DesyncError("a row has no token to compute")
        if (ends > table.num_known[slots]).any():
            row = int(np.argmax(ends > table.num_known[slots]))
            raise DesyncError(
                f"slot {slots[row]}: tokens up to {ends[row]} planned, {table.num_known[slots[row]]} known"
            )
        if (ends > table.num_blocks[slots] * table.block_size).any():
            row = int(np.argmax(ends > table.num_blocks[slots] * table.block_size))
            raise DesyncError(
                f"slot {slots[row]}: tokens up to {ends[row]} planned in {table.num_blocks[slots[row]]} blocks"
            )
        self._query_start[0] = 0
        np.cumsum(counts, out=self._query_start[1 : rows + 1])
        total = int(self._query_start[rows])
        if total > self._max_tokens:
            raise DesyncError(f"{total} tokens planned, this worker holds {self._max_tokens} in a step")
        if total == rows:
            positions, token_slots = starts, slots
        else:
            row_of_token = np.repeat(np.arange(rows), counts)
            positions = np.arange(total, dtype=np.int32) + (starts - self._query_start[:rows])[row_of_token]
            token_slots = slots[row_of_token]
        self._positions[:total] = positions
        self._token_ids[:total] = table.token_ids[token_slots, positions]
        blocks = table.block_table[token_slots, positions // table.block_size].astype(np.int64)
        self._slot_mapping[:total] = blocks * table.block_size + positions % table.block_size
        self._slots[:rows] = slots
        self._context_lens[:rows] = ends
        return StepBatch(
            num_tokens=total,
            slots=slots,
            starts=starts,
            counts=counts,
            prompt_lens=table.num_prompt[slots],
            token_ids=self._token_ids_t[:total],
            positions=self._positions_t[:total],
            slot_mapping=self._slot_mapping_t[:total],
            block_table=self._block_table_t,
            seq_slots=self._slots_t[:rows],
            query_start=self._query_start_t[: rows + 1],
            context_lens=self._context_lens_t[:rows],
            max_count=1 if total == rows else int(counts.max()),
        )
