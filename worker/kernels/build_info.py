"""What the installed kernels were built with, as the build wrote it beside them."""

from __future__ import annotations

import json
import os
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from worker.kernels._native import load_native

_FILE_NAME = "build_info.json"


@dataclass(frozen=True, slots=True)
class BuildInfo:
    """`cuda_reason` says why there are no CUDA kernels; `cuda_architectures` are as ("80", "90a")."""

    cuda_is_built: bool
    cuda_reason: str
    cuda_architectures: tuple[str, ...]
    cuda_compiler: str
    has_device_checks: bool


def build_info() -> BuildInfo | None:
    """None where nothing was written, or where $PAGEMILL_CUDA_LIBRARY names a library of another build."""
    path = Path(str(load_native().__file__)).parent / _FILE_NAME
    if os.environ.get("PAGEMILL_CUDA_LIBRARY") or not path.is_file():
        return None
    written = json.loads(path.read_text(encoding="utf-8"))
    return BuildInfo(**{**written, "cuda_architectures": tuple(written["cuda_architectures"])})


def runs_on(architectures: Sequence[str], compute_capability: int) -> bool:
    """Whether code for these architectures runs on a device, whose compute capability is as 90 for 9.0.

    Machine code runs on later processors of its generation, that of an architecture with a letter on its own alone. The
    last one without a letter comes as PTX too, which every later processor takes.
    """
    plain = [int(architecture) for architecture in architectures if architecture.isdecimal()]
    if any(number // 10 == compute_capability // 10 and number <= compute_capability for number in plain):
        return True
    if plain and plain[-1] <= compute_capability:
        return True
    return any(architecture[:-1] == str(compute_capability) for architecture in architectures)
