"""What the doctor says of the CUDA kernels, on machines that this one may not be."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from pagemill.commands import doctor
from worker import kernels
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
    assert detail == "built for 80, 90a by nvcc 13.0.88; devices: NVIDIA H200 (9.0)"


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
