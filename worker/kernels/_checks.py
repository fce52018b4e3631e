"""Shape, dtype and stride checks with named dimensions.

They run once per combination of shapes, strides and dtypes: the wrappers remember the combinations that passed.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

DTYPE_CODES: dict[torch.dtype, int] = {torch.float32: 0, torch.bfloat16: 1, torch.float16: 2}
HEAD_SIZES = (64, 80, 96, 112, 128, 192, 256)
BLOCK_SIZES = (8, 16, 32, 64)
MAX_PLANS = 4096


class PlanCache(dict[Any, Any]):
    """Validated combinations, bounded: when full it starts over, since refilling costs microseconds."""

    def remember(self, key: Any, plan: Any) -> Any:
        if len(self) >= MAX_PLANS:
            self.clear()
        self[key] = plan
        return plan


def names_of(dtypes: Sequence[torch.dtype]) -> str:
    return ", ".join(str(dtype).removeprefix("torch.") for dtype in dtypes)


class Dims:
    """Named dimensions of one call; each name has one size, given or seen first."""

    def __init__(self, op: str, **sizes: int) -> None:
        self.op = op
        self.sizes = sizes

    def __getitem__(self, name: str) -> int:
        return self.sizes[name]

    def tensor(
        self,
        name: str,
        tensor: torch.Tensor,
        dims: Sequence[str],
        dtypes: Sequence[torch.dtype],
        *,
        contiguous: bool = True,
    ) -> tuple[int, ...]:
        """Check one tensor and return its strides, with those of dimensions of size 1 made canonical.

        Raises:
            TypeError: not a tensor on the CPU, or a dtype that is not in the list, which the message gives.
            ValueError: number of dimensions, a size or a stride is wrong; the message gives the expected shape.
        """
        if not isinstance(tensor, torch.Tensor):
            raise TypeError(f"{self.op}: {name} must be a torch.Tensor, got {type(tensor).__name__}")
        if tensor.device.type != "cpu":
            raise TypeError(f"{self.op}: {name} is on {tensor.device}; supported devices: cpu")
        if tensor.dtype not in dtypes:
            raise TypeError(f"{self.op}: {name} is {names_of([tensor.dtype])}; supported: {names_of(dtypes)}")
        wanted = ", ".join(f"{d}={self.sizes[d]}" if d in self.sizes else d for d in dims)
        if tensor.dim() != len(dims):
            raise ValueError(f"{self.op}: {name} has shape {list(tensor.shape)}; expected [{wanted}]")
        for dim, size in zip(dims, tensor.shape, strict=True):
            if self.sizes.setdefault(dim, size) != size:
                raise ValueError(f"{self.op}: {name} has shape {list(tensor.shape)}; expected [{wanted}]")
        strides = tensor.stride()
        if contiguous:
            if not tensor.is_contiguous():
                raise ValueError(f"{self.op}: {name} must be contiguous, its strides are {list(strides)}")
        elif strides and tensor.shape[-1] > 1 and strides[-1] != 1:
            raise ValueError(f"{self.op}: the last dimension of {name} must be contiguous, strides {list(strides)}")
        return strides

    def one_of(self, name: str, supported: Sequence[int]) -> int:
        size = self.sizes[name]
        if size not in supported:
            raise ValueError(f"{self.op}: {name} {size} is not supported; supported: {', '.join(map(str, supported))}")
        return size
