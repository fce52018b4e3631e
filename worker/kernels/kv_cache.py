"""Rotary embedding and the paged KV cache.

A layer's cache is two contiguous tensors [num_blocks, num_kv_heads, block_size, head_size] of the activations' dtype,
or of float8_e4m3fn or float8_e5m2. The slot of a token is block * block_size + offset.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Literal

import torch

from worker.kernels._checks import (
    BLOCK_SIZES,
    CPU_ONLY,
    DTYPE_CODES,
    KV_DTYPE_CODES,
    Dims,
    PlanCache,
    address,
    placement,
    stream_of,
)
from worker.kernels._native import load_native

_C = load_native()
_ACTIVATIONS = tuple(DTYPE_CODES)
_INT64 = (torch.int64,)
_FLOAT32 = (torch.float32,)
_DIRECTIONS = {"to_host": 0, "to_device": 1}
LAYOUTS = {"neox": 0, "interleaved": 1}
_CACHE_DIMS = ("num_blocks", "num_kv_heads", "block_size", "head_size")

_rotary_plans = PlanCache()
_store_plans = PlanCache()
_rope_store_plans = PlanCache()


def _check_rotary(dims: Dims, positions: torch.Tensor, cos_sin: torch.Tensor, layout: str) -> None:
    if layout not in LAYOUTS:
        raise ValueError(f"{dims.op}: layout {layout!r} is not supported; supported: {', '.join(LAYOUTS)}")
    dims.tensor("positions", positions, ("num_tokens",), (torch.int64, torch.int32))
    dims.tensor("cos_sin", cos_sin, ("max_positions", "rot_dim"), _FLOAT32)
    if dims["rot_dim"] % 2 != 0 or not 0 < dims["rot_dim"] <= dims["head_size"]:
        raise ValueError(
            f"{dims.op}: rot_dim {dims['rot_dim']} of cos_sin must be even and at most head_size {dims['head_size']}"
        )


def rotary_embedding(
    q: torch.Tensor,
    k: torch.Tensor,
    positions: torch.Tensor,
    cos_sin: torch.Tensor,
    layout: Literal["neox", "interleaved"] = "neox",
) -> None:
    """Rotate the first rot_dim dimensions of each head of q and k in place.

    Shapes: q [num_tokens, num_query_heads, head_size], k [num_tokens, num_kv_heads, head_size] (both may be strided
    views of one tensor), positions [num_tokens] int32 or int64, cos_sin [max_positions, rot_dim] float32: rot_dim / 2
    cosines, then as many sines. Layout "neox" pairs dimension i with i + rot_dim / 2, "interleaved" 2 i with 2 i + 1.
    """
    key = (
        q.shape, q.stride(), k.shape, k.stride(), positions.shape, cos_sin.shape, layout,
        q.dtype, k.dtype, positions.dtype, cos_sin.dtype, placement(q, k, positions, cos_sin),
    )  # fmt: skip
    plan = _rotary_plans.get(key)
    if plan is None:
        dims = Dims("rotary_embedding")
        q_strides = dims.tensor("q", q, ("num_tokens", "num_query_heads", "head_size"), _ACTIVATIONS, contiguous=False)
        k_strides = dims.tensor("k", k, ("num_tokens", "num_kv_heads", "head_size"), (q.dtype,), contiguous=False)
        _check_rotary(dims, positions, cos_sin, layout)
        plan = _C.Rotary(
            dims.device_code, dims["num_tokens"], dims["max_positions"], [*q_strides[:2], *k_strides[:2]],
            [dims["num_query_heads"], dims["num_kv_heads"], dims["head_size"], dims["rot_dim"]],
            positions.dtype == torch.int64, LAYOUTS[layout], DTYPE_CODES[q.dtype],
        ).run  # fmt: skip
        _rotary_plans.remember(key, plan)
    plan(q.data_ptr(), k.data_ptr(), positions.data_ptr(), cos_sin.data_ptr(), stream_of(q))


def check_caches(dims: Dims, key_cache: torch.Tensor, value_cache: torch.Tensor, dtype: torch.dtype) -> int:
    """Check one layer's pair of caches for activations of `dtype`; the code of how they hold numbers.

    Raises:
        TypeError, ValueError: a dtype or shape that does not fit.
    """
    dims.tensor("key_cache", key_cache, _CACHE_DIMS, (dtype, *KV_DTYPE_CODES))
    dims.tensor("value_cache", value_cache, _CACHE_DIMS, (key_cache.dtype,))
    dims.one_of("block_size", BLOCK_SIZES)
    return KV_DTYPE_CODES.get(key_cache.dtype, 0)


def check_scales(dims: Dims, key_scale: torch.Tensor | None, value_scale: torch.Tensor | None) -> None:
    """Check the scales of an 8-bit cache, [num_kv_heads] float32 each. TypeError, ValueError."""
    for name, scale in (("key_scale", key_scale), ("value_scale", value_scale)):
        if scale is not None:
            dims.tensor(name, scale, ("num_kv_heads",), _FLOAT32)


def check_rope_and_store(
    dims: Dims,
    qkv: torch.Tensor,
    key_cache: torch.Tensor,
    value_cache: torch.Tensor,
    num_query_heads: int,
    rot_dim: int,
    layout: str,
) -> tuple[int, int]:
    """Check what does not depend on a step's tokens; dims has num_kv_heads. TypeError, ValueError.

    Returns:
        The row stride of qkv, and the code of how the caches hold numbers.
    """
    if layout not in LAYOUTS:
        raise ValueError(f"{dims.op}: layout {layout!r} is not supported; supported: {', '.join(LAYOUTS)}")
    kv_dtype = check_caches(dims, key_cache, value_cache, qkv.dtype)
    dims.sizes["width"] = (num_query_heads + 2 * dims["num_kv_heads"]) * dims["head_size"]
    row_stride = dims.tensor("qkv", qkv, ("num_tokens", "width"), _ACTIVATIONS, contiguous=False)[0]
    if rot_dim % 2 or not 0 < rot_dim <= dims["head_size"]:
        raise ValueError(f"{dims.op}: rot_dim {rot_dim} must be even and at most {dims['head_size']}")
    return row_stride, kv_dtype


def store_kv(
    key: torch.Tensor,
    value: torch.Tensor,
    key_cache: torch.Tensor,
    value_cache: torch.Tensor,
    slot_mapping: torch.Tensor,
    *,
    key_scale: torch.Tensor | None = None,
    value_scale: torch.Tensor | None = None,
) -> None:
    """Write each token's key and value into its slot; slot -1 skips the token.

    Shapes: key, value [num_tokens, num_kv_heads, head_size] (may be strided), slot_mapping [num_tokens] int64,
    key_scale, value_scale [num_kv_heads] float32 or None (1): an 8-bit cache holds number / scale, rounded to nearest
    even and clipped to the largest finite number.
    """
    signature = (
        key.shape, key.stride(), value.shape, value.stride(), key_cache.shape, value_cache.shape, slot_mapping.shape,
        key.dtype, value.dtype, key_cache.dtype, value_cache.dtype, slot_mapping.dtype,
        None if key_scale is None else key_scale.shape, None if value_scale is None else value_scale.shape,
        placement(key, value, key_cache, value_cache, slot_mapping, key_scale, value_scale),
    )  # fmt: skip
    plan = _store_plans.get(signature)
    if plan is None:
        dims = Dims("store_kv")
        token_dims = ("num_tokens", "num_kv_heads", "head_size")
        key_strides = dims.tensor("key", key, token_dims, _ACTIVATIONS, contiguous=False)
        value_strides = dims.tensor("value", value, token_dims, (key.dtype,), contiguous=False)
        kv_dtype = check_caches(dims, key_cache, value_cache, key.dtype)
        check_scales(dims, key_scale, value_scale)
        dims.tensor("slot_mapping", slot_mapping, ("num_tokens",), _INT64)
        plan = _C.StoreKv(
            dims.device_code, dims["num_tokens"], dims["num_blocks"], [*key_strides[:2], *value_strides[:2]],
            [dims["num_kv_heads"], dims["head_size"], dims["block_size"]], DTYPE_CODES[key.dtype], kv_dtype,
        ).run  # fmt: skip
        _store_plans.remember(signature, plan)
    plan(
        key.data_ptr(), value.data_ptr(), key_cache.data_ptr(), value_cache.data_ptr(), slot_mapping.data_ptr(),
        address(key_scale), address(value_scale), stream_of(key),
    )  # fmt: skip


def rope_and_store(
    qkv: torch.Tensor,
    positions: torch.Tensor,
    cos_sin: torch.Tensor,
    key_cache: torch.Tensor,
    value_cache: torch.Tensor,
    slot_mapping: torch.Tensor,
    num_query_heads: int,
    num_kv_heads: int,
    layout: Literal["neox", "interleaved"] = "neox",
    *,
    key_scale: torch.Tensor | None = None,
    value_scale: torch.Tensor | None = None,
) -> None:
    """Rotate q and k inside qkv in place and store k and v into the cache, in one pass.

    Shapes: qkv [num_tokens, (num_query_heads + 2 * num_kv_heads) * head_size] (rows may be strided), the others as for
    rotary_embedding and store_kv.
    """
    signature = (
        qkv.shape, qkv.stride(), positions.shape, cos_sin.shape, key_cache.shape, value_cache.shape, slot_mapping.shape,
        num_query_heads, num_kv_heads, layout, qkv.dtype, positions.dtype, key_cache.dtype, slot_mapping.dtype,
        value_cache.dtype, cos_sin.dtype,
        None if key_scale is None else key_scale.shape, None if value_scale is None else value_scale.shape,
        placement(qkv, positions, cos_sin, key_cache, value_cache, slot_mapping, key_scale, value_scale),
    )  # fmt: skip
    plan = _rope_store_plans.get(signature)
    if plan is None:
        plan = bind_rope_and_store(
            qkv, positions, cos_sin, key_cache, value_cache, slot_mapping, num_query_heads, num_kv_heads, layout,
            key_scale, value_scale,
        )  # fmt: skip
        _rope_store_plans.remember(signature, plan)
    plan(
        qkv.data_ptr(), positions.data_ptr(), cos_sin.data_ptr(), key_cache.data_ptr(), value_cache.data_ptr(),
        slot_mapping.data_ptr(), address(key_scale), address(value_scale), stream_of(qkv),
    )  # fmt: skip


def bind_rope_and_store(
    qkv: torch.Tensor,
    positions: torch.Tensor,
    cos_sin: torch.Tensor,
    key_cache: torch.Tensor,
    value_cache: torch.Tensor,
    slot_mapping: torch.Tensor,
    num_query_heads: int,
    num_kv_heads: int,
    layout: str,
    key_scale: torch.Tensor | None,
    value_scale: torch.Tensor | None,
) -> Callable[..., None]:
    """The native call for tensors of these shapes. TypeError, ValueError."""
    dims = Dims("rope_and_store", num_kv_heads=num_kv_heads)
    if num_query_heads < 1 or num_kv_heads < 1:
        raise ValueError(
            f"{dims.op}: num_query_heads {num_query_heads} and num_kv_heads {num_kv_heads} must be positive"
        )
    if key_cache.dim() == 4:
        width = "(num_query_heads + 2 * num_kv_heads) * head_size"
        dims.sizes[width] = (num_query_heads + 2 * num_kv_heads) * key_cache.shape[3]
    else:
        width = "width"
    row_stride = dims.tensor("qkv", qkv, ("num_tokens", width), _ACTIVATIONS, contiguous=False)[0]
    kv_dtype = check_caches(dims, key_cache, value_cache, qkv.dtype)
    check_scales(dims, key_scale, value_scale)
    _check_rotary(dims, positions, cos_sin, layout)
    dims.tensor("slot_mapping", slot_mapping, ("num_tokens",), _INT64)
    size, code = dims["head_size"], DTYPE_CODES[qkv.dtype]
    rotary = _C.Rotary(
        dims.device_code, dims["num_tokens"], dims["max_positions"], [row_stride, size, row_stride, size],
        [num_query_heads, num_kv_heads, size, dims["rot_dim"]], positions.dtype == torch.int64, LAYOUTS[layout], code,
    )  # fmt: skip
    store = _C.StoreKv(
        dims.device_code, dims["num_tokens"], dims["num_blocks"], [row_stride, size, row_stride, size],
        [num_kv_heads, size, dims["block_size"]], code, kv_dtype,
    )  # fmt: skip
    key_offset = num_query_heads * size * qkv.element_size()
    return _C.RopeAndStore(rotary, store, key_offset, key_offset + num_kv_heads * size * qkv.element_size()).run


def copy_blocks(
    key_caches: Sequence[torch.Tensor],
    value_caches: Sequence[torch.Tensor],
    sources: Sequence[int],
    destinations: Sequence[int],
) -> None:
    """Copy whole blocks, in order, inside the caches of all layers: destinations[i] becomes a copy of sources[i].

    Raises:
        ValueError: lists of unequal length, caches of unequal shape, or a block outside the cache.
    """
    if len(key_caches) != len(value_caches) or len(sources) != len(destinations):
        raise ValueError(
            f"copy_blocks: {len(key_caches)} key caches for {len(value_caches)} value caches, "
            f"{len(sources)} sources for {len(destinations)} destinations"
        )
    if not key_caches or not len(sources):
        return
    dims = Dims("copy_blocks")
    caches = [*key_caches, *value_caches]
    for cache in caches:
        dims.tensor("cache", cache, _CACHE_DIMS, (key_caches[0].dtype,))
    first = key_caches[0]
    _C.copy_blocks(
        dims.device_code, [c.data_ptr() for c in caches], list(sources), list(destinations), dims["num_blocks"],
        _block_bytes(dims, first), stream_of(first),
    )  # fmt: skip


def _block_bytes(dims: Dims, cache: torch.Tensor) -> int:
    return dims["num_kv_heads"] * dims["block_size"] * dims["head_size"] * cache.element_size()


def swap_blocks(
    caches: Sequence[torch.Tensor],
    host_caches: Sequence[torch.Tensor],
    blocks: Sequence[int],
    host_blocks: Sequence[int],
    direction: Literal["to_host", "to_device"],
) -> None:
    """Copy whole blocks between caches and their copies in host memory: blocks[i] to or from host_blocks[i] in each.

    caches, host_caches: of all layers, keys and values alike, [num_blocks, ...] and [num_host_blocks, ...]. Where the
    caches are on CUDA the host caches must be pinned, and the copies run in the order of the current stream.

    Raises:
        ValueError: lists of unequal length, caches of unequal shape, memory that is not pinned, or a block outside.
    """
    if direction not in _DIRECTIONS:
        raise ValueError(f"swap_blocks: direction {direction!r} is not supported; supported: {', '.join(_DIRECTIONS)}")
    if len(caches) != len(host_caches) or len(blocks) != len(host_blocks):
        raise ValueError(
            f"swap_blocks: {len(caches)} caches for {len(host_caches)} host caches, "
            f"{len(blocks)} blocks for {len(host_blocks)} host blocks"
        )
    if not caches or not len(blocks):
        return
    first = caches[0]
    dims, host_dims = Dims("swap_blocks"), Dims("swap_blocks", devices=CPU_ONLY)
    for cache, host_cache in zip(caches, host_caches, strict=True):
        dims.tensor("cache", cache, _CACHE_DIMS, (first.dtype,))
        host_dims.sizes.update({name: dims[name] for name in _CACHE_DIMS[1:]})
        host_dims.tensor("host_cache", host_cache, ("num_host_blocks", *_CACHE_DIMS[1:]), (first.dtype,))
        if cache.is_cuda and not host_cache.is_pinned():
            raise ValueError("swap_blocks: host_cache must be in pinned memory")
    _C.swap_blocks(
        dims.device_code, [c.data_ptr() for c in caches], [c.data_ptr() for c in host_caches], list(blocks),
        list(host_blocks), [dims["num_blocks"], host_dims["num_host_blocks"]], _block_bytes(dims, first),
        _DIRECTIONS[direction], stream_of(first),
    )  # fmt: skip
