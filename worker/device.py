"""The one place where a worker picks its device and the dtype of weights and KV cache."""

from __future__ import annotations

import os
import platform
from dataclasses import dataclass
from functools import cache
from pathlib import Path

import torch

from pagemill.errors import ConfigError

_DTYPES = {
    "float32": torch.float32,
    "bfloat16": torch.bfloat16,
    "float16": torch.float16,
    "half": torch.float16,
}


@dataclass(frozen=True, slots=True)
class Device:
    """Where tensors live and kernels run."""

    kind: str  # "cpu" or "cuda"
    name: str  # in words, for people
    torch_device: torch.device


@cache
def cpu_flags() -> frozenset[str]:
    """Instruction-set flags as Linux names them; empty where they cannot be read."""
    try:
        text = Path("/proc/cpuinfo").read_text()
    except OSError:
        return frozenset()
    for line in text.splitlines():
        if line.startswith(("flags", "Features")):
            return frozenset(line.partition(":")[2].split())
    return frozenset()


def cpu_multiplies_bfloat16() -> bool:
    """Whether bfloat16 products are faster than float32 ones on this CPU."""
    return bool(cpu_flags() & {"avx512_bf16", "amx_bf16", "bf16"})


def pick_device(setting: str) -> Device:
    """The device for a `device` setting of auto, cpu or cuda.

    Raises:
        ConfigError: CUDA is asked for but the kernels or the device are missing.
    """
    if setting == "cuda":
        raise ConfigError("device cuda: this build has CPU kernels only; use device cpu or auto", field="device")
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    return Device("cpu", f"cpu ({platform.machine()}, {cores} cores)", torch.device("cpu"))


def pick_dtype(setting: str, config_dtype: torch.dtype | None, device: Device) -> torch.dtype:
    """The dtype of weights, activations and KV cache.

    `auto` is the checkpoint's own dtype; on a CPU a 16-bit checkpoint runs in bfloat16 where the CPU multiplies
    bfloat16 natively and in float32 elsewhere. A checkpoint that names none (GGUF) counts as a 16-bit one.

    Raises:
        ConfigError: the device has no kernels for the dtype.
    """
    if setting == "auto":
        if device.kind == "cpu":
            if config_dtype in (torch.float32, torch.float64):
                return torch.float32
            return torch.bfloat16 if cpu_multiplies_bfloat16() else torch.float32
        return config_dtype or torch.bfloat16
    dtype = _DTYPES.get(setting)
    if dtype is None:
        raise ConfigError(f"dtype must be one of auto, {', '.join(_DTYPES)}; got {setting!r}", field="dtype")
    return dtype


def dtype_from_name(name: object) -> torch.dtype | None:
    """A torch dtype from a config's `dtype` or `torch_dtype`; None for none or an unknown one."""
    if not isinstance(name, str):
        return None
    dtype = getattr(torch, name.removeprefix("torch."), None)
    return dtype if isinstance(dtype, torch.dtype) and dtype.is_floating_point else None


def dtype_name(dtype: torch.dtype) -> str:
    """`torch.bfloat16` as `bfloat16`."""
    return str(dtype).removeprefix("torch.")
