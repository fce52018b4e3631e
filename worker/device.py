"""The one place where a worker picks its device and the dtype of weights and KV cache."""

from __future__ import annotations

import os
import platform
from dataclasses import dataclass

import torch

from pagemill.errors import ConfigError
from worker import kernels

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


# Instruction sets whose kernels multiply bfloat16 natively; the others widen it first.
_BFLOAT16_ISAS = ("avx512bf16", "amx")
# A prompt's chunk is computed in one step together with the running sequences, whose next tokens wait for it. These are
# the largest chunks worth having: below, the device is not filled; beyond, streams stall for nothing.
_MAX_STEP_TOKENS = {"cpu": 512, "cuda": 8192}


def cpu_multiplies_bfloat16() -> bool:
    """Whether the kernels in use, $PAGEMILL_CPU_ISA taken into account, are faster in bfloat16 than in float32."""
    return kernels.cpu_isa() in _BFLOAT16_ISAS


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


def pick_max_step_tokens(setting: int | None, device: Device) -> int:
    """Most tokens in one step: as set, else what suits the device."""
    return setting if setting is not None else _MAX_STEP_TOKENS[device.kind]


def dtype_from_name(name: object) -> torch.dtype | None:
    """A torch dtype from a config's `dtype` or `torch_dtype`; None for none or an unknown one."""
    if not isinstance(name, str):
        return None
    dtype = getattr(torch, name.removeprefix("torch."), None)
    return dtype if isinstance(dtype, torch.dtype) and dtype.is_floating_point else None


def dtype_name(dtype: torch.dtype) -> str:
    """`torch.bfloat16` as `bfloat16`."""
    return str(dtype).removeprefix("torch.")
