"""Products with few rows, where reading the weights is all the time."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import partial

import torch
import torch.nn.functional as F

from worker import kernels
from worker.bench.case import OURS, Candidate, Case, Contender, Site, Work
from worker.bench.models import LLAMA_2_7B, LLAMA_3_1B, LLAMA_3_8B, TINY, LayerShape
from worker.kernels.linear import PackedLinear

_DTYPE = torch.bfloat16


def linear_cases(site: Site) -> Iterator[Case]:
    """Cases of skinny_linear on CUDA and of linear, on packed weights, on the CPU."""
    if site.is_dry:
        models, row_counts = [TINY], [1, 3]
    elif site.is_cuda:
        models, row_counts = [LLAMA_3_8B, LLAMA_2_7B], [1, 4, 8, 16]
    else:
        models, row_counts = [LLAMA_3_1B], [1, 16, 256]
    seen: set[tuple[int, int]] = set()
    for model in models:
        for part, (num_outputs, num_inputs) in _products(model).items():
            if (num_outputs, num_inputs) in seen:
                continue
            seen.add((num_outputs, num_inputs))
            for num_rows in row_counts:
                shape = f"{model.name} {part}: {num_rows} x {num_inputs} by {num_outputs}"
                is_quick = part == "qkv" and num_rows in (row_counts[0], 16)
                yield _case(site, shape, num_rows, num_outputs, num_inputs, is_quick)


def _products(model: LayerShape) -> dict[str, tuple[int, int]]:
    """(outputs, inputs) of a layer's products and of the last one."""
    return {
        "qkv": ((model.num_query_heads + 2 * model.num_kv_heads) * model.head_size, model.hidden),
        "o": (model.hidden, model.num_query_heads * model.head_size),
        "gate_up": (2 * model.intermediate, model.hidden),
        "down": (model.hidden, model.intermediate),
        "lm_head": (model.vocab_size, model.hidden),
    }


def _case(site: Site, shape: str, num_rows: int, num_outputs: int, num_inputs: int, is_quick: bool) -> Case:
    num_bytes = (num_outputs * num_inputs + num_rows * (num_inputs + num_outputs)) * _DTYPE.itemsize

    def build() -> Sequence[Contender]:
        copies = site.num_copies(num_bytes, limit=32)
        weights = [site.random(num_outputs, num_inputs, dtype=_DTYPE) for _ in range(copies)]
        x = site.random(num_rows, num_inputs, dtype=_DTYPE)
        out = torch.empty(num_rows, num_outputs, dtype=_DTYPE, device=site.device)
        return [
            Contender(OURS, lambda: _ours(site, out, x, weights)),
            Contender("torch", lambda: _torch(x, weights)),
        ]

    work = Work(num_bytes, "read", 2 * num_rows * num_outputs * num_inputs)
    return Case("skinny_linear" if site.is_cuda else "linear", shape, _DTYPE, work, build, is_quick)


def _ours(site: Site, out: torch.Tensor, x: torch.Tensor, weights: list[torch.Tensor]) -> Candidate:
    if site.is_cuda:
        return Candidate([partial(kernels.SkinnyLinear(w), out, x) for w in weights], result=lambda: out)
    return Candidate([partial(PackedLinear(w), x, out) for w in weights], result=lambda: out)


def _torch(x: torch.Tensor, weights: list[torch.Tensor]) -> Candidate:
    latest: list[torch.Tensor] = []

    def call(weight: torch.Tensor) -> None:
        latest[:] = [F.linear(x, weight)]

    return Candidate([partial(call, w) for w in weights], result=lambda: latest[0])
