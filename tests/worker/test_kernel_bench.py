"""The kernel benchmark: all cases run, and figures are what they are said to be."""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch

from pagemill.errors import ConfigError
from worker.bench import report, runner, suite
from worker.bench.case import OURS, Candidate, Case, Contender, Site, Work
from worker.bench.ceilings import Ceilings
from worker.bench.runner import Row
from worker.bench.timing import CpuTimer, OnceTimer, Timing

DRY = Site(torch.device("cpu"), 1, is_dry=True)
# Of every kernel that has a face. What is for CUDA alone is not among the cases of a CPU.
KERNELS = {
    "decode_attention", "decode_attention_fp8", "prefill_attention", "merge_attention", "rms_norm",
    "fused_add_rms_norm", "silu_and_mul", "gelu_and_mul", "embedding", "rotary", "rope_and_store", "store_kv",
    "copy_blocks", "swap_blocks", "prepare_step", "scatter", "sample", "token_logprobs", "linear",
}  # fmt: skip


def test_every_kernel_has_cases_here_and_on_a_gpu() -> None:
    assert {case.kernel for case in suite.all_cases(DRY)} == KERNELS
    on_gpu = Site(torch.device("cuda"), 400 << 20)
    assert {case.kernel for case in suite.all_cases(on_gpu)} == KERNELS - {"linear"} | {"skinny_linear"}


@pytest.mark.parametrize("device", ["cpu", "cuda"])
def test_a_quick_run_has_each_kernel(device: str) -> None:
    site = Site(torch.device(device), 1 << 20)
    quick = suite.choose_cases(site, [], is_quick=True)
    assert {case.kernel for case in quick} == {case.kernel for case in suite.all_cases(site)}
    assert len(quick) < len(list(suite.all_cases(site))) / 2


def test_a_case_is_known_by_its_kernel_and_shape() -> None:
    for device in ("cpu", "cuda"):
        keys = [(case.kernel, case.shape) for case in suite.all_cases(Site(torch.device(device), 1 << 20))]
        assert len(keys) == len(set(keys))


@pytest.mark.parametrize("kernel", sorted(KERNELS))
def test_cases_run_and_agree_with_others(kernel: str) -> None:
    rows = list(runner.run(DRY, suite.choose_cases(DRY, [kernel], is_quick=False), OnceTimer()))
    assert rows
    assert report.failures(rows) == []
    compared = [row.difference for row in rows if row.difference is not None]
    assert all(difference < 1e-2 for difference in compared)
    assert bool(compared) == (kernel in {"decode_attention", "prefill_attention", "linear"})


def test_an_unknown_kernel_is_refused_with_those_that_there_are() -> None:
    with pytest.raises(ConfigError, match="no such kernel on cpu; there are decode_attention"):
        suite.choose_cases(DRY, ["rms"], is_quick=False)


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a CUDA device")
def test_a_device_that_is_not_there_is_refused() -> None:
    with pytest.raises(ConfigError, match="no CUDA device"):
        suite.make_site("cuda")


def test_the_floor_is_the_longer_of_moving_and_computing() -> None:
    ceilings = Ceilings({"read": 1e9, "copy": 2e9}, {torch.bfloat16: 1e12})
    assert ceilings.floor_s(Work(10**9, "read"), torch.bfloat16) == (1.0, "read")
    assert ceilings.floor_s(Work(10**9, "copy"), torch.bfloat16) == (0.5, "copy")
    assert ceilings.floor_s(Work(10**9, "copy", 10**12), torch.bfloat16) == (1.0, "product")
    assert ceilings.floor_s(Work(10**9, "copy", 10**11), torch.bfloat16) == (0.5, "copy")


class FixedTimer:
    """Every call takes two milliseconds."""

    def time(self, candidate: Candidate) -> Timing:
        return Timing(2e-3, "clock")


def rows_of(site: Site, *contenders: Contender) -> list[Row]:
    work = Work(4_000_000, "read", 8_000_000)
    case = Case("some_kernel", "some shape", torch.bfloat16, work, lambda: contenders)
    ceilings = Ceilings({"read": 4e9}, {torch.bfloat16: 1e15})
    return list(runner._run_case(site, case, ceilings, FixedTimer()))


def candidate(value: float) -> Callable[[], Candidate]:
    return lambda: Candidate([lambda: None], result=lambda: torch.tensor([value, value]))


def fails() -> Candidate:
    raise RuntimeError("needs\n  more memory")


def test_a_row_has_rates_and_its_share_of_the_floor() -> None:
    site = Site(torch.device("cpu"), 1)
    ours, other, failed = rows_of(
        site, Contender(OURS, candidate(1.0)), Contender("other", candidate(1.5)), Contender("third", fails)
    )
    assert (ours.time_us, ours.gb_per_s, ours.tflop_per_s) == pytest.approx((2000, 2.0, 0.004))
    assert (ours.floor_us, ours.share_of_floor, ours.bound) == (pytest.approx(1000), pytest.approx(0.5), "read")
    assert ours.difference is None
    assert other.difference == pytest.approx(0.5)
    assert (failed.time_us, failed.error) == (None, "RuntimeError: needs more memory")


def row(shape: str, implementation: str, time_us: float | None, *, is_same_work: bool = True) -> Row:
    return Row(
        "decode_attention", shape, "bfloat16", implementation, time_us, 1.0, None, 1.0, 0.5, "read", "graph",
        is_same_work,
    )  # fmt: skip


def test_the_summary_compares_with_the_fastest_other_on_each_shape() -> None:
    rows = [
        row("a", OURS, 10.0), row("a", "slow", 40.0), row("a", "fast", 20.0),
        row("b", OURS, 10.0), row("b", "fast", 5.0), row("b", "failed", None),
        row("c", OURS, 10.0),
    ]  # fmt: skip
    (line,) = report.summary(rows)
    assert line.startswith("decode_attention: 1.00 x as fast as the fastest other (geometric mean of 2 shapes")
    assert "least 0.50 x" in line
    assert line.endswith("no slower on 1")


def test_others_that_have_less_to_do_are_summed_up_apart() -> None:
    rows = [row("a", OURS, 10.0), row("a", "paged", 20.0), row("a", "contiguous", 5.0, is_same_work=False)]
    paged, contiguous = report.summary(rows)
    assert paged.startswith("decode_attention: 2.00 x as fast as the fastest other (")
    assert contiguous.startswith("decode_attention: 0.50 x as fast as the fastest other on contiguous memory")


def test_rows_are_appended_with_what_the_run_was(tmp_path: Path) -> None:
    about = report.context(DRY, "pagemill bench kernels --quick")
    assert set(about) == {"date", "device", "torch", "command"}
    for name in ("first", "second"):
        report.append_csv(tmp_path / "rows.csv", [row(name, OURS, 10.0)], about)
        report.append_jsonl(tmp_path / "rows.jsonl", [row(name, OURS, None)], about)
    lines = (tmp_path / "rows.csv").read_text().splitlines()
    assert len(lines) == 3
    assert lines[0].startswith("kernel,shape,dtype,implementation,time_us")
    written = [json.loads(line) for line in (tmp_path / "rows.jsonl").read_text().splitlines()]
    assert [line["shape"] for line in written] == ["first", "second"]
    assert "time_us" not in written[0]
    assert written[0]["command"] == "pagemill bench kernels --quick"


def test_calls_go_round_over_memory_that_no_cache_holds() -> None:
    site = Site(torch.device("cpu"), cold_bytes=1000)
    assert site.num_copies(300) == 4
    assert site.num_copies(5000) == 1
    assert site.num_copies(1) == 256
    assert site.num_copies(1, limit=8) == 8


@pytest.fixture()
def counted() -> Iterator[list[int]]:
    yield [0, 0]


def test_a_timer_runs_all_calls_equally_often(counted: list[int]) -> None:
    def call(index: int) -> Callable[[], None]:
        def count() -> None:
            counted[index] += 1

        return count

    timing = CpuTimer(1e-4, 3).time(Candidate([call(0), call(1)]))
    assert timing.method == "clock"
    assert 0 < timing.seconds < math.inf
    assert counted[0] == counted[1] > 3
