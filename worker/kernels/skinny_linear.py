"""Matrix products with few rows on CUDA, where reading the weights is all the time."""

from __future__ import annotations

from typing import Any

import torch

from worker.kernels._checks import DTYPE_CODES, Dims, PlanCache, placement, stream_of
from worker.kernels._native import load_native

_C = load_native()
_HALVES = (torch.bfloat16, torch.float16)
MAX_ROWS = 16


class SkinnyLinear:
    """out = x · Wᵀ for at most 16 rows, summed in float32 and rounded once. Owns the workspace that its calls share.

    A launch reads the weight while the kernel before it in the stream may still run: that one must not write it.

    Args:
        weight: [num_outputs, num_inputs], bfloat16 or float16 on CUDA, contiguous; kept.

    Raises:
        TypeError, ValueError: a dtype, device or shape that is not supported, naming it.
    """

    _is_gated = False

    def __init__(self, weight: torch.Tensor) -> None:
        dims = Dims("skinny_linear", devices=("cuda",))
        dims.tensor("weight", weight, ("num_outputs", "num_inputs"), _HALVES)
        self._weight = weight
        self._num_outputs, self._num_inputs = self._sizes(weight)
        self._plans = PlanCache()
        with torch.cuda.device(weight.device):
            num_bytes = self._plan(MAX_ROWS, self._num_outputs, self._num_inputs).workspace_bytes()
        self._workspace = torch.zeros(num_bytes, dtype=torch.uint8, device=weight.device)

    @staticmethod
    def _sizes(weight: torch.Tensor) -> tuple[int, int]:
        """Outputs and inputs."""
        return weight.shape[0], weight.shape[1]

    def _plan(self, num_rows: int, out_stride: int, x_stride: int) -> Any:
        return _C.SkinnyLinear(
            num_rows, self._num_outputs, self._num_inputs, out_stride, x_stride, DTYPE_CODES[self._weight.dtype],
            self._is_gated,
        )  # fmt: skip

    def wins(self, num_rows: int) -> bool:
        """Whether this is faster than torch's product for so many rows, by measurement."""
        return num_rows <= MAX_ROWS and self._plan(num_rows, self._num_outputs, self._num_inputs).wins()

    def __call__(self, out: torch.Tensor, x: torch.Tensor) -> None:
        """out [num_rows, num_outputs], x [num_rows, num_inputs]; rows may be strided. TypeError, ValueError."""
        key = (out.shape, out.stride(), x.shape, x.stride(), out.dtype, x.dtype, placement(out, x))
        plan = self._plans.get(key)
        if plan is None:
            sizes = {"num_outputs": self._num_outputs, "num_inputs": self._num_inputs}
            dims = Dims("skinny_linear", devices=("cuda",), **sizes)
            dims.tensor("weight", self._weight, ("num_weight_rows", "num_inputs"), _HALVES)
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


class SkinnyGateUp(SkinnyLinear):
    """out = silu(x · gateᵀ) * (x · upᵀ) for at most 16 rows, in float32 and rounded once.

    Args:
        weight: [2 * num_outputs, num_inputs]: the rows of gate, then those of up; otherwise as for SkinnyLinear.

    Raises:
        TypeError, ValueError: as for SkinnyLinear; also for an odd number of rows.
    """

    _is_gated = True

    @staticmethod
    def _sizes(weight: torch.Tensor) -> tuple[int, int]:
        if weight.shape[0] % 2:
            raise ValueError(f"skinny_linear: weight has {weight.shape[0]} rows: no gate and up of equal size")
        return weight.shape[0] // 2, weight.shape[1]


def skinny_linear(out: torch.Tensor, x: torch.Tensor, weight: torch.Tensor) -> None:
    """One product; see `SkinnyLinear`, which a model keeps instead."""
    SkinnyLinear(weight)(out, x)
