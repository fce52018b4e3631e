"""A GPU's memory and utilization as the driver's management library tells them; that is what nvidia-smi shows.

It is asked rather than CUDA, whose calls may not come from another thread while a graph is captured.
"""

from __future__ import annotations

import ctypes
from dataclasses import dataclass

from pagemill.errors import PagemillError

_LIBRARY = "libnvidia-ml.so.1"
_SUCCESS, _NOT_SUPPORTED = 0, 3


class NvmlError(PagemillError):
    """The library is missing or fails; the message says how."""


@dataclass(frozen=True, slots=True)
class GpuReading:
    """State of one GPU.

    Attributes:
        used_bytes: held by all processes; what the driver keeps for itself is left out, as nvidia-smi does.
        total_bytes: all of it.
        utilization: share of the last sampling period in which a kernel ran; None where the GPU does not tell, as one
            that is divided (MIG).
    """

    used_bytes: int
    total_bytes: int
    utilization: float | None


class _Memory(ctypes.Structure):
    _fields_ = (
        ("version", ctypes.c_uint),
        ("total", ctypes.c_ulonglong),
        ("reserved", ctypes.c_ulonglong),
        ("free", ctypes.c_ulonglong),
        ("used", ctypes.c_ulonglong),
    )


class _Utilization(ctypes.Structure):
    _fields_ = (("gpu", ctypes.c_uint), ("memory", ctypes.c_uint))


# Size and number of the structure's layout, as the library checks them.
_MEMORY_VERSION = ctypes.sizeof(_Memory) | 2 << 24


class NvmlGpu:
    """One GPU. `read` may be called from any thread.

    Args:
        uuid: as `GPU-...`.

    Raises:
        NvmlError: there is no library (a driver of version 510 or later has it), or it does not know the GPU.
    """

    def __init__(self, uuid: str, library: str = _LIBRARY) -> None:
        try:
            self._library = ctypes.CDLL(library)
            self._memory_info = self._library.nvmlDeviceGetMemoryInfo_v2
        except (OSError, AttributeError) as error:
            raise NvmlError(str(error)) from error
        self._library.nvmlErrorString.restype = ctypes.c_char_p
        self._check("nvmlInit", self._library.nvmlInit_v2())
        self._handle = ctypes.c_void_p()
        status = self._library.nvmlDeviceGetHandleByUUID(uuid.encode(), ctypes.byref(self._handle))
        self._check(f"nvmlDeviceGetHandleByUUID({uuid})", status)

    def read(self) -> GpuReading:
        """Ask the driver; takes well under a millisecond. Raises NvmlError."""
        memory = _Memory(version=_MEMORY_VERSION)
        self._check("nvmlDeviceGetMemoryInfo", self._memory_info(self._handle, ctypes.byref(memory)))
        utilization = _Utilization()
        status = self._library.nvmlDeviceGetUtilizationRates(self._handle, ctypes.byref(utilization))
        if status == _NOT_SUPPORTED:
            return GpuReading(memory.used, memory.total, None)
        self._check("nvmlDeviceGetUtilizationRates", status)
        return GpuReading(memory.used, memory.total, utilization.gpu / 100)

    def _check(self, operation: str, status: int) -> None:
        if status != _SUCCESS:
            text = self._library.nvmlErrorString(status)
            raise NvmlError(f"{operation}: {text.decode(errors='replace') if text else 'unknown error'} ({status})")
