"""Matrix products on packed weights: out = x · Wᵀ (+ bias), summed in float32.

A weight is packed once, for the instruction set in force then; the plain tensor can be freed. A row of the output
depends on that row of x alone: neither the number of threads nor the other rows of a call change a bit of it.
Different instruction sets round differently.
"""

from __future__ import annotations

import torch

from worker.kernels import _C

_DTYPE_CODES = {torch.float32: 0, torch.bfloat16: 1, torch.float16: 2}
_ROWS, _GATE_UP = 0, 1
STORE, ACCUMULATE, SILU_MUL = 0, 1, 2  # LinearEpilogue


class _Packed:
    """A weight in native layout (`native`), with what is needed to check a call against it."""

    _order = _ROWS
    epilogue = STORE

    def __init__(self, weight: torch.Tensor, bias: torch.Tensor | None = None, *, isa: str = "") -> None:
        if weight.dim() != 2 or weight.dtype not in _DTYPE_CODES:
            supported = ", ".join(str(dtype) for dtype in _DTYPE_CODES)
            raise ValueError(
                f"weight must be [out_features, in_features] of {supported}, not {list(weight.shape)} of {weight.dtype}"
            )
        num_rows, self.in_features = weight.shape
        if bias is not None and bias.shape != (num_rows,):
            raise ValueError(f"bias must be [{num_rows}] as the weight's rows, not {list(bias.shape)}")
        weight = weight.detach().cpu()
        if weight.stride(1) != 1 or weight.stride(0) < self.in_features:
            weight = weight.contiguous()
        bias = None if bias is None else bias.detach().float().cpu().contiguous()
        self._weight_shape = (num_rows, self.in_features)
        self.out_features = num_rows
        self.dtype = weight.dtype
        self.native = _C.PackedLinear(
            weight.data_ptr(),
            num_rows,
            self.in_features,
            weight.stride(0),
            _DTYPE_CODES[weight.dtype],
            0 if bias is None else bias.data_ptr(),
            self._order,
            isa,
        )
        self._apply = self.native.apply

    @property
    def num_bytes(self) -> int:
        """Bytes of the packed weight, padding included."""
        return int(self.native.num_bytes)

    @property
    def isa(self) -> str:
        """Instruction set that the weight is packed for."""
        return str(self.native.isa)

    def unpack(self) -> torch.Tensor:
        """The weight as it was given to the constructor, as a new tensor."""
        weight = torch.empty(self._weight_shape, dtype=self.dtype)
        self.native.unpack(weight.data_ptr())
        return weight

    def __call__(self, x: torch.Tensor, out: torch.Tensor) -> None:
        """Write the product into `out`.

        Args:
            x: [T, in_features] of the weight's dtype; rows may be strided, elements of a row are contiguous.
            out: [T, out_features] of the weight's dtype or float32; likewise. Must not overlap x.

        Raises:
            ValueError: a shape, dtype or stride does not fit.
        """
        self._run(x, out, self.epilogue)

    def _run(self, x: torch.Tensor, out: torch.Tensor, epilogue: int) -> None:
        self.check(x, out)
        self._apply(
            x.data_ptr(), x.shape[0], x.stride(0), out.data_ptr(), out.stride(0), _DTYPE_CODES[out.dtype], epilogue
        )

    def check(self, x: torch.Tensor, out: torch.Tensor) -> None:
        """Check the arguments of a call. Raises ValueError."""
        num_rows, in_features = x.shape
        dtype, out_dtype = x.dtype, out.dtype
        if (
            in_features != self.in_features
            or out.shape != (num_rows, self.out_features)
            or dtype is not self.dtype
            or (out_dtype is not dtype and out_dtype is not torch.float32)
            or x.stride(1) != 1
            or out.stride(1) != 1
        ):
            self._reject(x, out)

    def _reject(self, x: torch.Tensor, out: torch.Tensor) -> None:
        raise ValueError(
            f"x must be [T, {self.in_features}] of {self.dtype} and out [T, {self.out_features}] of {self.dtype} or "
            f"torch.float32, both with contiguous rows; x is {list(x.shape)} of {x.dtype} with strides "
            f"{list(x.stride())}, out is {list(out.shape)} of {out.dtype} with strides {list(out.stride())}"
        )


class PackedLinear(_Packed):
    """A weight [out_features, in_features] and an optional bias [out_features].

    Args:
        weight: bfloat16, float16 or float32; not kept.
        bias: any float dtype, applied as float32; not kept.
        isa: instruction set to pack for; empty takes the one in force (`worker.kernels.cpu_isa`).

    Raises:
        ValueError: a shape or dtype does not fit, or the machine lacks the instruction set.
    """

    def accumulate(self, x: torch.Tensor, out: torch.Tensor) -> None:
        """Add the product to `out`: summed in float32, rounded once. Arguments and errors as for the call."""
        self._run(x, out, ACCUMULATE)


class PackedGateUp(_Packed):
    """The two products of a gated MLP and its activation in one: out = silu(x · gateᵀ) * (x · upᵀ), in float32.

    Args:
        weight: [2 * out_features, in_features]: the rows of gate, then those of up.
        bias: [2 * out_features] likewise, or None.
        isa: as for PackedLinear.

    Raises:
        ValueError: as for PackedLinear; also for an odd number of rows.
    """

    _order = _GATE_UP
    epilogue = SILU_MUL

    def __init__(self, weight: torch.Tensor, bias: torch.Tensor | None = None, *, isa: str = "") -> None:
        super().__init__(weight, bias, isa=isa)
        self.out_features = self._weight_shape[0] // 2


def linear(packed: PackedLinear | PackedGateUp, x: torch.Tensor, out: torch.Tensor) -> None:
    """Write the product of x [T, in_features] with a packed weight into out [T, out_features]."""
    packed(x, out)
