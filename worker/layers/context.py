"""What every layer is built with: dtype, device, and its place in the tensor-parallel group."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch

from pagemill.errors import ModelLoadError


def _no_reduce(tensor: torch.Tensor) -> None:
    """Sum over a group of one."""


@dataclass(frozen=True, slots=True)
class LayerContext:
    """Build-time facts of a rank.

    Attributes:
        dtype: of weights and activations.
        device: where tensors live.
        rank: this worker's place in its tensor-parallel group.
        size: ranks in the group.
        all_reduce: sums a tensor over the group in place.
    """

    dtype: torch.dtype
    device: torch.device
    rank: int = 0
    size: int = 1
    all_reduce: Callable[[torch.Tensor], None] = _no_reduce

    def share(self, count: int, what: str) -> int:
        """This rank's part of `count` equal things.

        Raises:
            ModelLoadError: not divisible by the group's size.
        """
        if count % self.size:
            raise ModelLoadError(f"{count} {what} do not divide into {self.size} tensor-parallel ranks")
        return count // self.size
