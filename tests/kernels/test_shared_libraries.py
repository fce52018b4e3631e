"""What the built libraries need and offer: no torch, nothing of CUDA's, and a C interface that any Python can call."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch

import worker
from worker import kernels
from worker.kernels._native import load_native

MODULE = Path(str(load_native().__file__))
CPU_LIBRARY = MODULE.with_name("libpagemill_kernels.so")
CUDA_LIBRARY = Path(os.environ.get("PAGEMILL_CUDA_LIBRARY") or MODULE.with_name("libpagemill_cuda.so"))
ROOT = Path(worker.__file__).resolve().parents[1]

needs_cuda_library = pytest.mark.skipif(
    not CUDA_LIBRARY.is_file(), reason=f"no CUDA library was built: there is no {CUDA_LIBRARY}"
)
each_library = pytest.mark.parametrize(
    "library",
    [MODULE, CPU_LIBRARY, pytest.param(CUDA_LIBRARY, marks=needs_cuda_library)],
    ids=["module", "cpu", "cuda"],
)


def output_of(*command: str | Path, folder: Path = ROOT, **environment: str) -> str:
    run = subprocess.run(command, capture_output=True, text=True, timeout=300, cwd=folder, env=os.environ | environment)
    assert run.returncode == 0, run.stderr
    return run.stdout


@each_library
def test_no_library_of_torch_is_needed(library: Path) -> None:
    needed = output_of("ldd", library)
    assert "libc.so" in needed
    assert not [line for line in needed.splitlines() if "torch" in line or "c10" in line or "not found" in line]


@each_library
def test_no_library_of_cuda_is_needed(library: Path) -> None:
    needed = output_of("ldd", library)
    assert not [line for line in needed.splitlines() if "libcuda" in line or "libcublas" in line]


@needs_cuda_library
def test_the_cuda_library_offers_its_c_functions_and_nothing_else() -> None:
    symbols = [line.split()[-1] for line in output_of("nm", "-D", "--defined-only", CUDA_LIBRARY).splitlines()]
    assert "pagemill_cuda_device_count" in symbols
    assert [name for name in symbols if not name.startswith("pagemill_cuda_")] == []


@needs_cuda_library
def test_the_cuda_library_loads_and_says_which_devices_there_are() -> None:
    assert len(kernels.cuda_devices()) == torch.cuda.device_count()


def test_a_missing_cuda_library_is_named(tmp_path: Path) -> None:
    probe = "from worker import kernels\ntry: kernels.cuda_devices()\nexcept RuntimeError as error: print(error)"
    absent = tmp_path / "libabsent.so"
    said = output_of(sys.executable, "-c", probe, PAGEMILL_CUDA_LIBRARY=str(absent))
    assert "CUDA kernels do not load" in said
    assert str(absent) in said


# As pagemill/params.h and kernels.h declare them, with nothing but the standard library.
RMS_NORM_BY_CTYPES = """
import ctypes, math, sys
from ctypes import POINTER, Structure, c_bool, c_char_p, c_float, c_int32, c_int64, c_void_p

class RmsNormParams(Structure):
    _fields_ = [
        ("out", c_void_p), ("x", c_void_p), ("residual", c_void_p), ("weight", c_void_p),
        ("num_tokens", c_int64), ("hidden", c_int64),
        ("out_stride", c_int64), ("x_stride", c_int64), ("residual_stride", c_int64),
        ("epsilon", c_float), ("dtype", c_int32), ("is_wide", c_bool),
    ]

library = ctypes.CDLL(sys.argv[1])
library.pagemill_rms_norm.argtypes = [POINTER(RmsNormParams)]
library.pagemill_last_error.restype = c_char_p
rows, hidden, epsilon = 3, 40, 1e-5
x = (c_float * (rows * hidden))(*[math.sin(i) for i in range(rows * hidden)])
weight = (c_float * hidden)(*[1 + i / hidden for i in range(hidden)])
out = (c_float * (rows * hidden))()
params = RmsNormParams(
    ctypes.addressof(out), ctypes.addressof(x), None, ctypes.addressof(weight), rows, hidden, hidden, hidden, 0,
    epsilon, 0, False,
)
if library.pagemill_rms_norm(ctypes.byref(params)) != 0:
    sys.exit(library.pagemill_last_error().decode())
for row in range(rows):
    numbers = x[row * hidden : (row + 1) * hidden]
    scale = 1 / math.sqrt(sum(number * number for number in numbers) / hidden + epsilon)
    for i, number in enumerate(numbers):
        assert abs(out[row * hidden + i] - number * scale * weight[i]) < 1e-5, (row, i)
print("same")
"""


def interpreters() -> list[str]:
    """This Python and others on PATH that start, one a version."""
    found = {sys.version_info[:2]: sys.executable}
    for minor in range(9, 16):
        path = shutil.which(f"python3.{minor}")
        if path and subprocess.run([path, "-c", ""], capture_output=True, timeout=60).returncode == 0:
            found.setdefault((3, minor), path)
    return [found[version] for version in sorted(found)]


@pytest.mark.parametrize("interpreter", interpreters(), ids=lambda path: Path(path).name)
def test_one_library_serves_every_python_without_the_module(interpreter: str) -> None:
    """-I and -S: neither site-packages nor the environment's paths."""
    assert output_of(interpreter, "-I", "-S", "-c", RMS_NORM_BY_CTYPES, CPU_LIBRARY).strip() == "same"


RESULT_OF_A_KERNEL = """
import torch
from worker import kernels
x = torch.arange(96, dtype=torch.float32).sin().view(3, 32).to(torch.bfloat16)
out = torch.empty_like(x)
kernels.rms_norm(out, x, torch.ones(32, dtype=torch.bfloat16), 1e-5)
print(torch.__version__)
print(kernels._C.__file__)
print(out.view(torch.int16).tolist())
"""


def test_the_same_build_runs_under_two_versions_of_torch(tmp_path: Path) -> None:
    """$PAGEMILL_TEST_SECOND_TORCH is a Python of this version with another torch; `.ci/run` sets one up."""
    second = os.environ.get("PAGEMILL_TEST_SECOND_TORCH")
    if not second:
        pytest.skip("PAGEMILL_TEST_SECOND_TORCH names no Python with another version of torch")
    # The package alone, with the libraries of this build beside it: nothing else of this environment.
    ignored = shutil.ignore_patterns("*.so", "__pycache__")
    shutil.copytree(ROOT / "worker" / "kernels", tmp_path / "worker" / "kernels", ignore=ignored)
    shutil.copytree(ROOT / "pagemill", tmp_path / "pagemill", ignore=ignored)
    shutil.copy(ROOT / "worker" / "__init__.py", tmp_path / "worker")
    for library in (MODULE, CPU_LIBRARY):
        shutil.copy(library, tmp_path / "worker" / "kernels")
    here = output_of(sys.executable, "-c", RESULT_OF_A_KERNEL).splitlines()
    there = output_of(second, "-c", RESULT_OF_A_KERNEL, folder=tmp_path, PYTHONPATH=str(tmp_path)).splitlines()
    assert there[0] != here[0], f"{second} has the same torch"
    assert there[1] == str(tmp_path / "worker" / "kernels" / MODULE.name)
    assert there[2] == here[2]
