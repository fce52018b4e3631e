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


@pytest.fixture(params=DTYPES, ids=lambda d: str(d).removeprefix("torch."))
def dtype(request: pytest.FixtureRequest) -> torch.dtype:
    return request.param
