"""Threads and instruction set of the CPU kernels, and the CUDA devices of the others."""

from __future__ import annotations

from typing import Any

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


def cuda_devices() -> list[Any]:
    """The CUDA devices that the kernels see.

    Each has name, compute_capability (90 for 9.0), num_multiprocessors, l2_bytes and memory_bytes.

    Raises:
        RuntimeError: the CUDA kernels were not built, or do not load.
    """
    return [_C.cuda_device_info(index) for index in range(_C.cuda_device_count())]
