"""The CUDA devices that a process sees, by the driver alone: no torch and no kernels are needed to ask."""

from __future__ import annotations

import ctypes
import os
from collections.abc import Sequence
from dataclasses import dataclass

from pagemill.errors import ConfigError

# The kernels need what came with this compute capability: bfloat16 products and asynchronous copies.
MIN_COMPUTE_CAPABILITY = 80
VISIBLE_DEVICES_ENV = "CUDA_VISIBLE_DEVICES"

_SUCCESS, _NO_DEVICE = 0, 100
_MAJOR, _MINOR = 75, 76  # attributes of a device
_NAME_BYTES = 256


class NoCudaError(ConfigError):
    """CUDA cannot be used; the message says why and what would help.

    Attributes:
        sees_device: a device is there, so that running on the CPU may surprise.
    """

    def __init__(self, message: str, *, sees_device: bool) -> None:
        super().__init__(message, field="device")
        self.sees_device = sees_device


@dataclass(frozen=True, slots=True)
class DriverDevice:
    """One device. `compute_capability` is as 90 for 9.0."""

    name: str
    compute_capability: int
    memory_bytes: int

    def __str__(self) -> str:
        return f"{self.name} ({dotted(self.compute_capability)})"


def dotted(compute_capability: int) -> str:
    """90 as 9.0."""
    return f"{compute_capability // 10}.{compute_capability % 10}"


def cuda_devices() -> list[DriverDevice]:
    """The devices in the order of their indices; none without a driver.

    Raises:
        NoCudaError: the driver is there and fails, as one that does not fit the module in the system's kernel.
    """
    try:
        driver = ctypes.CDLL("libcuda.so.1")
    except OSError:
        return []
    status = driver.cuInit(0)
    if status == _NO_DEVICE:
        return []
    _check(driver, "cuInit", status)
    count = ctypes.c_int()
    _check(driver, "cuDeviceGetCount", driver.cuDeviceGetCount(ctypes.byref(count)))
    return [_device(driver, index) for index in range(count.value)]


def _device(driver: ctypes.CDLL, index: int) -> DriverDevice:
    handle, major, minor, memory = ctypes.c_int(), ctypes.c_int(), ctypes.c_int(), ctypes.c_size_t()
    name = ctypes.create_string_buffer(_NAME_BYTES)
    _check(driver, "cuDeviceGet", driver.cuDeviceGet(ctypes.byref(handle), index))
    _check(driver, "cuDeviceGetName", driver.cuDeviceGetName(name, _NAME_BYTES, handle))
    for value, attribute in ((major, _MAJOR), (minor, _MINOR)):
        status = driver.cuDeviceGetAttribute(ctypes.byref(value), attribute, handle)
        _check(driver, "cuDeviceGetAttribute", status)
    _check(driver, "cuDeviceTotalMem", driver.cuDeviceTotalMem_v2(ctypes.byref(memory), handle))
    return DriverDevice(name.value.decode(errors="replace"), 10 * major.value + minor.value, memory.value)


def _check(driver: ctypes.CDLL, operation: str, status: int) -> None:
    if status == _SUCCESS:
        return
    text = ctypes.c_char_p()
    driver.cuGetErrorString(status, ctypes.byref(text))
    reason = text.value.decode(errors="replace") if text.value else "unknown error"
    raise NoCudaError(
        f"the CUDA driver fails in {operation}: {reason} (error {status}); `nvidia-smi` shows whether it works at all",
        sees_device=True,
    )


def pick_cuda_device(devices: Sequence[DriverDevice]) -> int:
    """Index of the first device that the kernels can run on.

    Raises:
        NoCudaError: there is none.
    """
    for index, device in enumerate(devices):
        if device.compute_capability >= MIN_COMPUTE_CAPABILITY:
            return index
    narrowed = os.environ.get(VISIBLE_DEVICES_ENV)
    note = "" if narrowed is None else f", {VISIBLE_DEVICES_ENV} is {narrowed!r}"
    if not devices:
        raise NoCudaError(
            f"no CUDA device is visible{note}; `nvidia-smi` lists those of this machine", sees_device=False
        )
    found = ", ".join(map(str, devices))
    raise NoCudaError(
        f"a compute capability of {dotted(MIN_COMPUTE_CAPABILITY)} or more is needed, visible: {found}{note}",
        sees_device=True,
    )
