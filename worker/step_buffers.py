"""What goes to the device with a step and what comes back: one packed buffer each way, none of them waited for."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch

from worker.step_device import RING_DEPTH, Mark, StepDevice

# Columns begin at multiples of 16 bytes.
_ALIGNMENT_INTS = 4
_DTYPES = {
    np.dtype(np.int32): torch.int32,
    np.dtype(np.int64): torch.int64,
    np.dtype(np.float32): torch.float32,
}


def aligned(num_ints: int) -> int:
    """The next multiple of a column's alignment."""
    return -(-num_ints // _ALIGNMENT_INTS) * _ALIGNMENT_INTS


class Staging:
    """The small inputs of one step: columns end to end in a host buffer that one copy takes to the device.

    The first `header_ints` are placed by hand and have fixed addresses; further columns follow in the order in which
    they are added. Host buffers are used in turn, each again only when the copy from it has been made.
    """

    def __init__(self, device: StepDevice, header_ints: int, num_ints: int) -> None:
        """`num_ints` for the columns behind the header."""
        self._device = device
        self._header_ints = aligned(header_ints)
        self.capacity_ints = aligned(num_ints)
        self._hosts, self._on_device = device.staging(self._header_ints + self.capacity_ints)
        self._arrays = [host.numpy() for host in self._hosts]
        self._copied: list[Mark | None] = [None] * len(self._hosts)
        self._at = 0
        self._used = self._header_ints

    @property
    def free_ints(self) -> int:
        """Room for further columns."""
        return self._header_ints + self.capacity_ints - self._used

    def begin(self) -> None:
        """Start to fill the next host buffer."""
        self._at = (self._at + 1) % len(self._hosts)
        copied = self._copied[self._at]
        if copied is not None:
            copied.wait()  # long reached: two steps have been launched since
        self._used = self._header_ints

    def host_header(self, first: int, count: int) -> npt.NDArray[np.int32]:
        """Ints of the header in the host buffer, to be written."""
        return self._arrays[self._at][first : first + count]

    def host_tensor(self, first: int, count: int) -> torch.Tensor:
        """The same as a tensor."""
        return self._hosts[self._at][first : first + count]

    def device_header(self, first: int, count: int) -> torch.Tensor:
        """Ints of the header on the device; the same address for every step."""
        return self._on_device[first : first + count]

    def column(self, values: npt.NDArray[np.generic]) -> torch.Tensor:
        """Add a column of int32, int64 or float32; the tensor on the device, which holds it after `upload`."""
        dtype = _DTYPES[values.dtype]
        num_ints = values.nbytes // 4
        first = self._used
        self._used += aligned(num_ints)
        self._arrays[self._at][first : first + num_ints].view(values.dtype)[:] = values
        column = self._on_device[first : first + num_ints]
        return column if dtype is torch.int32 else column.view(dtype)

    def upload(self) -> None:
        """Copy everything to the device, in the order of its work."""
        used = self._used
        self._device.to_device(self._hosts[self._at][:used], self._on_device[:used])
        if len(self._hosts) > 1:
            self._copied[self._at] = self._device.mark()


@dataclass(slots=True)
class Results:
    """What a step's sampling leaves: status and token id per row.

    Attributes:
        status: int32 [num_rows] on the device; not 0 where the logits are NaN or infinite.
        token_ids: int64 [num_rows] on the device.
        host_status: the same in host memory, after `ResultRing.download` and the next mark.
        host_token_ids: likewise.
    """

    status: torch.Tensor
    token_ids: torch.Tensor
    host_status: npt.NDArray[np.int32]
    host_token_ids: npt.NDArray[np.int64]
    whole: tuple[torch.Tensor, torch.Tensor]


class ResultRing:
    """Buffers of the results of RING_DEPTH steps for at most `max_rows` rows each, used in turn."""

    def __init__(self, device: StepDevice, max_rows: int) -> None:
        self._device = device
        rows = aligned(max_rows)
        self._ring = [
            Results(
                pair[0][:rows],
                pair[0][rows:].view(torch.int64),
                pair[1].numpy()[:rows],
                pair[1].numpy()[rows:].view(np.int64),
                pair,
            )
            for pair in device.results(3 * rows)
        ]
        assert len(self._ring) == RING_DEPTH
        self._next = 0

    def take(self) -> Results:
        """The next one; what it held RING_DEPTH steps ago is lost."""
        results = self._ring[self._next]
        self._next = (self._next + 1) % RING_DEPTH
        return results

    def download(self, results: Results) -> None:
        """Copy to host memory, in the order of the device's work."""
        self._device.to_host(*results.whole)
