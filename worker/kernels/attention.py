"""Attention through the paged KV cache, and the joining of partial results."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable

import torch

from worker.kernels._checks import DTYPE_CODES, HEAD_SIZES, Dims, PlanCache, address, placement, stream_of
from worker.kernels._native import load_native
from worker.kernels.attention_plan import AttentionPlan
from worker.kernels.kv_cache import check_caches, check_scales

_C = load_native()
_ACTIVATIONS = tuple(DTYPE_CODES)
_INT32 = (torch.int32,)
_FLOAT32 = (torch.float32,)
# Which kernel runs: what the plan chose, or the one of that name.
_BY_PLAN, _V1, _V2 = 0, 1, 2

_TRACING = os.environ.get("PAGEMILL_TRACE_KERNELS", "0") not in ("", "0")

_attention_plans = PlanCache()


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
    key_scale: torch.Tensor | None = None,
    value_scale: torch.Tensor | None = None,
    plan: AttentionPlan | None = None,
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
        lse: [num_tokens, num_query_heads] float32, receives the natural log of each softmax denominator.
        key_scale, value_scale: [num_kv_heads] float32 or None (1): what the numbers of an 8-bit cache are multiplied
            with.

    window: keys that a token sees, itself included; -1 is all. soft_cap: scores become cap * tanh(score / cap); 0
    is off. plan: on CUDA, of the same query_start, context_lens, window, heads and dtypes; on the CPU it is ignored.

    On the CPU the result of a token depends neither on the batch, nor on how its prompt was cut into chunks, nor on the
    number of threads, nor on which physical blocks hold the cache: not in one bit. On CUDA the same holds for the
    physical blocks, and for the batch where the plan has fixed partitions.
    """
    _run(
        _BY_PLAN, (out, query, key_cache, value_cache, block_tables, seq_slots, query_start, context_lens,
        alibi_slopes, sinks, lse, key_scale, value_scale), scale, window, soft_cap, plan,
    )  # fmt: skip


def paged_attention_v1(
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
    key_scale: torch.Tensor | None = None,
    value_scale: torch.Tensor | None = None,
    plan: AttentionPlan | None = None,
) -> None:
    """`paged_attention` of sequences with few new tokens, in one pass over all keys of a sequence and KV head.

    On CUDA the plan must be of version "v1" (ValueError otherwise). On the CPU there is one kernel for all.
    """
    _run(
        _V1, (out, query, key_cache, value_cache, block_tables, seq_slots, query_start, context_lens,
        alibi_slopes, sinks, lse, key_scale, value_scale), scale, window, soft_cap, plan,
    )  # fmt: skip


def paged_attention_v2(
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
    key_scale: torch.Tensor | None = None,
    value_scale: torch.Tensor | None = None,
    plan: AttentionPlan | None = None,
) -> None:
    """`paged_attention` of sequences with few new tokens, in pieces of the keys that the last to finish joins.

    On CUDA the plan must be of version "v2" (ValueError otherwise). On the CPU there is one kernel for all.
    """
    _run(
        _V2, (out, query, key_cache, value_cache, block_tables, seq_slots, query_start, context_lens,
        alibi_slopes, sinks, lse, key_scale, value_scale), scale, window, soft_cap, plan,
    )  # fmt: skip


def _run(
    entry: int,
    tensors: tuple[torch.Tensor | None, ...],
    scale: float,
    window: int,
    soft_cap: float,
    plan: AttentionPlan | None,
) -> None:
    key = (
        *[None if t is None else (t.shape, t.stride(), t.dtype) for t in tensors],
        placement(*tensors),
    )  # fmt: skip
    run = _attention_plans.get(key)
    if run is None:
        run = _attention_plans.remember(key, bind_attention(*tensors))
    query = tensors[1]
    launch = None
    if query.is_cuda:
        launch = _checked_launch(entry, plan)
        if is_tracing():
            trace(key_cache=tensors[2], block_tables=tensors[4], seq_slots=tensors[5], context_lens=tensors[7])
    run(entry, [address(t) for t in tensors], scale, window, soft_cap, launch, stream_of(query))


def _checked_launch(entry: int, plan: AttentionPlan | None) -> object:
    if plan is None:
        raise ValueError("paged_attention: plan is needed on CUDA: see plan_attention")
    if entry != _BY_PLAN and entry != plan.version:
        raise ValueError(f"paged_attention_v{entry}: the plan is of version v{plan.version}")
    return plan.launch


def is_tracing() -> bool:
    """Whether $PAGEMILL_TRACE_KERNELS asks for a line per launch, and the current stream can be waited for."""
    return _TRACING and not torch.cuda.is_current_stream_capturing()


def trace(
    key_cache: torch.Tensor, block_tables: torch.Tensor, seq_slots: torch.Tensor | None, context_lens: torch.Tensor
) -> None:
    """Write the line of one launch, which the CPU kernels write themselves; it waits for the device."""
    lengths = context_lens.tolist()
    if not lengths:
        return
    row = 0 if seq_slots is None else int(seq_slots[0])
    num_blocks = -(-lengths[0] // key_cache.shape[2])
    blocks = ",".join(map(str, block_tables[row, :num_blocks].tolist()))
    lens = ",".join(map(str, lengths))
    line = f"PagedAttentionKernel: block_table=[{blocks}], context_len=[{lens}], block_size={key_cache.shape[2]}"
    print(line, file=sys.stderr)


def check_attention_sizes(
    dims: Dims, out: torch.Tensor, query: torch.Tensor, key_cache: torch.Tensor, value_cache: torch.Tensor
) -> tuple[list[int], int]:
    """Check what does not depend on the batch. TypeError, ValueError.

    Returns:
        Token and head strides of out, then of query; and the code of how the cache holds numbers.
    """
    token_dims = ("num_tokens", "num_query_heads", "head_size")
    query_strides = dims.tensor("query", query, token_dims, _ACTIVATIONS, contiguous=False)
    out_strides = dims.tensor("out", out, token_dims, (query.dtype,), contiguous=False)
    dims.one_of("head_size", HEAD_SIZES)
    kv_dtype = check_caches(dims, key_cache, value_cache, query.dtype)
    if dims["num_kv_heads"] < 1 or dims["num_query_heads"] % dims["num_kv_heads"] != 0:
        raise ValueError(
            f"{dims.op}: num_query_heads {dims['num_query_heads']} is not a multiple "
            f"of num_kv_heads {dims['num_kv_heads']}"
        )
    return [*out_strides[:2], *query_strides[:2]], kv_dtype


def bind_attention(
    out: torch.Tensor,
    query: torch.Tensor,
    key_cache: torch.Tensor,
    value_cache: torch.Tensor,
    block_tables: torch.Tensor,
    seq_slots: torch.Tensor | None,
    query_start: torch.Tensor,
    context_lens: torch.Tensor,
    alibi_slopes: torch.Tensor | None,
    sinks: torch.Tensor | None,
    lse: torch.Tensor | None,
    key_scale: torch.Tensor | None,
    value_scale: torch.Tensor | None,
) -> Callable[..., None]:
    """The native call for tensors of these shapes. TypeError, ValueError."""
    dims = Dims("paged_attention")
    strides, kv_dtype = check_attention_sizes(dims, out, query, key_cache, value_cache)
    table_strides = dims.tensor(
        "block_tables", block_tables, ("num_table_rows", "max_blocks"), _INT32, contiguous=False
    )
    dims.tensor("context_lens", context_lens, ("num_seqs",), _INT32)
    dims.sizes["num_seqs + 1"] = dims["num_seqs"] + 1
    dims.tensor("query_start", query_start, ("num_seqs + 1",), _INT32)
    if seq_slots is not None:
        dims.tensor("seq_slots", seq_slots, ("num_seqs",), _INT32)
    if alibi_slopes is not None:
        dims.tensor("alibi_slopes", alibi_slopes, ("num_query_heads",), _FLOAT32)
    if sinks is not None:
        dims.tensor("sinks", sinks, ("num_query_heads",), _FLOAT32)
    if lse is not None:
        dims.tensor("lse", lse, ("num_tokens", "num_query_heads"), _FLOAT32)
    check_scales(dims, key_scale, value_scale)
    return _C.PagedAttention(
        dims.device_code, [dims["num_tokens"], dims["num_blocks"], dims["num_table_rows"], dims["max_blocks"]],
        [*strides, table_strides[0]],
        [dims["num_query_heads"], dims["num_kv_heads"], dims["head_size"], dims["block_size"]],
        dims["num_seqs"], DTYPE_CODES[query.dtype], kv_dtype,
    ).run  # fmt: skip


def merge_attention(
    out: torch.Tensor,
    lse: torch.Tensor | None,
    a: torch.Tensor,
    lse_a: torch.Tensor,
    b: torch.Tensor,
    lse_b: torch.Tensor,
) -> None:
    """Join two results of attention of the same queries to disjoint sets of keys, as cascade and context parallel do.

    Shapes: out, a, b [num_tokens, num_query_heads, head_size] contiguous, of one dtype; lse, lse_a, lse_b [num_tokens,
    num_query_heads] float32, natural logs of softmax denominators; -inf is a side that saw no key. out may be a or b,
    and lse may be lse_a or lse_b; lse may be None.
    """
    dims = Dims("merge_attention")
    rows = ("num_tokens", "num_query_heads")
    dims.tensor("out", out, (*rows, "head_size"), _ACTIVATIONS)
    for name, tensor in (("a", a), ("b", b)):
        dims.tensor(name, tensor, (*rows, "head_size"), (out.dtype,))
    for name, tensor in (("lse", lse), ("lse_a", lse_a), ("lse_b", lse_b)):
        if tensor is not None or name != "lse":
            dims.tensor(name, tensor, rows, _FLOAT32)
    _C.merge_attention(
        dims.device_code, [address(t) for t in (out, lse, a, lse_a, b, lse_b)],
        dims["num_tokens"] * dims["num_query_heads"], dims["head_size"], DTYPE_CODES[out.dtype], stream_of(out),
    )  # fmt: skip
