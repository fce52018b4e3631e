"""Rows as a table for people and as lines for files."""

from __future__ import annotations

import csv
import json
import math
from collections.abc import Iterator, Mapping, Sequence
from datetime import UTC, datetime
from pathlib import Path

import torch
from rich.table import Table

from pagemill.bench.machine import processor_name
from worker import kernels
from worker.bench.case import OURS, Site
from worker.bench.runner import CEILING, Row

_LEFT = ("kernel", "shape", "implementation")
_RIGHT = ("time µs", "GB/s", "TFLOP/s", "floor µs", "of floor", "ours is", "difference")


def context(site: Site, command: str) -> dict[str, object]:
    """What every written row says of the run: date, device, versions and the command."""
    cpu = f"{processor_name()}, {kernels.cpu_isa()}, {kernels.num_threads()} threads"
    return {
        "date": datetime.now(UTC).isoformat(timespec="seconds"),
        "device": torch.cuda.get_device_name(site.device) if site.is_cuda else cpu,
        "torch": str(torch.__version__),
        "command": command,
    }


def failures(rows: Sequence[Row]) -> list[str]:
    return [f"{row.kernel} {row.shape}, {row.implementation}: {row.error}" for row in rows if row.error]


def table(rows: Sequence[Row]) -> Table:
    """One line a timing. "ours is" says how many times as fast Pagemill's kernel is as that implementation."""
    made = Table(header_style="bold", box=None, pad_edge=False)
    for name in _LEFT:
        made.add_column(name, overflow="fold")
    for name in _RIGHT:
        made.add_column(name, justify="right", no_wrap=True)
    ours = {(row.kernel, row.shape): row.time_us for row in rows if row.implementation == OURS}
    for row in rows:
        made.add_row(
            *_cells(row, ours.get((row.kernel, row.shape))), style="bold" if row.implementation == OURS else ""
        )
    return made


def _cells(row: Row, ours_us: float | None) -> Iterator[str]:
    yield from (row.kernel, row.shape, row.implementation)
    ratio = row.time_us / ours_us if row.time_us and ours_us and row.implementation != OURS else None
    yield "failed" if row.error else _number(row.time_us)
    yield _number(row.gb_per_s)
    yield _number(row.tflop_per_s)
    yield _number(row.floor_us)
    yield "" if row.share_of_floor is None else f"{row.share_of_floor:.0%}"
    yield "" if ratio is None else f"{ratio:.2f} x"
    yield "" if row.difference is None else f"{row.difference:.1e}"


def _number(value: float | None) -> str:
    """Three digits that count."""
    if value is None:
        return ""
    return f"{value:.0f}" if value >= 100 else f"{value:.3g}"


def summary(rows: Sequence[Row]) -> list[str]:
    """For each kernel with others beside it: how often ours is the fastest, and by how much in the geometric mean.

    Others that are given less to do have a line of their own.
    """
    lines = []
    for kernel in dict.fromkeys(row.kernel for row in rows if row.kernel != CEILING):
        of_kernel = [row for row in rows if row.kernel == kernel]
        for is_same_work, whom in ((True, "the fastest other"), (False, "the fastest other on contiguous memory")):
            ratios = list(_ratios_to_fastest(of_kernel, is_same_work))
            if ratios:
                mean = math.exp(sum(map(math.log, ratios)) / len(ratios))
                ahead = sum(ratio >= 1 for ratio in ratios)
                lines.append(
                    f"{kernel}: {mean:.2f} x as fast as {whom} (geometric mean of {len(ratios)} shapes, "
                    f"least {min(ratios):.2f} x); no slower on {ahead}"
                )
    return lines


def _ratios_to_fastest(rows: Sequence[Row], is_same_work: bool) -> Iterator[float]:
    """Of each shape that has both: time of the fastest other over ours."""
    for shape in dict.fromkeys(row.shape for row in rows):
        timed = [row for row in rows if row.shape == shape and row.time_us is not None]
        ours = [row.time_us for row in timed if row.implementation == OURS]
        others = [row.time_us for row in timed if row.implementation != OURS and row.is_same_work == is_same_work]
        if ours and others:
            yield min(filter(None, others)) / (ours[0] or math.inf)


def append_csv(path: Path, rows: Sequence[Row], about: Mapping[str, object]) -> None:
    """Append rows; a new file gets a header first."""
    is_new = not path.exists() or path.stat().st_size == 0
    with path.open("a", newline="", encoding="utf-8") as file:
        lines = [{**row.as_dict(), **about} for row in rows]
        writer = csv.DictWriter(file, list(lines[0]) if lines else list(about))
        if is_new:
            writer.writeheader()
        writer.writerows(lines)


def append_jsonl(path: Path, rows: Sequence[Row], about: Mapping[str, object]) -> None:
    """Append rows, one JSON object a line, without the fields that a row does not have."""
    with path.open("a", encoding="utf-8") as file:
        for row in rows:
            line = {name: value for name, value in row.as_dict().items() if value not in (None, "")}
            file.write(json.dumps({**line, **about}) + "\n")
