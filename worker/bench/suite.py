"""All cases, and the choice among them."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import chain
from pathlib import Path

import torch

from pagemill.errors import ConfigError
from worker.bench.attention_cases import attention_cases
from worker.bench.cache_cases import cache_cases
from worker.bench.case import Case, Site
from worker.bench.linear_cases import linear_cases
from worker.bench.row_cases import row_cases
from worker.bench.sampling_cases import sampling_cases
from worker.bench.step_cases import step_cases

# Several times the largest cache of any GPU that is supported.
_CUDA_COLD_BYTES = 400 << 20
_UNKNOWN_CPU_CACHE = 64 << 20


def make_site(device: str, *, is_dry: bool = False) -> Site:
    """Raises ConfigError where there is no such device."""
    if device == "cuda" and not torch.cuda.is_available():
        raise ConfigError("--device cuda: torch sees no CUDA device", field="device")
    if device == "cuda":
        return Site(torch.device("cuda", torch.cuda.current_device()), _CUDA_COLD_BYTES, is_dry)
    return Site(torch.device("cpu"), 2 * _last_level_cache(), is_dry)


def _last_level_cache() -> int:
    sizes = []
    for path in Path("/sys/devices/system/cpu/cpu0/cache").glob("index*/size"):
        text = path.read_text(encoding="utf-8").strip()
        sizes.append(int(text[:-1]) << {"K": 10, "M": 20}[text[-1]] if text[-1] in "KM" else int(text))
    return max(sizes, default=_UNKNOWN_CPU_CACHE)


def all_cases(site: Site) -> Iterator[Case]:
    makers = (attention_cases, row_cases, cache_cases, step_cases, sampling_cases, linear_cases)
    return chain.from_iterable(make(site) for make in makers)


def choose_cases(site: Site, names: Sequence[str], *, is_quick: bool) -> list[Case]:
    """Cases of the kernels named, or all.

    Raises:
        ConfigError: a name that no kernel has; lists those that there are.
    """
    cases = list(all_cases(site))
    known = dict.fromkeys(case.kernel for case in cases)
    for name in names:
        if name not in known:
            raise ConfigError(
                f"--kernel {name}: there is no such kernel on {site.device.type}; there are {', '.join(known)}",
                field="kernel",
            )
    return [
        case for case in cases if (not names or case.kernel in names) and (case.is_quick or not is_quick or site.is_dry)
    ]
