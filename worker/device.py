"""The one place where a worker picks its device, the dtypes of weights and KV cache, and what suits the device."""

from __future__ import annotations

import logging
import os
import platform
from dataclasses import dataclass

import torch

from pagemill.cuda_driver import NoCudaError, cuda_devices, dotted, pick_cuda_device
from pagemill.errors import ConfigError
from worker import kernels
from worker.kernels.build_info import build_info, runs_on

logger = logging.getLogger(__name__)

_DTYPES = {
    "float32": torch.float32,
    "bfloat16": torch.bfloat16,
    "float16": torch.float16,
    "half": torch.float16,
}
_KV_DTYPES = {
    "fp8": torch.float8_e4m3fn,
    "fp8_e4m3": torch.float8_e4m3fn,
    "fp8_e5m2": torch.float8_e5m2,
}


@dataclass(frozen=True, slots=True)
class Device:
    """Where tensors live and kernels run.

    Attributes:
        kind: "cpu" or "cuda".
        name: in words, for people.
        memory_bytes: all of a CUDA device's memory; 0 for the CPU.
    """

    kind: str
    name: str
    torch_device: torch.device
    memory_bytes: int = 0


@dataclass(frozen=True, slots=True)
class StepLimits:
    """Largest steps worth having on a device.

    A prompt's chunk is computed in one step together with the running sequences, whose next tokens wait for it: fewer
    tokens do not fill the device, and with more of them streams stall for nothing. A sequence costs a row of logits and
    its token history.
    """

    max_tokens: int
    max_seqs: int


_CPU_LIMITS = StepLimits(max_tokens=512, max_seqs=256)
_CUDA_LIMITS = StepLimits(max_tokens=2048, max_seqs=256)
_LARGE_CUDA_LIMITS = StepLimits(max_tokens=8192, max_seqs=1024)
_LARGE_CUDA_BYTES = 70 << 30

# Instruction sets whose kernels multiply bfloat16 natively; the others widen it first.
_BFLOAT16_ISAS = ("avx512bf16", "amx")


def cpu_multiplies_bfloat16() -> bool:
    """Whether the kernels in use, $PAGEMILL_CPU_ISA taken into account, are faster in bfloat16 than in float32."""
    return kernels.cpu_isa() in _BFLOAT16_ISAS


def pick_device(setting: str) -> Device:
    """The device for a `device` setting of auto, cpu or cuda; a CUDA device is made the calling thread's current one.

    `auto` takes the first CUDA device that the kernels run on, and the CPU where there is none.

    Raises:
        ConfigError: CUDA is asked for and cannot be used, or a device that `auto` picked is held by another process.
    """
    if setting == "cpu":
        return _cpu()
    try:
        return _cuda(setting)
    except NoCudaError as error:
        if setting == "cuda":
            raise ConfigError(f"device cuda: {error.message}; or use device cpu", field="device") from error
        if error.sees_device:
            logger.warning("running on the CPU although there is a GPU: %s", error.message)
    return _cpu()


def use_device(device: Device) -> None:
    """Make a device the calling thread's own: of several GPUs each thread has a current one, where kernels run."""
    if device.kind == "cuda":
        torch.cuda.set_device(device.torch_device)


def _cpu() -> Device:
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    return Device("cpu", f"cpu ({platform.machine()}, {cores} cores)", torch.device("cpu"))


def _cuda(setting: str) -> Device:
    """The first CUDA device that kernels and torch can use. Raises NoCudaError, and ConfigError for a busy one."""
    devices = cuda_devices()
    index = pick_cuda_device(devices)
    picked = devices[index]
    _check_cuda_kernels(picked.compute_capability)
    if torch.version.cuda is None:
        raise NoCudaError(
            f"torch {torch.__version__} is a build without CUDA; install one with it, as https://pytorch.org says",
            sees_device=True,
        )
    if torch.cuda.device_count() <= index:
        raise NoCudaError(
            f"torch {torch.__version__} for CUDA {torch.version.cuda} does not see {picked}, which the driver sees: "
            "the driver may be too old for this torch",
            sees_device=True,
        )
    device = torch.device("cuda", index)
    try:
        torch.cuda.set_device(device)
        torch.zeros(1, device=device)
        torch.cuda.synchronize(device)
    except RuntimeError as error:
        raise ConfigError(f"device {setting}: {picked} {_first_use_problem(error)}", field="device") from error
    return Device(
        "cuda", f"cuda ({picked.name}, {picked.memory_bytes / (1 << 30):.1f} GiB)", device, picked.memory_bytes
    )


def _check_cuda_kernels(compute_capability: int) -> None:
    """Refuse kernels that are not built, do not load, or are for other devices. Raises NoCudaError."""
    info = build_info()
    try:
        kernels.cuda_devices()
    except RuntimeError as error:
        is_left_out = info is not None and not info.cuda_is_built
        reason = f"the CUDA kernels are not built ({info.cuda_reason})" if is_left_out else str(error)
        raise NoCudaError(f"{reason}; `make install` builds them where nvcc is on PATH", sees_device=True) from error
    if info is not None and info.cuda_is_built and not runs_on(info.cuda_architectures, compute_capability):
        built, wanted = ", ".join(info.cuda_architectures), dotted(compute_capability)
        raise NoCudaError(
            f"the CUDA kernels are built for {built}, which compute capability {wanted} cannot run; "
            f"`make install CUDA_ARCHITECTURES={compute_capability}` builds others",
            sees_device=True,
        )


def _first_use_problem(error: RuntimeError) -> str:
    """What went wrong when a device was first used, and what would help; comes after the device's name."""
    lines = str(error).strip().splitlines() or [type(error).__name__]
    reason = lines[0].removeprefix("CUDA error: ").rstrip(".")
    if isinstance(error, torch.OutOfMemoryError) or "out of memory" in reason:
        return "has no free memory: other processes hold it; stop one of them, or use device cpu"
    if "busy or unavailable" in reason:
        return (
            f"cannot be used ({reason}): another process holds it, or its compute mode forbids it; stop that "
            "process, let CUDA_VISIBLE_DEVICES name another device, or use device cpu"
        )
    return f"cannot be used ({reason}); let CUDA_VISIBLE_DEVICES name another device, or use device cpu"


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


def pick_kv_dtype(setting: str, dtype: torch.dtype) -> torch.dtype:
    """The dtype of the KV cache beside activations of `dtype`: theirs for auto, 8 bits for fp8.

    Raises:
        ConfigError: an unknown setting.
    """
    if setting == "auto":
        return dtype
    kv_dtype = _KV_DTYPES.get(setting)
    if kv_dtype is None:
        known = ", ".join(("auto", *_KV_DTYPES))
        raise ConfigError(f"kv_cache_dtype must be one of {known}; got {setting!r}", field="kv_cache_dtype")
    return kv_dtype


def step_limits(device: Device) -> StepLimits:
    """What suits the device, for settings that are left open."""
    if device.kind == "cpu":
        return _CPU_LIMITS
    return _LARGE_CUDA_LIMITS if device.memory_bytes >= _LARGE_CUDA_BYTES else _CUDA_LIMITS


def pick_max_step_tokens(setting: int | None, device: Device) -> int:
    """Most tokens in one step: as set, else what suits the device."""
    return setting if setting is not None else step_limits(device).max_tokens


def pick_max_num_seqs(setting: int | None, device: Device) -> int:
    """Slots for sequences: as set, else what suits the device."""
    return setting if setting is not None else step_limits(device).max_seqs


def dtype_from_name(name: object) -> torch.dtype | None:
    """A torch dtype from a config's `dtype` or `torch_dtype`; None for none or an unknown one."""
    if not isinstance(name, str):
        return None
    dtype = getattr(torch, name.removeprefix("torch."), None)
    return dtype if isinstance(dtype, torch.dtype) and dtype.is_floating_point else None


def dtype_name(dtype: torch.dtype) -> str:
    """`torch.bfloat16` as `bfloat16`."""
    return str(dtype).removeprefix("torch.")
