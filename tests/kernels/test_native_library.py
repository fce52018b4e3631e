import os
import shutil
import subprocess
import sys
import sysconfig
from pathlib import Path

import pytest

import worker
from worker import kernels

PROBE = """
from pagemill.errors import NativeLibraryError
try:
    import worker.kernels
except NativeLibraryError as error:
    print(error)
"""


@pytest.mark.parametrize("present", [False, True])
def test_a_missing_or_broken_library_is_named_with_the_command_that_builds_it(tmp_path: Path, present: bool) -> None:
    source = Path(worker.__file__).parent
    shutil.copytree(source / "kernels", tmp_path / "worker/kernels", ignore=shutil.ignore_patterns("*.so"))
    shutil.copy(source / "__init__.py", tmp_path / "worker")
    shutil.copytree(source.parent / "pagemill", tmp_path / "pagemill", ignore=shutil.ignore_patterns("__pycache__"))
    module = next((source / "kernels").glob("_C*.so"))
    if present:
        (tmp_path / "worker/kernels" / module.name).write_bytes(b"not a library")
    # Without site's start-up files, by which an editable install would bring in the working library.
    env = os.environ | {"PYTHONPATH": os.pathsep.join([str(tmp_path), sysconfig.get_path("purelib")])}
    done = subprocess.run(
        [sys.executable, "-S", "-c", PROBE], cwd=tmp_path, env=env, capture_output=True, text=True, timeout=120
    )
    assert str(tmp_path / "worker/kernels" / module.name) in done.stdout, done.stderr
    assert "pip install --no-build-isolation -e ." in done.stdout


def test_the_instruction_set_is_capped_by_the_environment() -> None:
    probe = "from worker import kernels; print(kernels.cpu_isa())"
    env = {"PAGEMILL_CPU_ISA": "portable", "PATH": ""}
    root = Path(worker.__file__).parents[1]
    done = subprocess.run([sys.executable, "-c", probe], cwd=root, env=env, capture_output=True, text=True, timeout=120)
    assert done.stdout.strip() == "portable", done.stderr


def test_an_instruction_set_above_the_machines_is_refused() -> None:
    with pytest.raises(ValueError, match="portable, avx2, avx512, avx512bf16, amx"):
        kernels.set_cpu_isa("sse9")


WITHOUT_VECTOR_INSTRUCTIONS = """
import torch
from worker import kernels
from worker.kernels.linear import PackedLinear
x, weight = torch.eye(4, 64).bfloat16(), torch.eye(64).bfloat16()
out = torch.empty(4, 64, dtype=torch.bfloat16)
PackedLinear(weight)(x, out)
assert torch.equal(out, x)
kv = torch.ones(2, 1, 16, 64).bfloat16()
table, start, lens = (torch.tensor(v, dtype=torch.int32) for v in ([[1, 0]], [0, 1], [20]))
query = x[:1].view(1, 1, 64)
attended = torch.empty_like(query)
kernels.paged_attention(attended, query, kv, kv, table, None, start, lens, 1.0)
assert torch.equal(attended, torch.ones_like(attended))
try:
    kernels.set_cpu_isa("avx2")
except ValueError as error:
    print(kernels.cpu_isa(), error)
"""


def test_a_processor_without_vector_instructions_runs_the_portable_kernels() -> None:
    env = os.environ | {"PAGEMILL_CPU_ISA": "portable"}
    root = Path(worker.__file__).parents[1]
    command = [sys.executable, "-c", WITHOUT_VECTOR_INSTRUCTIONS]
    done = subprocess.run(command, cwd=root, env=env, capture_output=True, text=True, timeout=120)
    assert done.stdout.strip() == "portable this machine supports portable at best, not avx2", done.stderr
