"""What CMake does with the options of csrc, without compiling anything."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

import worker

SOURCES = Path(worker.__file__).resolve().parents[1] / "csrc"
CMAKE = shutil.which("cmake", path=f"{Path(sys.executable).parent}{os.pathsep}{os.environ.get('PATH', '')}")

pytestmark = pytest.mark.skipif(
    CMAKE is None or not SOURCES.is_dir(), reason="needs cmake and the sources of the kernels"
)
needs_nvcc = pytest.mark.skipif(shutil.which("nvcc") is None, reason="needs nvcc on PATH")
NO_NVCC = {"CUDACXX": "/bin/false"}


def configure(folder: Path, *options: str, **environment: str) -> subprocess.CompletedProcess[str]:
    command = [str(CMAKE), "-S", str(SOURCES), "-B", str(folder), *options]
    return subprocess.run(command, capture_output=True, text=True, timeout=200, env=os.environ | environment)


def build_info(folder: Path) -> dict[str, object]:
    written: dict[str, object] = json.loads((folder / "build_info.json").read_text())
    return written


def test_a_machine_without_nvcc_builds_the_cpu_kernels_and_says_so(tmp_path: Path) -> None:
    run = configure(tmp_path, **NO_NVCC)
    assert run.returncode == 0, run.stderr
    assert "CUDA kernels: off, no working nvcc was found" in run.stdout
    assert build_info(tmp_path)["cuda_is_built"] is False
    assert "no working nvcc" in str(build_info(tmp_path)["cuda_reason"])


def test_cuda_kernels_that_are_required_are_not_left_out_silently(tmp_path: Path) -> None:
    run = configure(tmp_path, "-DPAGEMILL_CUDA=ON", **NO_NVCC)
    assert run.returncode != 0
    assert "no working nvcc was found; put it on PATH or set CUDACXX" in run.stderr


@needs_nvcc
def test_the_architectures_asked_for_are_built_and_written_down(tmp_path: Path) -> None:
    run = configure(tmp_path, "-DPAGEMILL_CUDA=ON", "-DPAGEMILL_CUDA_ARCHITECTURES=80;90a")
    assert run.returncode == 0, run.stderr
    assert build_info(tmp_path)["cuda_architectures"] == ["80", "90a"]


@needs_nvcc
@pytest.mark.parametrize(
    ("architecture", "words"),
    [("hopper", "is not an architecture; 80, 86, 89, 90a, 100 are"), ("75", "is not supported; 80 is the oldest"),
     ("990", "does not know 990")],
)  # fmt: skip
def test_an_architecture_that_cannot_be_built_is_refused(tmp_path: Path, architecture: str, words: str) -> None:
    run = configure(tmp_path, f"-DPAGEMILL_CUDA_ARCHITECTURES=80;{architecture}")
    assert run.returncode != 0
    assert words in " ".join(run.stderr.split())
