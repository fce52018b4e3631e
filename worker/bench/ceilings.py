"""What the device can do, measured with torch: the floors of all cases come from these."""

from __future__ import annotations

from dataclasses import dataclass, field

import torch

from worker.bench.case import Candidate, Site, Work
from worker.bench.timing import Timer

_CUDA_BYTES = 4 << 30
_CUDA_LINK_BYTES = 256 << 20
_CUDA_PRODUCT = 8192
_CPU_PRODUCT = 2048
# Timings of which the best counts: anything else on the machine can only make a ceiling look lower.
_ATTEMPTS = 3
_DRY_BYTES = 1 << 20
_DRY_PRODUCT = 128


@dataclass(slots=True)
class Ceilings:
    """Bytes a second of reading, of copying (read and written together) and of both ways between host and device;
    floating-point operations a second of a product of large matrices, by dtype."""

    bandwidths: dict[str, float]
    products: dict[torch.dtype, float] = field(default_factory=dict)

    def floor_s(self, work: Work, dtype: torch.dtype) -> tuple[float, str]:
        """The least time for the work and what it is bound by: a kind of traffic, or "product"."""
        moving = work.num_bytes / self.bandwidths[work.traffic]
        computing = work.flops / self.products[dtype] if work.flops else 0.0
        return (computing, "product") if computing > moving else (moving, work.traffic)


def measure(site: Site, timer: Timer, dtypes: list[torch.dtype]) -> Ceilings:
    """Measure the device of `site`; products for each of `dtypes`."""
    bandwidths = _cuda_bandwidths(site, timer) if site.is_cuda else _cpu_bandwidths(site, timer)
    return Ceilings(bandwidths, {dtype: _product_rate(site, timer, dtype) for dtype in dtypes})


def _cuda_bandwidths(site: Site, timer: Timer) -> dict[str, float]:
    source = site.random(_CUDA_BYTES // 2, dtype=torch.bfloat16)
    words = source.view(torch.int32)
    read = _best_s(timer, Candidate([lambda: words.max()]))
    target = torch.empty_like(source)
    # Not in a graph, where a copy is left to an engine that is slower than the multiprocessors.
    copy = _best_s(timer, Candidate([lambda: target.copy_(source)], is_capturable=False))
    device_part = words[: _CUDA_LINK_BYTES // 4]
    host = torch.empty(device_part.shape, dtype=device_part.dtype, pin_memory=True)
    to_host = _best_s(timer, Candidate([lambda: host.copy_(device_part, non_blocking=True)], is_capturable=False))
    to_device = _best_s(timer, Candidate([lambda: device_part.copy_(host, non_blocking=True)], is_capturable=False))
    return {
        "read": _CUDA_BYTES / read,
        "copy": 2 * _CUDA_BYTES / copy,
        "to_host": _CUDA_LINK_BYTES / to_host,
        "to_device": _CUDA_LINK_BYTES / to_device,
    }


def _cpu_bandwidths(site: Site, timer: Timer) -> dict[str, float]:
    """The better of two ways to read, since neither is written for bandwidth alone."""
    num_bytes = _DRY_BYTES if site.is_dry else max(512 << 20, 2 * site.cold_bytes)
    source = torch.ones(num_bytes // 4)
    read = min(_best_s(timer, Candidate([call])) for call in (source.sum, source.max))
    target = torch.empty_like(source)
    copy = _best_s(timer, Candidate([lambda: target.copy_(source)]))
    copied = 2 * num_bytes / copy
    # Blocks that are swapped are read and written: each byte is counted once there, as on a link.
    return {"read": num_bytes / read, "copy": copied, "to_host": copied / 2, "to_device": copied / 2}


def _product_rate(site: Site, timer: Timer, dtype: torch.dtype) -> float:
    size = _DRY_PRODUCT if site.is_dry else _CUDA_PRODUCT if site.is_cuda else _CPU_PRODUCT
    a, b = site.random(size, size, dtype=dtype), site.random(size, size, dtype=dtype)
    out = torch.empty_like(a)
    seconds = _best_s(timer, Candidate([lambda: torch.mm(a, b.t(), out=out)]))
    return 2 * size**3 / seconds


def _best_s(timer: Timer, candidate: Candidate) -> float:
    return min(timer.time(candidate).seconds for _ in range(_ATTEMPTS))
