import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.nn import functional as F

from worker import kernels

ON_DEVICES = ["cpu", "cuda"] if torch.cuda.is_available() else ["cpu"]
# Half a unit in the last place of the output's dtype, with room for float32 sums.
TOLERANCE = {torch.float32: 2e-6, torch.float16: 1e-3, torch.bfloat16: 8e-3}


def assert_close(actual: torch.Tensor, expected: torch.Tensor) -> None:
    tolerance = TOLERANCE[actual.dtype]
    torch.testing.assert_close(actual.double(), expected.double(), rtol=tolerance, atol=tolerance)


def norm_reference(x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    x = x.double()
    return x / (x.square().mean(-1, keepdim=True) + eps).sqrt() * weight.double()


@pytest.mark.parametrize("hidden", [1, 5, 64, 128, 576, 1000, 4096, 8192, 40000])
def test_rms_norm_matches_float64(device: str, dtype: torch.dtype, hidden: int) -> None:
    x, weight = torch.randn(9, hidden).to(dtype), torch.randn(hidden).to(dtype)
    out = torch.empty_like(x)
    kernels.rms_norm(out, x, weight, 1e-5)
    assert_close(out, norm_reference(x, weight, 1e-5))


def test_rms_norm_takes_strided_rows_and_writes_in_place(device: str, dtype: torch.dtype) -> None:
    wide, weight = torch.randn(4, 200).to(dtype), torch.randn(96).to(dtype)
    x = wide[:, 50:146]
    expected = norm_reference(x, weight, 1e-6)
    kernels.rms_norm(x, x, weight, 1e-6)
    assert_close(x, expected)


def test_fused_add_rms_norm_normalises_the_rounded_sum(device: str, dtype: torch.dtype) -> None:
    x, residual, weight = torch.randn(300, 576).to(dtype), torch.randn(300, 576).to(dtype), torch.randn(576).to(dtype)
    total = (x.float() + residual.float()).to(dtype)
    out = torch.empty_like(x)
    kernels.fused_add_rms_norm(out, x, residual, weight, 1e-5)
    assert torch.equal(residual, total)
    assert_close(out, norm_reference(total, weight, 1e-5))


def test_norms_of_a_float32_residual_write_the_weights_dtype(device: str, dtype: torch.dtype) -> None:
    x, residual, weight = torch.randn(300, 577), torch.randn(300, 577), torch.randn(577).to(dtype)
    out = torch.empty(300, 577, dtype=dtype)
    kernels.rms_norm(out, x, weight, 1e-5)
    assert_close(out, norm_reference(x, weight, 1e-5))
    total = x + residual
    kernels.fused_add_rms_norm(out, x, residual, weight, 1e-5)
    assert torch.equal(residual, total)
    assert_close(out, norm_reference(total, weight, 1e-5))


@pytest.mark.parametrize("hidden", [5, 64, 96, 576, 577, 4096, 8192])
def test_a_float32_residual_takes_sums_of_narrower_rows(device: str, dtype: torch.dtype, hidden: int) -> None:
    x, residual, weight = torch.randn(37, hidden).to(dtype), torch.randn(37, hidden), torch.randn(hidden).to(dtype)
    total = residual + x.float()
    out = torch.empty_like(x)
    kernels.fused_add_rms_norm(out, x, residual, weight, 1e-5)
    assert torch.equal(residual, total)
    assert_close(out, norm_reference(total, weight, 1e-5))
    kernels.fused_add_rms_norm(x, x, residual, weight, 1e-5)
    assert_close(x, norm_reference(residual, weight, 1e-5))


def test_a_residual_is_of_its_rows_dtype_or_float32() -> None:
    x, weight = torch.zeros(2, 8, dtype=torch.bfloat16), torch.zeros(8, dtype=torch.bfloat16)
    with pytest.raises(TypeError, match="residual is float16; supported: bfloat16, float32"):
        kernels.fused_add_rms_norm(x, x, torch.zeros(2, 8, dtype=torch.float16), weight, 1e-5)


def test_embedding_widens_to_float32(device: str, dtype: torch.dtype) -> None:
    table, ids = torch.randn(50, 77).to(dtype), torch.tensor([3, 49, 0, 3], dtype=torch.int32)
    out = torch.empty(4, 77)
    kernels.embedding(out, ids, table)
    assert torch.equal(out, table[ids.long()].float())


@settings(max_examples=40, deadline=None)
@given(
    num_tokens=st.integers(0, 70),
    size=st.integers(1, 300),
    dtype=st.sampled_from(list(TOLERANCE)),
    device=st.sampled_from(ON_DEVICES),
)
def test_activations_match_float64(num_tokens: int, size: int, dtype: torch.dtype, device: str) -> None:
    with torch.device(device):
        check_activations(num_tokens, size, dtype)


def check_activations(num_tokens: int, size: int, dtype: torch.dtype) -> None:
    torch.manual_seed(1000 * num_tokens + size)
    gate_up = (torch.randn(num_tokens, 2 * size) * 4).to(dtype)
    gate, up = gate_up.double().chunk(2, -1)
    for run, reference in [
        (kernels.silu_and_mul, F.silu(gate)),
        (kernels.gelu_and_mul, F.gelu(gate, approximate="tanh")),
        (lambda o, x: kernels.gelu_and_mul(o, x, "none"), F.gelu(gate)),
    ]:
        out = torch.empty(num_tokens, size, dtype=dtype)
        run(out, gate_up)
        # 1 + erf(x) of a negative gate cancels: what is left is as exact as the product of gate and up, not as itself.
        error = (out.double() - reference * up).abs()
        assert (error <= TOLERANCE[dtype] * 2 * (gate * up).abs().clamp(min=1)).all(), error.max()


def test_activations_match_float64_everywhere(device: str, dtype: torch.dtype) -> None:
    gate_up = torch.cat([torch.linspace(-100, 100, 1001), torch.ones(1001)])[None].to(dtype)
    out = torch.empty(1, 1001, dtype=dtype)
    kernels.silu_and_mul(out, gate_up)
    assert_close(out, F.silu(gate_up[:, :1001].double()))


def rotate_reference(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor, layout: str) -> torch.Tensor:
    half = cos.shape[-1]
    out = x.double().clone()
    first, second = (slice(0, half), slice(half, 2 * half)) if layout == "neox" else (slice(0, 2 * half, 2),) * 2
    if layout == "interleaved":
        second = slice(1, 2 * half, 2)
    a, b = out[..., first].clone(), out[..., second].clone()
    cos, sin = cos.double()[:, None], sin.double()[:, None]
    out[..., first], out[..., second] = a * cos - b * sin, b * cos + a * sin
    return out


def cos_sin_table(max_positions: int, rot_dim: int) -> torch.Tensor:
    angles = torch.arange(max_positions)[:, None] / 10000 ** (torch.arange(0, rot_dim, 2) / rot_dim)
    return torch.cat([angles.cos(), angles.sin()], -1)


@pytest.mark.parametrize("layout", ["neox", "interleaved"])
@pytest.mark.parametrize("rot_dim", [20, 64])
@pytest.mark.parametrize("index_dtype", [torch.int32, torch.int64])
def test_rotary_embedding_matches_float64(
    device: str, dtype: torch.dtype, layout: str, rot_dim: int, index_dtype: torch.dtype
) -> None:
    table, positions = cos_sin_table(100, rot_dim), torch.tensor([0, 1, 99, 7], dtype=index_dtype)
    qkv = torch.randn(4, 5 * 64).to(dtype)
    q, k = qkv[:, : 3 * 64].view(4, 3, 64), qkv[:, 3 * 64 : 4 * 64].view(4, 1, 64)
    value = qkv[:, 4 * 64 :].clone()
    cos, sin = table[positions.long()].chunk(2, -1)
    expected = [rotate_reference(x, cos, sin, layout) for x in (q, k)]
    kernels.rotary_embedding(q, k, positions, table, layout)
    assert_close(q, expected[0])
    assert_close(k, expected[1])
    assert torch.equal(qkv[:, 4 * 64 :], value)


@pytest.mark.parametrize("num_tokens", [0, 1, 130])
def test_rope_and_store_equals_its_two_halves(device: str, dtype: torch.dtype, num_tokens: int) -> None:
    table, positions = cos_sin_table(200, 64), torch.arange(num_tokens)
    qkv = torch.randn(num_tokens, 5 * 64).to(dtype)
    slots = torch.randperm(20 * 8)[:num_tokens]
    slots[num_tokens // 2 :: 7] = -1
    apart = [torch.zeros(20, 1, 8, 64, dtype=dtype) for _ in range(2)]
    fused = [torch.zeros(20, 1, 8, 64, dtype=dtype) for _ in range(2)]
    separate = qkv.clone()
    q, k, v = (separate[:, a * 64 : b * 64].view(num_tokens, b - a, 64) for a, b in ((0, 3), (3, 4), (4, 5)))
    kernels.rotary_embedding(q, k, positions, table)
    kernels.store_kv(k, v, *apart, slots)
    kernels.rope_and_store(qkv, positions, table, *fused, slots, 3, 1)
    assert torch.equal(qkv, separate)
    assert torch.equal(torch.stack(fused), torch.stack(apart))
    kept = [i for i, slot in enumerate(slots.tolist()) if slot >= 0]
    for i in kept[:5]:
        block, offset = divmod(int(slots[i]), 8)
        assert torch.equal(apart[0][block, :, offset], k[i])
        assert torch.equal(apart[1][block, :, offset], v[i])


def test_lookups_copy_rows(device: str, dtype: torch.dtype) -> None:
    table = torch.randn(50, 24).to(dtype)
    for index_dtype in (torch.int32, torch.int64):
        ids = torch.tensor([49, 0, 7, 7], dtype=index_dtype)
        for lookup in (lambda o, i: kernels.embedding(o, i, table), lambda o, i: kernels.gather_rows(o, table, i)):
            out = torch.empty(4, 24, dtype=dtype)
            lookup(out, ids)
            assert torch.equal(out, table[ids.long()])


def test_copy_blocks_copies_in_order_in_every_layer(device: str, dtype: torch.dtype) -> None:
    keys = [torch.randn(6, 2, 8, 64).to(dtype) for _ in range(3)]
    values = [torch.randn(6, 2, 8, 64).to(dtype) for _ in range(3)]
    before = [c.clone() for c in (*keys, *values)]
    kernels.copy_blocks(keys, values, [0, 3], [3, 5])
    for cache, old in zip((*keys, *values), before, strict=True):
        assert torch.equal(cache[3], old[0]) and torch.equal(cache[5], old[0])
        assert torch.equal(cache[[0, 1, 2, 4]], old[[0, 1, 2, 4]])


def test_many_copies_of_blocks_follow_one_another(device: str) -> None:
    keys, values = [torch.randn(400, 1, 8, 64)], [torch.randn(400, 1, 8, 64)]
    expected = keys[0].clone()
    sources, destinations = torch.randint(0, 400, (2, 300), device="cpu").tolist()
    for source, destination in zip(sources, destinations, strict=True):
        expected[destination] = expected[source].clone()
    kernels.copy_blocks(keys, values, sources, destinations)
    assert torch.equal(keys[0], expected)


def test_swapped_blocks_come_back(device: str, dtype: torch.dtype) -> None:
    caches = [torch.randn(9, 2, 8, 64).to(dtype) for _ in range(4)]
    before = [c.clone() for c in caches]
    hosts = [torch.zeros(7, 2, 8, 64, dtype=dtype, device="cpu", pin_memory=device == "cuda") for _ in caches]
    blocks, host_blocks = [2, 3, 4, 8, 0], [0, 1, 2, 3, 6]
    kernels.swap_blocks(caches, hosts, blocks, host_blocks, "to_host")
    for cache in caches:
        cache.zero_()
    kernels.swap_blocks(caches, hosts, blocks, host_blocks, "to_device")
    for cache, old, host in zip(caches, before, hosts, strict=True):
        assert torch.equal(cache[blocks], old[blocks]) and torch.equal(host[host_blocks], old[blocks].cpu())
        assert not cache[[1, 5, 6, 7]].any() and not host[[4, 5]].any()


@pytest.mark.parametrize("cache_dtype", [torch.float8_e4m3fn, torch.float8_e5m2])
@pytest.mark.parametrize("has_scales", [False, True])
def test_8_bit_caches_hold_the_nearest_finite_quotient(
    device: str, dtype: torch.dtype, cache_dtype: torch.dtype, has_scales: bool
) -> None:
    key, value = (torch.randn(130, 3, 64).to(dtype) * 10 ** torch.randn(130, 3, 1) for _ in range(2))
    key, value = key.to(dtype), value.to(dtype)
    key[0, 0, :4] = torch.tensor([torch.inf, -torch.inf, 6e4, -6e4])
    scales = [torch.rand(3) + 0.1 for _ in range(2)] if has_scales else [None, None]
    caches = [torch.zeros(20, 3, 8, 64).to(cache_dtype) for _ in range(2)]
    slots = torch.randperm(160)[:130]
    kernels.store_kv(key, value, *caches, slots, key_scale=scales[0], value_scale=scales[1])
    limit = torch.finfo(cache_dtype).max
    for cache, x, scale in zip(caches, (key, value), scales, strict=True):
        quotient = x.float() if scale is None else x.float() / scale[:, None]
        stored = cache.view(torch.uint8)[slots // 8, :, slots % 8]
        assert torch.equal(stored, quotient.clamp(-limit, limit).to(cache_dtype).view(torch.uint8))


def test_8_bit_caches_keep_nan(device: str) -> None:
    caches = [torch.zeros(1, 1, 8, 64).to(torch.float8_e4m3fn) for _ in range(2)]
    kernels.store_kv(
        torch.full((1, 1, 64), torch.nan), torch.ones(1, 1, 64), *caches, torch.zeros(1, dtype=torch.int64)
    )
    assert caches[0].float()[0, 0, 0].isnan().all() and (caches[1].float()[0, 0, 0] == 1).all()


def test_bad_input_is_refused_by_name() -> None:
    x, cache = torch.zeros(2, 8), torch.zeros(3, 1, 8, 64)
    kv, index = torch.zeros(1, 1, 64), torch.zeros(1, dtype=torch.int64)
    cases = [
        (lambda: kernels.rms_norm(x, x, torch.zeros(9), 1e-5), r"weight has shape \[9\]; expected \[hidden=8\]"),
        (lambda: kernels.rms_norm(x, x.double(), x[0], 1e-5), "x is float64; supported: float32, bfloat16, float16"),
        (lambda: kernels.rms_norm(x, x.half(), x[0].half(), 1e-5), "out is float32; supported: float16"),
        (lambda: kernels.rms_norm(x.t(), x.t(), x[:, 0].clone(), 1e-5), "last dimension of x must be contiguous"),
        (lambda: kernels.silu_and_mul(x, torch.zeros(2, 15)), r"gate_up has shape .* 2\*size=16"),
        (lambda: kernels.gelu_and_mul(x, torch.zeros(2, 16), "fast"), "supported: tanh, none"),
        (lambda: kernels.embedding(x[:1], index + 2, x), r"ids\[0\] is 2, outside the table's 2 rows"),
        (lambda: kernels.store_kv(kv, kv, cache, cache, index + 24), r"slot_mapping\[0\] is 24, but .* 24 slots"),
        (lambda: kernels.rotary_embedding(kv, kv, index + 5, torch.zeros(5, 64)), r"positions\[0\] is 5"),
        (lambda: kernels.rotary_embedding(kv, kv, index, torch.zeros(5, 66)), "rot_dim 66"),
        (lambda: kernels.rotary_embedding(kv, kv, index, torch.zeros(5, 64), "gptj"), "supported: neox, interleaved"),
        (lambda: kernels.copy_blocks([cache], [cache], [0], [3]), r"destinations\[0\] is 3"),
    ]
    for call, message in cases:
        with pytest.raises((ValueError, TypeError), match=message):
            call()
