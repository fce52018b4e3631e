from __future__ import annotations

import pytest
import torch

from worker import kernels
from worker.device import pick_device, pick_dtype, pick_max_step_tokens

CPU = pick_device("cpu")
ISAS = ["portable", "avx2", "avx512", "avx512bf16", "amx"]


@pytest.mark.parametrize("isa", ISAS)
def test_a_16_bit_checkpoint_is_bfloat16_where_the_kernels_in_use_multiply_it(isa: str) -> None:
    if ISAS.index(isa) > ISAS.index(kernels.best_cpu_isa()):
        pytest.skip(f"this machine has {kernels.best_cpu_isa()} at best")
    kernels.set_cpu_isa(isa)
    try:
        native = torch.bfloat16 if isa in ("avx512bf16", "amx") else torch.float32
        for checkpoint in (torch.bfloat16, torch.float16, None):
            assert pick_dtype("auto", checkpoint, CPU) is native
        assert pick_dtype("auto", torch.float32, CPU) is torch.float32
        assert pick_dtype("bfloat16", torch.float32, CPU) is torch.bfloat16
    finally:
        kernels.set_cpu_isa(kernels.best_cpu_isa())


def test_the_step_budget_is_the_devices_unless_set() -> None:
    assert pick_max_step_tokens(None, CPU) == 512
    assert pick_max_step_tokens(3000, CPU) == 3000
