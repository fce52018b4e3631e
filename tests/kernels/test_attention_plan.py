"""The plan of one step's attention on a GPU: every key tile is given out once, and workers agree on who shares what."""

from __future__ import annotations

from dataclasses import dataclass

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from worker.kernels import AttentionGeometry, AttentionPlan
from worker.kernels._native import load_native

_C = load_native()
TILE_KEYS, TILE_ROWS, MAX_ROWS, PREFILL_QUERIES = 16, 16, 64, 128
VERSIONS = {"auto": 0, "v1": 1, "v2": 2}


@dataclass(frozen=True)
class Entry:
    seq: int
    first_token: int
    first_position: int
    first_row: int
    num_rows: int
    first_tile: int
    num_tiles: int
    first_piece: int
    begin_key: int
    end_key: int
    all_end: int


@dataclass(frozen=True)
class Worker:
    entry: Entry
    entry_index: int
    kv_head: int
    tile: int
    num_tiles: int
    first_owner: int
    first_sharers: int
    last_sharers: int


@dataclass
class Plan:
    version: int
    workspace_bytes: int
    piece_tiles: int
    entries: list[Entry]
    workers: list[Worker]
    prefill_tiles: list[list[int]]  # sequence, first query, queries, end key
    num_kv_heads: int

    def segments(self, worker: Worker) -> list[tuple[int, int, int, int]]:
        """Entry, KV head, first and end tile of each part of a worker's range."""
        found = []
        entry, head, tile, left = worker.entry_index, worker.kv_head, worker.tile, worker.num_tiles
        while left > 0:
            end = min(self.entries[entry].num_tiles, tile + left)
            if self.piece_tiles:
                end = min(end, (tile // self.piece_tiles + 1) * self.piece_tiles)
            found.append((entry, head, tile, end))
            left -= end - tile
            tile = end
            if tile == self.entries[entry].num_tiles:
                tile, head = 0, head + 1
            if head == self.num_kv_heads:
                head, entry = 0, entry + 1
        return found

    def loads(self) -> list[int]:
        return [worker.num_tiles for worker in self.workers]


def make_plan(
    context_lens: list[int],
    query_lens: list[int] | None = None,
    *,
    num_query_heads: int = 8,
    num_kv_heads: int = 2,
    num_workers: int = 264,
    window: int = -1,
    version: str = "auto",
    partition_keys: int = 0,
    head_size: int = 128,
) -> Plan:
    lens = torch.tensor(context_lens, dtype=torch.int32)
    news = torch.tensor(query_lens or [1] * len(context_lens), dtype=torch.int32)
    query_start = torch.cat([torch.zeros(1, dtype=torch.int32), news.cumsum(0).int()])
    sizes = [len(context_lens), num_query_heads, num_kv_heads, head_size]

    def run(buffer: torch.Tensor) -> object:
        return _C.plan_attention(
            query_start.data_ptr(), lens.data_ptr(), sizes, window, num_workers, VERSIONS[version], partition_keys,
            buffer.data_ptr(), buffer.numel(),
        )  # fmt: skip

    buffer = torch.zeros(run(torch.zeros(0, dtype=torch.int32)).plan_ints, dtype=torch.int32)
    result = run(buffer)
    ints = buffer.tolist()
    num_entries, entries_at, num_ranges, ranges_at, _, piece_tiles, _, header_version, num_prefill, prefill_at = ints[
        :10
    ]
    assert num_ranges >= num_workers
    assert header_version == result.version
    assert (result.has_decode, result.has_prefill) == (num_entries > 0, num_prefill > 0)

    def rows(start: int, count: int, width: int) -> list[list[int]]:
        return [ints[start + i * width : start + (i + 1) * width] for i in range(count)]

    return Plan(
        version=result.version,
        workspace_bytes=result.workspace_bytes,
        piece_tiles=piece_tiles,
        entries=[Entry(*row[:11]) for row in rows(entries_at, num_entries, 12)],
        workers=[Worker(Entry(*row[:11]), *row[12:19]) for row in rows(ranges_at, num_ranges, 20)],
        prefill_tiles=rows(prefill_at, num_prefill, 4),
        num_kv_heads=num_kv_heads,
    )


def assert_consistent(plan: Plan) -> None:
    given_out: set[tuple[int, int, int]] = set()
    users: dict[tuple[int, int], list[int]] = {}
    for index, worker in enumerate(plan.workers):
        if worker.num_tiles:
            assert worker.entry == plan.entries[worker.entry_index]
        for entry, head, tile, end in plan.segments(worker):
            tiles = {(entry, head, t) for t in range(tile, end)}
            assert tiles and not tiles & given_out
            given_out |= tiles
            sharing = users.setdefault((entry, head), [])
            if index not in sharing:
                sharing.append(index)
    assert len(given_out) == sum(entry.num_tiles for entry in plan.entries) * plan.num_kv_heads
    for index, worker in enumerate(plan.workers):
        pairs = [segment[:2] for segment in plan.segments(worker)]
        if not pairs:
            continue
        first, last = users[pairs[0]], users[pairs[-1]]
        assert first == list(range(worker.first_owner, worker.first_owner + worker.first_sharers))
        assert len(last) == worker.last_sharers
        assert last[0] == index or pairs[0] == pairs[-1]
        if plan.version == 1:
            assert len(first) == len(last) == 1


def test_every_row_of_a_sequence_is_in_one_entry() -> None:
    plan = make_plan([50, 60], [3, 1], num_query_heads=24, num_kv_heads=2)
    assert [(e.seq, e.first_row, e.num_rows) for e in plan.entries] == [(0, 0, 16), (0, 16, 16), (0, 32, 4), (1, 0, 12)]
    assert [e.first_position for e in plan.entries] == [47, 47, 47, 59]
    assert [e.first_token for e in plan.entries] == [0, 0, 0, 3]


def test_an_entry_ends_at_the_last_key_that_one_of_its_rows_sees() -> None:
    # Rows 0..15 are tokens 0 and 1 of the sequence, at positions 15 and 16; the others are at 17 and 18.
    plan = make_plan([19], [4], num_query_heads=8, num_kv_heads=1)
    assert [e.num_tiles for e in plan.entries] == [2, 2]
    assert [e.num_tiles for e in make_plan([18], [4], num_query_heads=8, num_kv_heads=1).entries] == [1, 2]


def test_a_window_leaves_tiles_behind() -> None:
    (entry,) = make_plan([1000], window=100, num_query_heads=2).entries
    assert (entry.first_tile, entry.num_tiles) == (900 // TILE_KEYS, 1000 // TILE_KEYS + 1 - 900 // TILE_KEYS)


@pytest.mark.parametrize("query_len", [16, 17, 300])
def test_many_query_rows_are_prefill(query_len: int) -> None:
    plan = make_plan([1000, 500], [query_len, 1])
    is_prefill = query_len * 4 > MAX_ROWS
    assert {e.seq for e in plan.entries} == ({1} if is_prefill else {0, 1})
    covered = [q for seq, first, count, _ in plan.prefill_tiles for q in range(first, first + count)]
    assert sorted(covered) == (list(range(query_len)) if is_prefill else [])


def test_prefill_tiles_come_costliest_first() -> None:
    plan = make_plan([300, 1000], [300, 200])
    assert [tile[3] for tile in plan.prefill_tiles] == [1000, 928, 300, 256, 128]
    assert plan.prefill_tiles[0] == [1, PREFILL_QUERIES, 72, 1000]


def test_a_sequence_without_new_tokens_has_no_work() -> None:
    plan = make_plan([100, 40], [0, 1])
    assert [e.seq for e in plan.entries] == [1]
    assert make_plan([100], [0]).loads() == [0] * 264
    assert make_plan([], []).entries == []


def test_a_long_sequence_is_shared_by_all_workers() -> None:
    plan = make_plan([100_000])
    assert plan.version == 2
    assert_consistent(plan)
    assert max(plan.loads()) <= 1.07 * sum(plan.loads()) / 264


def test_sequences_of_one_length_that_fill_the_machine_take_one_pass() -> None:
    plan = make_plan([4096] * 132)
    assert plan.version == 1
    assert set(plan.loads()) == {256}


@pytest.mark.parametrize(("context_len", "num_seqs"), [(4096, 132), (576, 256), (576, 1024), (128, 132)])
def test_version_two_cuts_nothing_where_one_pass_is_as_fast(context_len: int, num_seqs: int) -> None:
    chosen, two = (make_plan([context_len] * num_seqs, version=version) for version in ("auto", "v2"))
    assert (chosen.version, two.version) == (1, 2)
    assert two.workers == chosen.workers
    assert_consistent(two)


def test_a_ragged_batch_is_balanced() -> None:
    plan = make_plan([16, 30_000, 500, 77, 9_000])
    assert plan.version == 2
    assert_consistent(plan)
    assert max(plan.loads()) <= 1.07 * sum(plan.loads()) / 264


# Tiles of 16 keys, 32 to 48 of them.
DECODING_LENS = [512 + 61 * i % 257 for i in range(96)]


def test_short_sequences_of_unequal_length_stay_whole() -> None:
    plan = make_plan(DECODING_LENS, num_workers=100)
    assert plan.version == 1
    assert_consistent(plan)
    assert sum(load > 0 for load in plan.loads()) > 100


def test_fewer_unequal_sequences_than_workers_are_cut_into_pieces_of_their_own() -> None:
    plan = make_plan(DECODING_LENS, num_workers=400)
    assert plan.version == 2
    assert_consistent(plan)
    assert {len(plan.segments(worker)) for worker in plan.workers} == {0, 1}
    assert max(plan.loads()) == 24


def test_a_sequence_much_longer_than_the_others_is_cut() -> None:
    plan = make_plan([30_000, *DECODING_LENS], num_workers=100)
    assert plan.version == 2
    assert_consistent(plan)
    assert max(plan.loads()) < 30_000 // TILE_KEYS // 4


def test_fixed_partitions_do_not_depend_on_the_batch() -> None:
    def pieces(plan: Plan, seq: int) -> set[tuple[int, int, int]]:
        found = [s for worker in plan.workers for s in plan.segments(worker)]
        return {(head, tile, end) for entry, head, tile, end in found if plan.entries[entry].seq == seq}

    alone = make_plan([3000], partition_keys=512)
    among_others = make_plan([5000, 70, 3000], partition_keys=512, num_workers=7)
    assert alone.version == among_others.version == 2
    assert pieces(alone, 0) == pieces(among_others, 2)


def test_the_workspace_is_the_same_for_every_balanced_plan() -> None:
    sizes = {make_plan(lens).workspace_bytes for lens in ([1], [1000], [300] * 200, [50_000, 3])}
    assert len(sizes) == 1


@settings(max_examples=200, deadline=None)
@given(
    lens=st.lists(st.tuples(st.sampled_from([0, 1, 1, 1, 2, 5]), st.integers(0, 3000)), max_size=20),
    heads=st.tuples(st.sampled_from([1, 2, 5]), st.sampled_from([1, 3, 4, 8, 20])),
    num_workers=st.sampled_from([1, 3, 40, 264]),
    window=st.sampled_from([-1, 1, 50, 500]),
    mode=st.sampled_from([("auto", 0), ("v1", 0), ("v2", 0), ("v2", 128), ("auto", 512), ("auto", 64)]),
)
def test_work_is_given_out_once(
    lens: list[tuple[int, int]],
    heads: tuple[int, int],
    num_workers: int,
    window: int,
    mode: tuple[str, int],
) -> None:
    plan = make_plan(
        [new + past for new, past in lens],
        [new for new, _ in lens] or None,
        num_query_heads=heads[0] * heads[1],
        num_kv_heads=heads[0],
        num_workers=num_workers,
        window=window,
        version=mode[0],
        partition_keys=mode[1],
    )
    assert_consistent(plan)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"context_lens": [5], "query_lens": [6]}, r"context_lens\[0\] is 5"),
        ({"context_lens": [5], "query_lens": [-1]}, r"query_start\[0..1\]"),
        ({"context_lens": [5], "num_query_heads": 7}, "num_query_heads 7 is not a multiple of num_kv_heads 2"),
        ({"context_lens": [5], "num_workers": 0}, "num_workers is 0"),
        ({"context_lens": [5], "window": 0}, "window is 0"),
        ({"context_lens": [5], "partition_keys": 24}, "partition_keys is 24: it must be 0 .* multiple of 16"),
        ({"context_lens": [5], "partition_keys": 64, "version": "v1"}, "version 1 has no partitions"),
        ({"context_lens": [5], "head_size": 127}, "head_size 127 is not supported"),
    ],
)
def test_what_is_not_supported_is_named(arguments: dict, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        make_plan(**arguments)


def plan_of(context_lens: list[int], query_lens: list[int]) -> tuple[torch.Tensor, torch.Tensor]:
    lens = torch.tensor(context_lens, dtype=torch.int32)
    news = torch.tensor([0, *query_lens], dtype=torch.int32)
    return news.cumsum(0).int(), lens


@settings(max_examples=100, deadline=None)
@given(
    lens=st.lists(st.tuples(st.sampled_from([0, 1, 2, 5, 16, 17, 128, 129, 300]), st.integers(0, 2000)), max_size=12),
    heads=st.tuples(st.sampled_from([1, 2, 5]), st.sampled_from([1, 4, 8, 20])),
    num_workers=st.sampled_from([1, 40, 264]),
    mode=st.sampled_from([("auto", 0), ("v1", 0), ("v2", 0), ("v2", 64), ("auto", 512)]),
)
def test_no_plan_exceeds_the_capacity_of_its_bounds(
    lens: list[tuple[int, int]], heads: tuple[int, int], num_workers: int, mode: tuple[str, int]
) -> None:
    bounds = [sum(new for new, _ in lens), len(lens), max([new + past for new, past in lens], default=0)]
    query_heads, kv_heads = heads[0] * heads[1], heads[0]
    capacity = _C.attention_plan_capacity(bounds, [query_heads, kv_heads, 128], num_workers, mode[1])
    query_start, context_lens = plan_of([new + past for new, past in lens], [new for new, _ in lens])
    plan = _C.plan_attention(
        query_start.data_ptr(), context_lens.data_ptr(), [len(lens), query_heads, kv_heads, 128], -1, num_workers,
        VERSIONS[mode[0]], mode[1], 0, 0,
    )  # fmt: skip
    assert plan.plan_ints <= capacity.plan_ints
    assert plan.workspace_bytes <= capacity.workspace_bytes


def test_a_plan_with_room_reserved_stays_where_it_is() -> None:
    plan = AttentionPlan(AttentionGeometry(8, 2, 128, torch.bfloat16, "cpu"), num_host_buffers=3)
    plan.reserve(8192, 256, 4096)
    reserved = plan.num_reallocations
    for context_lens, query_lens in [([4096] * 2, [4096] * 2), ([4000] * 256, [1] * 256), ([50] * 256, [16] * 256)]:
        plan.update(*plan_of(context_lens, query_lens))
    assert plan.num_reallocations == reserved


def test_host_buffers_are_written_in_turn() -> None:
    plan = AttentionPlan(AttentionGeometry(8, 2, 128, torch.bfloat16, "cpu"), num_host_buffers=3)
    addresses, contents = [], []
    for context_len in (100, 200, 300, 400):
        plan.update(*plan_of([context_len], [1]))
        addresses.append(plan.buffer_cpu.data_ptr())
        contents.append(plan.buffer_cpu.clone())
        # The two plans before are as they were.
        for before, content in list(zip(addresses, contents, strict=True))[-3:]:
            buffer = next(b for b in plan._host_buffers if b.data_ptr() == before)
            assert torch.equal(buffer, content)
    assert len(set(addresses)) == 3
    assert addresses[3] == addresses[0]


def test_a_plan_needs_a_host_buffer() -> None:
    with pytest.raises(ValueError, match="num_host_buffers is 0"):
        AttentionPlan(AttentionGeometry(8, 2, 128, torch.bfloat16, "cpu"), num_host_buffers=0)


def test_negative_bounds_are_refused() -> None:
    plan = AttentionPlan(AttentionGeometry(8, 2, 128, torch.bfloat16, "cpu"))
    with pytest.raises(ValueError, match="max_tokens 8, max_seqs -1, max_model_len 64"):
        plan.reserve(8, -1, 64)
