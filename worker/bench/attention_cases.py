"""Attention through the paged cache: decode and prefill, beside torch on contiguous memory and FlashInfer on pages."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import partial

import torch

from worker import kernels
from worker.bench.attention_peers import flash_attention_3, flashinfer_decode, flashinfer_prefill, sdpa_contenders
from worker.bench.case import OURS, Candidate, Case, Contender, Site, Work, dtype_name
from worker.bench.models import LLAMA_2_7B, LLAMA_3_1B, LLAMA_3_8B, TINY, LayerShape
from worker.bench.paged_batch import PagedBatch

# (batch, context) of each model. A cell's cache must fit the device beside its contiguous copy.
_CUDA_DECODE: dict[LayerShape, list[tuple[int, int]]] = {
    LLAMA_3_8B: [
        (batch, context)
        for context in (512, 2048, 8192, 32768)
        for batch in (1, 16, 64, 256)
        if batch * context < 256 * 32768
    ],
    LLAMA_2_7B: [(1, 512), (16, 512), (64, 512), (256, 512), (1, 2048), (16, 2048), (64, 2048), (1, 8192)],
}
_CUDA_QUICK_DECODE = {("8B", 64, 2048), ("8B", 1, 8192), ("7B", 16, 512)}
_CUDA_FP8_DECODE: dict[LayerShape, list[tuple[int, int]]] = {
    LLAMA_3_8B: [(16, 2048), (64, 2048), (256, 2048), (1, 8192), (16, 8192), (64, 8192)],
    LLAMA_2_7B: [(64, 2048)],
}
_CUDA_PREFILL: dict[LayerShape, list[tuple[int, int]]] = {
    model: [(1, 2048), (1, 8192), (8, 2048)] for model in (LLAMA_3_8B, LLAMA_2_7B)
}
_CPU_DECODE = {LLAMA_3_8B: [(1, 2048), (16, 2048), (1, 32768), (8, 8192)], LLAMA_3_1B: [(16, 2048), (1, 32768)]}
_CPU_FP8_DECODE = {LLAMA_3_8B: [(16, 2048), (1, 32768)]}
_CPU_PREFILL = {LLAMA_3_8B: [(1, 512), (1, 2048), (4, 512)], LLAMA_3_1B: [(1, 2048)]}
_TINY = {TINY: [(1, 64), (3, 48)]}


def attention_cases(site: Site) -> Iterator[Case]:
    """Cases of decode_attention, decode_attention_fp8 and prefill_attention."""
    if site.is_dry:
        decode = fp8 = prefill = _TINY
    elif site.is_cuda:
        decode, fp8, prefill = _CUDA_DECODE, _CUDA_FP8_DECODE, _CUDA_PREFILL
    else:
        decode, fp8, prefill = _CPU_DECODE, _CPU_FP8_DECODE, _CPU_PREFILL
    for model, cells in decode.items():
        for index, (batch, context) in enumerate(cells):
            quick = (model.name, batch, context) in _CUDA_QUICK_DECODE if site.is_cuda else index == 1
            yield _decode_case(site, model, batch, context, None, quick)
    for model, cells in fp8.items():
        for index, (batch, context) in enumerate(cells):
            yield _decode_case(site, model, batch, context, torch.float8_e4m3fn, index == 1)
    for model, cells in prefill.items():
        for index, (batch, length) in enumerate(cells):
            yield _prefill_case(site, model, batch, length, index == 0)


def _decode_case(
    site: Site, model: LayerShape, batch: int, context: int, kv_dtype: torch.dtype | None, is_quick: bool
) -> Case:
    dtype = torch.bfloat16
    stored = dtype if kv_dtype is None else kv_dtype
    # Queries and results are left out: at 512 tokens of context they are less than a hundredth.
    num_bytes = 2 * batch * context * model.num_kv_heads * model.head_size * stored.itemsize
    kernel = "decode_attention" if kv_dtype is None else "decode_attention_fp8"
    shape = f"{model.name} {batch} x {context}" + ("" if kv_dtype is None else f" {dtype_name(kv_dtype)}")
    return Case(
        kernel, shape, dtype, Work(num_bytes, "read"),
        lambda: _decode_contenders(site, model, batch, context, kv_dtype, num_bytes), is_quick,
    )  # fmt: skip


def _decode_contenders(
    site: Site, model: LayerShape, batch: int, context: int, kv_dtype: torch.dtype | None, num_bytes: int
) -> Sequence[Contender]:
    paged = PagedBatch(
        site, model, num_sequences=batch, context=context, num_queries=1, copies=site.num_copies(num_bytes),
        kv_dtype=kv_dtype,
    )  # fmt: skip
    contenders = [Contender(OURS, lambda: _ours(paged))]
    if kv_dtype is None:
        contenders += [*sdpa_contenders(paged), *flashinfer_decode(paged), *flash_attention_3(paged)]
    return contenders


def _prefill_case(site: Site, model: LayerShape, batch: int, length: int, is_quick: bool) -> Case:
    dtype = torch.bfloat16
    tokens = batch * length
    num_bytes = 2 * tokens * (model.num_query_heads + model.num_kv_heads) * model.head_size * dtype.itemsize
    # Half of all pairs of a query and a key, two products each.
    flops = 2 * batch * model.num_query_heads * length * length * model.head_size
    return Case(
        "prefill_attention", f"{model.name} {batch} x {length}", dtype, Work(num_bytes, "copy", flops),
        lambda: _prefill_contenders(site, model, batch, length), is_quick,
    )  # fmt: skip


def _prefill_contenders(site: Site, model: LayerShape, batch: int, length: int) -> Sequence[Contender]:
    paged = PagedBatch(site, model, num_sequences=batch, context=length, num_queries=length, copies=1)
    return [
        Contender(OURS, lambda: _ours(paged)),
        *sdpa_contenders(paged),
        *flashinfer_prefill(paged),
        *flash_attention_3(paged),
    ]


def _ours(paged: PagedBatch) -> Candidate:
    plan = None
    if paged.site.is_cuda:
        geometry = kernels.AttentionGeometry(
            paged.model.num_query_heads, paged.model.num_kv_heads, paged.model.head_size, paged.query.dtype,
            paged.site.device, kv_dtype=paged.caches[0][0].dtype,
        )  # fmt: skip
        plan = kernels.plan_attention(paged.query_start.cpu(), paged.context_lens.cpu(), geometry)
    out = torch.empty_like(paged.query)
    calls = [
        partial(
            kernels.paged_attention, out, paged.query, key_cache, value_cache, paged.block_tables, None,
            paged.query_start, paged.context_lens, paged.scale, plan=plan,
        )
        for key_cache, value_cache in paged.caches
    ]  # fmt: skip
    return Candidate(calls, result=lambda: out)
