"""From a step plan and the slots to the tensors of one forward pass, without a Python loop over sequences.

The host knows lengths alone. It writes one row of numbers per sequence; ids, positions and KV slots of the tokens are
made from them where the histories and block tables lie.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np
import torch

from pagemill.errors import DesyncError
from pagemill.step import StepPlan
from worker import kernels
from worker.kernels import AttentionPlan
from worker.slots import IntArray, SlotTable
from worker.step_buffers import Staging, aligned
from worker.step_device import HostDevice, StepDevice


@dataclass(slots=True)
class StepBatch:
    """Inputs of one forward pass over T tokens in B rows.

    The tensors lie on the model's device, share memory with `BatchBuilder`'s buffers and hold their values until the
    next step's are written, in the order of the device's work. Arrays are the host's, of the rows that are no padding.

    Attributes:
        num_tokens: T. A batch for a CUDA graph may be padded: its last tokens belong to no row, with id 0, position 0
            and KV slot -1, and its last rows have no token.
        slots: int32 [B], slot of each row.
        starts: int32 [B], position of each row's first token.
        counts: int32 [B], tokens of each row.
        prompt_lens: int32 [B], prompt tokens of each row's sequence.
        token_ids: int32 [T].
        positions: int32 [T].
        slot_mapping: int64 [T], block * block_size + offset where each token's KV goes.
        block_table: int32 [S, max_blocks] of all slots.
        seq_slots: int32 [B], slots as a tensor.
        query_start: int32 [B + 1], first token of each row; the last entry is the number of tokens.
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


@dataclass(slots=True)
class StepRows:
    """What the host knows of a step's B rows.

    Attributes:
        slots, starts, counts: int32 [B] as in `StepBatch`.
        ends: int32 [B], starts + counts.
        num_tokens: sum of counts.
        max_count: the largest of counts.
    """

    slots: IntArray
    starts: IntArray
    counts: IntArray
    ends: IntArray
    num_tokens: int
    max_count: int


class BatchBuilder:
    """Builds step batches in preallocated buffers.

    Args:
        table: lengths, histories and block tables.
        max_tokens: most tokens of a step.
        device: where the tensors lie; without one: on the CPU, where the host writes.
        num_ints: room in the staging buffer for further columns.
    """

    def __init__(
        self, table: SlotTable, max_tokens: int, device: StepDevice | None = None, *, num_ints: int = 0
    ) -> None:
        device = device or HostDevice()
        self.table = table
        self._max_tokens = max_tokens
        # slots, query_start and context_lens have fixed addresses, which CUDA graphs read.
        self._query_start_at = aligned(table.num_slots)
        self._context_lens_at = self._query_start_at + aligned(table.num_slots + 1)
        self.staging = Staging(device, self._context_lens_at + table.num_slots, num_ints)
        place = device.torch_device
        self._token_ids = torch.zeros(max_tokens, dtype=torch.int32, device=place)
        self._positions = torch.zeros(max_tokens, dtype=torch.int32, device=place)
        self._slot_mapping = torch.zeros(max_tokens, dtype=torch.int64, device=place)

    def rows(self, plan: StepPlan, slots: IntArray) -> StepRows:
        """The plan's rows, checked; `num_computed` of the slots is not advanced.

        Raises:
            DesyncError: the plan computes tokens that are unknown, have no block, or are more than the worker holds.
        """
        table, num_rows = self.table, len(slots)
        counts = np.array(plan.num_tokens, dtype=np.int32)
        if len(counts) != num_rows or len(plan.sample) != num_rows:
            raise DesyncError(f"{num_rows} rows, but {len(counts)} token counts and {len(plan.sample)} sample flags")
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
        total = int(counts.sum())
        if total > self._max_tokens:
            raise DesyncError(f"{total} tokens planned, this worker holds {self._max_tokens} in a step")
        return StepRows(slots, starts, counts, ends, total, 1 if total == num_rows else int(counts.max()))

    def stage(self, rows: StepRows, padded_rows: int) -> None:
        """Write the rows to the staging buffer, followed by rows without tokens up to `padded_rows`."""
        staging, count = self.staging, len(rows.slots)
        slots = staging.host_header(0, padded_rows)
        slots[:count], slots[count:] = rows.slots, 0
        query_start = staging.host_header(self._query_start_at, padded_rows + 1)
        query_start[0] = 0
        np.cumsum(rows.counts, out=query_start[1 : count + 1])
        query_start[count + 1 :] = rows.num_tokens
        context_lens = staging.host_header(self._context_lens_at, padded_rows)
        context_lens[:count], context_lens[count:] = rows.ends, 0

    def host_rows(self, padded_rows: int) -> tuple[torch.Tensor, torch.Tensor]:
        """query_start and context_lens in the staging buffer, for plans that are made on the host."""
        staging = self.staging
        return (
            staging.host_tensor(self._query_start_at, padded_rows + 1),
            staging.host_tensor(self._context_lens_at, padded_rows),
        )

    def batch(
        self, rows: StepRows, padded_rows: int, num_tokens: int, attention_plans: dict[int, AttentionPlan]
    ) -> StepBatch:
        """The tensors of a step of num_tokens tokens, padding included. They get their values by `prepare`."""
        staging = self.staging
        return StepBatch(
            num_tokens=num_tokens,
            slots=rows.slots,
            starts=rows.starts,
            counts=rows.counts,
            prompt_lens=self.table.num_prompt[rows.slots],
            token_ids=self._token_ids[:num_tokens],
            positions=self._positions[:num_tokens],
            slot_mapping=self._slot_mapping[:num_tokens],
            block_table=self.table.store.block_table,
            seq_slots=staging.device_header(0, padded_rows),
            query_start=staging.device_header(self._query_start_at, padded_rows + 1),
            context_lens=staging.device_header(self._context_lens_at, padded_rows),
            max_count=rows.max_count,
            attention_plans=attention_plans,
        )

    def prepare(self, batch: StepBatch) -> None:
        """Launch what makes ids, positions and KV slots from the uploaded rows."""
        store = self.table.store
        kernels.prepare_step(
            batch.token_ids,
            batch.positions,
            batch.slot_mapping,
            store.history,
            store.block_table,
            batch.seq_slots,
            batch.query_start,
            batch.context_lens,
            self.table.block_size,
        )

    def build(self, plan: StepPlan, slots: IntArray) -> StepBatch:
        """All of it for a step that nothing else is sent with."""
        rows = self.rows(plan, slots)
        self.staging.begin()
        self.stage(rows, len(slots))
        self.table.store.stage(self.staging)
        self.staging.upload()
        self.table.store.apply()
        batch = self.batch(rows, len(slots), rows.num_tokens, {})
        self.prepare(batch)
        return batch
