"""Threads and instruction set of the CPU kernels."""

from __future__ import annotations

from worker.kernels._native import load_native

_C = load_native()


def num_threads() -> int:
    """Threads that a kernel may use, the calling one included."""
    return int(_C.num_threads())


def set_num_threads(count: int) -> None:
    """Set the number of threads, 1 to 1024; ValueError otherwise."""
    _C.set_num_threads(count)


def cpu_isa() -> str:
    """The instruction set in use: portable, avx2, avx512, avx512bf16 or amx."""
    return str(_C.cpu_isa())


def best_cpu_isa() -> str:
    """The best instruction set of this machine, as capped by $PAGEMILL_CPU_ISA."""
    return str(_C.best_cpu_isa())


def set_cpu_isa(name: str) -> None:
    """Use an instruction set up to best_cpu_isa(), for tests and benchmarks; ValueError otherwise."""
    _C.set_cpu_isa(name)
