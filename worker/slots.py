"""State of resident sequences, by slot, in persistent arrays that step plans change by deltas."""

from __future__ import annotations

from typing import Protocol

import numpy as np
import numpy.typing as npt
import torch

from pagemill.errors import ConfigError, DesyncError
from pagemill.step import NewSequence, StepPlan
from worker import kernels
from worker.step_buffers import Staging, aligned
from worker.step_device import StepDevice

IntArray = npt.NDArray[np.int32]
LongArray = npt.NDArray[np.int64]

# Kernels address histories with int32.
_MAX_HISTORY_INTS = 1 << 31


def _check_history(num_slots: int, max_model_len: int) -> None:
    if num_slots * max_model_len >= _MAX_HISTORY_INTS:
        raise ConfigError(
            f"max_num_seqs {num_slots} sequences of max_model_len {max_model_len} tokens are too many: their "
            f"product must be less than {_MAX_HISTORY_INTS}",
            field="max_num_seqs",
        )


class SlotStore(Protocol):
    """What kernels read about each slot.

    Attributes:
        history: int32 [S, max_model_len] on the device, known tokens.
        block_table: int32 [S, max_blocks] on the device.
    """

    history: torch.Tensor
    block_table: torch.Tensor

    def set_tokens(self, slot: int, token_ids: IntArray) -> None:
        """Replace a slot's history."""

    def set_blocks(self, slots: IntArray | LongArray, columns: IntArray | LongArray, block_ids: LongArray) -> None:
        """Set entries of block tables, each at most once a step."""

    def forget(self) -> None:
        """Drop changes that have not been made."""

    def stage_overflow(self, staging: Staging, reserve_ints: int) -> None:
        """Make changes at once as far as they leave less than reserve_ints of the next staging buffer."""

    def stage(self, staging: Staging) -> None:
        """Add what changes to a step's inputs."""

    def apply(self) -> None:
        """Launch the changes that were staged, after the upload."""


class HostStore:
    """Histories and block tables in the memory that kernels read: changes are writes.

    The history is never written beyond what sequences reach, so the system backs only those pages with memory.
    """

    def __init__(self, num_slots: int, max_model_len: int, max_blocks: int) -> None:
        """Raises ConfigError for more than kernels can address."""
        _check_history(num_slots, max_model_len)
        self._token_ids: IntArray = np.zeros((num_slots, max_model_len), dtype=np.int32)
        self._block_ids: IntArray = np.zeros((num_slots, max_blocks), dtype=np.int32)
        self.history = torch.from_numpy(self._token_ids)
        self.block_table = torch.from_numpy(self._block_ids)

    def set_tokens(self, slot: int, token_ids: IntArray) -> None:
        self._token_ids[slot, : len(token_ids)] = token_ids

    def set_blocks(self, slots: IntArray | LongArray, columns: IntArray | LongArray, block_ids: LongArray) -> None:
        self._block_ids[slots, columns] = block_ids

    def forget(self) -> None:
        return

    def stage_overflow(self, staging: Staging, reserve_ints: int) -> None:
        return

    def stage(self, staging: Staging) -> None:
        return

    def apply(self) -> None:
        return


class _Changes:
    """Values to be written into one int32 tensor on the device, at distinct places."""

    # An int64 index and an int32 value.
    INTS_PER_VALUE = 3

    def __init__(self, target: torch.Tensor) -> None:
        self._target = target.view(-1)
        self._indices: list[LongArray] = []
        self._values: list[IntArray] = []
        self._staged: tuple[torch.Tensor, torch.Tensor] | None = None
        self.count = 0

    def add(self, indices: LongArray, values: IntArray) -> None:
        self._indices.append(indices)
        self._values.append(values)
        self.count += len(indices)

    def forget(self) -> None:
        self._indices, self._values, self.count, self._staged = [], [], 0, None

    def stage(self, staging: Staging, most: int) -> None:
        """Move at most `most` values to a step's inputs."""
        if not self.count:
            return
        indices = self._indices[0] if len(self._indices) == 1 else np.concatenate(self._indices)
        values = self._values[0] if len(self._values) == 1 else np.concatenate(self._values)
        self.forget()
        if len(indices) > most:
            self.add(indices[most:], values[most:])
            indices, values = indices[:most], values[:most]
        self._staged = staging.column(indices), staging.column(values)

    def apply(self) -> None:
        if self._staged is not None:
            kernels.scatter(self._target, *self._staged)
            self._staged = None


class DeviceStore:
    """Histories and block tables in device memory, changed by one scatter each per step."""

    def __init__(self, device: StepDevice, num_slots: int, max_model_len: int, max_blocks: int) -> None:
        """Raises ConfigError for more than kernels can address."""
        _check_history(num_slots, max_model_len)
        place = device.torch_device
        self.history = torch.zeros((num_slots, max_model_len), dtype=torch.int32, device=place)
        self.block_table = torch.zeros((num_slots, max_blocks), dtype=torch.int32, device=place)
        self._tokens = _Changes(self.history)
        self._blocks = _Changes(self.block_table)

    def set_tokens(self, slot: int, token_ids: IntArray) -> None:
        first = slot * self.history.shape[1]
        self._tokens.add(np.arange(first, first + len(token_ids), dtype=np.int64), token_ids)

    def set_blocks(self, slots: IntArray | LongArray, columns: IntArray | LongArray, block_ids: LongArray) -> None:
        indices = slots.astype(np.int64) * self.block_table.shape[1] + columns
        self._blocks.add(indices, block_ids.astype(np.int32))

    def forget(self) -> None:
        self._tokens.forget()
        self._blocks.forget()

    def stage_overflow(self, staging: Staging, reserve_ints: int) -> None:
        # Prompts that are longer together than a step's buffers hold go up before it.
        room = (staging.capacity_ints - reserve_ints) // _Changes.INTS_PER_VALUE - 16
        while self._tokens.count + self._blocks.count > room:
            staging.begin()
            most = staging.capacity_ints // _Changes.INTS_PER_VALUE - 16
            for changes in (self._tokens, self._blocks):
                taken = min(changes.count, most)
                changes.stage(staging, taken)
                most -= taken
            staging.upload()
            self.apply()

    def stage(self, staging: Staging) -> None:
        for changes in (self._tokens, self._blocks):
            changes.stage(staging, changes.count)

    def apply(self) -> None:
        self._tokens.apply()
        self._blocks.apply()


def staged_change_ints(num_values: int) -> int:
    """Room that so many changes of a `DeviceStore` take in a staging buffer."""
    return aligned(_Changes.INTS_PER_VALUE * num_values) + 64


class SlotTable:
    """Lengths of all slots, and the checks of what plans do to them. What kernels read is in `store`.

    Attributes:
        store: histories and block tables.
        active: bool [S], the slot holds a sequence.
        num_blocks: int32 [S], valid entries of the block table.
        num_known: int32 [S], valid entries of the history.
        num_computed: int32 [S], tokens whose KV is stored.
        num_prompt: int32 [S], leading tokens that are the prompt.
    """

    def __init__(
        self,
        num_slots: int,
        max_model_len: int,
        block_size: int,
        num_pool_blocks: int,
        store: SlotStore | None = None,
    ) -> None:
        """Without a store it is one in host memory."""
        self.num_slots = num_slots
        self.max_model_len = max_model_len
        self.block_size = block_size
        self.num_pool_blocks = num_pool_blocks
        self.max_blocks = -(-max_model_len // block_size)
        self.store = store or HostStore(num_slots, max_model_len, self.max_blocks)
        self.active = np.zeros(num_slots, dtype=np.bool_)
        self.num_blocks: IntArray = np.zeros(num_slots, dtype=np.int32)
        self.num_known: IntArray = np.zeros(num_slots, dtype=np.int32)
        self.num_computed: IntArray = np.zeros(num_slots, dtype=np.int32)
        self.num_prompt: IntArray = np.zeros(num_slots, dtype=np.int32)

    def clear(self) -> None:
        """Forget all sequences."""
        self.active[:] = False
        self.store.forget()

    def release(self, slots: list[int]) -> None:
        """Free slots.

        Raises:
            DesyncError: one is out of range or holds no sequence.
        """
        for slot in slots:
            if not 0 <= slot < self.num_slots or not self.active[slot]:
                raise DesyncError(f"released slot {slot} holds no sequence")
            self.active[slot] = False

    def enter(self, sequence: NewSequence) -> None:
        """Put a sequence into its slot.

        Raises:
            DesyncError: the slot is taken or a count contradicts another.
        """
        slot, num_tokens, num_blocks = sequence.slot, len(sequence.token_ids), len(sequence.block_ids)
        if not 0 <= slot < self.num_slots or self.active[slot]:
            raise DesyncError(f"new sequence for slot {slot}, which is taken or out of range 0..{self.num_slots - 1}")
        if not 0 <= sequence.num_computed_tokens < num_tokens <= self.max_model_len:
            raise DesyncError(
                f"slot {slot}: {sequence.num_computed_tokens} computed of {num_tokens} tokens, "
                f"at most {self.max_model_len}"
            )
        if not 0 < sequence.num_prompt_tokens <= num_tokens:
            raise DesyncError(f"slot {slot}: {sequence.num_prompt_tokens} prompt tokens of {num_tokens}")
        if num_blocks > self.max_blocks:
            raise DesyncError(f"slot {slot}: {num_blocks} blocks, at most {self.max_blocks}")
        block_ids = np.array(sequence.block_ids, dtype=np.int64)
        self.check_blocks(block_ids)
        self.active[slot] = True
        self.store.set_blocks(np.full(num_blocks, slot, dtype=np.int32), np.arange(num_blocks), block_ids)
        self.num_blocks[slot] = num_blocks
        self.store.set_tokens(slot, np.array(sequence.token_ids, dtype=np.int32))
        self.num_known[slot] = num_tokens
        self.num_computed[slot] = sequence.num_computed_tokens
        self.num_prompt[slot] = sequence.num_prompt_tokens

    def append_blocks(self, slots: IntArray, plan: StepPlan) -> None:
        """Append a plan's new blocks to the block tables of its rows.

        Raises:
            DesyncError: counts contradict the ids, or a table overflows.
        """
        counts = np.array(plan.new_block_counts, dtype=np.int64)
        block_ids = np.array(plan.new_block_ids, dtype=np.int64)
        if not len(block_ids) and not counts.any():
            return
        if len(counts) != len(slots) or counts.sum() != len(block_ids):
            raise DesyncError(
                f"{len(block_ids)} new block ids, but the counts of {len(slots)} rows sum to {counts.sum()}"
            )
        self.check_blocks(block_ids)
        first = self.num_blocks[slots]
        if (first + counts > self.max_blocks).any():
            raise DesyncError(f"a block table grows past {self.max_blocks} blocks")
        starts = np.cumsum(counts) - counts
        columns = np.arange(len(block_ids)) + np.repeat(first - starts, counts)
        self.store.set_blocks(np.repeat(slots, counts), columns, block_ids)
        self.num_blocks[slots] += counts.astype(np.int32)

    def check_rows(self, slots: IntArray) -> None:
        """Check the slots of a plan's rows.

        Raises:
            DesyncError: one is out of range, holds no sequence or has two rows.
        """
        if not len(slots):
            return
        if not (slots.min() >= 0 and slots.max() < self.num_slots) or not self.active[slots].all():
            named = np.unique(slots)[:8].tolist()
            raise DesyncError(f"a row names a slot without a sequence; slots {named}, ...")
        if np.bincount(slots).max() > 1:
            raise DesyncError("a slot has two rows in one step")

    def check_blocks(self, block_ids: LongArray) -> None:
        """Check that blocks lie in the pool.

        Raises:
            DesyncError: one does not.
        """
        if len(block_ids) and not (block_ids.min() >= 0 and block_ids.max() < self.num_pool_blocks):
            raise DesyncError(
                f"block ids reach from {block_ids.min()} to {block_ids.max()}; pool {self.num_pool_blocks}"
            )

    def next_history_indices(self, slots: IntArray) -> LongArray:
        """Where the next token of each slot goes in the flat history, int64 [R]; -1 at the context length."""
        known = self.num_known[slots].astype(np.int64)
        return np.where(known < self.max_model_len, slots.astype(np.int64) * self.max_model_len + known, -1)

    def note_sampled(self, slots: IntArray) -> None:
        """Count one more known token for each of `slots`. At the context length the token is not kept."""
        self.num_known[slots] = np.minimum(self.num_known[slots] + 1, self.max_model_len)
