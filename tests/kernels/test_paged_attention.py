"""Attention on every instruction set of the machine, and on a CUDA device where there is one."""

import math
import os
import subprocess
import sys
from collections.abc import Callable, Iterator

import pytest
import torch
from attention_reference import TOLERANCE, PagedBatch, as_bytes, assert_matches
from conftest import AVAILABLE_ISAS
from hypothesis import given, settings
from hypothesis import strategies as st

from worker import kernels

HEAD_SIZES = [64, 80, 96, 112, 128, 192, 256]
BLOCK_SIZES = [8, 16, 32, 64]
FP8_DTYPES = [torch.float8_e4m3fn, torch.float8_e5m2]
CUDA = [pytest.param("cuda", marks=pytest.mark.gpu)] if torch.cuda.is_available() else []
DEVICES = ["cpu", *CUDA]


@pytest.fixture(params=[*AVAILABLE_ISAS, *CUDA])
def device(request: pytest.FixtureRequest) -> Iterator[str]:
    """The CPU once for each of its instruction sets, and CUDA."""
    if request.param == "cuda":
        yield "cuda"
        return
    kernels.set_cpu_isa(request.param)
    yield "cpu"
    kernels.set_cpu_isa(kernels.best_cpu_isa())


@pytest.mark.parametrize("head_size", HEAD_SIZES)
def test_matches_float64_on_a_ragged_batch(device: str, dtype: torch.dtype, head_size: int) -> None:
    contexts, queries = [1, 15, 16, 17, 70, 150], [1, 15, 1, 17, 33, 140]
    assert_matches(PagedBatch(contexts, queries, head_size=head_size, dtype=dtype, device=device))


@pytest.mark.parametrize("kv_dtype", FP8_DTYPES, ids=["e4m3", "e5m2"])
@pytest.mark.parametrize("head_size", [64, 80, 128, 256])
def test_an_8_bit_cache_matches_float64_of_the_stored_numbers(
    device: str, dtype: torch.dtype, kv_dtype: torch.dtype, head_size: int
) -> None:
    contexts, queries = [1, 15, 17, 70, 150], [1, 1, 17, 33, 140]
    assert_matches(
        PagedBatch(contexts, queries, head_size=head_size, dtype=dtype, kv_dtype=kv_dtype, device=device),
    )


@pytest.mark.parametrize("kv_dtype", FP8_DTYPES, ids=["e4m3", "e5m2"])
@pytest.mark.parametrize("queries", [1, 70], ids=["decode", "prefill"])
def test_nan_in_an_8_bit_cache_is_nan_where_it_is_seen_and_nowhere_else(
    device: str, dtype: torch.dtype, kv_dtype: torch.dtype, queries: int
) -> None:
    batch = PagedBatch([100, 100], [queries, queries], dtype=dtype, kv_dtype=kv_dtype, device=device)
    clean = batch.run()
    page = int(batch.block_tables[0, 0])
    as_bytes(batch.value_cache)[page, 0, 5, 3] = 0xFF
    group = batch.num_query_heads // batch.num_kv_heads
    seen = torch.zeros_like(clean, dtype=torch.bool)
    seen[:queries, :group, 3] = True
    out = batch.run()
    assert torch.equal(out.isnan(), seen)
    assert torch.equal(out[~seen], clean[~seen])
    as_bytes(batch.key_cache)[page, 1, 5, 3] = 0x7F
    seen[:queries, group:] = True
    out = batch.run()
    assert torch.equal(out.isnan(), seen)
    assert torch.equal(out[~seen], clean[~seen])


@pytest.mark.parametrize("block_size", BLOCK_SIZES)
@pytest.mark.parametrize("context", [1, 31, 32, 33, 127, 128, 129, 511, 512, 513])
def test_matches_float64_around_block_boundaries(device: str, block_size: int, context: int) -> None:
    for dtype in (torch.float32, torch.bfloat16):
        assert_matches(
            PagedBatch([context, context], [1, min(context, 3)], block_size=block_size, dtype=dtype, device=device)
        )


@pytest.mark.parametrize(("num_query_heads", "num_kv_heads"), [(1, 1), (4, 4), (9, 3), (8, 1), (20, 1), (71, 1)])
def test_matches_float64_for_every_grouping(device: str, num_query_heads: int, num_kv_heads: int) -> None:
    assert_matches(
        PagedBatch(
            [40, 5, 90],
            [40, 1, 13],
            num_query_heads=num_query_heads,
            num_kv_heads=num_kv_heads,
            dtype=torch.bfloat16,
            device=device,
        )
    )


def test_matches_float64_for_one_query_against_a_context_of_32k(device: str, dtype: torch.dtype) -> None:
    assert_matches(PagedBatch([32768], [1], dtype=dtype, device=device))


@pytest.mark.parametrize("kv_dtype", [None, *FP8_DTYPES], ids=["16-bit", "e4m3", "e5m2"])
@pytest.mark.parametrize("device", DEVICES)
def test_matches_float64_for_a_chunk_at_the_end_of_a_context_of_32k(device: str, kv_dtype: torch.dtype | None) -> None:
    assert_matches(PagedBatch([32768], [70], dtype=torch.bfloat16, kv_dtype=kv_dtype, device=device))


@pytest.mark.parametrize("device", DEVICES)
def test_matches_float64_on_many_sequences_some_without_new_tokens(device: str, dtype: torch.dtype) -> None:
    contexts = [1 + 37 * i % 200 for i in range(300)]
    queries = [0 if i % 7 == 3 else min(c, 1 + (i % 11 == 0) * (i % 90)) for i, c in enumerate(contexts)]
    assert_matches(PagedBatch(contexts, queries, dtype=dtype, device=device))


@pytest.mark.parametrize("device", DEVICES)
@settings(max_examples=60, deadline=None)
@given(data=st.data())
def test_matches_float64_on_sampled_batches(device: str, data: st.DataObject) -> None:
    contexts = data.draw(st.lists(st.integers(1, 700), min_size=1, max_size=4))
    group, num_kv_heads = data.draw(st.integers(1, 5)), data.draw(st.integers(1, 3))
    num_query_heads = group * num_kv_heads
    options = {"window": data.draw(st.sampled_from([-1, 1, 7, 100, 600]))}
    if data.draw(st.booleans()):
        options["soft_cap"] = data.draw(st.sampled_from([2.0, 30.0]))
    if data.draw(st.booleans()):
        options["alibi_slopes"] = torch.linspace(0.01, 0.5, num_query_heads)
    if data.draw(st.booleans()):
        options["sinks"] = torch.linspace(-2.0, 6.0, num_query_heads)
    version, partition_keys = data.draw(st.sampled_from([("auto", 0), ("v1", 0), ("v2", 0), ("v2", 64), ("v2", 256)]))
    batch = PagedBatch(
        contexts,
        [data.draw(st.integers(0, min(c, 150))) for c in contexts],
        num_query_heads=num_query_heads,
        num_kv_heads=num_kv_heads,
        head_size=data.draw(st.sampled_from(HEAD_SIZES)),
        block_size=data.draw(st.sampled_from(BLOCK_SIZES)),
        dtype=data.draw(st.sampled_from([torch.float32, torch.bfloat16, torch.float16])),
        kv_dtype=data.draw(st.sampled_from([None, None, *FP8_DTYPES])),
        device=device,
        seed=data.draw(st.integers(0, 1000)),
        version=version,
        partition_keys=partition_keys,
    )
    assert_matches(batch, **options)


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
def test_options_match_float64(device: str, dtype: torch.dtype, options: dict[str, object]) -> None:
    assert_matches(PagedBatch([200, 37, 9], [140, 1, 9], dtype=dtype, device=device), **options)


@pytest.mark.parametrize("kernel", [kernels.paged_attention_v1, kernels.paged_attention_v2], ids=["v1", "v2"])
@pytest.mark.parametrize("device", DEVICES)
def test_each_decode_kernel_matches_float64(device: str, kernel: Callable[..., None], dtype: torch.dtype) -> None:
    version = kernel.__name__.removeprefix("paged_attention_")
    for kv_dtype in (None, torch.float8_e4m3fn):
        batch = PagedBatch(
            [3000, 1, 64, 65, 777], [1, 1, 5, 2, 0], dtype=dtype, kv_dtype=kv_dtype, device=device, version=version
        )
        assert_matches(batch, kernel)


def test_lse_is_the_log_of_the_softmax_denominator(device: str) -> None:
    for sinks in (None, torch.tensor([1.0, -2.0, 0.0, 3.0, 0.5, 8.0])):
        batch = PagedBatch([600, 300, 37], [3, 130, 37], dtype=torch.bfloat16, device=device)
        lse = torch.zeros(170, batch.num_query_heads, device=device)
        batch.run(lse=lse, sinks=sinks)
        torch.testing.assert_close(lse.cpu().double(), batch.reference(sinks=sinks)[1], rtol=1e-3, atol=1e-3)


@pytest.mark.parametrize("device", DEVICES)
def test_two_halves_of_the_keys_merge_into_the_whole(device: str, dtype: torch.dtype) -> None:
    batch = PagedBatch([640, 100, 33], [1, 1, 1], dtype=dtype, device=device)
    shape = batch.query.shape
    expected, expected_lse = batch.reference()
    halves = []
    for first_block, lens in [(0, [320, 48, 16]), (None, [320, 52, 17])]:
        part = PagedBatch([640, 100, 33], [1, 1, 1], dtype=dtype, device=device)
        part.lens = torch.tensor(lens, dtype=torch.int32, device=device)
        if first_block is None:
            for b, skipped in enumerate([20, 3, 1]):
                part.block_tables[b] = part.block_tables[b].roll(-skipped)
        lse = torch.zeros(shape[:2], device=device)
        halves.append((part.run(lse=lse).to(device), lse))
    out, lse = torch.empty(shape, dtype=dtype, device=device), torch.empty(shape[:2], device=device)
    (a, lse_a), (b, lse_b) = halves
    kernels.merge_attention(out, lse, a, lse_a, b, lse_b)
    torch.testing.assert_close(out.cpu().double(), expected, rtol=TOLERANCE[dtype], atol=TOLERANCE[dtype])
    torch.testing.assert_close(lse.cpu().double(), expected_lse, rtol=1e-3, atol=1e-3)
    kernels.merge_attention(a, lse_a, a, lse_a, b, lse_b)
    assert torch.equal(a, out)
    assert torch.equal(lse_a, lse)


@pytest.mark.parametrize("device", DEVICES)
def test_a_side_that_saw_no_key_leaves_the_other_as_it_is(device: str, dtype: torch.dtype) -> None:
    a = torch.randn(3, 4, 64, device=device).to(dtype)
    unseen = torch.full_like(a, math.nan)
    lse, no_key = torch.randn(3, 4, device=device), torch.full((3, 4), -math.inf, device=device)
    for sides in [(a, lse, unseen, no_key), (unseen, no_key, a, lse)]:
        out, merged_lse = torch.empty_like(a), torch.empty_like(lse)
        kernels.merge_attention(out, merged_lse, *sides)
        assert torch.equal(out, a)
        assert torch.equal(merged_lse, lse)


def test_an_empty_batch_is_a_no_op(device: str) -> None:
    assert PagedBatch([], [], device=device).run().shape[0] == 0


@pytest.mark.parametrize("kv_dtype", [None, *FP8_DTYPES], ids=["activation", "e4m3", "e5m2"])
def test_permuting_physical_pages_changes_no_bit(device: str, dtype: torch.dtype, kv_dtype: torch.dtype | None) -> None:
    sizes = [700, 260, 33], [50, 200, 1]
    scattered = PagedBatch(*sizes, dtype=dtype, kv_dtype=kv_dtype, device=device)
    in_order = PagedBatch(*sizes, dtype=dtype, kv_dtype=kv_dtype, device=device, permute=False)
    assert torch.equal(scattered.run(), in_order.run())


def chunked(whole: PagedBatch, bounds: list[int]) -> torch.Tensor:
    """The one sequence of `whole`, computed chunk by chunk."""
    chunk = PagedBatch(whole.context_lens, whole.query_lens, dtype=whole.dtype, device=whole.device)
    rows = []
    for first, last in zip([0, *bounds], [*bounds, whole.context_lens[0]], strict=True):
        chunk.query = whole.query[first:last]
        chunk.query_start = torch.tensor([0, last - first], dtype=torch.int32, device=whole.device)
        chunk.lens = torch.tensor([last], dtype=torch.int32, device=whole.device)
        rows.append(chunk.run())
    return torch.cat(rows)


def test_a_result_depends_neither_on_chunking_nor_on_threads(device: str, dtype: torch.dtype) -> None:
    if device == "cuda" and dtype != torch.float32:
        pytest.skip("16-bit prefill and decode on CUDA are different kernels")
    whole = PagedBatch([1100], [1100], dtype=dtype, device=device)
    expected = whole.run()
    assert torch.equal(chunked(whole, [1, 14, 511, 512, 513, 1099]), expected)
    before = kernels.num_threads()
    try:
        for count in (1, 2, 3):
            kernels.set_num_threads(count)
            assert torch.equal(whole.run(), expected)
    finally:
        kernels.set_num_threads(before)


@pytest.mark.parametrize("device", DEVICES)
def test_with_fixed_partitions_a_result_does_not_depend_on_the_batch(device: str, dtype: torch.dtype) -> None:
    contexts, queries = [1100, 1, 300, 2048, 70], [1, 1, 4, 1, 30]
    together = PagedBatch(contexts, queries, dtype=dtype, device=device, version="v2", partition_keys=256)
    expected, starts = together.run(), together.query_start.tolist()
    for b, context in enumerate(contexts):
        alone = PagedBatch(contexts, queries, dtype=dtype, device=device, version="v2", partition_keys=256)
        alone.query = together.query[starts[b] : starts[b + 1]]
        alone.query_start = torch.tensor([0, queries[b]], dtype=torch.int32, device=device)
        alone.lens = torch.tensor([context], dtype=torch.int32, device=device)
        alone.block_tables = together.block_tables[b : b + 1]
        assert torch.equal(alone.run(), expected[starts[b] : starts[b + 1]])


def test_sequence_slots_select_rows_of_a_strided_table(device: str) -> None:
    batch = PagedBatch([40, 70, 200], [1, 5, 130], dtype=torch.bfloat16, device=device)
    expected = batch.run()
    table = torch.full((8, 40), -1, dtype=torch.int32, device=device)[:, :20]
    for b, slot in enumerate([6, 2, 7]):
        table[slot, : batch.block_tables.shape[1]] = batch.block_tables[b]
    out = torch.zeros_like(batch.query)
    slots = torch.tensor([6, 2, 7], dtype=torch.int32, device=device)
    kernels.paged_attention(
        out,
        batch.query,
        batch.key_cache,
        batch.value_cache,
        table,
        slots,
        batch.query_start,
        batch.lens,
        batch.scale,
        plan=batch.plan(),
    )
    assert torch.equal(out.cpu(), expected)


@pytest.mark.parametrize("queries", [7, 100])
def test_query_may_be_a_view_into_a_fused_tensor(device: str, queries: int) -> None:
    batch = PagedBatch([140], [queries], dtype=torch.bfloat16, device=device)
    expected = batch.run()
    qkv = torch.zeros(queries, 10 * 64, dtype=torch.bfloat16, device=device)
    view = qkv[:, : 6 * 64].view(queries, 6, 64)
    view.copy_(batch.query)
    batch.query = view
    out = torch.full((6, queries, 64), math.nan, dtype=torch.bfloat16, device=device).transpose(0, 1)
    assert torch.equal(batch.run(out=out), expected)


def test_pages_that_a_window_has_left_behind_are_not_read(device: str) -> None:
    for dtype in (torch.float32, torch.bfloat16):
        for queries in (4, 100):
            batch = PagedBatch([300], [queries], dtype=dtype, block_size=8, device=device)
            expected = batch.run(window=50)
            batch.block_tables[0, : (300 - queries - 50) // 8] = -1
            assert torch.equal(batch.run(window=50), expected)


@pytest.mark.parametrize(
    ("field", "value", "message"),
    [
        ("lens", torch.tensor([2], dtype=torch.int32), r"context_lens\[0\] is 2"),
        ("query_start", torch.tensor([0, 3, 3], dtype=torch.int32), r"query_start has shape \[3\]"),
        ("lens", torch.tensor([40]), "context_lens is int64; supported: int32"),
        ("key_cache", torch.zeros(5, 2, 12, 64), "block_size 12 is not supported; supported: 8, 16, 32, 64"),
        ("value_cache", torch.zeros(5, 2, 16, 32), "value_cache has shape .* head_size=64"),
        ("key_cache", torch.zeros(5, 2, 16, 64, dtype=torch.float16), "key_cache is float16; supported: float32"),
        ("value_cache", torch.zeros(6, 2, 64, 16).transpose(2, 3), "value_cache must be contiguous"),
        ("query", torch.zeros(3, 5, 64), "num_query_heads"),
        ("query", torch.zeros(3, 64, 6).transpose(1, 2), "the last dimension of query must be contiguous"),
        ("key_scale", torch.zeros(3), r"key_scale has shape \[3\]"),
    ],
)
@pytest.mark.parametrize("device", DEVICES)
def test_bad_input_is_refused_by_name(device: str, field: str, value: torch.Tensor, message: str) -> None:
    batch = PagedBatch([40], [3], device=device)
    value = value.to(device)
    if field == "key_cache" and value.shape[2] == 12:
        batch.value_cache = value
    setattr(batch, field, value)
    with pytest.raises((ValueError, TypeError), match=message):
        batch.run()


@pytest.mark.parametrize(
    ("field", "value", "message"),
    [
        ("lens", torch.tensor([5000], dtype=torch.int32), r"context_lens\[0\] is 5000"),
        ("query_start", torch.tensor([0, 9], dtype=torch.int32), r"query_start\[0..1\]"),
        ("block_tables", torch.full((1, 5), 99, dtype=torch.int32), "block_tables row 0"),
    ],
)
def test_on_the_cpu_what_addresses_memory_is_checked(field: str, value: torch.Tensor, message: str) -> None:
    batch = PagedBatch([40], [3])
    setattr(batch, field, value)
    with pytest.raises(ValueError, match=message):
        batch.run()


@pytest.mark.parametrize("device", DEVICES)
def test_an_unsupported_head_size_lists_what_is_supported(device: str) -> None:
    with pytest.raises(ValueError, match="head_size 72 is not supported; supported: 64, 80, 96, 112, 128, 192, 256"):
        PagedBatch([4], [1], head_size=72, device=device).run()


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
    assert done.returncode == 0
