"""Rotary embedding, storing into the paged cache, and copies of whole blocks."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from functools import partial

import torch

from worker import kernels
from worker.bench.case import OURS, Call, Candidate, Case, Contender, Site, Work, dtype_name
from worker.bench.models import LLAMA_3_1B, LLAMA_3_8B, TINY, LayerShape
from worker.bench.paged_batch import BLOCK_SIZE

_DTYPE = torch.bfloat16
_WIDTH = _DTYPE.itemsize
_MAX_POSITIONS = 8192


def cache_cases(site: Site) -> Iterator[Case]:
    if site.is_dry:
        model, token_counts, block_counts = TINY, [1, 5], [2]
    elif site.is_cuda:
        model, token_counts, block_counts = LLAMA_3_8B, [1, 64, 512, 4096], [1, 64]
    else:
        model, token_counts, block_counts = LLAMA_3_1B, [64, 4096], [16]
    for num_tokens in token_counts:
        is_quick = num_tokens == token_counts[-1]
        yield _rotary_case(site, model, num_tokens, is_quick)
        for kv_dtype in (_DTYPE, torch.float8_e4m3fn):
            yield _rope_and_store_case(site, model, num_tokens, kv_dtype, is_quick)
            yield _store_case(site, model, num_tokens, kv_dtype, is_quick)
    for num_blocks in block_counts:
        is_quick = num_blocks == block_counts[-1]
        yield _copy_blocks_case(site, model, num_blocks, is_quick)
        yield _swap_blocks_case(site, model, num_blocks, "to_host", is_quick)
        yield _swap_blocks_case(site, model, num_blocks, "to_device", is_quick)


def _case(
    kernel: str,
    shape: str,
    work: Work,
    make_calls: Callable[[], list[Call]],
    is_quick: bool,
    is_capturable: bool = True,
) -> Case:
    def build() -> Sequence[Contender]:
        return [Contender(OURS, lambda: Candidate(make_calls(), is_capturable))]

    return Case(kernel, shape, _DTYPE, work, build, is_quick)


def _heads(model: LayerShape, num_tokens: int, kv_dtype: torch.dtype = _DTYPE) -> str:
    suffix = "" if kv_dtype is _DTYPE else f" {dtype_name(kv_dtype)}"
    return f"{num_tokens} tokens, {model.num_query_heads}/{model.num_kv_heads} x {model.head_size}{suffix}"


def _cos_sin(site: Site, model: LayerShape) -> torch.Tensor:
    return torch.rand(_MAX_POSITIONS, model.head_size, device=site.device)


def _positions(site: Site, num_tokens: int) -> torch.Tensor:
    return torch.randint(_MAX_POSITIONS, (num_tokens,), device=site.device)


def _caches(site: Site, model: LayerShape, num_blocks: int, dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor]:
    shape = (num_blocks, model.num_kv_heads, BLOCK_SIZE, model.head_size)
    return torch.zeros(shape, dtype=dtype, device=site.device), torch.zeros(shape, dtype=dtype, device=site.device)


def _slots(site: Site, num_tokens: int) -> tuple[torch.Tensor, int]:
    """Consecutive slots within blocks that are shuffled, as prompts fill them; and the number of blocks."""
    num_blocks = -(-num_tokens // BLOCK_SIZE)
    order = torch.randperm(num_blocks, device=site.device)
    slots = (order[:, None] * BLOCK_SIZE + torch.arange(BLOCK_SIZE, device=site.device)).flatten()
    return slots[:num_tokens].contiguous(), num_blocks


def _rotary_case(site: Site, model: LayerShape, num_tokens: int, is_quick: bool) -> Case:
    heads = model.num_query_heads + model.num_kv_heads
    num_bytes = num_tokens * model.head_size * (2 * heads * _WIDTH + 4)

    def calls() -> list[Call]:
        cos_sin = _cos_sin(site, model)
        made: list[Call] = []
        for _ in range(site.num_copies(num_bytes)):
            q = site.random(num_tokens, model.num_query_heads, model.head_size, dtype=_DTYPE)
            k = site.random(num_tokens, model.num_kv_heads, model.head_size, dtype=_DTYPE)
            made.append(partial(kernels.rotary_embedding, q, k, _positions(site, num_tokens), cos_sin))
        return made

    return _case("rotary", _heads(model, num_tokens), Work(num_bytes), calls, is_quick)


def _rope_and_store_case(site: Site, model: LayerShape, num_tokens: int, kv_dtype: torch.dtype, is_quick: bool) -> Case:
    """q and k are read and written, v is read, k and v are written to the cache."""
    q, kv = model.num_query_heads, model.num_kv_heads
    a_token = (2 * q + 3 * kv) * _WIDTH + 2 * kv * kv_dtype.itemsize + 4
    num_bytes = num_tokens * model.head_size * a_token

    def calls() -> list[Call]:
        cos_sin = _cos_sin(site, model)
        made: list[Call] = []
        for _ in range(site.num_copies(num_bytes)):
            slots, num_blocks = _slots(site, num_tokens)
            qkv = site.random(num_tokens, (q + 2 * kv) * model.head_size, dtype=_DTYPE)
            key_cache, value_cache = _caches(site, model, num_blocks, kv_dtype)
            positions = _positions(site, num_tokens)
            made.append(partial(kernels.rope_and_store, qkv, positions, cos_sin, key_cache, value_cache, slots, q, kv))
        return made

    return _case("rope_and_store", _heads(model, num_tokens, kv_dtype), Work(num_bytes), calls, is_quick)


def _store_case(site: Site, model: LayerShape, num_tokens: int, kv_dtype: torch.dtype, is_quick: bool) -> Case:
    heads = model.num_kv_heads
    num_bytes = 2 * num_tokens * heads * model.head_size * (_WIDTH + kv_dtype.itemsize)

    def calls() -> list[Call]:
        made: list[Call] = []
        for _ in range(site.num_copies(num_bytes)):
            slots, num_blocks = _slots(site, num_tokens)
            key, value = (site.random(num_tokens, heads, model.head_size, dtype=_DTYPE) for _ in range(2))
            made.append(partial(kernels.store_kv, key, value, *_caches(site, model, num_blocks, kv_dtype), slots))
        return made

    return _case("store_kv", _heads(model, num_tokens, kv_dtype), Work(num_bytes), calls, is_quick)


def _block_bytes(model: LayerShape) -> int:
    return model.num_kv_heads * BLOCK_SIZE * model.head_size * _WIDTH


def _copy_blocks_case(site: Site, model: LayerShape, num_blocks: int, is_quick: bool) -> Case:
    """All layers, keys and values; the pool is large enough that calls go through cold blocks."""
    num_caches = 2 * model.num_layers
    num_bytes = 2 * num_caches * num_blocks * _block_bytes(model)

    def calls() -> list[Call]:
        copies = site.num_copies(num_bytes, limit=64)
        pool = 2 * num_blocks * copies
        keys = [site.random(pool, *_page(model), dtype=_DTYPE) for _ in range(model.num_layers)]
        values = [site.random(pool, *_page(model), dtype=_DTYPE) for _ in range(model.num_layers)]
        order = torch.randperm(pool).view(copies, 2, num_blocks).tolist()
        return [partial(kernels.copy_blocks, keys, values, *pair) for pair in order]

    return _case("copy_blocks", f"{num_blocks} blocks of {num_caches} caches", Work(num_bytes), calls, is_quick)


def _page(model: LayerShape) -> tuple[int, int, int]:
    return model.num_kv_heads, BLOCK_SIZE, model.head_size


def _swap_blocks_case(site: Site, model: LayerShape, num_blocks: int, direction: str, is_quick: bool) -> Case:
    """The link is far slower than either memory: one set of blocks is enough. Not captured, since hosts call it."""
    num_caches = 2 * model.num_layers
    num_bytes = num_caches * num_blocks * _block_bytes(model)

    def calls() -> list[Call]:
        caches = [site.random(2 * num_blocks, *_page(model), dtype=_DTYPE) for _ in range(num_caches)]
        hosts = [
            torch.zeros(num_blocks, *_page(model), dtype=_DTYPE, pin_memory=site.is_cuda) for _ in range(num_caches)
        ]
        blocks = torch.randperm(2 * num_blocks)[:num_blocks].tolist()
        return [partial(kernels.swap_blocks, caches, hosts, blocks, list(range(num_blocks)), direction)]

    shape = f"{num_blocks} blocks of {num_caches} caches {direction}"
    work = Work(num_bytes, "to_host" if direction == "to_host" else "to_device")
    return _case("swap_blocks", shape, work, calls, is_quick, is_capturable=False)
