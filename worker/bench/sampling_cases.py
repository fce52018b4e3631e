"""Sampling and log-probabilities over the logits of a batch."""

from __future__ import annotations

import importlib
import importlib.util
from collections.abc import Callable, Iterator, Sequence
from functools import partial

import torch

from worker import kernels
from worker.bench.case import OURS, Call, Candidate, Case, Contender, Site, Work, dtype_name

_TOP_K, _TOP_P, _MIN_P, _TEMPERATURE = 50, 0.9, 0.05, 0.8
_NUM_TOP = 5
_PENALISED_TOKENS = 512


def _full(site: Site, rows: int, value: float, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return torch.full((rows,), value, dtype=dtype, device=site.device)


def _drawing(site: Site, rows: int) -> kernels.SamplingBatch:
    return kernels.SamplingBatch(
        temperature=_full(site, rows, _TEMPERATURE),
        seeds=torch.arange(rows, device=site.device),
        positions=torch.arange(rows, device=site.device),
    )


def _greedy(site: Site, rows: int, vocab: int) -> kernels.SamplingBatch:
    return kernels.SamplingBatch()


def _temperature(site: Site, rows: int, vocab: int) -> kernels.SamplingBatch:
    return _drawing(site, rows)


def _top_k(site: Site, rows: int, vocab: int) -> kernels.SamplingBatch:
    batch = _drawing(site, rows)
    batch.top_k = _full(site, rows, _TOP_K, torch.int32)
    return batch


def _top_p(site: Site, rows: int, vocab: int) -> kernels.SamplingBatch:
    batch = _drawing(site, rows)
    batch.top_p = _full(site, rows, _TOP_P)
    return batch


def _top_k_top_p(site: Site, rows: int, vocab: int) -> kernels.SamplingBatch:
    batch = _top_k(site, rows, vocab)
    batch.top_p = _full(site, rows, _TOP_P)
    return batch


def _min_p(site: Site, rows: int, vocab: int) -> kernels.SamplingBatch:
    batch = _drawing(site, rows)
    batch.min_p = _full(site, rows, _MIN_P)
    return batch


def _penalties(site: Site, rows: int, vocab: int) -> kernels.SamplingBatch:
    """Every row with all three penalties over a prompt and an output of 512 tokens each."""
    batch = _top_k_top_p(site, rows, vocab)
    length = min(_PENALISED_TOKENS, vocab)
    offsets = torch.arange(rows + 1, dtype=torch.int32, device=site.device) * length
    batch.repetition_penalty = _full(site, rows, 1.1)
    batch.frequency_penalty = _full(site, rows, 0.1)
    batch.presence_penalty = _full(site, rows, 0.1)
    batch.prompt_offsets = batch.output_offsets = offsets
    batch.prompt_ids = torch.randint(vocab, (rows * length,), dtype=torch.int32, device=site.device)
    batch.output_ids = torch.randint(vocab, (rows * length,), dtype=torch.int32, device=site.device)
    return batch


_SETTINGS: dict[str, Callable[[Site, int, int], kernels.SamplingBatch]] = {
    "greedy": _greedy,
    "temperature": _temperature,
    "top-k": _top_k,
    "top-p": _top_p,
    "top-k and top-p": _top_k_top_p,
    "min-p": _min_p,
    "penalties, top-k and top-p": _penalties,
}


def sampling_cases(site: Site) -> Iterator[Case]:
    rows, vocab = (3, 1000) if site.is_dry else (256, 128256) if site.is_cuda else (16, 128256)
    for setting in _SETTINGS:
        dtypes = (torch.float32, torch.bfloat16) if setting == "top-k and top-p" else (torch.float32,)
        for dtype in dtypes:
            is_quick = setting == "top-k and top-p" and dtype is torch.float32
            yield _sample_case(site, rows, vocab, setting, dtype, 0, is_quick)
    yield _sample_case(site, rows, vocab, "top-k and top-p", torch.float32, _NUM_TOP, False)
    if site.is_cuda and not site.is_dry:
        yield _sample_case(site, 1, vocab, "top-k and top-p", torch.float32, 0, False)
    yield _token_logprobs_case(site, rows, vocab, True)


def _logits(site: Site, rows: int, vocab: int, dtype: torch.dtype) -> list[torch.Tensor]:
    """With the spread of a model's: a few tokens hold most of the probability."""
    copies = site.num_copies(rows * vocab * dtype.itemsize, limit=64)
    return [(3 * site.random(rows, vocab, dtype=torch.float32)).to(dtype) for _ in range(copies)]


def _sample_case(
    site: Site, rows: int, vocab: int, setting: str, dtype: torch.dtype, num_top: int, is_quick: bool
) -> Case:
    def build() -> Sequence[Contender]:
        logits = _logits(site, rows, vocab, dtype)
        contenders = [Contender(OURS, lambda: Candidate(_sample_calls(site, logits, setting, num_top)))]
        if setting == "top-k and top-p" and num_top == 0:
            contenders.append(Contender("torch_sort", lambda: Candidate([partial(_torch_sample, x) for x in logits])))
            if site.is_cuda and importlib.util.find_spec("flashinfer") is not None:
                contenders.append(Contender("flashinfer", lambda: _flashinfer_sample(site, logits)))
        return contenders

    tops = f", {num_top} logprobs" if num_top else ""
    shape = f"{rows} x {vocab} {dtype_name(dtype)}, {setting}{tops}"
    return Case("sample", shape, dtype, Work(rows * vocab * dtype.itemsize, "read"), build, is_quick)


def _sample_calls(site: Site, logits: list[torch.Tensor], setting: str, num_top: int) -> list[Call]:
    rows, vocab = logits[0].shape
    batch = _SETTINGS[setting](site, rows, vocab)
    workspace = kernels.sampling_workspace(rows, vocab, logits[0].dtype, site.device, num_top=num_top)
    out = torch.empty(rows, dtype=torch.int64, device=site.device)
    status = torch.empty(rows, dtype=torch.int32, device=site.device)
    more: dict[str, torch.Tensor] = {}
    if num_top:
        more["out_logprobs"] = torch.empty(rows, device=site.device)
        more["out_ranks"] = torch.empty(rows, dtype=torch.int32, device=site.device)
        more["out_top_ids"] = torch.empty(rows, num_top, dtype=torch.int32, device=site.device)
        more["out_top_logprobs"] = torch.empty(rows, num_top, device=site.device)
    return [partial(kernels.sample, x, batch, out, status, workspace=workspace, **more) for x in logits]


def _torch_sample(logits: torch.Tensor) -> torch.Tensor:
    """The usual way with torch: sort, cut, draw."""
    values, ids = (logits.float() / _TEMPERATURE).sort(dim=-1, descending=True)
    values[:, _TOP_K:] = float("-inf")
    probabilities = values.softmax(-1)
    probabilities[probabilities.cumsum(-1) - probabilities >= _TOP_P] = 0
    return ids.gather(1, probabilities.multinomial(1))


def _flashinfer_sample(site: Site, logits: list[torch.Tensor]) -> Candidate:
    """Given the probabilities: the softmax before it is not counted."""
    draw = importlib.import_module("flashinfer.sampling").top_k_top_p_sampling_from_probs
    probabilities = [(x.float() / _TEMPERATURE).softmax(-1) for x in logits]
    rows = logits[0].shape[0]
    top_k, top_p = _full(site, rows, _TOP_K, torch.int32), _full(site, rows, _TOP_P)
    return Candidate(
        [partial(draw, p, top_k, top_p, filter_apply_order="top_k_first") for p in probabilities], is_capturable=False
    )


def _token_logprobs_case(site: Site, rows: int, vocab: int, is_quick: bool) -> Case:
    dtype = torch.float32

    def calls() -> list[Call]:
        ids = torch.randint(vocab, (rows,), device=site.device)
        logprobs = torch.empty(rows, device=site.device)
        ranks, status = (torch.empty(rows, dtype=torch.int32, device=site.device) for _ in range(2))
        workspace = kernels.sampling_workspace(rows, vocab, dtype, site.device)
        return [
            partial(kernels.token_logprobs, x, ids, logprobs, ranks, status, workspace=workspace)
            for x in _logits(site, rows, vocab, dtype)
        ]

    def build() -> Sequence[Contender]:
        return [Contender(OURS, lambda: Candidate(calls()))]

    shape = f"{rows} x {vocab} {dtype_name(dtype)}"
    return Case("token_logprobs", shape, dtype, Work(rows * vocab * dtype.itemsize, "read"), build, is_quick)
