"""Rows that the host computes for each step, on the device without a wait."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import numpy.typing as npt
import torch

# Steps in flight, and the one that is being prepared.
_NUM_BUFFERS = 3

# From rows [n, width] and a number of tokens T >= n: float32 [T, width] on the device, zero from n on or undefined.
Upload = Callable[[npt.NDArray[np.float32], int], torch.Tensor]


def host_rows(rows: npt.NDArray[np.float32], num_tokens: int) -> torch.Tensor:
    """The rows themselves, for a CPU: padded where a step has more tokens than rows."""
    if len(rows) < num_tokens:
        rows = np.concatenate((rows, np.zeros((num_tokens - len(rows), rows.shape[1]), dtype=np.float32)))
    return torch.from_numpy(rows)


class DeviceRows:
    """One buffer on a CUDA device, filled from pinned buffers in turn; the current stream orders copies and readers."""

    def __init__(self, max_rows: int, width: int, device: torch.device) -> None:
        self._rows = torch.zeros((max_rows, width), dtype=torch.float32, device=device)
        self._pinned = [torch.empty((max_rows, width), pin_memory=True) for _ in range(_NUM_BUFFERS)]
        self._copied = [torch.cuda.Event() for _ in range(_NUM_BUFFERS)]
        self._next = 0

    def __call__(self, rows: npt.NDArray[np.float32], num_tokens: int) -> torch.Tensor:
        pinned, copied = self._pinned[self._next], self._copied[self._next]
        self._next = (self._next + 1) % _NUM_BUFFERS
        copied.synchronize()  # of three steps ago
        pinned[: len(rows)].copy_(torch.from_numpy(rows))
        self._rows[: len(rows)].copy_(pinned[: len(rows)], non_blocking=True)
        copied.record()
        return self._rows[:num_tokens]


def make_upload(max_rows: int, width: int, device: torch.device) -> Upload:
    """How a step's rows get to a device."""
    return host_rows if device.type == "cpu" else DeviceRows(max_rows, width, device)
