"""What is measured: cases, the work that each must do, and the contenders that do it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Literal

import torch

Call = Callable[[], object]
# Which measured bandwidth bounds a case: reading alone, reading and writing, or the link between device and host.
Traffic = Literal["read", "copy", "to_host", "to_device"]

OURS = "pagemill"


@dataclass(frozen=True, slots=True)
class Work:
    """The least that a case must do: bytes moved at the bandwidth of `traffic`, and floating-point operations."""

    num_bytes: int
    traffic: Traffic = "copy"
    flops: int = 0


@dataclass(frozen=True, slots=True)
class Candidate:
    """One implementation, ready to run.

    Attributes:
        calls: the same work on different memory, run in rotation so that no cache holds what is read.
        is_capturable: whether the calls can be recorded in a CUDA graph.
        result: the output after the first of `calls`, for comparison between contenders; None: not compared.
    """

    calls: Sequence[Call]
    is_capturable: bool = True
    result: Callable[[], torch.Tensor] | None = None


@dataclass(frozen=True, slots=True)
class Contender:
    """An implementation by name; `make` allocates what it alone needs, and may raise where it cannot run.

    Attributes:
        is_same_work: False where it is given less to do, such as contiguous memory instead of pages.
    """

    name: str
    make: Callable[[], Candidate]
    is_same_work: bool = True


@dataclass(frozen=True, slots=True)
class Case:
    """One kernel on one shape. `build` allocates what the contenders share; Pagemill's comes first."""

    kernel: str
    shape: str
    dtype: torch.dtype
    work: Work
    build: Callable[[], Sequence[Contender]]
    is_quick: bool = False


@dataclass(frozen=True, slots=True)
class Site:
    """Where cases run.

    Attributes:
        cold_bytes: memory that calls go through before they come back to the same, so that it has left the caches.
        is_dry: cases are tiny and run once, which shows that they run.
    """

    device: torch.device
    cold_bytes: int
    is_dry: bool = False

    @property
    def is_cuda(self) -> bool:
        return self.device.type == "cuda"

    def num_copies(self, num_bytes: int, limit: int = 256) -> int:
        """Of memory of so many bytes, for calls to rotate over."""
        if self.is_dry:
            return 2
        return max(1, min(limit, -(-self.cold_bytes // max(num_bytes, 1))))

    def random(self, *shape: int, dtype: torch.dtype) -> torch.Tensor:
        """Normally distributed numbers. 8-bit types have no generator: those are made from bfloat16, slice by slice."""
        if dtype.itemsize > 1:
            return torch.empty(shape, dtype=dtype, device=self.device).normal_()
        tensor = torch.empty(shape, dtype=dtype, device=self.device)
        for row in tensor:
            row.copy_(torch.empty(row.shape, dtype=torch.bfloat16, device=self.device).normal_())
        return tensor


def dtype_name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")
