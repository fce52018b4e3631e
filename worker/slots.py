"""State of resident sequences, by slot, in persistent arrays that step plans change by deltas."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from pagemill.errors import DesyncError
from pagemill.step import NewSequence, StepPlan

IntArray = npt.NDArray[np.int32]


class SlotTable:
    """Block tables, token histories and lengths of all slots.

    The token history is [num_slots, max_model_len] int32 and never written beyond what sequences reach, so the
    operating system backs only those pages with memory.

    Attributes:
        active: bool [S], the slot holds a sequence.
        block_table: int32 [S, max_blocks].
        num_blocks: int32 [S], valid entries of block_table.
        token_ids: int32 [S, max_model_len], known tokens.
        num_known: int32 [S], valid entries of token_ids.
        num_computed: int32 [S], tokens whose KV is stored.
        num_prompt: int32 [S], leading tokens that are the prompt.
    """

    def __init__(self, num_slots: int, max_model_len: int, block_size: int, num_pool_blocks: int) -> None:
        self.num_slots = num_slots
        self.max_model_len = max_model_len
        self.block_size = block_size
        self.num_pool_blocks = num_pool_blocks
        self.max_blocks = -(-max_model_len // block_size)
        self.active = np.zeros(num_slots, dtype=np.bool_)
        self.block_table: IntArray = np.zeros((num_slots, self.max_blocks), dtype=np.int32)
        self.num_blocks: IntArray = np.zeros(num_slots, dtype=np.int32)
        self.token_ids: IntArray = np.zeros((num_slots, max_model_len), dtype=np.int32)
        self.num_known: IntArray = np.zeros(num_slots, dtype=np.int32)
        self.num_computed: IntArray = np.zeros(num_slots, dtype=np.int32)
        self.num_prompt: IntArray = np.zeros(num_slots, dtype=np.int32)

    def clear(self) -> None:
        """Forget all sequences."""
        self.active[:] = False

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
        self.block_table[slot, :num_blocks] = block_ids
        self.num_blocks[slot] = num_blocks
        self.token_ids[slot, :num_tokens] = sequence.token_ids
        self.num_known[slot] = num_tokens
        self.num_computed[slot] = sequence.num_computed_tokens
        self.num_prompt[slot] = sequence.num_prompt_tokens

    def append_blocks(self, slots: IntArray, plan: StepPlan) -> None:
        """Append a plan's new blocks to the block tables of its rows.

        Raises:
            DesyncError: counts contradict the ids, or a table overflows.
        """
        if not plan.new_block_ids and not any(plan.new_block_counts):
            return
        counts = np.array(plan.new_block_counts, dtype=np.int64)
        block_ids = np.array(plan.new_block_ids, dtype=np.int64)
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
        self.block_table[np.repeat(slots, counts), columns] = block_ids
        self.num_blocks[slots] += counts.astype(np.int32)

    def check_rows(self, listed: list[int], slots: IntArray) -> None:
        """Check the slots of a plan's rows, given as list and as array.

        Raises:
            DesyncError: one is out of range, holds no sequence or has two rows.
        """
        if not listed:
            return
        if not (slots.min() >= 0 and slots.max() < self.num_slots) or not self.active[slots].all():
            raise DesyncError(f"a row names a slot without a sequence; slots {sorted(set(listed))[:8]}, ...")
        if len(set(listed)) != len(listed):
            raise DesyncError("a slot has two rows in one step")

    def check_blocks(self, block_ids: npt.NDArray[np.int64]) -> None:
        """Check that blocks lie in the pool.

        Raises:
            DesyncError: one does not.
        """
        if len(block_ids) and not (block_ids.min() >= 0 and block_ids.max() < self.num_pool_blocks):
            raise DesyncError(
                f"block ids reach from {block_ids.min()} to {block_ids.max()}; pool {self.num_pool_blocks}"
            )

    def append_tokens(self, slots: IntArray, token_ids: npt.NDArray[np.int64]) -> None:
        """Append one sampled token to each of `slots`. At the context length the token is not kept."""
        known = self.num_known[slots]
        room = known < self.max_model_len
        if not room.all():
            slots, token_ids, known = slots[room], token_ids[room], known[room]
        self.token_ids[slots, known] = token_ids
        self.num_known[slots] = known + 1
