"""What a row says of the machine that it was measured on."""

from __future__ import annotations

import platform
import subprocess
from pathlib import Path

from pagemill.cpu_cores import available_cores

_DRIVER = Path("/proc/driver/nvidia/gpus")
_NVIDIA_SMI = ("nvidia-smi", "--query-gpu=name", "--format=csv,noheader")


def processor_name(cpuinfo: Path = Path("/proc/cpuinfo")) -> str:
    """The model of the CPU, as the kernel calls it."""
    if cpuinfo.is_file():
        for line in cpuinfo.read_text(encoding="utf-8").splitlines():
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    return platform.processor() or platform.machine()


def gpu_names() -> list[str]:
    """Names of the GPUs that the driver has, without making a context on any."""
    names = []
    for file in sorted(_DRIVER.glob("*/information")):
        lines = dict(line.partition(":")[::2] for line in file.read_text(encoding="utf-8").splitlines())
        if name := lines.get("Model", "").strip():
            names.append(name)
    return names or _ask_nvidia_smi()


def _ask_nvidia_smi() -> list[str]:
    try:
        run = subprocess.run(_NVIDIA_SMI, capture_output=True, text=True, timeout=20)
    except (OSError, subprocess.TimeoutExpired):
        return []
    return [line.strip() for line in run.stdout.splitlines() if line.strip()] if run.returncode == 0 else []


def device_name(device: str) -> str:
    """The device that a process with this setting (auto, cpu or cuda) runs on."""
    names = [] if device == "cpu" else gpu_names()
    return names[0] if names else f"{processor_name()}, {available_cores()} cores"


def device_name_here(device: str) -> str:
    """The device that an engine in this process runs on, once it has begun; needs torch."""
    import torch

    if device != "cpu" and torch.cuda.is_initialized():  # type: ignore[no-untyped-call, unused-ignore]
        return torch.cuda.get_device_name()
    return device_name("cpu")
