"""What `make` would do from nothing and from each half-way state, by its dry run."""

from __future__ import annotations

import os
import shutil
import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture()
def tree(tmp_path: Path) -> Path:
    for name in ("Makefile", "pyproject.toml"):
        shutil.copy(ROOT / name, tmp_path)
    (tmp_path / "csrc").mkdir()
    (tmp_path / ".venv" / "bin").mkdir(parents=True)
    (tmp_path / ".venv" / "bin" / "python").write_text("")
    return tmp_path


def steps(tree: Path, *goals: str) -> str:
    environment = {name: value for name, value in os.environ.items() if not name.startswith(("MAKE", "MFLAGS"))}
    run = subprocess.run(
        ["make", "-n", *goals], cwd=tree, env=environment, capture_output=True, text=True, timeout=60, check=True
    )
    return run.stdout


def done(tree: Path, *stamps: str) -> None:
    for stamp in stamps:
        (tree / ".venv" / stamp).write_text("")


SERVING, TESTING, BUILD = "install_dependencies.py all", "install_dependencies.py dev", "--editable ."


def test_serving_installs_no_tools_for_tests(tree: Path) -> None:
    text = steps(tree, "serve")
    assert text.index(SERVING) < text.index(BUILD) < text.index("pagemill serve")
    assert TESTING not in text


@pytest.mark.parametrize("goal", ["test", "lint"])
def test_tests_and_checks_add_theirs_from_nothing_and_after_serving(tree: Path, goal: str) -> None:
    text = steps(tree, goal)
    assert all(step in text for step in (SERVING, TESTING, BUILD))
    done(tree, ".dependencies-installed", ".native-built")
    text = steps(tree, goal)
    assert TESTING in text
    assert SERVING not in text
    assert BUILD not in text


def test_serving_after_tests_finds_all_done(tree: Path) -> None:
    done(tree, ".dependencies-installed", ".native-built", ".development-installed")
    text = steps(tree, "serve")
    assert not any(step in text for step in (SERVING, TESTING, BUILD))


def test_other_cuda_architectures_than_those_that_were_built_are_built(tree: Path) -> None:
    done(tree, ".dependencies-installed", ".native-built", ".development-installed")
    assert BUILD in steps(tree, "install", "CUDA_ARCHITECTURES=90a")
    (tree / ".venv" / ".native-built").write_text("90a\n")
    assert BUILD not in steps(tree, "install", "CUDA_ARCHITECTURES=90a")
    assert BUILD not in steps(tree, "install")
    assert BUILD in steps(tree, "install", "CUDA_ARCHITECTURES=80 90a")


def test_the_slow_steps_say_what_they_do_and_how_long_it_takes(tree: Path) -> None:
    said = [line for line in steps(tree, "test").splitlines() if line.startswith("echo")]
    assert len([line for line in said if "minute" in line]) == 3
