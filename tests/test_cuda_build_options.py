"""What `make install` builds of the CUDA kernels, by the machine's GPUs and by what was asked for."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).resolve().parent.parent / "tools"))

import cuda_build_options
from cuda_build_options import choose


def test_a_machine_without_a_gpu_builds_none_and_says_how_to_force_it() -> None:
    choice = choose("", [], has_nvcc=True)
    assert not choice.is_built
    assert 'make install CUDA_ARCHITECTURES="90a"' in choice.reason
    assert "--config-settings=cmake.define.PAGEMILL_CUDA=OFF" in choice.options()


@pytest.mark.parametrize(
    ("capabilities", "architectures"),
    [(["9.0"], ("90a",)), (["8.0", "8.0"], ("80",)), (["12.0", "8.9"], ("89", "120")), (["7.5", "8.6"], ("86",))],
)
def test_a_machine_builds_for_its_own_gpus_alone(capabilities: list[str], architectures: tuple[str, ...]) -> None:
    choice = choose("", capabilities, has_nvcc=True)
    assert choice.is_built
    assert choice.architectures == architectures


def test_a_gpu_that_is_too_old_or_lacks_the_compiler_is_named() -> None:
    assert "compute capability 7.5 is below 8.0" in choose("", ["7.5"], has_nvcc=True).reason
    choice = choose("", ["9.0"], has_nvcc=False)
    assert not choice.is_built
    assert "no nvcc" in choice.reason


@pytest.mark.parametrize("requested", ["80 90a", "80;90a", "80, 90a"])
def test_a_list_is_taken_as_it_is_asked_for(requested: str) -> None:
    choice = choose(requested, ["8.9"], has_nvcc=False)
    assert choice.options() == [
        "--config-settings=cmake.define.PAGEMILL_CUDA=ON",
        "--config-settings=cmake.define.PAGEMILL_CUDA_ARCHITECTURES=80;90a",
    ]


def test_all_leaves_the_list_to_the_build_and_off_builds_none() -> None:
    assert choose("all", [], has_nvcc=True) == choose("all", ["9.0"], has_nvcc=True)
    assert choose("all", [], has_nvcc=True).is_built
    assert not choose("off", ["9.0"], has_nvcc=True).is_built


def test_a_machine_without_a_driver_has_no_gpus(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    assert cuda_build_options.own_capabilities() == []


def test_the_driver_is_asked_for_each_gpu(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    program = tmp_path / "nvidia-smi"
    program.write_text("#!/bin/sh\necho 9.0\necho 8.9\n")
    program.chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path))
    assert cuda_build_options.own_capabilities() == ["9.0", "8.9"]
