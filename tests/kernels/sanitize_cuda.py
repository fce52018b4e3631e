"""One small call of every CUDA kernel, to be run under compute-sanitizer:

    PYTHONPATH=tests/kernels compute-sanitizer --tool memcheck --error-exitcode 1 python tests/kernels/sanitize_cuda.py
    PYTHONPATH=tests/kernels compute-sanitizer --tool racecheck --error-exitcode 1 python tests/kernels/sanitize_cuda.py

Arguments name the groups to run; without any, all. Prefill under racecheck takes seconds with `--kernel-regex
kns=prefill` and the group prefill_races. Every result is compared with what plain torch gives, loosely: the
tests proper do that closely.
"""

from __future__ import annotations

import sys
from collections.abc import Callable

import torch
from attention_reference import TOLERANCE, PagedBatch, assert_matches

from worker import kernels

FP8 = (torch.float8_e4m3fn, torch.float8_e5m2)
HALVES = (torch.bfloat16, torch.float16)
ALL = (torch.float32, *HALVES)
CUDA = "cuda"


def close(actual: torch.Tensor, expected: torch.Tensor, dtype: torch.dtype) -> None:
    torch.testing.assert_close(actual.double(), expected.double(), rtol=4 * TOLERANCE[dtype], atol=4 * TOLERANCE[dtype])


def attention_decode() -> None:
    for dtype in ALL:
        for kv_dtype in (None, *FP8):
            for version, partition_keys, kernel in [
                ("v1", 0, kernels.paged_attention_v1),
                ("v2", 0, kernels.paged_attention_v2),
                ("v2", 64, kernels.paged_attention_v2),
            ]:
                batch = PagedBatch(
                    [150, 1, 70],
                    [1, 1, 3],
                    dtype=dtype,
                    kv_dtype=kv_dtype,
                    device=CUDA,
                    version=version,
                    partition_keys=partition_keys,
                )
                assert_matches(batch, kernel)
    for head_size in (64, 80, 96, 112, 128, 192, 256):
        batch = PagedBatch([90, 17], [1, 2], head_size=head_size, dtype=torch.bfloat16, device=CUDA, block_size=8)
        assert_matches(batch, window=40, sinks=torch.zeros(6))


def attention_prefill() -> None:
    for head_size in (64, 80, 96, 112, 128, 192, 256):
        for dtype in ALL:
            for kv_dtype in (None, FP8[0]):
                batch = PagedBatch(
                    [170, 66], [140, 65], head_size=head_size, dtype=dtype, kv_dtype=kv_dtype, device=CUDA
                )
                assert_matches(batch)
    options = {"window": 40, "soft_cap": 3.0, "alibi_slopes": torch.full((6,), 0.1), "sinks": torch.zeros(6)}
    for dtype in ALL:
        batch = PagedBatch([170, 66], [140, 65], dtype=dtype, device=CUDA, block_size=32)
        lse = torch.empty(205, 6, device=CUDA)
        assert_matches(batch, **options)
        batch.run(lse=lse)
        close(lse.cpu(), batch.reference()[1], dtype)


def prefill_races() -> None:
    """One call of each prefill kernel that goes over several key tiles, small enough for racecheck."""
    for dtype, kv_dtype in ((torch.bfloat16, None), (torch.bfloat16, FP8[0]), (torch.float32, None)):
        batch = PagedBatch(
            [330, 70, 130],
            [200, 70, 130],
            num_query_heads=2,
            num_kv_heads=1,
            head_size=128,
            dtype=dtype,
            kv_dtype=kv_dtype,
            device=CUDA,
        )
        assert_matches(batch)


def attention_merge() -> None:
    for dtype in ALL:
        a, b = (torch.randn(5, 3, 64, device=CUDA).to(dtype) for _ in range(2))
        lse_a, lse_b = (torch.randn(5, 3, device=CUDA) for _ in range(2))
        out, lse = torch.empty_like(a), torch.empty_like(lse_a)
        kernels.merge_attention(out, lse, a, lse_a, b, lse_b)
        share = torch.sigmoid(lse_a - lse_b)[..., None]
        close(out, share * a.float() + (1 - share) * b.float(), dtype)
        torch.testing.assert_close(lse, torch.logaddexp(lse_a, lse_b))


def kv_cache() -> None:
    num_tokens, heads, kv_heads, size = 21, 4, 2, 80
    slots = torch.randperm(64, device=CUDA)[:num_tokens]
    slots[3] = -1
    positions = torch.arange(num_tokens, device=CUDA)
    cos_sin = torch.randn(64, size, device=CUDA)
    for dtype in ALL:
        for kv_dtype in (dtype, *FP8):
            qkv = torch.randn(num_tokens, (heads + 2 * kv_heads) * size, device=CUDA).to(dtype)
            q, k, v = (
                t.view(num_tokens, -1, size) for t in qkv.split([heads * size, kv_heads * size, kv_heads * size], 1)
            )
            caches = [torch.zeros(4, kv_heads, 16, size, device=CUDA).to(kv_dtype) for _ in range(2)]
            scales = {} if kv_dtype is dtype else {"key_scale": torch.ones(2, device=CUDA), "value_scale": None}
            kernels.store_kv(k, v, *caches, slots, **scales)
            for layout in ("neox", "interleaved"):
                kernels.rotary_embedding(q, k, positions, cos_sin, layout)
                kernels.rope_and_store(qkv, positions, cos_sin, *caches, slots, heads, kv_heads, layout, **scales)
            kernels.copy_blocks([caches[0]], [caches[1]], [0, 1], [2, 3])
            host = [torch.zeros(c.shape).to(c.dtype).pin_memory() for c in caches]
            kernels.swap_blocks(caches, host, [0, 3], [1, 2], "to_host")
            kernels.swap_blocks(caches, host, [2, 1], [1, 2], "to_device")
            torch.cuda.synchronize()
            assert torch.equal(caches[0][2].view(torch.uint8), caches[0][0].view(torch.uint8))


def elementwise() -> None:
    num_tokens, hidden = 7, 1000
    for dtype in ALL:
        for x_dtype in (dtype, torch.float32):
            x = torch.randn(num_tokens, hidden, device=CUDA).to(x_dtype)
            residual, weight = torch.randn_like(x), torch.randn(hidden, device=CUDA).to(dtype)
            out = torch.empty(num_tokens, hidden, device=CUDA, dtype=dtype)
            kernels.rms_norm(out, x, weight, 1e-5)
            kernels.fused_add_rms_norm(out, x, residual, weight, 1e-5)
            close(out, torch.nn.functional.rms_norm(residual.float(), (hidden,), weight.float(), 1e-5), dtype)
        x, residual = (
            torch.randn(num_tokens, hidden, device=CUDA).to(dtype),
            torch.randn(num_tokens, hidden, device=CUDA),
        )
        out = torch.empty_like(x)
        kernels.fused_add_rms_norm(out, x, residual, weight, 1e-5)
        close(out, torch.nn.functional.rms_norm(residual, (hidden,), weight.float(), 1e-5), dtype)
        gate_up = torch.randn(num_tokens, 2 * hidden, device=CUDA).to(dtype)
        out = torch.empty(num_tokens, hidden, device=CUDA, dtype=dtype)
        gate, up = gate_up.float().chunk(2, 1)
        kernels.silu_and_mul(out, gate_up)
        close(out, torch.nn.functional.silu(gate) * up, dtype)
        for approximate in ("tanh", "none"):
            kernels.gelu_and_mul(out, gate_up, approximate)
            close(out, torch.nn.functional.gelu(gate, approximate=approximate) * up, dtype)
        table, ids = torch.randn(50, hidden, device=CUDA).to(dtype), torch.randint(50, (num_tokens,), device=CUDA)
        for out_dtype in (dtype, torch.float32):
            rows = torch.empty(num_tokens, hidden, device=CUDA, dtype=out_dtype)
            kernels.embedding(rows, ids, table)
            assert torch.equal(rows, table[ids].to(out_dtype))
        kernels.gather_rows(out, table, ids.int())
        assert torch.equal(out, table[ids])


def sampling() -> None:
    rows, vocab = 6, 5003
    per_row = lambda values, dtype: torch.tensor(values, dtype=dtype, device=CUDA)  # noqa: E731
    ids = per_row([1, 2, 3, 4, 5, 6], torch.int32)
    offsets = torch.arange(rows + 1, dtype=torch.int32, device=CUDA)
    for dtype in ALL:
        logits = torch.randn(rows, vocab, device=CUDA).to(dtype)
        batch = kernels.SamplingBatch(
            temperature=per_row([0, 1, 0.5, 1, 1, 2], torch.float32),
            top_k=per_row([0, 5, 0, 100, 1, 0], torch.int32),
            top_p=per_row([1, 1, 0.9, 0.5, 1, 1], torch.float32),
            min_p=per_row([0, 0, 0, 0, 0, 0.1], torch.float32),
            seeds=torch.arange(rows, device=CUDA),
            positions=torch.arange(rows, device=CUDA),
            presence_penalty=torch.full((rows,), 0.5, device=CUDA),
            frequency_penalty=torch.full((rows,), 0.5, device=CUDA),
            repetition_penalty=torch.full((rows,), 1.2, device=CUDA),
            prompt_offsets=offsets,
            prompt_ids=ids,
            output_offsets=offsets,
            output_ids=ids,
            bias_offsets=offsets,
            bias_ids=ids,
            bias_values=torch.ones(rows, device=CUDA),
            masked_offsets=offsets,
            masked_ids=ids,
        )
        workspace = kernels.sampling_workspace(rows, vocab, dtype, CUDA, num_top=5)
        out = {
            "out_logprobs": torch.empty(rows, device=CUDA),
            "out_ranks": torch.empty(rows, dtype=torch.int32, device=CUDA),
            "out_top_ids": torch.empty(rows, 5, dtype=torch.int32, device=CUDA),
            "out_top_logprobs": torch.empty(rows, 5, device=CUDA),
        }
        chosen, status = torch.empty(rows, dtype=torch.int64, device=CUDA), torch.empty_like(ids)
        for parameters in (batch, kernels.SamplingBatch()):
            kernels.sample(logits, parameters, chosen, status, workspace=workspace, **out)
            assert status.sum() == 0
        assert torch.equal(chosen, logits.argmax(1))
        sample_from_lists(logits, workspace)


def sample_from_lists(logits: torch.Tensor, workspace: torch.Tensor) -> None:
    """Without log-probabilities: rows that need few entries are drawn by kernels of their own."""
    rows = logits.shape[0]
    batch = kernels.SamplingBatch(
        temperature=torch.tensor([0, 1, 0.5, 1, 1, 2], device=CUDA),
        top_k=torch.tensor([0, 5, 128, 100, 1, 0], dtype=torch.int32, device=CUDA),
        top_p=torch.tensor([1, 1, 0.9, 0.5, 1, 1], device=CUDA),
        seeds=torch.arange(rows, device=CUDA),
    )
    chosen, expected = (torch.empty(rows, dtype=torch.int64, device=CUDA) for _ in range(2))
    status = torch.empty(rows, dtype=torch.int32, device=CUDA)
    kernels.sample(logits, batch, chosen, status, workspace=workspace)
    assert status.sum() == 0
    kernels.sample(
        logits, batch, expected, status, workspace=workspace, out_ranks=torch.empty_like(status),
        out_logprobs=torch.empty(rows, device=CUDA),
    )  # fmt: skip
    assert torch.equal(chosen, expected)


def steps() -> None:
    history = torch.randint(1000, (4, 50), dtype=torch.int32, device=CUDA)
    blocks = torch.randperm(28, dtype=torch.int32, device=CUDA).view(4, 7)
    query_start = torch.tensor([0, 3, 3, 4], dtype=torch.int32, device=CUDA)
    slots, lens = torch.tensor([[2, 0, 1], [50, 0, 17]], dtype=torch.int32, device=CUDA)
    ids, positions = (torch.empty(6, dtype=torch.int32, device=CUDA) for _ in range(2))
    mapping = torch.empty(6, dtype=torch.int64, device=CUDA)
    kernels.prepare_step(ids, positions, mapping, history, blocks, slots, query_start, lens, 8)
    assert positions.tolist() == [47, 48, 49, 16, 0, 0]
    assert ids.tolist() == [*history[2, 47:].tolist(), int(history[1, 16]), 0, 0]
    assert mapping.tolist() == [
        int(blocks[2, 5]) * 8 + 7, int(blocks[2, 6]) * 8, int(blocks[2, 6]) * 8 + 1, int(blocks[1, 2]) * 8, -1, -1,
    ]  # fmt: skip
    target = torch.zeros(5, dtype=torch.int32, device=CUDA)
    kernels.scatter(target, torch.tensor([4, -1, 0], device=CUDA), torch.tensor([7, 8, 9], device=CUDA))
    assert target.tolist() == [9, 0, 0, 0, 7]


def skinny_products() -> None:
    for dtype in HALVES:
        weight = torch.randn(200, 512, device=CUDA).to(dtype) / 16
        for num_rows in (1, 5, 16):
            x, out = (
                torch.randn(num_rows, 512, device=CUDA).to(dtype),
                torch.empty(num_rows, 200, device=CUDA, dtype=dtype),
            )
            kernels.skinny_linear(out, x, weight)
            close(out, x.float() @ weight.float().T, dtype)


GROUPS: dict[str, Callable[[], None]] = {
    f.__name__: f
    for f in (
        attention_decode,
        attention_prefill,
        prefill_races,
        attention_merge,
        kv_cache,
        elementwise,
        sampling,
        steps,
        skinny_products,
    )
}


def main() -> None:
    torch.manual_seed(0)
    for name in sys.argv[1:] or GROUPS:
        GROUPS[name]()
        torch.cuda.synchronize()
        print(f"{name}: done", flush=True)


if __name__ == "__main__":
    main()
