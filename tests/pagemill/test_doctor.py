"""What the doctor says of the CUDA kernels, on machines that this one may not be."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from pagemill.commands import doctor
from pagemill.cuda_driver import DriverDevice
from pagemill.errors import ConfigError
from worker import device, kernels
from worker.device import Device
from worker.kernels import build_info as build
from worker.kernels.build_info import BuildInfo

H200 = SimpleNamespace(name="NVIDIA H200", compute_capability=90)


def says(monkeypatch: pytest.MonkeyPatch, info: BuildInfo | None, devices: list[Any]) -> tuple[str, str]:
    monkeypatch.setattr(build, "build_info", lambda: info)
    monkeypatch.setattr(kernels, "cuda_devices", lambda: devices)
    finding = doctor.check_cuda_kernels()
    return finding.verdict, finding.detail


def built(*architectures: str) -> BuildInfo:
    return BuildInfo(True, "", architectures, "13.0.88", False)


def test_kernels_that_were_not_built_are_a_note_with_the_reason(monkeypatch: pytest.MonkeyPatch) -> None:
    info = BuildInfo(False, "no working nvcc was found", (), "", False)
    assert says(monkeypatch, info, []) == ("note", "not built: no working nvcc was found")


def test_architectures_compiler_and_devices_are_named(monkeypatch: pytest.MonkeyPatch) -> None:
    verdict, detail = says(monkeypatch, built("80", "90a"), [H200])
    assert verdict == "ok"
    assert detail == (
        "built for 80, 90a by nvcc 13.0.88; devices: NVIDIA H200 (9.0); "
        "prefill by warp-group products, products of few rows by Pagemill's kernel"
    )


@pytest.mark.parametrize(
    ("architectures", "capability", "words"),
    [
        (("80", "90"), 90, "prefill by mma products, products of few rows by Pagemill's kernel"),
        (("80", "90a"), 80, "prefill by mma products, products of few rows by cuBLAS"),
    ],
)
def test_the_kernels_that_a_device_gets_are_named(
    monkeypatch: pytest.MonkeyPatch, architectures: tuple[str, ...], capability: int, words: str
) -> None:
    device = SimpleNamespace(name="GPU", compute_capability=capability)
    assert says(monkeypatch, built(*architectures), [device])[1].endswith(words)


def test_the_driver_and_what_torch_was_built_for_are_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(doctor, "cuda_devices", lambda: [DriverDevice("NVIDIA H200", 90, 141 << 30)])
    monkeypatch.setattr(doctor.shutil, "which", lambda name: f"/opt/{name}")
    monkeypatch.setattr(torch.version, "cuda", "13.0")
    assert doctor.check_cuda() == doctor.Finding(
        "ok", "cuda", "NVIDIA H200 (9.0), 141.0 GiB; torch for CUDA 13.0; nvcc at /opt/nvcc"
    )
    monkeypatch.setattr(doctor, "cuda_devices", list)
    monkeypatch.setattr(torch.version, "cuda", None)
    assert doctor.check_cuda().detail == "no CUDA device is visible; torch without CUDA; nvcc at /opt/nvcc"


def test_the_device_that_a_worker_would_take_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(setting: str) -> Device:
        raise ConfigError("device cuda: no CUDA device is visible; or use device cpu")

    monkeypatch.setattr(device, "pick_device", refuse)
    assert doctor.check_device().detail == "a worker runs on the CPU: no CUDA device is visible"
    found = Device("cuda", "cuda (NVIDIA H200)", torch.device("cuda", 0), 141 << 30)
    monkeypatch.setattr(device, "pick_device", lambda setting: found)
    assert doctor.check_device() == doctor.Finding(
        "ok", "device", "a worker runs on cuda (NVIDIA H200), by default 1024 sequences and 8192 tokens a step"
    )


def test_a_device_that_the_code_does_not_run_on_is_a_note(monkeypatch: pytest.MonkeyPatch) -> None:
    verdict, detail = says(monkeypatch, built("100"), [H200])
    assert verdict == "note"
    assert "which compute capability 9.0 cannot run" in detail


def test_no_device_is_a_note(monkeypatch: pytest.MonkeyPatch) -> None:
    assert says(monkeypatch, built("90a"), []) == ("note", "built for 90a by nvcc 13.0.88; no device found")


def test_a_library_that_does_not_load_is_a_note_with_its_error(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail() -> list[Any]:
        raise RuntimeError("the CUDA kernels do not load: no such file")

    monkeypatch.setattr(build, "build_info", lambda: None)
    monkeypatch.setattr(kernels, "cuda_devices", fail)
    finding = doctor.check_cuda_kernels()
    assert (finding.verdict, finding.detail) == ("note", "the CUDA kernels do not load: no such file")
