"""Slots and step tensors: what a plan's deltas make of them, and what contradictions raise."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from pagemill.errors import DesyncError
from pagemill.step import NewSequence, SlotSampling, StepPlan
from worker.batch import BatchBuilder, StepBatch
from worker.slots import SlotTable

BLOCK = 8


def table_with(*sequences: NewSequence) -> SlotTable:
    table = SlotTable(num_slots=4, max_model_len=64, block_size=BLOCK, num_pool_blocks=50)
    for sequence in sequences:
        table.enter(sequence)
    return table


def sequence(slot: int, num_tokens: int, blocks: list[int], num_computed: int = 0) -> NewSequence:
    return NewSequence(
        slot, [100 * slot + i for i in range(num_tokens)], num_tokens, num_computed, blocks, SlotSampling()
    )


def build(table: SlotTable, plan: StepPlan, max_tokens: int = 64) -> StepBatch:
    slots = np.array(plan.slots, dtype=np.int32)
    table.check_rows(slots)
    table.append_blocks(slots, plan)
    return BatchBuilder(table, max_tokens).build(plan, slots)


def rows(slots: list[int], counts: list[int], new: list[int] | None = None, ids: list[int] | None = None) -> StepPlan:
    return StepPlan(
        1, 0, slots=slots, num_tokens=counts, sample=[True] * len(slots), new_block_counts=new or [0] * len(slots),
        new_block_ids=ids or [],
    )  # fmt: skip


def test_mixed_rows_become_flat_tokens() -> None:
    table = table_with(sequence(3, 12, [7, 9], num_computed=5), sequence(0, 3, [5]), sequence(2, 18, [1, 2, 3], 17))
    batch = build(table, rows([3, 0, 2], [7, 3, 1]))
    assert batch.num_tokens == 11
    assert batch.max_count == 7
    assert batch.token_ids.tolist() == [305, 306, 307, 308, 309, 310, 311, 0, 1, 2, 217]
    assert batch.positions.tolist() == [5, 6, 7, 8, 9, 10, 11, 0, 1, 2, 17]
    assert batch.slot_mapping.tolist() == [61, 62, 63, 72, 73, 74, 75, 40, 41, 42, 25]
    assert batch.seq_slots.tolist() == [3, 0, 2]
    assert batch.query_start.tolist() == [0, 7, 10, 11]
    assert batch.context_lens.tolist() == [12, 3, 18]


def test_decode_rows_use_the_sampled_tokens_and_new_blocks() -> None:
    table = table_with(sequence(1, 8, [10]), sequence(2, 3, [20]))
    table.num_computed[[1, 2]] = [8, 3]
    slots = np.array([2, 1], dtype=np.int32)
    table.store.history.view(-1)[torch.from_numpy(table.next_history_indices(slots))] = torch.tensor(
        [77, 66], dtype=torch.int32
    )
    table.note_sampled(slots)
    batch = build(table, rows([1, 2], [1, 1], [1, 0], [11]))
    assert batch.token_ids.tolist() == [66, 77]
    assert batch.positions.tolist() == [8, 3]
    assert batch.slot_mapping.tolist() == [88, 163]
    assert table.store.block_table[1, :2].tolist() == [10, 11]


def test_several_new_blocks_go_to_their_rows_in_order() -> None:
    table = table_with(sequence(0, 24, [1]), sequence(1, 18, [2]), sequence(2, 2, [3]))
    build(table, rows([0, 2, 1], [24, 2, 18], [2, 0, 2], [30, 31, 40, 41]))
    assert table.store.block_table[0, :3].tolist() == [1, 30, 31]
    assert table.store.block_table[1, :3].tolist() == [2, 40, 41]
    assert table.num_blocks.tolist()[:3] == [3, 3, 1]


def test_a_released_slot_can_be_taken_in_the_same_step() -> None:
    table = table_with(sequence(0, 3, [1]))
    table.release([0])
    table.enter(sequence(0, 2, [2]))
    assert table.num_known[0] == 2


def test_a_token_past_the_context_length_is_dropped() -> None:
    table = table_with(sequence(0, 64, list(range(8))))
    slots = np.zeros(1, dtype=np.int32)
    assert table.next_history_indices(slots).tolist() == [-1]
    table.note_sampled(slots)
    assert table.num_known[0] == 64


@pytest.mark.parametrize(
    ("plan", "message"),
    [
        (rows([1], [1]), "without a sequence"),
        (rows([9], [1]), "without a sequence"),
        (rows([0, 0], [1, 1]), "two rows"),
        (rows([0], [4]), "3 known"),
        (rows([2], [10]), "planned in 1 blocks"),
        (rows([0], [0]), "no token"),
        (rows([0], [1], [1], []), "counts of 1 rows sum to 1"),
        (rows([0], [1], [1], [50]), "pool 50"),
        (rows([0], [1], [8], list(range(8))), "grows past 8 blocks"),
    ],
)
def test_contradictions_are_desyncs(plan: StepPlan, message: str) -> None:
    table = table_with(sequence(0, 3, [1]), sequence(2, 10, [4]))
    with pytest.raises(DesyncError, match=message):
        build(table, plan)


def test_more_tokens_than_the_worker_holds_is_a_desync() -> None:
    table = table_with(sequence(0, 3, [1]))
    with pytest.raises(DesyncError, match="3 tokens planned, this worker holds 2"):
        build(table, rows([0], [3]), max_tokens=2)


@pytest.mark.parametrize(
    ("bad", "message"),
    [
        (sequence(0, 3, [1]), "taken or out of range"),
        (sequence(4, 3, [1]), "taken or out of range"),
        (sequence(1, 65, [1]), "65 tokens, at most 64"),
        (sequence(1, 3, [1], num_computed=3), "3 computed of 3"),
        (sequence(1, 3, [-1]), "pool 50"),
        (sequence(1, 3, list(range(9))), "9 blocks, at most 8"),
    ],
)
def test_sequences_that_do_not_fit_are_desyncs(bad: NewSequence, message: str) -> None:
    table = table_with(sequence(0, 3, [1]))
    with pytest.raises(DesyncError, match=message):
        table.enter(bad)


def test_release_of_an_empty_slot_is_a_desync() -> None:
    with pytest.raises(DesyncError, match="slot 3 holds no sequence"):
        table_with().release([3])
