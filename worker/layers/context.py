"""What every layer is built with: dtype, device, and its place in the tensor-parallel group."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch

from pagemill.errors import ModelLoadError
from worker.kernels.execution import Execution, execution_for


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
        execution: how weights are held and passes run; unless given, `execution_for` the device.
    """

    dtype: torch.dtype
    device: torch.device
    rank: int = 0
    size: int = 1
    all_reduce: Callable[[torch.Tensor], None] = _no_reduce
    execution: Execution = None  # type: ignore[assignment]  # what suits the device

    def __post_init__(self) -> None:
        if self.execution is None:
            object.__setattr__(self, "execution", execution_for(self.device))

    def share(self, count: int, what: str) -> int:
        """This rank's part of `count` equal things.

        Raises:
            ModelLoadError: not divisible by the group's size.
        """
        if count % self.size:
            raise ModelLoadError(f"{count} {what} do not divide into {self.size} tensor-parallel ranks")
        return count // self.size
