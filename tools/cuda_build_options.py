#!/usr/bin/env python3
"""Prints the options with which `make install` has pip build the CUDA kernels, and says on stderr what it chose.

cuda_build_options.py [ARCHITECTURES]

ARCHITECTURES: a list such as "90a" or "80 90a"; "all" for those that a wheel has; "off"; empty for those of this
machine's own GPUs, since compiling for one takes minutes.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

OLDEST = 80
# Compiled with its own instructions, which the kernels use; others have none that they need.
_WITH_OWN_INSTRUCTIONS = {"90": "90a"}


@dataclass(frozen=True, slots=True)
class Choice:
    """What to build, and one line that says why."""

    is_built: bool
    architectures: tuple[str, ...]  # empty: the default list
    reason: str

    def options(self) -> list[str]:
        """Arguments for `pip install`."""
        defines = {
            "PAGEMILL_CUDA": "ON" if self.is_built else "OFF",
            "PAGEMILL_CUDA_ARCHITECTURES": ";".join(self.architectures),
        }
        return [f"--config-settings=cmake.define.{name}={value}" for name, value in defines.items()]


def choose(requested: str, capabilities: list[str], has_nvcc: bool) -> Choice:
    """Choose from what was asked for, compute capabilities such as "9.0" of the machine's GPUs, and the compiler."""
    words = requested.replace(";", " ").replace(",", " ").split()
    force = 'make install CUDA_ARCHITECTURES="90a" builds them for a machine with such a GPU'
    if words == ["off"]:
        return Choice(False, (), "CUDA kernels: not built, as asked")
    if words == ["all"]:
        return Choice(True, (), "CUDA kernels: built for all supported architectures")
    if words:
        return Choice(True, tuple(words), f"CUDA kernels: built for {', '.join(words)}, as asked")
    if not capabilities:
        return Choice(False, (), f"CUDA kernels: not built, this machine has no GPU; {force}")
    numbers = sorted({capability.replace(".", "") for capability in capabilities}, key=int)
    supported = tuple(_WITH_OWN_INSTRUCTIONS.get(number, number) for number in numbers if int(number) >= OLDEST)
    found = ", ".join(sorted(set(capabilities)))
    if not supported:
        return Choice(False, (), f"CUDA kernels: not built, compute capability {found} is below 8.0")
    if not has_nvcc:
        return Choice(False, (), "CUDA kernels: not built although there is a GPU, no nvcc: install the CUDA toolkit")
    return Choice(True, supported, f"CUDA kernels: built for this machine's GPUs, compute capability {found}")


def own_capabilities() -> list[str]:
    """Compute capabilities of this machine's GPUs, such as "9.0"; empty where there is none or no driver."""
    try:
        run = subprocess.run(
            ["nvidia-smi", "--query-gpu=compute_cap", "--format=csv,noheader"],
            capture_output=True,
            text=True,
            timeout=60,
            check=True,
        )
    except (OSError, subprocess.SubprocessError):
        return []
    return [line.strip() for line in run.stdout.splitlines() if line.strip().replace(".", "").isdecimal()]


def has_nvcc() -> bool:
    if "CUDACXX" in os.environ or shutil.which("nvcc"):
        return True
    homes = [os.environ.get("CUDA_HOME"), os.environ.get("CUDA_PATH"), "/usr/local/cuda"]
    return any(home and (Path(home) / "bin" / "nvcc").is_file() for home in homes)


def main() -> int:
    if len(sys.argv) > 2:
        print(__doc__, file=sys.stderr)
        return 2
    choice = choose(sys.argv[1] if len(sys.argv) == 2 else "", own_capabilities(), has_nvcc())
    print(choice.reason, file=sys.stderr)
    print("\n".join(choice.options()))
    return 0


if __name__ == "__main__":
    sys.exit(main())
