"""Rows of measurements: a table for people, CSV and JSON lines for files."""

from __future__ import annotations

import csv
import json
import math
import shlex
import sys
from collections.abc import Mapping, Sequence
from datetime import UTC, datetime
from itertools import pairwise
from pathlib import Path
from typing import TYPE_CHECKING

from pagemill import __version__
from pagemill.errors import ConfigError

if TYPE_CHECKING:
    from rich.table import Table

Row = Mapping[str, object]

# What every row ends with, whatever was measured.
CONTEXT_COLUMNS = ("label", "model", "options", "version", "date", "command")

THROUGHPUT_COLUMNS = (
    "backend", "device", "input_len", "output_len", "num_prompts", "batch_size", "elapsed_s", "requests_per_second",
    "output_tokens_per_second", "total_tokens_per_second", "ms_per_step", "first_token_ms", "prefill_tokens_per_second",
    "ttft_ms_p50", "ttft_ms_p99", "elapsed_s_each", *CONTEXT_COLUMNS,
)  # fmt: skip

_HOLD_KEYS = ("--api-key", "--serve-args")
_DISTRIBUTION = ("mean", "p50", "p90", "p99", "max")


def distribution_columns(*names: str) -> tuple[str, ...]:
    """Names of the columns of `Distribution.columns`."""
    return tuple(f"{name}_{key}" for name in names for key in _DISTRIBUTION)


LATENCY_COLUMNS = (
    "backend", "device", "input_len", "output_len", "batch_size", "num_rounds",
    *distribution_columns("ttft_ms", "tpot_ms", "e2e_ms"), *CONTEXT_COLUMNS,
)  # fmt: skip

SERVE_COLUMNS = (
    "backend", "device", "workload", "input_len", "output_len", "request_rate", "burstiness", "concurrency",
    "num_requests", "num_failed", "failures", "elapsed_s", "requests_per_second", "output_tokens_per_second",
    "input_tokens_per_second", "cached_share", *distribution_columns("ttft_ms", "itl_ms", "tpot_ms", "e2e_ms"),
    "slo_ttft_ms", "slo_tpot_ms", "goodput_requests_per_second", "goodput_share", "late_ms_p99", "client_cpu_share",
    "seed", *CONTEXT_COLUMNS,
)  # fmt: skip


def context(model: str, options: str, label: str) -> dict[str, object]:
    """What every row says of the run."""
    return {
        "label": label,
        "model": model,
        "options": options,
        "version": __version__,
        "date": datetime.now(UTC).isoformat(timespec="seconds"),
        "command": shlex.join([*_program(), *without_keys(sys.argv[1:])]),
    }


def without_keys(words: Sequence[str]) -> list[str]:
    """Words of a command line as they may be kept: without API keys, also where a server is to get them."""
    shown = []
    for before, word in pairwise(["", *words]):
        option, equals, value = word.partition("=")
        if before in _HOLD_KEYS:
            shown.append(_without_key(before, word))
        elif equals and option in _HOLD_KEYS:
            shown.append(f"{option}={_without_key(option, value)}")
        else:
            shown.append(word)
    return shown


def _without_key(option: str, value: str) -> str:
    return "KEY" if option == "--api-key" else shlex.join(without_keys(shlex.split(value)))


def _program() -> list[str]:
    """How this program was called: by its name, or as a script."""
    name = Path(sys.argv[0]).name
    return ["pagemill"] if name in ("pagemill", "cli.py") else ["python", sys.argv[0]]


class RowFiles:
    """Where rows go as soon as they are there, so that a run that is stopped leaves what it has measured.

    Args:
        csv_path: appended to; None is no file.
        json_path: one JSON object a line, appended to; None is no file.
        columns: of the CSV file, in order.

    Raises:
        ConfigError: a folder is missing, or the CSV file has other columns.
    """

    def __init__(self, csv_path: Path | None, json_path: Path | None, columns: Sequence[str]) -> None:
        self._csv_path, self._json_path, self._columns = csv_path, json_path, list(columns)
        for path, field in ((csv_path, "csv"), (json_path, "json")):
            if path is not None and not path.parent.is_dir():
                raise ConfigError(f"{path}: there is no folder {path.parent}", field=field)
        if csv_path is not None and csv_path.exists() and csv_path.stat().st_size:
            with csv_path.open(newline="", encoding="utf-8") as file:
                present = next(csv.reader(file), [])
            if present != self._columns:
                raise ConfigError(
                    f"{csv_path} has other columns than this command writes; name a new file", field="csv"
                )

    def write(self, row: Row) -> None:
        """Append one row; figures that it does not have stay empty."""
        unknown = row.keys() - set(self._columns)
        assert not unknown, f"columns without a place: {unknown}"
        if self._csv_path is not None:
            is_new = not self._csv_path.exists() or not self._csv_path.stat().st_size
            with self._csv_path.open("a", newline="", encoding="utf-8") as file:
                writer = csv.DictWriter(file, self._columns)
                if is_new:
                    writer.writeheader()
                writer.writerow({name: _cell(row.get(name)) for name in self._columns})
        if self._json_path is not None:
            line = {name: _plain(row[name]) for name in self._columns if _plain(row.get(name)) not in (None, "")}
            with self._json_path.open("a", encoding="utf-8") as file:
                file.write(json.dumps(line) + "\n")


def _plain(value: object) -> object:
    """A value as JSON may hold it: no NaN, and no digits beyond what a clock tells."""
    if isinstance(value, float):
        return float(f"{value:.6g}") if math.isfinite(value) else None
    return value


def _cell(value: object) -> object:
    plain = _plain(value)
    return "" if plain is None else plain


def table(rows: Sequence[Row], columns: Mapping[str, str]) -> Table:
    """Columns as `name of the column: heading`; those that no row has are left out."""
    from rich.table import Table

    shown = {name: title for name, title in columns.items() if any(_plain(row.get(name)) is not None for row in rows)}
    made = Table(header_style="bold", box=None, pad_edge=False)
    for name, title in shown.items():
        is_text = any(isinstance(row.get(name), str) for row in rows)
        made.add_column(title, justify="left" if is_text else "right", overflow="fold", no_wrap=not is_text)
    for row in rows:
        made.add_row(*(_shown(row.get(name)) for name in shown))
    return made


def _shown(value: object) -> str:
    """Three digits that count, and all that stand before the point."""
    if value is None:
        return ""
    if not isinstance(value, float):
        return str(value)
    if not math.isfinite(value):
        return "" if math.isnan(value) else str(value)
    return f"{value:,.0f}" if abs(value) >= 1000 else f"{value:.4g}" if abs(value) >= 100 else f"{value:.3g}"
