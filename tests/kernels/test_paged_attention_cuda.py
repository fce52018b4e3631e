"""What attention has on CUDA alone: captured launches, plans, devices."""

import pytest
import torch
from attention_reference import TOLERANCE, PagedBatch

from worker import kernels

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")]


@pytest.mark.parametrize(
    ("first", "second"),
    [
        (([900, 40, 7], [1, 1, 1]), ([65, 1300, 300], [1, 1, 1])),
        (([200, 190, 7], [130, 80, 1]), ([500, 700, 300], [90, 120, 1])),
        (([100, 100], [100, 100]), ([164, 1000], [64, 136])),
    ],
    ids=["decode", "mixed", "prefill"],
)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_captured_launch_follows_its_rewritten_plan(
    dtype: torch.dtype, first: tuple[list[int], list[int]], second: tuple[list[int], list[int]]
) -> None:
    before = PagedBatch(*first, dtype=dtype, device="cuda", seed=1)
    after = PagedBatch(*second, dtype=dtype, device="cuda", seed=2)
    num_blocks = max(before.key_cache.shape[0], after.key_cache.shape[0])
    width = max(before.block_tables.shape[1], after.block_tables.shape[1])
    caches = [torch.zeros(num_blocks, *before.key_cache.shape[1:], dtype=dtype, device="cuda") for _ in range(2)]
    tables = torch.full((len(first[0]), width), -1, dtype=torch.int32, device="cuda")
    query, starts, lens = before.query.clone(), before.query_start.clone(), before.lens.clone()
    out = torch.empty_like(query)
    plan = kernels.AttentionPlan(before.geometry(), capacity_ints=1 << 16, workspace_bytes=1 << 24)

    def load(batch: PagedBatch) -> None:
        for cache, source in zip(caches, (batch.key_cache, batch.value_cache), strict=True):
            cache[: source.shape[0]] = source
        tables[:, : batch.block_tables.shape[1]] = batch.block_tables
        query.copy_(batch.query)
        starts.copy_(batch.query_start)
        lens.copy_(batch.lens)
        plan.update(batch.query_start.cpu(), batch.lens.cpu(), version="v2")
        torch.cuda.synchronize()

    def launch() -> None:
        kernels.paged_attention(out, query, *caches, tables, None, starts, lens, before.scale, plan=plan)

    load(before)
    flags = plan.flags
    launch()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        launch()
    for batch in (after, before, after):
        load(batch)
        assert plan.flags == flags
        out.fill_(torch.nan)
        graph.replay()
        torch.testing.assert_close(
            out.cpu().double(), batch.reference()[0], rtol=TOLERANCE[dtype], atol=TOLERANCE[dtype]
        )


def test_a_plan_is_needed() -> None:
    with pytest.raises(ValueError, match="plan is needed on CUDA"):
        PagedBatch([4], [1], device="cuda").run(plan=None)


def test_the_decode_kernels_refuse_the_plan_of_the_other() -> None:
    one, two = PagedBatch([4], [1], device="cuda", version="v1"), PagedBatch([4], [1], device="cuda", version="v2")
    with pytest.raises(ValueError, match="the plan is of version v2"):
        two.run(kernels.paged_attention_v1)
    with pytest.raises(ValueError, match="the plan is of version v1"):
        one.run(kernels.paged_attention_v2)


def test_the_decode_kernels_refuse_long_queries() -> None:
    with pytest.raises(ValueError, match="prefill"):
        PagedBatch([200], [100], device="cuda", version="v1").run(kernels.paged_attention_v1)


@pytest.mark.parametrize("field", ["key_cache", "block_tables", "query_start", "lens"])
def test_tensors_on_two_devices_are_refused_by_name(field: str) -> None:
    batch = PagedBatch([40], [3], device="cuda")
    plan = batch.plan()
    setattr(batch, field, getattr(batch, field).cpu())
    name = "context_lens" if field == "lens" else field
    with pytest.raises((TypeError, ValueError), match=rf"{name} is on cpu"):
        batch.run(plan=plan)


def test_a_stride_that_16_byte_loads_cannot_follow_is_refused() -> None:
    batch = PagedBatch([200], [100], dtype=torch.bfloat16, device="cuda")
    batch.query = torch.zeros(100, 6 * 64 + 4, dtype=torch.bfloat16, device="cuda")[:, : 6 * 64].view(100, 6, 64)
    with pytest.raises(ValueError, match="query's token stride 388 is not supported; supported: multiples of 8"):
        batch.run()


@pytest.mark.parametrize("window", [0, -2])
def test_a_window_that_sees_nothing_is_refused(window: int) -> None:
    with pytest.raises(ValueError, match="window"):
        PagedBatch([4], [1], device="cuda").run(window=window)
