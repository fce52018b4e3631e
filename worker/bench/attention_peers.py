"""Other implementations of attention: torch's on contiguous memory; FlashInfer's and FlashAttention-3, as vLLM carries
it, on the same pages."""

from __future__ import annotations

import functools
import importlib
import importlib.util
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel

from worker.bench.case import Candidate, Contender
from worker.bench.paged_batch import BLOCK_SIZE, PagedBatch

_WORKSPACE_BYTES = 512 << 20


def sdpa_contenders(paged: PagedBatch) -> Iterator[Contender]:
    """torch's scaled_dot_product_attention: on CUDA by FlashAttention and by cuDNN, on the CPU what it chooses."""
    backends = {"torch": None}
    if paged.site.is_cuda:
        backends = {"torch_flash": SDPBackend.FLASH_ATTENTION, "torch_cudnn": SDPBackend.CUDNN_ATTENTION}
    for name, backend in backends.items():
        yield Contender(f"{name}_contiguous", partial(_sdpa, paged, backend), is_same_work=False)


def _sdpa(paged: PagedBatch, backend: SDPBackend | None) -> Candidate:
    model = paged.model
    shape = (paged.num_sequences, paged.num_queries, model.num_query_heads, model.head_size)
    query = paged.query.view(shape).transpose(1, 2)
    latest: list[torch.Tensor] = []

    def call(key: torch.Tensor, value: torch.Tensor) -> None:
        out = F.scaled_dot_product_attention(
            query, key, value, is_causal=not paged.is_decode, scale=paged.scale,
            enable_gqa=model.num_query_heads != model.num_kv_heads,
        )  # fmt: skip
        latest[:] = [out]

    def call_with_backend(key: torch.Tensor, value: torch.Tensor) -> None:
        with sdpa_kernel([backend]):
            call(key, value)

    run = call if backend is None else call_with_backend
    calls = [partial(run, *paged.contiguous(copy)) for copy in range(len(paged.caches))]
    return Candidate(calls, result=lambda: latest[0].transpose(1, 2).reshape(paged.query.shape))


@functools.cache
def _flashinfer() -> Any:
    return importlib.import_module("flashinfer")


def _has_flashinfer(paged: PagedBatch) -> bool:
    return paged.site.is_cuda and importlib.util.find_spec("flashinfer") is not None


# FlashInfer's names of how a page is laid out: ours, heads before tokens, and tokens before heads.
_LAYOUTS = ("HND", "NHD")


def flashinfer_decode(paged: PagedBatch) -> Iterator[Contender]:
    """Its decode kernels with and without tensor cores, in both layouts of a page."""
    if not _has_flashinfer(paged):
        return
    for layout in _LAYOUTS:
        for cores in ("tensor", "cuda"):
            yield Contender(f"flashinfer_{cores}_{layout.lower()}", partial(_flashinfer_decode, paged, layout, cores))


def flashinfer_prefill(paged: PagedBatch) -> Iterator[Contender]:
    if not _has_flashinfer(paged):
        return
    for layout in _LAYOUTS:
        for backend in ("fa2", "fa3"):
            yield Contender(
                f"flashinfer_{backend}_{layout.lower()}", partial(_flashinfer_prefill, paged, layout, backend)
            )


def _page_arguments(paged: PagedBatch) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Where the pages of each sequence begin, the pages, and how full each last one is."""
    blocks = paged.context // BLOCK_SIZE
    starts = torch.arange(paged.num_sequences + 1, dtype=torch.int32) * blocks
    return starts, paged.block_tables.view(-1), torch.full((paged.num_sequences,), BLOCK_SIZE, dtype=torch.int32)


def _in_layout(paged: PagedBatch, layout: str) -> list[tuple[torch.Tensor, torch.Tensor]]:
    return paged.caches if layout == "HND" else paged.token_major_caches


def _candidate(paged: PagedBatch, wrapper: Any, layout: str) -> Candidate:
    out = torch.empty_like(paged.query)
    run: Callable[..., Any] = wrapper.run
    return Candidate(
        [partial(run, paged.query, cache, out=out) for cache in _in_layout(paged, layout)], result=lambda: out
    )


def _flashinfer_decode(paged: PagedBatch, layout: str, cores: str) -> Candidate:
    model = paged.model
    workspace = torch.empty(_WORKSPACE_BYTES, dtype=torch.uint8, device=paged.site.device)
    wrapper = _flashinfer().BatchDecodeWithPagedKVCacheWrapper(workspace, layout, use_tensor_cores=cores == "tensor")
    starts, pages, last = _page_arguments(paged)
    wrapper.plan(
        starts, pages, last, model.num_query_heads, model.num_kv_heads, model.head_size, BLOCK_SIZE,
        q_data_type=paged.query.dtype, kv_data_type=paged.query.dtype, sm_scale=paged.scale,
    )  # fmt: skip
    return _candidate(paged, wrapper, layout)


def _flashinfer_prefill(paged: PagedBatch, layout: str, backend: str) -> Candidate:
    model = paged.model
    workspace = torch.empty(_WORKSPACE_BYTES, dtype=torch.uint8, device=paged.site.device)
    wrapper = _flashinfer().BatchPrefillWithPagedKVCacheWrapper(workspace, layout, backend=backend)
    starts, pages, last = _page_arguments(paged)
    device = paged.site.device
    wrapper.plan(
        paged.query_start, starts.to(device), pages, last.to(device), model.num_query_heads, model.num_kv_heads,
        model.head_size, BLOCK_SIZE, causal=True, q_data_type=paged.query.dtype, kv_data_type=paged.query.dtype,
        sm_scale=paged.scale,
    )  # fmt: skip
    return _candidate(paged, wrapper, layout)


# Pieces of the keys of a sequence: chosen by the library, or as many as it has at most.
_FA3_SPLITS = (0, 32)


def flash_attention_3(paged: PagedBatch) -> Iterator[Contender]:
    """Decode by its own choice of pieces and with 32; prefill without."""
    if not paged.site.is_cuda or importlib.util.find_spec("vllm") is None:
        return
    for splits in _FA3_SPLITS if paged.is_decode else (0,):
        name = f"fa3_{splits or 'auto'}_splits" if paged.is_decode else "fa3"
        yield Contender(name, partial(_flash_attention_3, paged, splits))


def _flash_attention_3(paged: PagedBatch, splits: int) -> Candidate:
    library = importlib.import_module("vllm.vllm_flash_attn.flash_attn_interface")
    model = paged.model
    more: dict[str, Any] = {}
    if paged.is_decode:
        more["num_splits"] = splits
        more["scheduler_metadata"] = library.get_scheduler_metadata(
            batch_size=paged.num_sequences, max_seqlen_q=paged.num_queries, max_seqlen_k=paged.context,
            num_heads_q=model.num_query_heads, num_heads_kv=model.num_kv_heads, headdim=model.head_size,
            cache_seqlens=paged.context_lens, qkv_dtype=paged.query.dtype, cu_seqlens_q=paged.query_start,
            page_size=BLOCK_SIZE, causal=True, window_size=(-1, -1), num_splits=splits,
        )  # fmt: skip
    out = torch.empty_like(paged.query)
    calls = [
        partial(
            library.flash_attn_varlen_func, q=paged.query, k=key, v=value, out=out, cu_seqlens_q=paged.query_start,
            max_seqlen_q=paged.num_queries, seqused_k=paged.context_lens, max_seqlen_k=paged.context, causal=True,
            softmax_scale=paged.scale, block_table=paged.block_tables, fa_version=3, **more,
        )
        for key, value in paged.token_major_caches
    ]  # fmt: skip
    return Candidate(calls, result=lambda: out)
