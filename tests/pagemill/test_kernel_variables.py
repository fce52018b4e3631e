"""Variables of the native kernels: judged as the kernels judge them, only sooner."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

import worker
from pagemill.config_loader import OTHER_VARIABLES
from pagemill.errors import ConfigError
from pagemill.kernel_variables import CPU_ISAS, check_kernel_variables, cpu_isa_note

AVX2 = "avx2 fma f16c"
AVX512 = f"{AVX2} avx512f avx512bw avx512dq avx512vl"


@pytest.mark.parametrize("name", ["", *CPU_ISAS])
def test_known_instruction_sets_and_none_pass(name: str) -> None:
    check_kernel_variables({"PAGEMILL_CPU_ISA": name, "PAGEMILL_SPIN_US": "0"})
    check_kernel_variables({})


@pytest.mark.parametrize(
    ("variable", "value"),
    [("PAGEMILL_CPU_ISA", "AVX2"), ("PAGEMILL_CPU_ISA", "foo")]
    + [("PAGEMILL_SPIN_US", value) for value in ("x", "-1", "1000001", "1.5", "²")],
)
def test_what_is_refused_here_the_kernels_refuse_too(variable: str, value: str) -> None:
    with pytest.raises(ConfigError, match=variable):
        check_kernel_variables({variable: value})
    use = "from worker import kernels; kernels.cpu_isa(); kernels.num_threads()"
    run = subprocess.run(
        [sys.executable, "-c", use], env=os.environ | {variable: value}, capture_output=True, text=True, timeout=60
    )
    assert run.returncode != 0
    assert variable in run.stderr


@pytest.mark.parametrize(
    ("flags", "name", "best"),
    [(AVX2, "avx512", "avx2"), (AVX512, "amx", "avx512"), ("sse2", "avx2", "portable"), (AVX512, "avx512", None)],
)
def test_a_cap_above_the_machine_is_noted(tmp_path: Path, flags: str, name: str, best: str | None) -> None:
    cpuinfo = tmp_path / "cpuinfo"
    cpuinfo.write_text(f"processor : 0\nflags : {flags}\n")
    note = cpu_isa_note({"PAGEMILL_CPU_ISA": name}, cpuinfo)
    assert (f"it has {best} at best" in note) if best else note == ""
    assert cpu_isa_note({"PAGEMILL_CPU_ISA": name}, tmp_path / "absent") == ""


def test_every_variable_that_the_native_code_or_its_face_reads_is_known_to_the_configuration() -> None:
    root = Path(worker.__file__).parents[1]
    sources = [*root.glob("csrc/**/*.cpp"), *root.glob("csrc/**/*.cu"), *root.glob("worker/kernels/*.py")]
    reads = re.compile(r"(?:getenv|environ\.get|environ)[(\[]\"(PAGEMILL_\w+)\"")
    names = {name for source in sources for name in reads.findall(source.read_text(encoding="utf-8"))}
    assert {"PAGEMILL_CPU_ISA", "PAGEMILL_CUDA_LIBRARY", "PAGEMILL_TRACE_KERNELS"} <= names
    assert names <= OTHER_VARIABLES.keys()
