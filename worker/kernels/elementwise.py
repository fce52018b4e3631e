"""Norms, activations and row lookups."""

from __future__ import annotations

from collections.abc import Callable
from typing import Literal

import torch

from worker.kernels._checks import DTYPE_CODES, Dims, PlanCache, placement, stream_of
from worker.kernels._native import load_native

_C = load_native()
_ACTIVATIONS = tuple(DTYPE_CODES)
_INDEX_DTYPES = (torch.int64, torch.int32)
_ACTIVATION_CODES = {"silu": 0, "tanh": 1, "none": 2}

_norm_plans = PlanCache()
_activation_plans = PlanCache()
_gather_plans = PlanCache()


def rms_norm(out: torch.Tensor, x: torch.Tensor, weight: torch.Tensor, eps: float) -> None:
    """out = x / sqrt(mean(x^2) + eps) * weight.

    Shapes: out, x [num_tokens, hidden] (rows may be strided; out may be x), weight [hidden]; one dtype for all, or
    float32 x with out and weight of another.
    """
    key = (
        x.shape, x.stride(), out.shape, out.stride(), weight.shape, x.dtype, out.dtype, weight.dtype,
        placement(out, x, weight),
    )  # fmt: skip
    plan = _norm_plans.get(key)
    if plan is None:
        plan = _norm_plans.remember(key, bind_norm("rms_norm", out, x, weight, None))
    plan(out.data_ptr(), x.data_ptr(), 0, weight.data_ptr(), eps, stream_of(x))


def fused_add_rms_norm(
    out: torch.Tensor, x: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor, eps: float
) -> None:
    """residual += x, rounded to its dtype; out = rms_norm(residual).

    Shapes: out, x, residual [num_tokens, hidden] (rows may be strided; out may be x), weight [hidden]; one dtype, or a
    float32 residual with out and weight of another, where x is of either.
    """
    key = (
        x.shape, x.stride(), out.shape, out.stride(), residual.shape, residual.stride(), weight.shape,
        x.dtype, out.dtype, residual.dtype, weight.dtype, placement(out, x, residual, weight),
    )  # fmt: skip
    plan = _norm_plans.get(key)
    if plan is None:
        plan = _norm_plans.remember(key, bind_norm("fused_add_rms_norm", out, x, weight, residual))
    plan(out.data_ptr(), x.data_ptr(), residual.data_ptr(), weight.data_ptr(), eps, stream_of(x))


def check_norm(
    dims: Dims, out: torch.Tensor, x: torch.Tensor, weight: torch.Tensor, residual: torch.Tensor | None
) -> list[int]:
    """Check a norm's tensors; row strides of out, x and residual (0 without). TypeError, ValueError."""
    x_stride = dims.tensor("x", x, ("num_tokens", "hidden"), _ACTIVATIONS, contiguous=False)[0]
    out_dtypes = _ACTIVATIONS if x.dtype is torch.float32 else (x.dtype,)
    out_stride = dims.tensor("out", out, ("num_tokens", "hidden"), out_dtypes, contiguous=False)[0]
    dims.tensor("weight", weight, ("hidden",), (out.dtype,))
    if residual is None:
        return [out_stride, x_stride, 0]
    residual_dtypes = tuple(dict.fromkeys((x.dtype, torch.float32)))
    residual_strides = dims.tensor("residual", residual, ("num_tokens", "hidden"), residual_dtypes, contiguous=False)
    return [out_stride, x_stride, residual_strides[0]]


def bind_norm(
    op: str, out: torch.Tensor, x: torch.Tensor, weight: torch.Tensor, residual: torch.Tensor | None
) -> Callable[..., None]:
    """The native call for tensors of these shapes. TypeError, ValueError."""
    dims = Dims(op)
    strides = check_norm(dims, out, x, weight, residual)
    residual_dtype = x.dtype if residual is None else residual.dtype
    dtypes = [DTYPE_CODES[dtype] for dtype in (out.dtype, x.dtype, residual_dtype)]
    return _C.RmsNorm(dims.device_code, dims["num_tokens"], dims["hidden"], strides, dtypes).run


def silu_and_mul(out: torch.Tensor, gate_up: torch.Tensor) -> None:
    """out = silu(gate) * up, where gate_up is [num_tokens, 2 * size] = [gate, up] and out [num_tokens, size]."""
    _activation_and_mul(out, gate_up, "silu")


def gelu_and_mul(out: torch.Tensor, gate_up: torch.Tensor, approximate: Literal["tanh", "none"] = "tanh") -> None:
    """out = gelu(gate) * up, by the tanh formula or ("none") the error function; shapes as silu_and_mul."""
    if approximate not in ("tanh", "none"):
        raise ValueError(f"gelu_and_mul: approximate {approximate!r} is not supported; supported: tanh, none")
    _activation_and_mul(out, gate_up, approximate)


def _activation_and_mul(out: torch.Tensor, gate_up: torch.Tensor, activation: str) -> None:
    key = (
        activation, gate_up.shape, gate_up.stride(), out.shape, out.stride(), gate_up.dtype, out.dtype,
        placement(out, gate_up),
    )  # fmt: skip
    plan = _activation_plans.get(key)
    if plan is None:
        plan = _activation_plans.remember(key, bind_activation(out, gate_up, activation))
    plan(out.data_ptr(), gate_up.data_ptr(), stream_of(out))


def bind_activation(out: torch.Tensor, gate_up: torch.Tensor, activation: str) -> Callable[..., None]:
    """The native call for tensors of these shapes. TypeError, ValueError."""
    op = "silu_and_mul" if activation == "silu" else "gelu_and_mul"
    dims = Dims(op)
    out_strides = dims.tensor("out", out, ("num_tokens", "size"), _ACTIVATIONS, contiguous=False)
    dims.sizes["2*size"] = 2 * dims["size"]
    strides = dims.tensor("gate_up", gate_up, ("num_tokens", "2*size"), (out.dtype,), contiguous=False)
    code = _ACTIVATION_CODES[activation]
    return _C.ActivationAndMul(
        dims.device_code, dims["num_tokens"], dims["size"], out_strides[0], strides[0], code, DTYPE_CODES[out.dtype]
    ).run


def embedding(out: torch.Tensor, ids: torch.Tensor, table: torch.Tensor) -> None:
    """out[i] = table[ids[i]]; out [num_tokens, hidden], ids [num_tokens] int32 or int64, table [vocab_size, hidden].

    out has the table's dtype or float32.
    """
    _gather("embedding", out, table, ids)


def gather_rows(out: torch.Tensor, x: torch.Tensor, rows: torch.Tensor) -> None:
    """out[i] = x[rows[i]]; out [num_rows, hidden], x [num_tokens, hidden], rows [num_rows] int32 or int64."""
    _gather("gather_rows", out, x, rows)


def _gather(op: str, out: torch.Tensor, table: torch.Tensor, ids: torch.Tensor) -> None:
    key = (
        out.shape,
        out.stride(),
        table.shape,
        table.stride(),
        ids.shape,
        ids.stride(),
        out.dtype,
        table.dtype,
        ids.dtype,
        placement(out, table, ids),
    )
    plan = _gather_plans.get(key)
    if plan is None:
        plan = _gather_plans.remember(key, bind_gather(op, out, table, ids))
    plan(out.data_ptr(), table.data_ptr(), ids.data_ptr(), stream_of(out))


def check_embedding(dims: Dims, out: torch.Tensor, table: torch.Tensor) -> tuple[int, int]:
    """Check a lookup's tensors; row strides of out and table. TypeError, ValueError."""
    table_strides = dims.tensor("table", table, ("num_table_rows", "hidden"), _ACTIVATIONS, contiguous=False)
    out_strides = dims.tensor(
        "out", out, ("num_rows", "hidden"), (table.dtype, torch.float32), contiguous=False
    )  # fmt: skip
    return out_strides[0], table_strides[0]


def bind_gather(op: str, out: torch.Tensor, table: torch.Tensor, ids: torch.Tensor) -> Callable[..., None]:
    """The native call for tensors of these shapes. TypeError, ValueError."""
    dims = Dims(op)
    out_stride, table_stride = check_embedding(dims, out, table)
    dims.tensor("ids", ids, ("num_rows",), _INDEX_DTYPES)
    width = table.element_size()
    return _C.GatherRows(
        dims.device_code, [dims["num_rows"], dims["num_table_rows"], dims["hidden"] * width],
        [out_stride * out.element_size(), table_stride * width], ids.dtype == torch.int64,
        out.dtype is not table.dtype, DTYPE_CODES[table.dtype],
    ).run  # fmt: skip
