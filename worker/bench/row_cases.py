"""Norms, activations, lookups and the joining of partial results: kernels that read and write rows once."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial

import torch
import torch.nn.functional as F

from worker import kernels
from worker.bench.case import OURS, Call, Candidate, Case, Contender, Site, Work
from worker.bench.models import LLAMA_3_1B, LLAMA_3_8B, TINY, LayerShape

_EPSILON = 1e-5
_DTYPE = torch.bfloat16
_WIDTH = _DTYPE.itemsize


@dataclass(frozen=True, slots=True)
class _RowKernel:
    """One kernel over rows: how wide one is, the numbers that it reads and writes, and how its calls are made."""

    name: str
    width: str
    numbers_a_row: int
    make_calls: Callable[[int, int], list[Call]]  # (num_tokens, copies)
    make_peer_calls: Callable[[int, int], list[Call]] | None = None
    peer: str = "torch"


def row_cases(site: Site) -> Iterator[Case]:
    if site.is_dry:
        model, token_counts = TINY, [1, 5]
    elif site.is_cuda:
        model, token_counts = LLAMA_3_8B, [1, 64, 512, 4096]
    else:
        model, token_counts = LLAMA_3_1B, [64, 4096]
    for kernel in _row_kernels(site, model):
        for index, num_tokens in enumerate(token_counts):
            yield _case(site, kernel, num_tokens, index == len(token_counts) - 1)


def _case(site: Site, kernel: _RowKernel, num_tokens: int, is_quick: bool) -> Case:
    num_bytes = num_tokens * kernel.numbers_a_row * _WIDTH

    def build() -> Sequence[Contender]:
        copies = site.num_copies(num_bytes)
        contenders = [Contender(OURS, lambda: Candidate(kernel.make_calls(num_tokens, copies)))]
        make_peer_calls = kernel.make_peer_calls
        if make_peer_calls is not None:
            contenders.append(Contender(kernel.peer, lambda: Candidate(make_peer_calls(num_tokens, copies))))
        return contenders

    return Case(kernel.name, f"{num_tokens} tokens of {kernel.width}", _DTYPE, Work(num_bytes), build, is_quick)


def _row_kernels(site: Site, model: LayerShape) -> Iterator[_RowKernel]:
    hidden = model.hidden
    wide = str(hidden)
    yield _RowKernel(
        "rms_norm", wide, 2 * hidden, partial(_rms_norm, site, hidden), partial(_torch_rms_norm, site, hidden)
    )
    yield _RowKernel("fused_add_rms_norm", wide, 4 * hidden, partial(_fused_add_rms_norm, site, hidden))
    size = model.intermediate
    for name, kernel in (("silu_and_mul", kernels.silu_and_mul), ("gelu_and_mul", kernels.gelu_and_mul)):
        yield _RowKernel(name, str(size), 3 * size, partial(_activation_and_mul, site, size, kernel))
    yield _RowKernel(
        "embedding", wide, 2 * hidden, partial(_embedding, site, model), partial(_torch_embedding, site, model)
    )
    heads = (model.num_query_heads, model.head_size)
    # Two results in, one out; of the logarithms, three float32 a head.
    numbers = 3 * heads[0] * heads[1] + 3 * heads[0] * 4 // _WIDTH
    yield _RowKernel("merge_attention", f"{heads[0]} x {heads[1]}", numbers, partial(_merge_attention, site, heads))


def _rms_norm(site: Site, hidden: int, num_tokens: int, copies: int) -> list[Call]:
    weight = site.random(hidden, dtype=_DTYPE)
    return [
        partial(kernels.rms_norm, torch.empty_like(x), x, weight, _EPSILON)
        for x in (site.random(num_tokens, hidden, dtype=_DTYPE) for _ in range(copies))
    ]


def _torch_rms_norm(site: Site, hidden: int, num_tokens: int, copies: int) -> list[Call]:
    weight = site.random(hidden, dtype=_DTYPE)
    return [
        partial(F.rms_norm, site.random(num_tokens, hidden, dtype=_DTYPE), (hidden,), weight, _EPSILON)
        for _ in range(copies)
    ]


def _fused_add_rms_norm(site: Site, hidden: int, num_tokens: int, copies: int) -> list[Call]:
    """Repeated calls add x again and again: with x this small the residual stays finite."""
    weight = site.random(hidden, dtype=_DTYPE)
    calls: list[Call] = []
    for _ in range(copies):
        x, residual = (site.random(num_tokens, hidden, dtype=_DTYPE) for _ in range(2))
        x *= 1e-3
        calls.append(partial(kernels.fused_add_rms_norm, torch.empty_like(x), x, residual, weight, _EPSILON))
    return calls


def _activation_and_mul(
    site: Site, size: int, kernel: Callable[[torch.Tensor, torch.Tensor], None], num_tokens: int, copies: int
) -> list[Call]:
    return [
        partial(
            kernel,
            torch.empty(num_tokens, size, dtype=_DTYPE, device=site.device),
            site.random(num_tokens, 2 * size, dtype=_DTYPE),
        )
        for _ in range(copies)
    ]


def _table_and_ids(
    site: Site, model: LayerShape, num_tokens: int, copies: int
) -> tuple[torch.Tensor, list[torch.Tensor]]:
    table = site.random(model.vocab_size, model.hidden, dtype=_DTYPE)
    return table, [torch.randint(model.vocab_size, (num_tokens,), device=site.device) for _ in range(copies)]


def _embedding(site: Site, model: LayerShape, num_tokens: int, copies: int) -> list[Call]:
    table, all_ids = _table_and_ids(site, model, num_tokens, copies)
    return [
        partial(kernels.embedding, torch.empty(num_tokens, model.hidden, dtype=_DTYPE, device=site.device), ids, table)
        for ids in all_ids
    ]


def _torch_embedding(site: Site, model: LayerShape, num_tokens: int, copies: int) -> list[Call]:
    table, all_ids = _table_and_ids(site, model, num_tokens, copies)
    return [partial(F.embedding, ids, table) for ids in all_ids]


def _merge_attention(site: Site, heads: tuple[int, int], num_tokens: int, copies: int) -> list[Call]:
    calls: list[Call] = []
    for _ in range(copies):
        a, b = (site.random(num_tokens, *heads, dtype=_DTYPE) for _ in range(2))
        lse_a, lse_b = (site.random(num_tokens, heads[0], dtype=torch.float32) for _ in range(2))
        calls.append(partial(kernels.merge_attention, torch.empty_like(a), torch.empty_like(lse_a), a, lse_a, b, lse_b))
    return calls
