"""Where a step's memory lies and how its end is noticed: everything that differs between a CPU and a GPU but graphs.

`HostDevice` computes in the memory that the host writes, at once. `CopyingDevice` has memory of its own, which copies
reach; `CudaDevice` is one whose copies and kernels run behind the host's back, in the order of the current stream.
"""

from __future__ import annotations

import time
from dataclasses import dataclass, field
from typing import Protocol

import numpy as np
import numpy.typing as npt
import torch

from worker.kernels.execution import Execution, LaunchExecution, NativeExecution

# Steps whose buffers exist at once. One more than may be in flight, so that no launch waits for a buffer.
RING_DEPTH = 3


class Mark(Protocol):
    """A point in the device's work."""

    @property
    def is_reached(self) -> bool:
        """All work before it is done."""

    def wait(self) -> None:
        """Wait until it is reached; the interpreter lock is free meanwhile."""

    def ns_since(self, earlier: Mark) -> int:
        """Nanoseconds of the device's time since another mark of the same kind. Both must have been reached."""


class StepDevice(Protocol):
    """What the runner needs of a device.

    Attributes:
        torch_device: of tensors that kernels read and write.
        execution: how a model holds its weights there and runs.
        max_steps_in_flight: steps worth launching before the oldest one's result is asked for.
    """

    torch_device: torch.device
    execution: Execution
    max_steps_in_flight: int

    def activate(self) -> None:
        """Make it the current device of the calling thread, before anything is launched."""

    def staging(self, num_ints: int) -> tuple[list[torch.Tensor], torch.Tensor]:
        """Host buffers to be filled in turn, and the one on the device that each is copied to. All int32."""

    def results(self, num_ints: int) -> list[tuple[torch.Tensor, torch.Tensor]]:
        """RING_DEPTH pairs of a device buffer and the host buffer that it is copied to. All int32."""

    def to_device(self, host: torch.Tensor, device: torch.Tensor) -> None:
        """Copy a buffer of `staging`, in the order of the device's work."""

    def to_host(self, device: torch.Tensor, host: torch.Tensor) -> None:
        """Copy a buffer of `results`; complete at the next mark."""

    def upload(self, array: npt.NDArray[np.generic]) -> torch.Tensor:
        """A copy of a host array on the device."""

    def download(self, tensor: torch.Tensor) -> torch.Tensor:
        """A host tensor with the contents of a device tensor, complete at the next mark."""

    def mark(self) -> Mark:
        """The end of the work so far."""


@dataclass(slots=True)
class HostMark:
    """A moment: on a CPU work is done when its call returns."""

    reached_ns: int = field(default_factory=time.monotonic_ns)

    @property
    def is_reached(self) -> bool:
        return True

    def wait(self) -> None:
        return

    def ns_since(self, earlier: Mark) -> int:
        assert isinstance(earlier, HostMark)
        return self.reached_ns - earlier.reached_ns


class HostDevice:
    """The CPU: kernels read what the host wrote, where it wrote it."""

    max_steps_in_flight = 1

    def __init__(self) -> None:
        self.torch_device = torch.device("cpu")
        self.execution: Execution = NativeExecution()

    def activate(self) -> None:
        return

    def staging(self, num_ints: int) -> tuple[list[torch.Tensor], torch.Tensor]:
        buffer = torch.zeros(num_ints, dtype=torch.int32)
        return [buffer], buffer

    def results(self, num_ints: int) -> list[tuple[torch.Tensor, torch.Tensor]]:
        buffers = [torch.zeros(num_ints, dtype=torch.int32) for _ in range(RING_DEPTH)]
        return [(buffer, buffer) for buffer in buffers]

    def to_device(self, host: torch.Tensor, device: torch.Tensor) -> None:
        return

    def to_host(self, device: torch.Tensor, host: torch.Tensor) -> None:
        return

    def upload(self, array: npt.NDArray[np.generic]) -> torch.Tensor:
        return torch.from_numpy(array)

    def download(self, tensor: torch.Tensor) -> torch.Tensor:
        return tensor

    def mark(self) -> Mark:
        return HostMark()


class CopyingDevice:
    """A device with memory of its own, whose copies are complete when their call returns."""

    max_steps_in_flight = 2

    def __init__(self, torch_device: torch.device) -> None:
        self.torch_device = torch_device
        self.execution: Execution = LaunchExecution(torch_device)

    def activate(self) -> None:
        return

    def _host_buffer(self, num_ints: int) -> torch.Tensor:
        return torch.zeros(num_ints, dtype=torch.int32)

    def staging(self, num_ints: int) -> tuple[list[torch.Tensor], torch.Tensor]:
        hosts = [self._host_buffer(num_ints) for _ in range(RING_DEPTH)]
        return hosts, torch.zeros(num_ints, dtype=torch.int32, device=self.torch_device)

    def results(self, num_ints: int) -> list[tuple[torch.Tensor, torch.Tensor]]:
        # One on the device: its copy is ordered before the step that writes it next.
        device = torch.zeros(num_ints, dtype=torch.int32, device=self.torch_device)
        return [(device, self._host_buffer(num_ints)) for _ in range(RING_DEPTH)]

    def to_device(self, host: torch.Tensor, device: torch.Tensor) -> None:
        device.copy_(host, non_blocking=True)

    def to_host(self, device: torch.Tensor, host: torch.Tensor) -> None:
        host.copy_(device, non_blocking=True)

    def upload(self, array: npt.NDArray[np.generic]) -> torch.Tensor:
        return torch.from_numpy(array).clone().to(self.torch_device)

    def download(self, tensor: torch.Tensor) -> torch.Tensor:
        return tensor.clone()

    def mark(self) -> Mark:
        return HostMark()


class CudaMark:
    """An event in the current stream."""

    __slots__ = ("_event",)

    def __init__(self) -> None:
        self._event = torch.cuda.Event(enable_timing=True)
        self._event.record()

    @property
    def is_reached(self) -> bool:
        return bool(self._event.query())

    def wait(self) -> None:
        self._event.synchronize()

    def ns_since(self, earlier: Mark) -> int:
        assert isinstance(earlier, CudaMark)
        return max(0, round(earlier._event.elapsed_time(self._event) * 1e6))


class CudaDevice(CopyingDevice):
    """A CUDA device. Nothing here waits for it but `Mark.wait`: all host memory is pinned."""

    def activate(self) -> None:
        torch.cuda.set_device(self.torch_device)

    def _host_buffer(self, num_ints: int) -> torch.Tensor:
        return torch.zeros(num_ints, dtype=torch.int32, pin_memory=True)

    def upload(self, array: npt.NDArray[np.generic]) -> torch.Tensor:
        # torch's allocator of pinned memory reuses the buffer only after the copy.
        return torch.from_numpy(array).pin_memory().to(self.torch_device, non_blocking=True)

    def download(self, tensor: torch.Tensor) -> torch.Tensor:
        host = torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=True)
        return host.copy_(tensor, non_blocking=True)

    def mark(self) -> Mark:
        return CudaMark()


def step_device(torch_device: torch.device) -> StepDevice:
    """What suits a device."""
    return HostDevice() if torch_device.type == "cpu" else CudaDevice(torch_device)
