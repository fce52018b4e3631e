"""A picture of loads: distributions of latencies, and percentiles against the load where there are several."""

from __future__ import annotations

import importlib.util
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pagemill.bench.serving import LoadSamples
from pagemill.errors import ConfigError

_PANELS = (
    ("ttft_ms", "time to the first token, ms"),
    ("tpot_ms", "time per output token, ms"),
    ("e2e_ms", "whole, ms"),
)
_PERCENTILES = ("p50", "p90", "p99")


@dataclass(frozen=True, slots=True)
class PlottedLoad:
    """One load: `at` is its rate or its concurrency."""

    name: str
    at: float
    samples: LoadSamples
    row: Mapping[str, object]


def check_plot(path: Path) -> None:
    """Before anything is measured.

    Raises:
        ConfigError: matplotlib is not installed, the file is no .png, or its folder is missing.
    """
    if path.suffix.lower() != ".png":
        raise ConfigError(f"--plot {path}: must be a .png file", field="plot")
    if not path.parent.is_dir():
        raise ConfigError(f"--plot {path}: there is no folder {path.parent}", field="plot")
    if importlib.util.find_spec("matplotlib") is None:
        raise ConfigError("--plot needs matplotlib, which is not installed: pip install 'pagemill[plot]'", field="plot")


def write_plot(path: Path, title: str, axis: str, loads: Sequence[PlottedLoad]) -> None:
    """Write the picture as PNG; `axis` names what `PlottedLoad.at` is."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    num_rows = 2 if len(loads) > 1 else 1
    figure = Figure(figsize=(15, 4.5 * num_rows), layout="constrained")
    FigureCanvasAgg(figure)
    panels = figure.subplots(num_rows, len(_PANELS), squeeze=False)
    figure.suptitle(title)
    for column, (name, label) in enumerate(_PANELS):
        _draw_distributions(panels[0][column], label, [(load.name, _samples_ms(load.samples, name)) for load in loads])
        if num_rows > 1:
            _draw_percentiles(panels[1][column], label, axis, name, loads)
    figure.savefig(path, dpi=110)


def _samples_ms(samples: LoadSamples, name: str) -> list[float]:
    seconds = {"ttft_ms": samples.first_token_s, "tpot_ms": samples.per_token_s, "e2e_ms": samples.whole_s}[name]
    return [value * 1e3 for value in seconds]


def _draw_distributions(panel: Any, label: str, curves: Sequence[tuple[str, list[float]]]) -> None:
    for name, samples in curves:
        ordered = sorted(samples)
        panel.step(ordered, [(at + 1) / len(ordered) for at in range(len(ordered))], where="post", label=name)
    panel.set_xlabel(label)
    panel.set_ylabel("share of requests")
    panel.set_ylim(0, 1.01)
    panel.grid(alpha=0.3)
    panel.legend()


def _draw_percentiles(panel: Any, label: str, axis: str, name: str, loads: Sequence[PlottedLoad]) -> None:
    ordered = sorted(loads, key=lambda load: load.at)
    for key in _PERCENTILES:
        panel.plot([load.at for load in ordered], [load.row[f"{name}_{key}"] for load in ordered], "o-", label=key)
    panel.set_xlabel(axis)
    panel.set_ylabel(label)
    panel.set_ylim(bottom=0)
    panel.grid(alpha=0.3)
    panel.legend()
