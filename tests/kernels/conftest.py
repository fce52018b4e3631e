"""Shared by the kernel tests: every instruction set of the machine, and tolerances by dtype."""

from collections.abc import Iterator

import pytest
import torch

from worker import kernels

ISA_NAMES = ["portable", "avx2", "avx512", "avx512bf16", "amx"]
AVAILABLE_ISAS = ISA_NAMES[: ISA_NAMES.index(kernels.best_cpu_isa()) + 1]
DTYPES = [torch.float32, torch.bfloat16, torch.float16]


def pytest_configure(config: pytest.Config) -> None:
    torch.set_num_threads(1)


@pytest.fixture(params=AVAILABLE_ISAS)
def isa(request: pytest.FixtureRequest) -> Iterator[str]:
    kernels.set_cpu_isa(request.param)
    yield request.param
    kernels.set_cpu_isa(kernels.best_cpu_isa())


# Each instruction set of the CPU, then CUDA where there is one.
DEVICES = [pytest.param(("cpu", isa), id=f"cpu-{isa}") for isa in AVAILABLE_ISAS]
if torch.cuda.is_available():
    DEVICES.append(pytest.param(("cuda", kernels.best_cpu_isa()), id="cuda", marks=pytest.mark.gpu))


@pytest.fixture(params=DEVICES)
def device(request: pytest.FixtureRequest) -> Iterator[str]:
    """Where the test's tensors are made: "cpu", once per instruction set, or "cuda"."""
    name, isa = request.param
    kernels.set_cpu_isa(isa)
    with torch.device(name):
        yield name
    kernels.set_cpu_isa(kernels.best_cpu_isa())


@pytest.fixture(params=DTYPES, ids=lambda d: str(d).removeprefix("torch."))
def dtype(request: pytest.FixtureRequest) -> torch.dtype:
    return request.param
