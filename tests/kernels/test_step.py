import numpy as np
import pytest
import torch

from worker import kernels

SLOTS, MODEL_LEN, BLOCK_SIZE = 9, 70, 8


def tables() -> tuple[torch.Tensor, torch.Tensor]:
    """Histories and block tables whose rows are part of wider ones."""
    history = torch.randint(0, 1000, (SLOTS, MODEL_LEN + 5), dtype=torch.int32)[:, :MODEL_LEN]
    blocks = torch.randperm(SLOTS * 10, dtype=torch.int32).view(SLOTS, 10)[:, :9]
    return history, blocks


def batch(slots: list[int], query_lens: list[int], context_lens: list[int]) -> dict[str, torch.Tensor]:
    return {
        "seq_slots": torch.tensor(slots, dtype=torch.int32),
        "query_start": torch.tensor([0, *np.cumsum(query_lens)], dtype=torch.int32),
        "context_lens": torch.tensor(context_lens, dtype=torch.int32),
    }


def prepare(
    num_tokens: int, history: torch.Tensor, blocks: torch.Tensor, rows: dict[str, torch.Tensor]
) -> list[np.ndarray]:
    out = [
        torch.full((num_tokens,), -77, dtype=torch.int32),
        torch.full((num_tokens,), -77, dtype=torch.int32),
        torch.full((num_tokens,), -77),
    ]
    kernels.prepare_step(*out, history, blocks, **rows, block_size=BLOCK_SIZE)
    return [t.cpu().numpy() for t in out]


def prepare_reference(
    num_tokens: int, history: torch.Tensor, blocks: torch.Tensor, rows: dict[str, torch.Tensor]
) -> list[np.ndarray]:
    history_array, block_array = history.cpu().numpy(), blocks.cpu().numpy().astype(np.int64)
    slots, start, lens = (rows[name].cpu().numpy() for name in ("seq_slots", "query_start", "context_lens"))
    ids, positions, mapping = np.zeros(num_tokens), np.zeros(num_tokens), np.full(num_tokens, -1)
    for row, slot in enumerate(slots):
        tokens = np.arange(start[row], start[row + 1])
        place = tokens - start[row + 1] + lens[row]
        ids[tokens], positions[tokens] = history_array[slot, place], place
        mapping[tokens] = block_array[slot, place // BLOCK_SIZE] * BLOCK_SIZE + place % BLOCK_SIZE
    return [ids, positions, mapping]


@pytest.mark.parametrize(
    ("slots", "query_lens", "context_lens", "num_tokens"),
    [
        ([3, 1, 8], [1, 1, 1], [70, 1, 33], 3),  # decode
        ([3, 1, 8], [1, 1, 1], [70, 1, 33], 8),  # with padding
        ([0, 2, 5, 4], [5, 0, 64, 1], [5, 0, 70, 9], 75),  # prompts, an empty row
        ([7, 7, 7], [0, 0, 1], [0, 0, 2], 1),
        ([1, 2], [0, 0], [5, 6], 4),  # nothing but padding
        ([], [], [], 3),
        ([6], [70], [70], 70),
    ],
)
def test_ids_positions_and_slots_of_a_step_match_numpy(
    device: str, slots: list[int], query_lens: list[int], context_lens: list[int], num_tokens: int
) -> None:
    history, blocks = tables()
    rows = batch(slots, query_lens, context_lens)
    expected = prepare_reference(num_tokens, history, blocks, rows)
    for actual, wanted in zip(prepare(num_tokens, history, blocks, rows), expected, strict=True):
        np.testing.assert_array_equal(actual, wanted)


@pytest.mark.parametrize("num_rows", [700, 5000])
def test_a_step_of_many_rows_matches_numpy(device: str, num_rows: int) -> None:
    history, blocks = tables()
    query_lens = torch.randint(0, 3, (num_rows,), device="cpu").tolist()
    context_lens = [
        length + int(extra) for length, extra in zip(query_lens, torch.randint(0, 60, (num_rows,)), strict=True)
    ]
    rows = batch(torch.randint(0, SLOTS, (num_rows,)).tolist(), query_lens, context_lens)
    num_tokens = sum(query_lens) + 3
    expected = prepare_reference(num_tokens, history, blocks, rows)
    for actual, wanted in zip(prepare(num_tokens, history, blocks, rows), expected, strict=True):
        np.testing.assert_array_equal(actual, wanted)


@pytest.mark.parametrize(
    ("rows", "message"),
    [
        (batch([9], [1], [1]), r"seq_slots\[0\] is 9, outside the 9 rows"),
        (batch([0, 1], [1, 2], [1, 71]), r"context_lens\[1\] is 71"),
        (batch([0], [2], [1]), r"context_lens\[0\] is 1: 2 new tokens"),
        (batch([0], [5], [5]), "query_start is 0 .. 5: it must ascend from 0 to at most 4 tokens"),
        (batch([0, 1], [3, -1], [3, 3]), r"query_start\[2\] is 2, less than the 3 before it"),
    ],
)
def test_what_lies_outside_the_tables_is_refused_by_name(rows: dict[str, torch.Tensor], message: str) -> None:
    out = torch.full((4,), 5, dtype=torch.int32), torch.full((4,), 5, dtype=torch.int32), torch.full((4,), 5)
    with pytest.raises(ValueError, match=message):
        kernels.prepare_step(*out, *tables(), **rows, block_size=BLOCK_SIZE)
    assert all((t == 5).all() for t in out)


def test_shapes_and_block_sizes_are_checked_by_name() -> None:
    ids, mapping = torch.zeros(4, dtype=torch.int32), torch.zeros(4, dtype=torch.int64)
    rows = batch([0], [1], [1])
    with pytest.raises(ValueError, match="block_size 7 is not supported; supported: 8, 16, 32, 64"):
        kernels.prepare_step(ids, ids, mapping, *tables(), **rows, block_size=7)
    with pytest.raises(TypeError, match="slot_mapping is int32; supported: int64"):
        kernels.prepare_step(ids, ids, ids, *tables(), **rows, block_size=8)
    with pytest.raises(ValueError, match=r"query_start has shape \[2\]; expected \[num_seqs \+ 1=3\]"):
        kernels.prepare_step(
            ids, ids, mapping, *tables(), rows["seq_slots"].repeat(2), rows["query_start"], rows["context_lens"],
            block_size=8,
        )  # fmt: skip


@pytest.mark.parametrize("num_values", [0, 1, 300])
@pytest.mark.parametrize("values_dtype", [torch.int32, torch.int64])
def test_scatter_matches_numpy(device: str, num_values: int, values_dtype: torch.dtype) -> None:
    target = torch.randint(0, 50, (1000,), dtype=torch.int32)
    indices = torch.randperm(1000)[:num_values]
    indices[::7] = -1
    values = torch.randint(-(2**31), 2**31, (num_values,), dtype=torch.int64).to(values_dtype)
    expected, places = target.cpu().numpy().copy(), indices.cpu().numpy()
    expected[places[places >= 0]] = values.cpu().numpy()[places >= 0]
    kernels.scatter(target, indices, values)
    np.testing.assert_array_equal(target.cpu().numpy(), expected)


def test_an_index_past_the_target_is_refused() -> None:
    target = torch.zeros(4, dtype=torch.int32)
    with pytest.raises(ValueError, match=r"indices\[1\] is 4, outside the target's 4 numbers"):
        kernels.scatter(target, torch.tensor([0, 4]), torch.tensor([5, 6]))
    assert target.tolist() == [0] * 4


def test_scatter_names_what_does_not_fit() -> None:
    target = torch.zeros(4, dtype=torch.int32)
    with pytest.raises(TypeError, match="indices is int32; supported: int64"):
        kernels.scatter(target, torch.zeros(2, dtype=torch.int32), torch.zeros(2, dtype=torch.int32))
    with pytest.raises(ValueError, match=r"values has shape \[3\]; expected \[num_values=2\]"):
        kernels.scatter(target, torch.zeros(2, dtype=torch.int64), torch.zeros(3, dtype=torch.int32))
