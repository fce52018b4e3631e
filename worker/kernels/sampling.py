"""Sampling and log-probabilities over rows of logits."""

from __future__ import annotations

from dataclasses import dataclass, fields

import torch

from worker.kernels._checks import DTYPE_CODES, Dims, PlanCache, address, placement, stream_of
from worker.kernels._native import load_native

_C = load_native()
_ACTIVATIONS = tuple(DTYPE_CODES)
_INT32 = (torch.int32,)
_INT64 = (torch.int64,)
_FLOAT32 = (torch.float32,)
_SEEDS = (torch.int64, torch.uint64)

_sample_plans = PlanCache()
_logprob_plans = PlanCache()


@dataclass(slots=True)
class SamplingBatch:
    """Per-row parameters of `sample`; a field that is None holds for all rows with the value in brackets.

    Lists of ids per row are pairs of int32 tensors: offsets [num_rows + 1] and the ids of all rows end to end. With
    `prompt_ends` or `output_ends` the list of row r is ids[offsets[r] : ends[r]] instead, offsets may be [num_rows] and
    lists may lie anywhere in `ids`, a table of histories for instance.
    """

    temperature: torch.Tensor | None = None  # float32 [0: greedy]; below 1e-5 is greedy
    top_k: torch.Tensor | None = None  # int32 [0: off]
    top_p: torch.Tensor | None = None  # float32 [1]
    min_p: torch.Tensor | None = None  # float32 [0]
    seeds: torch.Tensor | None = None  # uint64, or int64 with the same bits [0]
    positions: torch.Tensor | None = None  # int64 [0]: the draw depends on (seed, position) alone
    presence_penalty: torch.Tensor | None = None  # float32 [0]
    frequency_penalty: torch.Tensor | None = None  # float32 [0]
    repetition_penalty: torch.Tensor | None = None  # float32 [1]
    prompt_offsets: torch.Tensor | None = None  # int32 [num_rows + 1]; read where a row has penalties
    prompt_ends: torch.Tensor | None = None  # int32 [num_rows] [the next row's offset]
    prompt_ids: torch.Tensor | None = None  # int32
    output_offsets: torch.Tensor | None = None  # int32 [num_rows + 1]; read where a row has penalties
    output_ends: torch.Tensor | None = None  # int32 [num_rows] [the next row's offset]
    output_ids: torch.Tensor | None = None  # int32
    bias_offsets: torch.Tensor | None = None  # int32 [num_rows + 1]
    bias_ids: torch.Tensor | None = None  # int32
    bias_values: torch.Tensor | None = None  # float32
    masked_offsets: torch.Tensor | None = None  # int32 [num_rows + 1]
    masked_ids: torch.Tensor | None = None  # int32: never sampled


_ID_LISTS = ("prompt", "output", "bias", "masked")
_ENDS = ("prompt_ends", "output_ends")
_BATCH_FIELDS = tuple(f.name for f in fields(SamplingBatch))
_FIELD_TYPES = {
    **dict.fromkeys(
        ("temperature", "top_p", "min_p", "presence_penalty", "frequency_penalty", "repetition_penalty"),
        (("num_rows",), _FLOAT32),
    ),
    "top_k": (("num_rows",), _INT32),
    "seeds": (("num_rows",), _SEEDS),
    "positions": (("num_rows",), _INT64),
    **dict.fromkeys(
        ("prompt_offsets", "output_offsets", "bias_offsets", "masked_offsets"), (("num_rows + 1",), _INT32)
    ),
    **dict.fromkeys(("prompt_ends", "output_ends"), (("num_rows",), _INT32)),
    "prompt_ids": (("num_prompt_ids",), _INT32),
    "output_ids": (("num_output_ids",), _INT32),
    "bias_ids": (("num_bias_ids",), _INT32),
    "bias_values": (("num_bias_ids",), _FLOAT32),
    "masked_ids": (("num_masked_ids",), _INT32),
}


def sampling_workspace(
    num_rows: int, vocab_size: int, dtype: torch.dtype, device: torch.device | str, *, num_top: int = 0
) -> torch.Tensor | None:
    """What `sample` and `token_logprobs` need on CUDA for at most `num_rows` rows of logits, whatever the parameters.

    uint8, zero when made; kernels leave it reusable, one call after the other. None for the CPU.
    """
    if dtype not in DTYPE_CODES:
        raise TypeError(
            f"sampling_workspace: dtype {dtype} is not supported; supported: {', '.join(map(str, DTYPE_CODES))}"
        )
    device = torch.device(device)
    if device.type == "cpu":
        return None
    with torch.cuda.device(device):
        num_bytes = _C.sample_workspace(num_rows, vocab_size, num_top, DTYPE_CODES[dtype])
    return torch.zeros(num_bytes, dtype=torch.uint8, device=device)


def _check_workspace(op: str, logits: torch.Tensor, num_top: int, workspace: torch.Tensor | None) -> None:
    if workspace is None or workspace.dtype is not torch.uint8 or workspace.device != logits.device:
        raise ValueError(f"{op}: workspace is needed on CUDA: see sampling_workspace")
    needed = _C.sample_workspace(logits.shape[0], logits.shape[1], num_top, DTYPE_CODES[logits.dtype])
    if workspace.numel() < needed:
        raise ValueError(f"{op}: workspace has {workspace.numel()} bytes; {needed} are needed")


def sample(
    logits: torch.Tensor,
    batch: SamplingBatch,
    out_ids: torch.Tensor,
    out_status: torch.Tensor,
    *,
    out_logprobs: torch.Tensor | None = None,
    out_ranks: torch.Tensor | None = None,
    out_top_ids: torch.Tensor | None = None,
    out_top_logprobs: torch.Tensor | None = None,
    workspace: torch.Tensor | None = None,
) -> None:
    """Sample one token per row.

    Order: logit bias, repetition, frequency and presence penalties, masked ids, temperature, top-k, top-p, min-p. A
    row's token depends on its own logits and parameters alone; greedy rows take the first of equal logits.

    Shapes: logits [num_rows, vocab_size] (rows may be strided), out_ids [num_rows] int64, out_status [num_rows] int32:
    1 where a logit is NaN or +inf or all are -inf, and the id is 0 then. Of the raw distribution, before any
    processing, and at least -9999: out_logprobs [num_rows] float32 of the sampled token, out_ranks [num_rows] int32 (1
    + number of larger logits), out_top_ids [num_rows, num_top] int32 and out_top_logprobs [num_rows, num_top] float32,
    descending. On CUDA `workspace` is what `sampling_workspace` gave, and nothing waits for the device: that lists of
    ids end where they should is checked on the CPU alone.
    """
    params = [getattr(batch, name) for name in _BATCH_FIELDS]
    outputs = (out_ids, out_logprobs, out_ranks, out_status, out_top_ids, out_top_logprobs)
    key = (
        logits.shape, logits.stride(), logits.dtype,
        *[None if t is None else (t.shape, t.dtype) for t in params],
        *[None if t is None else (t.shape, t.dtype) for t in outputs],
        placement(logits, *params, *outputs),
    )  # fmt: skip
    plan = _sample_plans.get(key)
    if plan is None:
        plan = _sample_plans.remember(key, _sample_plan(logits, params, outputs))
    if logits.is_cuda:
        _check_workspace("sample", logits, 0 if out_top_ids is None else out_top_ids.shape[1], workspace)
    else:
        for name in _ID_LISTS:
            if getattr(batch, f"{name}_offsets") is not None:
                _check_end(name, batch)
    plan([logits.data_ptr(), *[address(t) for t in (*params, *outputs)]], address(workspace), stream_of(logits))


def _check_end(name: str, batch: SamplingBatch) -> None:
    offsets, ids = getattr(batch, f"{name}_offsets"), getattr(batch, f"{name}_ids")
    ends = getattr(batch, f"{name}_ends", None)
    end = int(offsets[-1]) if ends is None else int(ends.max()) if len(ends) else 0
    if end > ids.shape[0]:
        what = "offsets" if ends is None else "ends"
        raise ValueError(f"sample: {name}_{what} end at {end}, past {ids.shape[0]} {name}_ids")


def _sample_plan(
    logits: torch.Tensor, params: list[torch.Tensor | None], outputs: tuple[torch.Tensor | None, ...]
) -> object:
    dims = Dims("sample")
    stride = dims.tensor("logits", logits, ("num_rows", "vocab_size"), _ACTIVATIONS, contiguous=False)[0]
    dims.sizes["num_rows + 1"] = dims["num_rows"] + 1
    given = {name: tensor for name, tensor in zip(_BATCH_FIELDS, params, strict=True) if tensor is not None}
    for name, tensor in given.items():
        shape, dtypes = _FIELD_TYPES[name]
        if name.replace("_offsets", "_ends") in given and tensor.shape == (dims["num_rows"],):
            shape = ("num_rows",)
        dims.tensor(name, tensor, shape, dtypes)
    for name in _ID_LISTS:
        parts = [field for field in _BATCH_FIELDS if field.startswith(f"{name}_") and field not in _ENDS]
        if 0 < len(given.keys() & set(parts)) < len(parts) or (f"{name}_ends" in given and parts[0] not in given):
            raise ValueError(f"sample: {' and '.join(parts)} go together")
    out_ids, out_logprobs, out_ranks, out_status, out_top_ids, out_top_logprobs = outputs
    dims.tensor("out_ids", out_ids, ("num_rows",), _INT64)
    _check_outputs(dims, out_logprobs, out_ranks, out_status, out_top_ids, out_top_logprobs)
    return _C.Sample(
        dims.device_code,
        dims["num_rows"],
        dims["vocab_size"],
        stride,
        dims.sizes.get("num_top", 0),
        DTYPE_CODES[logits.dtype],
    ).run


def _check_outputs(
    dims: Dims,
    out_logprobs: torch.Tensor | None,
    out_ranks: torch.Tensor | None,
    out_status: torch.Tensor | None,
    out_top_ids: torch.Tensor | None,
    out_top_logprobs: torch.Tensor | None,
) -> None:
    if out_status is None:
        raise TypeError(f"{dims.op}: out_status must be a torch.Tensor, got NoneType")
    dims.tensor("out_status", out_status, ("num_rows",), _INT32)
    if out_logprobs is not None:
        dims.tensor("out_logprobs", out_logprobs, ("num_rows",), _FLOAT32)
    if out_ranks is not None:
        dims.tensor("out_ranks", out_ranks, ("num_rows",), _INT32)
    if (out_top_ids is None) != (out_top_logprobs is None):
        raise ValueError(f"{dims.op}: out_top_ids and out_top_logprobs go together")
    if out_top_ids is not None and out_top_logprobs is not None:
        dims.tensor("out_top_ids", out_top_ids, ("num_rows", "num_top"), _INT32)
        dims.tensor("out_top_logprobs", out_top_logprobs, ("num_rows", "num_top"), _FLOAT32)


def token_logprobs(
    logits: torch.Tensor,
    ids: torch.Tensor,
    out_logprobs: torch.Tensor,
    out_ranks: torch.Tensor,
    out_status: torch.Tensor,
    out_top_ids: torch.Tensor | None = None,
    out_top_logprobs: torch.Tensor | None = None,
    *,
    workspace: torch.Tensor | None = None,
) -> None:
    """Raw log-probabilities of given tokens, for prompts.

    Shapes: logits [num_rows, vocab_size] (rows may be strided), ids [num_rows] int64, outputs as for `sample`.
    """
    outputs = (out_logprobs, out_ranks, out_status, out_top_ids, out_top_logprobs)
    key = (
        logits.shape, logits.stride(), logits.dtype, ids.shape, ids.dtype,
        *[None if t is None else (t.shape, t.dtype) for t in outputs],
        placement(logits, ids, *outputs),
    )  # fmt: skip
    plan = _logprob_plans.get(key)
    if plan is None:
        dims = Dims("token_logprobs")
        stride = dims.tensor("logits", logits, ("num_rows", "vocab_size"), _ACTIVATIONS, contiguous=False)[0]
        dims.tensor("ids", ids, ("num_rows",), _INT64)
        _check_outputs(dims, *outputs)
        plan = _C.TokenLogprobs(
            dims.device_code,
            dims["num_rows"],
            dims["vocab_size"],
            stride,
            dims.sizes.get("num_top", 0),
            DTYPE_CODES[logits.dtype],
        ).run
        _logprob_plans.remember(key, plan)
    if logits.is_cuda:
        _check_workspace("token_logprobs", logits, 0 if out_top_ids is None else out_top_ids.shape[1], workspace)
    plan(logits.data_ptr(), ids.data_ptr(), *[address(t) for t in outputs], address(workspace), stream_of(logits))
