"""Matrix products with weights in device memory: out = x · Wᵀ (+ bias), summed in float32 and rounded once.

The weight stays as it is, [out_features, in_features], for the device's own library of products; up to 16 rows go to
`SkinnyLinear` where it is faster. A product is bound to the rows of its input and output before it is launched, since
what computes it depends on their number.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import torch

from worker.kernels.skinny_linear import SkinnyGateUp, SkinnyLinear

_DTYPES = (torch.float32, torch.bfloat16, torch.float16)
Launch = Callable[[], object]


class _DeviceProduct:
    """A weight on its device, and the ways to multiply with it."""

    _skinny_class = SkinnyLinear

    def __init__(self, weight: torch.Tensor, bias: torch.Tensor | None = None) -> None:
        if weight.dim() != 2 or weight.dtype not in _DTYPES or not weight.is_contiguous():
            supported = ", ".join(map(str, _DTYPES))
            raise ValueError(
                f"weight must be contiguous [out_features, in_features] of {supported}, "
                f"not {list(weight.shape)} of {weight.dtype} with strides {list(weight.stride())}"
            )
        if bias is not None and (bias.shape != weight.shape[:1] or bias.dtype is not weight.dtype):
            raise ValueError(
                f"bias must be [{weight.shape[0]}] of {weight.dtype}, not {list(bias.shape)} of {bias.dtype}"
            )
        self.weight = weight.detach()
        self.bias = bias
        self.dtype = weight.dtype
        self.out_features, self.in_features = weight.shape
        self._transposed = self.weight.t()
        is_skinny = weight.is_cuda and weight.dtype is not torch.float32 and bias is None
        self._skinny = self._skinny_class(self.weight) if is_skinny else None

    @property
    def num_bytes(self) -> int:
        """Bytes of weight and bias."""
        return self.weight.nbytes + (0 if self.bias is None else self.bias.nbytes)

    def check(self, x: torch.Tensor, out: torch.Tensor) -> None:
        """Check the arguments of a call. Raises ValueError."""
        num_rows, in_features = x.shape
        if (
            in_features != self.in_features
            or out.shape != (num_rows, self.out_features)
            or x.dtype is not self.dtype
            or out.dtype not in (self.dtype, torch.float32)
            or not x.device == out.device == self.weight.device
            or x.stride(1) != 1
            or out.stride(1) != 1
        ):
            raise ValueError(
                f"x must be [T, {self.in_features}] of {self.dtype} and out [T, {self.out_features}] of {self.dtype} "
                f"or torch.float32, both on {self.weight.device} with contiguous rows; x is {list(x.shape)} of "
                f"{x.dtype} on {x.device} with strides {list(x.stride())}, out is {list(out.shape)} of {out.dtype} on "
                f"{out.device} with strides {list(out.stride())}"
            )

    def _bind_skinny(self, x: torch.Tensor, out: torch.Tensor) -> Launch | None:
        """The kernel for few rows, where it is faster and writes what is asked for."""
        if self._skinny is None or out.dtype is not self.dtype or not self._skinny.wins(x.shape[0]):
            return None
        return partial(self._skinny, out, x)

    def _bind_product(self, x: torch.Tensor, out: torch.Tensor) -> Launch:
        if out.dtype is self.dtype:
            if self.bias is None:
                return partial(torch.mm, x, self._transposed, out=out)
            return partial(torch.addmm, self.bias, x, self._transposed, out=out)
        if self.bias is None:
            return self._bind_wide(x, out)
        return partial(_in_turn, self._bind_wide(x, out), partial(out.add_, self.bias))

    def _bind_wide(self, x: torch.Tensor, out: torch.Tensor) -> Launch:
        if x.is_cuda:
            return partial(torch.mm, x, self._transposed, out_dtype=torch.float32, out=out)
        return partial(_widened_product, x, self._transposed, out)


class DeviceLinear(_DeviceProduct):
    """A weight [out_features, in_features] and an optional bias [out_features], kept where they lie.

    Args:
        weight: float32, bfloat16 or float16, contiguous; kept.
        bias: of the weight's dtype, contiguous, or None; kept.

    Raises:
        ValueError: a shape or dtype does not fit.
    """

    def bind(self, x: torch.Tensor, out: torch.Tensor) -> Launch:
        """What writes x · Wᵀ + bias into `out` when called; nothing is allocated in a call on CUDA.

        Args:
            x: [T, in_features] of the weight's dtype; rows may be strided.
            out: [T, out_features] of the weight's dtype or float32; likewise.
        """
        return self._bind_skinny(x, out) or self._bind_product(x, out)

    def __call__(self, x: torch.Tensor, out: torch.Tensor) -> None:
        """Write the product into `out`. Arguments as for `bind`; errors as for `check`."""
        self.check(x, out)
        self.bind(x, out)()


class DeviceGateUp(_DeviceProduct):
    """The weight of a gated MLP, [2 * out_features, in_features]: the rows of gate, then those of up.

    Raises:
        ValueError: as for DeviceLinear; also for an odd number of rows.
    """

    _skinny_class = SkinnyGateUp

    def __init__(self, weight: torch.Tensor, bias: torch.Tensor | None = None) -> None:
        super().__init__(weight, bias)
        if self.out_features % 2:
            raise ValueError(f"weight has {self.out_features} rows, which are no gate and up of equal size")
        self.out_features //= 2

    def bind_activated(self, x: torch.Tensor, out: torch.Tensor) -> Launch | None:
        """One launch that writes silu(x · gateᵀ) * (x · upᵀ) into out [T, out_features]; None where two are faster."""
        return self._bind_skinny(x, out)

    def bind_product(self, x: torch.Tensor, out: torch.Tensor) -> Launch:
        """What writes both products, [T, 2 * out_features], into `out`, for an activation to read."""
        return self._bind_product(x, out)


def _in_turn(first: Launch, second: Launch) -> None:
    first()
    second()


def _widened_product(x: torch.Tensor, transposed: torch.Tensor, out: torch.Tensor) -> None:
    """A product with float32 output where torch has none: the CPU, on which launches are only compared."""
    torch.mm(x.float(), transposed.float(), out=out)
