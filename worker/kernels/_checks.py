"""Shape, dtype, stride and device checks with named dimensions.

They run once per combination: the wrappers remember those that passed.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

DTYPE_CODES: dict[torch.dtype, int] = {torch.float32: 0, torch.bfloat16: 1, torch.float16: 2}
# How a cache holds its numbers: as the activations (0), or in 8 bits.
KV_DTYPE_CODES: dict[torch.dtype, int] = {torch.float8_e4m3fn: 1, torch.float8_e5m2: 2}
DEVICE_CODES = {"cpu": 0, "cuda": 1}
CPU_ONLY = ("cpu",)
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


def placement(*tensors: torch.Tensor | None) -> tuple[int, ...]:
    """Where each tensor lies: -1 for the CPU, the index of a CUDA device, -2 for None. Part of a plan's key."""
    return tuple([-2 if t is None else t.get_device() for t in tensors])


def address(tensor: torch.Tensor | None) -> int:
    return 0 if tensor is None else tensor.data_ptr()


def stream_of(tensor: torch.Tensor) -> int:
    """The current stream of the tensor's CUDA device as an integer; 0 on the CPU.

    Raises:
        ValueError: the tensor is on a CUDA device that is not the current one, on which kernels are launched.
    """
    index = tensor.get_device()
    if index < 0:
        return 0
    if index != torch.cuda.current_device():
        raise ValueError(f"tensors are on cuda:{index}, but the current device is cuda:{torch.cuda.current_device()}")
    return int(torch._C._cuda_getCurrentRawStream(index))


class Dims:
    """Named dimensions of one call; each name has one size, given or seen first. All tensors share one device."""

    def __init__(self, op: str, *, devices: Sequence[str] = tuple(DEVICE_CODES), **sizes: int) -> None:
        self.op = op
        self.sizes = sizes
        self._devices = devices
        self._device: torch.device | None = None
        self._first = ""

    @property
    def device_code(self) -> int:
        """Of the tensors checked so far."""
        return DEVICE_CODES[self._device.type] if self._device is not None else 0

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
            TypeError: not a tensor, a device that is not supported or not that of the tensors before, or a dtype that
                is not in the list, which the message gives.
            ValueError: number of dimensions, a size or a stride is wrong; the message gives the expected shape.
        """
        if not isinstance(tensor, torch.Tensor):
            raise TypeError(f"{self.op}: {name} must be a torch.Tensor, got {type(tensor).__name__}")
        self._check_device(name, tensor)
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

    def _check_device(self, name: str, tensor: torch.Tensor) -> None:
        device = tensor.device
        if device.type not in self._devices:
            raise TypeError(f"{self.op}: {name} is on {device}; supported devices: {', '.join(self._devices)}")
        if self._device is None:
            self._device, self._first = device, name
        elif device != self._device:
            raise TypeError(f"{self.op}: {name} is on {device}; expected {self._device} like {self._first}")

    def one_of(self, name: str, supported: Sequence[int]) -> int:
        size = self.sizes[name]
        if size not in supported:
            raise ValueError(f"{self.op}: {name} {size} is not supported; supported: {', '.join(map(str, supported))}")
        return size
