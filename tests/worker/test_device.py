from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Any

import pytest
import torch

from pagemill.cuda_driver import DriverDevice, NoCudaError
from pagemill.errors import ConfigError
from worker import device as device_module
from worker import kernels
from worker.device import (
    Device,
    pick_device,
    pick_dtype,
    pick_kv_dtype,
    pick_max_num_seqs,
    pick_max_step_tokens,
    use_device,
)
from worker.kernels.build_info import BuildInfo

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


GIB = 1 << 30
H200 = DriverDevice("NVIDIA H200", 90, 140 * GIB)
V100 = DriverDevice("Tesla V100", 70, 16 * GIB)


@pytest.mark.parametrize(
    ("device", "tokens", "seqs"),
    [
        (CPU, 512, 256),
        (Device("cuda", "large", torch.device("cuda", 0), 80 * GIB), 8192, 1024),
        (Device("cuda", "small", torch.device("cuda", 0), 24 * GIB), 2048, 256),
    ],
)
def test_the_limits_of_a_step_are_the_devices_unless_set(device: Device, tokens: int, seqs: int) -> None:
    assert (pick_max_step_tokens(None, device), pick_max_num_seqs(None, device)) == (tokens, seqs)
    assert (pick_max_step_tokens(3000, device), pick_max_num_seqs(7, device)) == (3000, 7)


def test_the_cache_has_the_weights_dtype_or_8_bits() -> None:
    assert pick_kv_dtype("auto", torch.bfloat16) is torch.bfloat16
    assert pick_kv_dtype("fp8", torch.float32) is pick_kv_dtype("fp8_e4m3", torch.float16) is torch.float8_e4m3fn
    assert pick_kv_dtype("fp8_e5m2", torch.bfloat16) is torch.float8_e5m2
    with pytest.raises(ConfigError, match="kv_cache_dtype must be one of auto, fp8, fp8_e4m3, fp8_e5m2; got 'int8'"):
        pick_kv_dtype("int8", torch.bfloat16)


class Machine:
    """A machine with CUDA as the driver, the kernels and torch would describe it; each part can be made to fail."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self._patch = monkeypatch
        monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
        self.devices = [H200]
        self.built(True, ("80", "90a"))
        self.kernels(list)
        monkeypatch.setattr(device_module, "cuda_devices", lambda: self.devices)
        monkeypatch.setattr(torch.version, "cuda", "13.0")
        monkeypatch.setattr(torch.cuda, "device_count", lambda: len(self.devices))
        monkeypatch.setattr(torch.cuda, "set_device", self._use)
        monkeypatch.setattr(torch.cuda, "synchronize", lambda device: None)
        monkeypatch.setattr(torch, "zeros", lambda *_, **__: None)
        self.used: list[Any] = []
        self.error: RuntimeError | None = None

    def built(self, cuda: bool, architectures: tuple[str, ...] = (), reason: str = "") -> None:
        info = BuildInfo(cuda, reason, architectures, "13.0.88", False)
        self._patch.setattr(device_module, "build_info", lambda: info)

    def kernels(self, cuda_devices: Callable[[], list[Any]]) -> None:
        self._patch.setattr(kernels, "cuda_devices", cuda_devices)

    def torch(self, name: str, value: object, of: object = torch.cuda) -> None:
        self._patch.setattr(of, name, value)

    def _use(self, device: torch.device) -> None:
        if self.error is not None:
            raise self.error
        self.used.append(device)


@pytest.fixture
def machine(monkeypatch: pytest.MonkeyPatch) -> Machine:
    return Machine(monkeypatch)


@pytest.mark.parametrize("setting", ["auto", "cuda"])
def test_the_first_device_that_the_kernels_run_on_is_taken_and_made_current(machine: Machine, setting: str) -> None:
    machine.devices = [V100, H200]
    device = pick_device(setting)
    assert device == Device("cuda", "cuda (NVIDIA H200, 140.0 GiB)", torch.device("cuda", 1), 140 * GIB)
    assert machine.used == [torch.device("cuda", 1)]


def test_another_thread_makes_the_device_its_own(machine: Machine) -> None:
    use_device(pick_device("cuda"))
    use_device(CPU)
    assert machine.used == [torch.device("cuda", 0)] * 2


def test_the_cpu_is_taken_where_it_is_asked_for(machine: Machine) -> None:
    assert pick_device("cpu").kind == "cpu"
    assert machine.used == []


def no_library() -> list[Any]:
    raise RuntimeError("the CUDA kernels do not load: libpagemill_cuda.so: no such file")


def break_driver(machine: Machine) -> None:
    def fail() -> list[DriverDevice]:
        raise NoCudaError("the CUDA driver fails in cuInit: system has unsupported driver", sees_device=True)

    machine.torch("cuda_devices", fail, device_module)


UNUSABLE: dict[str, tuple[Callable[[Machine], object], str]] = {
    "capability": (
        lambda m: m.devices.__setitem__(0, V100),
        r"a compute capability of 8\.0 or more is needed, visible: Tesla V100 \(7\.0\)",
    ),
    "not built": (
        lambda m: (m.built(False, reason="no working nvcc was found"), m.kernels(no_library)),
        r"not built \(no working nvcc was found\); `make install` builds them",
    ),
    "not loading": (lambda m: m.kernels(no_library), "do not load: libpagemill_cuda.so: no such file; `make install`"),
    "architecture": (
        lambda m: m.built(True, ("100",)),
        r"built for 100, which compute capability 9\.0 cannot run; `make install CUDA_ARCHITECTURES=90`",
    ),
    "torch": (lambda m: m.torch("cuda", None, torch.version), "torch .* is a build without CUDA; install one"),
    "torch sees none": (
        lambda m: m.torch("device_count", lambda: 0),
        r"does not see NVIDIA H200 \(9\.0\), which the driver sees",
    ),
    "driver": (break_driver, "the CUDA driver fails in cuInit: system has unsupported driver"),
}


@pytest.mark.parametrize("case", UNUSABLE)
def test_cuda_that_cannot_be_used_is_refused_in_one_line_and_a_warning_for_auto(
    machine: Machine, caplog: pytest.LogCaptureFixture, case: str
) -> None:
    spoil, words = UNUSABLE[case]
    spoil(machine)
    with pytest.raises(ConfigError, match=f"^device cuda: .*{words}.*; or use device cpu$") as refused:
        pick_device("cuda")
    assert refused.value.field == "device"
    assert "\n" not in refused.value.message
    with caplog.at_level(logging.WARNING):
        assert pick_device("auto").kind == "cpu"
    assert "running on the CPU although there is a GPU" in caplog.text


def test_no_device_is_refused_and_no_surprise_for_auto(
    machine: Machine, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    machine.devices = []
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "7")
    with pytest.raises(ConfigError, match="no CUDA device is visible, CUDA_VISIBLE_DEVICES is '7'"):
        pick_device("cuda")
    assert pick_device("auto").kind == "cpu"
    assert caplog.text == ""


@pytest.mark.parametrize("setting", ["auto", "cuda"])
@pytest.mark.parametrize(
    ("error", "words"),
    [
        (
            RuntimeError("CUDA error: CUDA-capable device(s) is/are busy or unavailable\nSearch for `cudaError"),
            "is/are busy or unavailable\\): another process holds it",
        ),
        (torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 MiB."), "has no free memory"),
        (RuntimeError("CUDA error: out of memory\nCompile with"), "has no free memory"),
        (RuntimeError("CUDA error: an illegal instruction was encountered\n"), "cannot be used \\(an illegal instr"),
    ],
)
def test_a_device_that_fails_when_first_used_is_refused_whatever_was_asked_for(
    machine: Machine, setting: str, error: RuntimeError, words: str
) -> None:
    machine.error = error
    with pytest.raises(ConfigError, match=f"^device {setting}: NVIDIA H200 .*{words}.*use device cpu$") as refused:
        pick_device(setting)
    assert "\n" not in refused.value.message
