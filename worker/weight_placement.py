"""Where weights go after they were read: host memory, or through pinned memory to a device while more are read."""

from __future__ import annotations

import os
from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from queue import SimpleQueue
from typing import Protocol

import torch

_MAX_THREADS = 8
_STAGING_BYTES = 16 << 20


class _Source(Protocol):
    @property
    def device(self) -> torch.device: ...

    def read(self, name: str, shape: tuple[int, ...], index: tuple[slice, ...]) -> torch.Tensor: ...


@dataclass(frozen=True, slots=True)
class WeightPart:
    """A part of a stored tensor.

    Attributes:
        name: as the source knows it.
        whole_shape: of the stored tensor.
        index: the part.
        shape: of the part.
    """

    name: str
    whole_shape: tuple[int, ...]
    index: tuple[slice, ...]
    shape: tuple[int, ...]


class Placement(Protocol):
    """Makes tensors of parts."""

    def place(self, source: _Source, parts: Sequence[WeightPart]) -> torch.Tensor:
        """The parts one below the other, contiguous; its content is there after `finish`. Raises ModelLoadError."""

    def finish(self) -> None:
        """Wait for all that was placed. Raises ModelLoadError."""


class HostPlacement:
    """Tensors in host memory, at once; one part whose dtype needs no cast stays a view of its file."""

    def __init__(self, dtype: torch.dtype) -> None:
        self._dtype = dtype

    def place(self, source: _Source, parts: Sequence[WeightPart]) -> torch.Tensor:
        tensors = [source.read(part.name, part.whole_shape, part.index).to(self._dtype) for part in parts]
        return tensors[0].contiguous() if len(tensors) == 1 else torch.cat(tensors)

    def finish(self) -> None:
        """Nothing is outstanding."""


class _Lane:
    """Two pinned buffers and a stream: one buffer is filled while the other one is copied."""

    def __init__(self, device: torch.device) -> None:
        self._stream = torch.cuda.Stream(device)
        self._buffers = [torch.empty(_STAGING_BYTES, dtype=torch.uint8, pin_memory=True) for _ in range(2)]
        self._copied = [torch.cuda.Event() for _ in range(2)]

    def send(self, part: torch.Tensor, target: torch.Tensor, ready: torch.cuda.Event) -> None:
        """Copy a host tensor into a contiguous one of any dtype on the device, which is free from `ready` on."""
        values, places = part.reshape(-1), target.view(-1)
        chunk = _STAGING_BYTES // target.element_size()
        with torch.cuda.stream(self._stream):
            self._stream.wait_event(ready)
            for first in range(0, len(values), chunk):
                some = values[first : first + chunk]
                self._copied[0].synchronize()
                staged = self._buffers[0][: len(some) * target.element_size()].view(target.dtype)
                staged.copy_(some)
                places[first : first + chunk].copy_(staged, non_blocking=True)
                self._copied[0].record(self._stream)
                self._buffers.reverse()
                self._copied.reverse()


class DevicePlacement:
    """Tensors on a CUDA device. Threads read, cast and copy; what the source makes on the device is copied at once.

    Owns its threads and pinned memory from the first part that comes from the host until `finish`.
    """

    def __init__(self, dtype: torch.dtype, device: torch.device) -> None:
        self._dtype = dtype
        self._device = device
        self._num_threads = min(_MAX_THREADS, len(os.sched_getaffinity(0)))
        self._lanes: SimpleQueue[_Lane] = SimpleQueue()
        self._threads: ThreadPoolExecutor | None = None
        self._outstanding: list[Future[None]] = []

    def place(self, source: _Source, parts: Sequence[WeightPart]) -> torch.Tensor:
        num_rows = sum(part.shape[0] for part in parts)
        tensor = torch.empty((num_rows, *parts[0].shape[1:]), dtype=self._dtype, device=self._device)
        first = 0
        for part in parts:
            target = tensor[first : first + part.shape[0]]
            first += part.shape[0]
            if source.device.type == self._device.type:
                target.copy_(source.read(part.name, part.whole_shape, part.index))
            else:
                ready = torch.cuda.Event()
                ready.record()
                self._outstanding.append(self._pool().submit(self._fill, source, part, target, ready))
        return tensor

    def _pool(self) -> ThreadPoolExecutor:
        if self._threads is None:
            for _ in range(self._num_threads):
                self._lanes.put(_Lane(self._device))
            self._threads = ThreadPoolExecutor(self._num_threads, thread_name_prefix="weights")
        return self._threads

    def _fill(self, source: _Source, part: WeightPart, target: torch.Tensor, ready: torch.cuda.Event) -> None:
        values = source.read(part.name, part.whole_shape, part.index)
        lane = self._lanes.get()
        try:
            lane.send(values, target, ready)
        finally:
            self._lanes.put(lane)

    def finish(self) -> None:
        try:
            for future in self._outstanding:
                future.result()
        finally:
            self._outstanding.clear()
            if self._threads is not None:
                self._threads.shutdown(cancel_futures=True)
                self._threads = None
            torch.cuda.synchronize(self._device)
            self._lanes = SimpleQueue()
            torch.cuda.empty_cache()


def placement_for(dtype: torch.dtype, device: torch.device) -> Placement:
    """How weights get to a device."""
    return HostPlacement(dtype) if device.type == "cpu" else DevicePlacement(dtype, device)
