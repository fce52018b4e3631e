"""Times of launches, by the clock of the device that runs them."""

from __future__ import annotations

import time
from itertools import pairwise
from typing import Protocol

import torch


class LaunchClock(Protocol):
    """Marks in the order of a device's work, and the time between them."""

    def mark(self) -> None:
        """The end of what was launched so far."""

    def intervals_ns(self) -> list[int]:
        """Nanoseconds from each mark to the next, once the last one is reached."""


class _HostClock:
    """Times between marks on a CPU, where a launch returns when it is done."""

    def __init__(self) -> None:
        self._marks_ns: list[int] = []

    def mark(self) -> None:
        self._marks_ns.append(time.perf_counter_ns())

    def intervals_ns(self) -> list[int]:
        return [later - earlier for earlier, later in pairwise(self._marks_ns)]


class _DeviceClock:
    """Times between marks in a stream of a CUDA device."""

    def __init__(self) -> None:
        self._events: list[torch.cuda.Event] = []

    def mark(self) -> None:
        event = torch.cuda.Event(enable_timing=True)
        event.record()
        self._events.append(event)

    def intervals_ns(self) -> list[int]:
        self._events[-1].synchronize()
        return [int(earlier.elapsed_time(later) * 1e6) for earlier, later in pairwise(self._events)]


def launch_clock(device: torch.device) -> LaunchClock:
    """A new clock of a device."""
    return _HostClock() if device.type == "cpu" else _DeviceClock()
