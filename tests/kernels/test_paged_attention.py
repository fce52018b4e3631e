import math
import os
import subprocess
import sys

import pytest
import torch
from attention_reference import PagedBatch, assert_matches
from hypothesis import given, settings
from hypothesis import strategies as st

from worker import kernels

HEAD_SIZES = [64, 80, 96, 112, 128, 192, 256]
BLOCK_SIZES = [8, 16, 32, 64]


@pytest.mark.parametrize("head_size", HEAD_SIZES)
def test_matches_float64_on_a_ragged_batch(isa: str, dtype: torch.dtype, head_size: int) -> None:
    assert_matches(PagedBatch([1, 15, 16, 17, 70], [1, 15, 1, 17, 33], head_size=head_size, dtype=dtype))


@pytest.mark.parametrize("block_size", BLOCK_SIZES)
@pytest.mark.parametrize("context", [1, 31, 32, 33, 127, 128, 129, 511, 512, 513])
def test_matches_float64_around_block_boundaries(isa: str, block_size: int, context: int) -> None:
    for dtype in (torch.float32, torch.bfloat16):
        batch = PagedBatch([context, context], [1, min(context, 3)], block_size=block_size, dtype=dtype)
        assert_matches(batch)


@pytest.mark.parametrize(("num_query_heads", "num_kv_heads"), [(1, 1), (4, 4), (9, 3), (8, 1), (20, 1)])
def test_matches_float64_for_every_grouping(isa: str, num_query_heads: int, num_kv_heads: int) -> None:
    assert_matches(
        PagedBatch(
            [40, 5, 90],
            [40, 1, 13],
            num_query_heads=num_query_heads,
            num_kv_heads=num_kv_heads,
            dtype=torch.bfloat16,
        )
    )


def test_matches_float64_for_one_query_against_a_long_context(isa: str, dtype: torch.dtype) -> None:
    assert_matches(PagedBatch([8192], [1], dtype=dtype))


@settings(max_examples=60, deadline=None)
@given(data=st.data())
def test_matches_float64_on_sampled_batches(data: st.DataObject) -> None:
    contexts = data.draw(st.lists(st.integers(1, 700), min_size=1, max_size=4))
    group, num_kv_heads = data.draw(st.integers(1, 5)), data.draw(st.integers(1, 3))
    batch = PagedBatch(
        contexts,
        [data.draw(st.integers(1, min(c, 80))) for c in contexts],
        num_query_heads=group * num_kv_heads,
        num_kv_heads=num_kv_heads,
        head_size=data.draw(st.sampled_from(HEAD_SIZES)),
        block_size=data.draw(st.sampled_from(BLOCK_SIZES)),
        dtype=data.draw(st.sampled_from([torch.float32, torch.bfloat16, torch.float16])),
        seed=data.draw(st.integers(0, 1000)),
    )
    assert_matches(batch, window=data.draw(st.sampled_from([-1, 1, 7, 100, 600])))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(
    "options",
    [
        {"window": 5},
        {"window": 40},
        {"soft_cap": 2.0},
        {"alibi_slopes": torch.tensor([0.5, 0.25, 0.125, 0.1, 0.05, 0.01])},
        {"sinks": torch.tensor([1.0, -2.0, 0.0, 3.0, 0.5, 8.0])},
        {"soft_cap": 3.0, "window": 20, "sinks": torch.zeros(6)},
    ],
    ids=lambda o: "+".join(o),
)
def test_options_match_float64(isa: str, dtype: torch.dtype, options: dict[str, object]) -> None:
    assert_matches(PagedBatch([200, 37, 9], [40, 1, 9], dtype=dtype), **options)


def test_lse_is_the_log_of_the_softmax_denominator(isa: str) -> None:
    batch = PagedBatch([600, 37], [3, 37], dtype=torch.bfloat16)
    lse = torch.zeros(40, batch.num_query_heads)
    batch.run(lse=lse)
    torch.testing.assert_close(lse.double(), batch.reference()[1], rtol=1e-3, atol=1e-3)


def test_an_empty_batch_is_a_no_op(isa: str) -> None:
    assert PagedBatch([], []).run().shape[0] == 0


def test_permuting_physical_pages_changes_no_bit(isa: str, dtype: torch.dtype) -> None:
    scattered = PagedBatch([700, 33], [50, 1], dtype=dtype)
    in_order = PagedBatch([700, 33], [50, 1], dtype=dtype, permute=False)
    assert torch.equal(scattered.run(), in_order.run())


def test_a_result_depends_neither_on_the_batch_nor_on_chunking_nor_on_threads(isa: str, dtype: torch.dtype) -> None:
    context = 1100
    whole = PagedBatch([context], [context], dtype=dtype)
    expected = whole.run()
    one_by_one = PagedBatch([context], [context], dtype=dtype)
    rows = []
    for first, last in [(0, 1), (1, 14), (14, 511), (511, 512), (512, 513), (513, 1099), (1099, 1100)]:
        one_by_one.query = whole.query[first:last]
        one_by_one.query_start = torch.tensor([0, last - first], dtype=torch.int32)
        one_by_one.lens = torch.tensor([last], dtype=torch.int32)
        rows.append(one_by_one.run())
    assert torch.equal(torch.cat(rows), expected)
    before = kernels.num_threads()
    try:
        for count in (1, 2, 3):
            kernels.set_num_threads(count)
            assert torch.equal(whole.run(), expected)
    finally:
        kernels.set_num_threads(before)


def test_sequence_slots_select_rows_of_a_strided_table(isa: str) -> None:
    batch = PagedBatch([40, 70], [1, 5], dtype=torch.bfloat16)
    expected = batch.run()
    table = torch.full((8, 20), -1, dtype=torch.int32)[:, :10]
    table[6, : batch.block_tables.shape[1]] = batch.block_tables[0]
    table[2, : batch.block_tables.shape[1]] = batch.block_tables[1]
    out = torch.zeros_like(expected)
    slots = torch.tensor([6, 2], dtype=torch.int32)
    kernels.paged_attention(
        out, batch.query, batch.key_cache, batch.value_cache, table, slots, batch.query_start, batch.lens, batch.scale
    )
    assert torch.equal(out, expected)


def test_query_may_be_a_view_into_a_fused_tensor(isa: str) -> None:
    batch = PagedBatch([40], [7], dtype=torch.bfloat16)
    expected = batch.run()
    qkv = torch.zeros(7, 10 * 64, dtype=torch.bfloat16)
    view = qkv[:, : 6 * 64].view(7, 6, 64)
    view.copy_(batch.query)
    batch.query = view
    assert torch.equal(batch.run(), expected)


def test_pages_that_a_window_has_left_behind_are_not_read(isa: str) -> None:
    for dtype in (torch.float32, torch.bfloat16):
        batch = PagedBatch([300], [4], dtype=dtype, block_size=8)
        expected = batch.run(window=50)
        batch.block_tables[0, : (300 - 4 - 50) // 8] = -1
        assert torch.equal(batch.run(window=50), expected)


@pytest.mark.parametrize(
    ("field", "value", "message"),
    [
        ("lens", torch.tensor([5000], dtype=torch.int32), r"context_lens\[0\] is 5000"),
        ("lens", torch.tensor([2], dtype=torch.int32), r"context_lens\[0\] is 2"),
        ("query_start", torch.tensor([0, 9], dtype=torch.int32), r"query_start\[0..1\]"),
        ("block_tables", torch.full((1, 5), 99, dtype=torch.int32), "block_tables row 0"),
        ("query_start", torch.tensor([0, 3, 3], dtype=torch.int32), r"query_start has shape \[3\]"),
        ("lens", torch.tensor([40]), "context_lens is int64; supported: int32"),
        ("key_cache", torch.zeros(5, 2, 12, 64), "block_size 12 is not supported; supported: 8, 16, 32, 64"),
        ("value_cache", torch.zeros(5, 2, 16, 32), "value_cache has shape .* head_size=64"),
        ("query", torch.zeros(3, 5, 64), "num_query_heads"),
    ],
)
def test_bad_input_is_refused_by_name(field: str, value: torch.Tensor, message: str) -> None:
    batch = PagedBatch([40], [3])
    if field == "key_cache":
        batch.value_cache = value
    setattr(batch, field, value)
    with pytest.raises((ValueError, TypeError), match=message):
        batch.run()


def test_an_unsupported_head_size_lists_what_is_supported() -> None:
    with pytest.raises(ValueError, match="head_size 72 is not supported; supported: 64, 80, 96, 112, 128, 192, 256"):
        PagedBatch([4], [1], head_size=72).run()


TRACED = """
import torch
from worker import kernels
kv = torch.zeros(4, 1, 16, 64)
table = torch.tensor([[2, 0, 1]], dtype=torch.int32)
q = torch.zeros(1, 1, 64)
start, lens = torch.tensor([0, 1], dtype=torch.int32), torch.tensor([40], dtype=torch.int32)
kernels.paged_attention(torch.empty_like(q), q, kv, kv, table, None, start, lens, 1.0)
"""


def test_tracing_logs_block_table_context_length_and_block_size() -> None:
    env = {**os.environ, "PAGEMILL_TRACE_KERNELS": "1"}
    done = subprocess.run([sys.executable, "-c", TRACED], env=env, capture_output=True, text=True, timeout=120)
    assert "PagedAttentionKernel: block_table=[2,0,1], context_len=[40], block_size=16\n" in done.stderr
    assert math.isfinite(done.returncode) and done.returncode == 0
