"""Variables that the native kernels read, judged before the library or torch is loaded."""

from __future__ import annotations

import difflib
from collections.abc import Mapping
from pathlib import Path

from pagemill.errors import ConfigError

CPU_ISA_ENV = "PAGEMILL_CPU_ISA"
SPIN_US_ENV = "PAGEMILL_SPIN_US"
MAX_SPIN_US = 1_000_000
# Lowest first: each level includes those before it.
CPU_ISAS = ("portable", "avx2", "avx512", "avx512bf16", "amx")

_CPUINFO = Path("/proc/cpuinfo")
# What each level asks for beyond the one before it, as Linux names the flags.
_FLAGS = {
    "avx2": {"avx2", "fma", "f16c"},
    "avx512": {"avx512f", "avx512bw", "avx512dq", "avx512vl"},
    "avx512bf16": {"avx512_bf16"},
    "amx": {"amx_tile", "amx_bf16"},
}


def check_kernel_variables(environment: Mapping[str, str]) -> None:
    """Refuse what the kernels would refuse when they are first used; empty is as unset.

    Raises:
        ConfigError: names the variable and what it may be.
    """
    spin_us = environment.get(SPIN_US_ENV, "")
    if spin_us and not (spin_us.isascii() and spin_us.isdecimal() and int(spin_us) <= MAX_SPIN_US):
        raise ConfigError(
            f"environment {SPIN_US_ENV}: should be a number of microseconds, 0 to {MAX_SPIN_US}, is {spin_us!r:.80}",
            field=SPIN_US_ENV,
        )
    name = environment.get(CPU_ISA_ENV, "")
    if name and name not in CPU_ISAS:
        close = difflib.get_close_matches(name, CPU_ISAS, n=1)
        hint = f", did you mean {close[0]}?" if close else ""
        raise ConfigError(
            f"environment {CPU_ISA_ENV}: should be one of {', '.join(CPU_ISAS)}, is {name!r:.80}{hint}",
            field=CPU_ISA_ENV,
        )


def cpu_isa_note(environment: Mapping[str, str], cpuinfo: Path = _CPUINFO) -> str:
    """One sentence where the cap is above what this machine has, and so changes nothing; empty elsewhere."""
    name = environment.get(CPU_ISA_ENV, "")
    best = _machine_cpu_isa(cpuinfo)
    if name not in CPU_ISAS or best is None or CPU_ISAS.index(name) <= CPU_ISAS.index(best):
        return ""
    return f"{CPU_ISA_ENV}={name} is more than this machine has: it has {best} at best, which is used"


def _machine_cpu_isa(cpuinfo: Path) -> str | None:
    """The best level by the processor's flags; None where they cannot be read."""
    try:
        lines = cpuinfo.read_text(encoding="utf-8", errors="replace").splitlines()
    except OSError:
        return None
    flags = next((set(line.partition(":")[2].split()) for line in lines if line.startswith("flags")), None)
    if flags is None:
        return None
    best = CPU_ISAS[0]
    for name in CPU_ISAS[1:]:
        if not _FLAGS[name] <= flags:
            break
        best = name
    return best
