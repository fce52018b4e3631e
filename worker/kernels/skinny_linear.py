"""Matrix products with few rows on CUDA, where reading the weights is all the time."""

from __future__ import annotations

import torch

from worker.kernels._checks import DTYPE_CODES, Dims, PlanCache, placement, stream_of
from worker.kernels._native import load_native

_C = load_native()
_HALVES = (torch.bfloat16, torch.float16)
MAX_ROWS = 16


class SkinnyLinear:
    """out = x · Wᵀ for at most 16 rows, summed in float32 and rounded once. Owns the workspace that its calls share.

    Args:
        weight: [num_outputs, num_inputs], bfloat16 or float16 on CUDA, contiguous; kept.

    Raises:
        TypeError, ValueError: a dtype, device or shape that is not supported, naming it.
    """

    def __init__(self, weight: torch.Tensor) -> None:
        dims = Dims("skinny_linear", devices=("cuda",))
        dims.tensor("weight", weight, ("num_outputs", "num_inputs"), _HALVES)
        self._weight = weight
        self._plans = PlanCache()
        with torch.cuda.device(weight.device):
            num_bytes = self._plan(MAX_ROWS, weight.shape[0], weight.shape[1]).workspace_bytes()
        self._workspace = torch.zeros(num_bytes, dtype=torch.uint8, device=weight.device)

    def _plan(self, num_rows: int, out_stride: int, x_stride: int) -> object:
        num_outputs, num_inputs = self._weight.shape
        return _C.SkinnyLinear(num_rows, num_outputs, num_inputs, out_stride, x_stride, DTYPE_CODES[self._weight.dtype])

    def wins(self, num_rows: int) -> bool:
        """Whether this is faster than torch's product for so many rows, by measurement."""
        return num_rows <= MAX_ROWS and self._plan(num_rows, *self._weight.shape).wins()

    def __call__(self, out: torch.Tensor, x: torch.Tensor) -> None:
        """out [num_rows, num_outputs], x [num_rows, num_inputs]; rows may be strided. TypeError, ValueError."""
        key = (out.shape, out.stride(), x.shape, x.stride(), out.dtype, x.dtype, placement(out, x))
        plan = self._plans.get(key)
        if plan is None:
            num_outputs, num_inputs = self._weight.shape
            dims = Dims("skinny_linear", devices=("cuda",), num_outputs=num_outputs, num_inputs=num_inputs)
            dims.tensor("weight", self._weight, ("num_outputs", "num_inputs"), _HALVES)
            dtypes = (self._weight.dtype,)
            x_stride = dims.tensor("x", x, ("num_rows", "num_inputs"), dtypes, contiguous=False)[0]
            out_stride = dims.tensor("out", out, ("num_rows", "num_outputs"), dtypes, contiguous=False)[0]
            if dims["num_rows"] > MAX_ROWS:
                raise ValueError(f"skinny_linear: x has {dims['num_rows']} rows; at most {MAX_ROWS} are supported")
            plan = self._plans.remember(key, self._plan(dims["num_rows"], out_stride, x_stride).run)
        plan(
            out.data_ptr(), x.data_ptr(), self._weight.data_ptr(), self._workspace.data_ptr(), self._workspace.numel(),
            stream_of(x),
        )  # fmt: skip


def skinny_linear(out: torch.Tensor, x: torch.Tensor, weight: torch.Tensor) -> None:
    """One product; see `SkinnyLinear`, which a model keeps instead."""
    SkinnyLinear(weight)(out, x)
