"""Rotary embedding, the paged KV cache, and attention through it.

A layer's cache is two contiguous tensors [num_blocks, num_kv_heads, block_size, head_size] of the activations'
dtype. The slot of a token is block * block_size + offset.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal

import torch

from worker.kernels._checks import BLOCK_SIZES, DTYPE_CODES, HEAD_SIZES, Dims, PlanCache
from worker.kernels._native import load_native

_C = load_native()
_ACTIVATIONS = tuple(DTYPE_CODES)
_INT32 = (torch.int32,)
_INT64 = (torch.int64,)
_FLOAT32 = (torch.float32,)
LAYOUTS = {"neox": 0, "interleaved": 1}
_CACHE_DIMS = ("num_blocks", "num_kv_heads", "block_size", "head_size")

_rotary_plans = PlanCache()
_store_plans = PlanCache()
_rope_store_plans = PlanCache()
_attention_plans = PlanCache()


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
        q.dtype, k.dtype, positions.dtype, cos_sin.dtype,
    )  # fmt: skip
    plan = _rotary_plans.get(key)
    if plan is None:
        dims = Dims("rotary_embedding")
        q_strides = dims.tensor("q", q, ("num_tokens", "num_query_heads", "head_size"), _ACTIVATIONS, contiguous=False)
        k_strides = dims.tensor("k", k, ("num_tokens", "num_kv_heads", "head_size"), (q.dtype,), contiguous=False)
        _check_rotary(dims, positions, cos_sin, layout)
        plan = _C.Rotary(
            dims["num_tokens"], dims["max_positions"], [*q_strides[:2], *k_strides[:2]],
            [dims["num_query_heads"], dims["num_kv_heads"], dims["head_size"], dims["rot_dim"]],
            positions.dtype == torch.int64, LAYOUTS[layout], DTYPE_CODES[q.dtype],
        ).run  # fmt: skip
        _rotary_plans.remember(key, plan)
    plan(q.data_ptr(), k.data_ptr(), positions.data_ptr(), cos_sin.data_ptr())


def check_caches(dims: Dims, key_cache: torch.Tensor, value_cache: torch.Tensor, dtype: torch.dtype) -> None:
    """Check one layer's pair of caches. TypeError, ValueError."""
    dims.tensor("key_cache", key_cache, _CACHE_DIMS, (dtype,))
    dims.tensor("value_cache", value_cache, _CACHE_DIMS, (dtype,))
    dims.one_of("block_size", BLOCK_SIZES)


def store_kv(
    key: torch.Tensor,
    value: torch.Tensor,
    key_cache: torch.Tensor,
    value_cache: torch.Tensor,
    slot_mapping: torch.Tensor,
) -> None:
    """Write each token's key and value into its slot; slot -1 skips the token.

    Shapes: key, value [num_tokens, num_kv_heads, head_size] (may be strided), slot_mapping [num_tokens] int64.
    """
    signature = (
        key.shape, key.stride(), value.shape, value.stride(), key_cache.shape, value_cache.shape, slot_mapping.shape,
        key.dtype, value.dtype, key_cache.dtype, value_cache.dtype, slot_mapping.dtype,
    )  # fmt: skip
    plan = _store_plans.get(signature)
    if plan is None:
        dims = Dims("store_kv")
        token_dims = ("num_tokens", "num_kv_heads", "head_size")
        key_strides = dims.tensor("key", key, token_dims, _ACTIVATIONS, contiguous=False)
        value_strides = dims.tensor("value", value, token_dims, (key.dtype,), contiguous=False)
        check_caches(dims, key_cache, value_cache, key.dtype)
        dims.tensor("slot_mapping", slot_mapping, ("num_tokens",), _INT64)
        plan = _C.StoreKv(
            dims["num_tokens"], dims["num_blocks"], [*key_strides[:2], *value_strides[:2]],
            dims["num_kv_heads"], dims["head_size"], dims["block_size"], DTYPE_CODES[key.dtype],
        ).run  # fmt: skip
        _store_plans.remember(signature, plan)
    plan(key.data_ptr(), value.data_ptr(), key_cache.data_ptr(), value_cache.data_ptr(), slot_mapping.data_ptr())


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
) -> None:
    """Rotate q and k inside qkv in place and store k and v into the cache, in one pass.

    Shapes: qkv [num_tokens, (num_query_heads + 2 * num_kv_heads) * head_size] (rows may be strided), the others as for
    rotary_embedding and store_kv.
    """
    signature = (
        qkv.shape, qkv.stride(), positions.shape, cos_sin.shape, key_cache.shape, value_cache.shape, slot_mapping.shape,
        num_query_heads, num_kv_heads, layout, qkv.dtype, positions.dtype, key_cache.dtype, slot_mapping.dtype,
    )  # fmt: skip
    plan = _rope_store_plans.get(signature)
    if plan is None:
        plan = _rope_store_plan(
            qkv, positions, cos_sin, key_cache, value_cache, slot_mapping, num_query_heads, num_kv_heads, layout
        )
        _rope_store_plans.remember(signature, plan)
    plan(
        qkv.data_ptr(), positions.data_ptr(), cos_sin.data_ptr(), key_cache.data_ptr(), value_cache.data_ptr(),
        slot_mapping.data_ptr(),
    )  # fmt: skip


def _rope_store_plan(
    qkv: torch.Tensor,
    positions: torch.Tensor,
    cos_sin: torch.Tensor,
    key_cache: torch.Tensor,
    value_cache: torch.Tensor,
    slot_mapping: torch.Tensor,
    num_query_heads: int,
    num_kv_heads: int,
    layout: str,
) -> object:
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
    check_caches(dims, key_cache, value_cache, qkv.dtype)
    _check_rotary(dims, positions, cos_sin, layout)
    dims.tensor("slot_mapping", slot_mapping, ("num_tokens",), _INT64)
    size, code = dims["head_size"], DTYPE_CODES[qkv.dtype]
    rotary = _C.Rotary(
        dims["num_tokens"], dims["max_positions"], [row_stride, size, row_stride, size],
        [num_query_heads, num_kv_heads, size, dims["rot_dim"]], positions.dtype == torch.int64, LAYOUTS[layout], code,
    )  # fmt: skip
    store = _C.StoreKv(
        dims["num_tokens"], dims["num_blocks"], [row_stride, size, row_stride, size], num_kv_heads, size,
        dims["block_size"], code,
    )  # fmt: skip
    key_offset = num_query_heads * size * qkv.element_size()
    return _C.RopeAndStore(rotary, store, key_offset, key_offset + num_kv_heads * size * qkv.element_size()).run


def paged_attention(
    out: torch.Tensor,
    query: torch.Tensor,
    key_cache: torch.Tensor,
    value_cache: torch.Tensor,
    block_tables: torch.Tensor,
    seq_slots: torch.Tensor | None,
    query_start: torch.Tensor,
    context_lens: torch.Tensor,
    scale: float,
    *,
    window: int = -1,
    soft_cap: float = 0.0,
    alibi_slopes: torch.Tensor | None = None,
    sinks: torch.Tensor | None = None,
    lse: torch.Tensor | None = None,
) -> None:
    """Causal attention of each sequence's new tokens to all its tokens so far; prefill, chunks and decode in one call.

    Shapes:
        out, query: [num_tokens, num_query_heads, head_size], tokens of a sequence consecutive; heads and tokens may be
            strided. num_query_heads is a multiple of num_kv_heads.
        block_tables: [num_table_rows, max_blocks] int32; rows may be strided.
        seq_slots: [num_seqs] int32, the row of block_tables of each sequence; None: row b for sequence b.
        query_start: [num_seqs + 1] int32, where the new tokens of each sequence begin.
        context_lens: [num_seqs] int32, tokens in the cache, this step's included.
        alibi_slopes, sinks: [num_query_heads] float32. A sink is a logit without a value.
        lse: [num_tokens, num_query_heads] float32, receives the log of each softmax denominator.

    window: keys that a token sees, itself included; -1 is all. soft_cap: scores become cap * tanh(score / cap); 0
    is off.

    The result of a token depends neither on the batch, nor on how its prompt was cut into chunks, nor on the number of
    threads, nor on which physical blocks hold the cache: not in one bit.
    """
    key = (
        out.shape, out.stride(), query.shape, query.stride(), key_cache.shape, value_cache.shape, block_tables.shape,
        block_tables.stride(), None if seq_slots is None else seq_slots.shape, query_start.shape, context_lens.shape,
        out.dtype, query.dtype, key_cache.dtype, value_cache.dtype, block_tables.dtype, query_start.dtype,
        context_lens.dtype,
    )  # fmt: skip
    plan = _attention_plans.get(key)
    if plan is None:
        plan = _attention_plan(
            out, query, key_cache, value_cache, block_tables, seq_slots, query_start, context_lens
        )  # fmt: skip
        _attention_plans.remember(key, plan)
    if alibi_slopes is not None or sinks is not None or lse is not None:
        _check_extras(query, alibi_slopes, sinks, lse)
    plan(
        out.data_ptr(), query.data_ptr(), key_cache.data_ptr(), value_cache.data_ptr(), block_tables.data_ptr(),
        0 if seq_slots is None else seq_slots.data_ptr(), query_start.data_ptr(), context_lens.data_ptr(),
        scale, window, soft_cap,
        0 if alibi_slopes is None else alibi_slopes.data_ptr(),
        0 if sinks is None else sinks.data_ptr(),
        0 if lse is None else lse.data_ptr(),
    )  # fmt: skip


def check_attention_sizes(
    dims: Dims, out: torch.Tensor, query: torch.Tensor, key_cache: torch.Tensor, value_cache: torch.Tensor
) -> list[int]:
    """Check what does not depend on the batch; token and head strides of out, then of query. TypeError, ValueError."""
    token_dims = ("num_tokens", "num_query_heads", "head_size")
    query_strides = dims.tensor("query", query, token_dims, _ACTIVATIONS, contiguous=False)
    out_strides = dims.tensor("out", out, token_dims, (query.dtype,), contiguous=False)
    dims.one_of("head_size", HEAD_SIZES)
    check_caches(dims, key_cache, value_cache, query.dtype)
    if dims["num_kv_heads"] < 1 or dims["num_query_heads"] % dims["num_kv_heads"] != 0:
        raise ValueError(
            f"{dims.op}: num_query_heads {dims['num_query_heads']} is not a multiple "
            f"of num_kv_heads {dims['num_kv_heads']}"
        )
    return [*out_strides[:2], *query_strides[:2]]


def _attention_plan(
    out: torch.Tensor,
    query: torch.Tensor,
    key_cache: torch.Tensor,
    value_cache: torch.Tensor,
    block_tables: torch.Tensor,
    seq_slots: torch.Tensor | None,
    query_start: torch.Tensor,
    context_lens: torch.Tensor,
) -> object:
    dims = Dims("paged_attention")
    strides = check_attention_sizes(dims, out, query, key_cache, value_cache)
    table_strides = dims.tensor(
        "block_tables", block_tables, ("num_table_rows", "max_blocks"), _INT32, contiguous=False
    )
    dims.tensor("context_lens", context_lens, ("num_seqs",), _INT32)
    dims.sizes["num_seqs + 1"] = dims["num_seqs"] + 1
    dims.tensor("query_start", query_start, ("num_seqs + 1",), _INT32)
    if seq_slots is not None:
        dims.tensor("seq_slots", seq_slots, ("num_seqs",), _INT32)
    return _C.PagedAttention(
        [dims["num_tokens"], dims["num_blocks"], dims["num_table_rows"], dims["max_blocks"]],
        [*strides, table_strides[0]],
        [dims["num_query_heads"], dims["num_kv_heads"], dims["head_size"], dims["block_size"]],
        dims["num_seqs"], DTYPE_CODES[query.dtype],
    ).run  # fmt: skip


def _check_extras(
    query: torch.Tensor, alibi_slopes: torch.Tensor | None, sinks: torch.Tensor | None, lse: torch.Tensor | None
) -> None:
    dims = Dims("paged_attention", num_tokens=query.shape[0], num_query_heads=query.shape[1])
    if alibi_slopes is not None:
        dims.tensor("alibi_slopes", alibi_slopes, ("num_query_heads",), _FLOAT32)
    if sinks is not None:
        dims.tensor("sinks", sinks, ("num_query_heads",), _FLOAT32)
    if lse is not None:
        dims.tensor("lse", lse, ("num_tokens", "num_query_heads"), _FLOAT32)


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
    block_bytes = dims["num_kv_heads"] * dims["block_size"] * dims["head_size"] * first.element_size()
    _C.copy_blocks([c.data_ptr() for c in caches], list(sources), list(destinations), dims["num_blocks"], block_bytes)
