"""What the build wrote beside the libraries, and which devices its code runs on."""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace

import pytest

from worker.kernels import build_info as module
from worker.kernels.build_info import BuildInfo, build_info, runs_on


@pytest.mark.parametrize(
    ("architectures", "compute_capability", "runs"),
    [
        (("80", "86", "89", "90a"), 90, True),
        (("90a",), 90, True),
        (("90a",), 100, False),  # its own generation alone
        (("90a",), 89, False),
        (("80", "90a"), 86, True),  # machine code of the same generation
        (("86",), 80, False),
        (("80", "90a"), 120, True),  # PTX of 80
        (("80", "86", "89", "90a", "100"), 75, False),
    ],
)
def test_code_runs_on_its_generation_and_ptx_on_later_ones(
    architectures: tuple[str, ...], compute_capability: int, runs: bool
) -> None:
    assert runs_on(architectures, compute_capability) is runs


@pytest.fixture()
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setattr(module, "load_native", lambda: SimpleNamespace(__file__=str(tmp_path / "_C.so")))
    monkeypatch.delenv("PAGEMILL_CUDA_LIBRARY", raising=False)
    return tmp_path


def test_what_was_written_is_read(folder: Path) -> None:
    written = {
        "cuda_is_built": True,
        "cuda_reason": "",
        "cuda_architectures": ["80", "90a"],
        "cuda_compiler": "13.0.88",
        "has_device_checks": False,
    }
    (folder / "build_info.json").write_text(json.dumps(written))
    assert build_info() == BuildInfo(True, "", ("80", "90a"), "13.0.88", False)


def test_nothing_is_known_without_the_file_or_of_a_library_of_another_build(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert build_info() is None
    (folder / "build_info.json").write_text("{}")
    monkeypatch.setenv("PAGEMILL_CUDA_LIBRARY", "/elsewhere/libpagemill_cuda.so")
    assert build_info() is None
