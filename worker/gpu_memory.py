"""Where a GPU's memory goes, and how many KV blocks that leaves: the measuring and, apart from it, the arithmetic."""

from __future__ import annotations

import gc
import logging
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import pairwise
from typing import Protocol

import torch

from pagemill.config import WorkerSettings
from pagemill.errors import ConfigError
from worker.device import Device
from worker.kv_cache import MIN_BLOCKS, KVLayout, check_context, requested_blocks

logger = logging.getLogger(__name__)

GIB = 1 << 30
# torch hands out large tensors in multiples of this.
_TORCH_GRANULE_BYTES = 2 << 20
# Graphs that are captured at once to see what one of them adds, and what it counts for at least: the driver takes
# memory in larger pieces than a graph.
_COMPARED_GRAPHS = 5
_MIN_GRAPH_BYTES = 1 << 20


@dataclass(frozen=True, slots=True)
class MemoryReading:
    """State of one device's memory, in bytes.

    Attributes:
        total: all of the device.
        free: of the device, what no process holds.
        pool: what torch's allocator of this process holds.
        peak_pool: the most of it since `DeviceMemory.forget_peak`.
    """

    total: int
    free: int
    pool: int
    peak_pool: int

    @property
    def outside(self) -> int:
        """Held by other processes, and by this one outside torch: CUDA's context, modules, graphs."""
        return self.total - self.free - self.pool


class DeviceMemory(Protocol):
    """What measures; tests bring their own."""

    def read(self) -> MemoryReading:
        """After all launched work has ended and what torch holds without need is given back."""

    def forget_peak(self) -> None:
        """Let `peak_pool` begin at what is held now."""


class CudaMemory:
    """The memory of one CUDA device."""

    def __init__(self, device: torch.device) -> None:
        self._device = device

    def read(self) -> MemoryReading:
        gc.collect()
        torch.cuda.synchronize(self._device)
        peak = torch.cuda.max_memory_reserved(self._device)
        torch.cuda.empty_cache()
        free, total = torch.cuda.mem_get_info(self._device)
        return MemoryReading(total, free, torch.cuda.memory_reserved(self._device), peak)

    def forget_peak(self) -> None:
        torch.cuda.reset_peak_memory_stats(self._device)


@dataclass(frozen=True, slots=True)
class MemoryUse:
    """What a device's memory goes to before there is a KV cache, in bytes.

    Attributes:
        total: all of the device.
        limit: the part of it that may be in use, other processes' included.
        before: in use when the worker began: other processes, this one's CUDA context, what else it has on the device.
        weights: of the model.
        activations: work buffers and the peak of the largest step, kernels and libraries it loaded included.
        graphs: estimated for all CUDA graphs.
    """

    total: int
    limit: int
    before: int
    weights: int
    activations: int
    graphs: int

    @property
    def left(self) -> int:
        """For the KV cache; below zero where the rest does not fit."""
        return self.limit - self.before - self.weights - self.activations - self.graphs

    def __str__(self) -> str:
        return (
            f"{gib(self.limit)} of {gib(self.total)} GiB may be in use: other processes and CUDA context "
            f"{gib(self.before)}, weights {gib(self.weights)}, activations {gib(self.activations)}, "
            f"graphs {gib(self.graphs)}"
        )


def gib(num_bytes: int) -> str:
    """Bytes in GiB, with two digits."""
    return f"{num_bytes / GIB:.2f}"


class MemoryLedger:
    """Follows a device's memory while a worker starts. Make one before anything is loaded.

    Args:
        utilization: share of the device's memory that may be in use, other processes' included.
    """

    def __init__(self, memory: DeviceMemory, utilization: float) -> None:
        self._memory = memory
        self._utilization = utilization
        self._start = memory.read()
        self._loaded = self._start

    @property
    def limit(self) -> int:
        """Bytes that may be in use."""
        return int(self._utilization * self._start.total)

    def check_weights(self, num_bytes: int, dtype: str) -> None:
        """Refuse weights of num_bytes, known before they are loaded, that cannot fit.

        Raises:
            ConfigError: with the numbers, and what would help.
        """
        if num_bytes > self._room():
            raise self._refusal(f"the model does not fit: its weights need {gib(num_bytes)} GiB as {dtype}", dtype)

    @contextmanager
    def loading(self, num_bytes: int, dtype: str) -> Iterator[None]:
        """Around the loading of weights: says with numbers when memory runs out, and reads what was taken.

        Raises:
            ConfigError: memory ran out.
        """
        try:
            yield
        except torch.OutOfMemoryError as error:
            text = f"memory ran out while the weights were loaded, {gib(num_bytes)} GiB as {dtype}"
            raise self._refusal(text, dtype) from error
        self._loaded = self._memory.read()

    @contextmanager
    def stepping(self) -> Iterator[None]:
        """Around what makes work buffers or runs a step.

        Raises:
            ConfigError: memory ran out; with the numbers.
        """
        try:
            yield
        except torch.OutOfMemoryError as error:
            raise ConfigError(
                f"the largest step does not fit: after the weights {gib(self._loaded.free)} of the GPU's "
                f"{gib(self._loaded.total)} GiB were free; lower max_num_batched_tokens, max_num_seqs or "
                "max_model_len, or end other processes on the GPU",
                field="max_num_batched_tokens",
            ) from error

    def _room(self) -> int:
        """Bytes that this worker may take."""
        return max(0, min(self.limit - (self._start.total - self._start.free), self._start.free))

    def _refusal(self, problem: str, dtype: str) -> ConfigError:
        start = self._start
        smaller = "dtype bfloat16, a smaller model" if dtype == "float32" else "a smaller model"
        return ConfigError(
            f"{problem}, of the GPU's {gib(start.total)} GiB {gib(start.free)} are free and at most {gib(self.limit)} "
            f"may be in use (gpu_memory_utilization {self._utilization:g}), so {gib(self._room())} are left; "
            f"use {smaller}, a larger GPU, a higher gpu_memory_utilization, or end other processes on the GPU",
            field="model",
        )

    def measure(
        self, run_largest_step: Callable[[], object], capture_graphs: Callable[[int], object], num_graphs: int
    ) -> MemoryUse:
        """What everything but the KV cache takes. Work buffers may be made before: they count as activations.

        Args:
            run_largest_step: runs a step of the most tokens and rows, sampling included, on a cache of a few blocks.
            capture_graphs: captures so many of the largest CUDA graphs on such a cache, returns what keeps them alive.
            num_graphs: how many there will be; with 0 none is captured.

        Raises:
            ConfigError: the step does not fit; with the numbers.
        """
        self._memory.forget_peak()
        with self.stepping():
            run_largest_step()
        ran = self._memory.read()
        peak = max(ran.peak_pool, ran.pool)
        graphs = self._graph_bytes(ran, capture_graphs, num_graphs) if num_graphs else 0
        start, loaded = self._start, self._loaded
        return MemoryUse(
            total=ran.total,
            limit=self.limit,
            before=start.outside + start.pool,
            weights=loaded.pool - start.pool,
            activations=peak - loaded.pool + ran.outside - start.outside,
            graphs=graphs,
        )

    def _graph_bytes(self, ran: MemoryReading, capture_graphs: Callable[[int], object], num_graphs: int) -> int:
        """The first capture shows what is loaded or made once for all, two more of other counts what a graph adds."""
        compared = min(_COMPARED_GRAPHS, num_graphs)
        kept, free = [], [ran.free]
        for count in (1, 1, compared):
            kept.append(capture_graphs(count))
            free.append(self._memory.read().free)
        del kept
        once, one, several = (before - after for before, after in pairwise(free))
        each = max((several - one) // (compared - 1) if compared > 1 else 0, _MIN_GRAPH_BYTES)
        return max(once, 0) + each * num_graphs


def pool_blocks(use: MemoryUse, layout: KVLayout) -> int:
    """KV blocks that fit into what `use` leaves, 0 where nothing is left. Each tensor of the pool is rounded up."""
    tensors = layout.num_tensors
    bytes_per_tensor = max(0, use.left) // tensors // _TORCH_GRANULE_BYTES * _TORCH_GRANULE_BYTES
    return bytes_per_tensor // (layout.block_bytes // tensors)


def gpu_kv_budget(
    use: MemoryUse, layout: KVLayout, settings: WorkerSettings, context_length: int, device: Device
) -> int:
    """Blocks of the pool: as set, if they fit into what `use` leaves, else all that fit. Logs where memory goes.

    Args:
        context_length: the model's own; see `check_context`.

    Raises:
        ConfigError: the pool that was asked for, or one request, does not fit; with the numbers.
    """
    fit, requested = pool_blocks(use, layout), requested_blocks(layout, settings)
    if requested is not None and requested > fit:
        name = "num_blocks" if settings.num_blocks is not None else "kv_cache_gib"
        raise ConfigError(
            f"{name} {getattr(settings, name):g} needs {requested} KV blocks, "
            f"{gib(requested * layout.block_bytes)} GiB, and {fit} fit; {use}",
            field=name,
        )
    num_blocks = fit if requested is None else requested
    if num_blocks < MIN_BLOCKS:
        raise ConfigError(
            f"no KV cache fits, {gib(use.left)} GiB are left for it; {use}; raise gpu_memory_utilization, lower "
            "max_num_batched_tokens or max_num_seqs, use a smaller model, or end other processes on the GPU",
            field="gpu_memory_utilization",
        )
    logger.info("memory: %s, KV cache %s", use, gib(num_blocks * layout.block_bytes))
    check_context(num_blocks, layout, settings, context_length, device)
    return num_blocks
