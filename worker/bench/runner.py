"""Runs cases and turns timings into rows."""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from typing import TypeVar

import torch

from worker.bench.case import OURS, Candidate, Case, Contender, Site, dtype_name
from worker.bench.ceilings import Ceilings, measure
from worker.bench.timing import CpuTimer, CudaTimer, OnceTimer, Timer

CEILING = "ceiling"
T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class Row:
    """One timing, or one failure.

    Attributes:
        floor_us: the least time by the ceilings of the same run; share_of_floor is floor over time, 1 at best.
        bound: what the floor comes from: read, copy, to_host, to_device or product.
        timed_by: graph, launches or clock; see timing.py.
        is_same_work: False where it is given less to do, such as contiguous memory instead of pages.
        difference: of the output from Pagemill's, as norm of the difference over norm; None where not compared.
        error: why there is no time.
    """

    kernel: str
    shape: str
    dtype: str
    implementation: str
    time_us: float | None
    gb_per_s: float | None
    tflop_per_s: float | None
    floor_us: float | None
    share_of_floor: float | None
    bound: str
    timed_by: str
    is_same_work: bool = True
    difference: float | None = None
    error: str = ""

    def as_dict(self) -> dict[str, object]:
        return asdict(self)


def make_timer(site: Site, *, is_quick: bool) -> Timer:
    if site.is_dry:
        return OnceTimer()
    if site.is_cuda:
        return CudaTimer(0.005, 5) if is_quick else CudaTimer(0.015, 7)
    return CpuTimer(0.05, 3) if is_quick else CpuTimer(0.2, 5)


def run(site: Site, cases: Sequence[Case], timer: Timer) -> Iterator[Row]:
    """Rows of the ceilings, then of each case as it is done. A contender that fails gives a row with its error."""
    dtypes = list(dict.fromkeys(case.dtype for case in cases if case.work.flops))
    ceilings = measure(site, timer, dtypes)
    if not site.is_dry:
        yield from _ceiling_rows(ceilings)
    for case in cases:
        yield from _run_case(site, case, ceilings, timer)
        _free(site)


def _ceiling_rows(ceilings: Ceilings) -> Iterator[Row]:
    for name, rate in ceilings.bandwidths.items():
        yield Row(CEILING, name, "", "torch", None, rate / 1e9, None, None, None, name, "")
    for dtype, rate in ceilings.products.items():
        yield Row(CEILING, "product", dtype_name(dtype), "torch", None, None, rate / 1e12, None, None, "product", "")


def _run_case(site: Site, case: Case, ceilings: Ceilings, timer: Timer) -> Iterator[Row]:
    contenders = _guarded(case.build)
    if isinstance(contenders, str):
        yield _failed(case, Contender(OURS, _never), contenders)
        return
    expected: torch.Tensor | None = None
    for contender in contenders:
        outcome = _guarded(lambda contender=contender: _time(contender, timer))  # type: ignore[misc]
        if isinstance(outcome, str):
            yield _failed(case, contender, outcome)
        else:
            seconds, method, result = outcome
            if contender.name == OURS:
                expected = result
            difference = _difference(result, expected)
            if site.is_dry:
                yield _ran(case, contender, difference)
            else:
                floor_s, bound = ceilings.floor_s(case.work, case.dtype)
                yield _row(case, contender, seconds, method, floor_s, bound, difference)
        _free(site)


def _never() -> Candidate:
    raise RuntimeError("what the contenders share could not be made")


def _time(contender: Contender, timer: Timer) -> tuple[float, str, torch.Tensor | None]:
    candidate: Candidate = contender.make()
    candidate.calls[0]()
    result = candidate.result().clone() if candidate.result is not None else None
    timing = timer.time(candidate)
    return timing.seconds, timing.method, result


def _guarded(make: Callable[[], T]) -> T | str:
    """What `make` gives, or the error in one line: other libraries fail in ways of their own."""
    try:
        return make()
    except Exception as error:
        return f"{type(error).__name__}: {' '.join(str(error).split())[:300]}"


def _difference(result: torch.Tensor | None, expected: torch.Tensor | None) -> float | None:
    """None where one is missing or both are the same tensor."""
    if result is None or expected is None or result is expected:
        return None
    expected = expected.float()
    return float((result.float() - expected).norm() / expected.norm())


def _row(
    case: Case,
    contender: Contender,
    seconds: float,
    method: str,
    floor_s: float,
    bound: str,
    difference: float | None,
) -> Row:
    work = case.work
    return Row(
        case.kernel, case.shape, dtype_name(case.dtype), contender.name, seconds * 1e6,
        work.num_bytes / seconds / 1e9, work.flops / seconds / 1e12 if work.flops else None, floor_s * 1e6,
        floor_s / seconds, bound, method, contender.is_same_work, difference,
    )  # fmt: skip


def _untimed(case: Case, contender: Contender) -> Row:
    return Row(
        case.kernel, case.shape, dtype_name(case.dtype), contender.name, None, None, None, None, None, "", "",
        contender.is_same_work,
    )  # fmt: skip


def _ran(case: Case, contender: Contender, difference: float | None) -> Row:
    """Of a dry run, whose times say nothing."""
    return replace(_untimed(case, contender), difference=difference)


def _failed(case: Case, contender: Contender, error: str) -> Row:
    return replace(_untimed(case, contender), error=error)


def _free(site: Site) -> None:
    gc.collect()
    if site.is_cuda:
        torch.cuda.empty_cache()
