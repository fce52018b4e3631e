"""What a start asks of memory, the same for host and GPU: room for weights, then blocks for the KV cache."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager
from typing import Any, Protocol

import torch

from pagemill.config import DEFAULT_GPU_MEMORY_UTILIZATION, WorkerSettings
from pagemill.errors import ConfigError
from pagemill.model_size import count_weights
from worker.device import Device, dtype_name
from worker.gpu_memory import CudaMemory, MemoryLedger, gpu_kv_budget
from worker.kv_cache import KVLayout, check_context, cpu_blocks
from worker.memory import check_weights


class StepProbe(Protocol):
    """The largest step, to be tried out before there is a KV cache: on one of a few blocks that the probe makes.

    Attributes:
        num_graphs: CUDA graphs that the worker is going to capture.
    """

    num_graphs: int

    def run_largest_step(self) -> None:
        """Run a step of the most tokens and rows, logits and sampling of all rows included."""

    def capture_graphs(self, count: int) -> object:
        """Capture the `count` largest graphs in one go; what is returned keeps them alive."""


class MemoryPlan(Protocol):
    """How a start goes about one device's memory."""

    def loading(self, config: Mapping[str, Any], dtype: torch.dtype) -> AbstractContextManager[None]:
        """Around the loading of the weights of a model. Raises ConfigError where they do not fit."""

    def stepping(self) -> AbstractContextManager[None]:
        """Around the making of work buffers for the largest step. Raises ConfigError where they do not fit."""

    def num_blocks(self, layout: KVLayout, context_length: int, probe: StepProbe) -> int:
        """Blocks of the KV cache. Raises ConfigError where none, those asked for, or one request does not fit."""


def make_memory_plan(device: Device, settings: WorkerSettings) -> MemoryPlan:
    """For a device. Make it before anything is loaded there."""
    if device.kind == "cpu":
        return HostMemoryPlan(device, settings)
    utilization = settings.gpu_memory_utilization or DEFAULT_GPU_MEMORY_UTILIZATION
    return GpuMemoryPlan(device, settings, MemoryLedger(CudaMemory(device.torch_device), utilization))


class HostMemoryPlan:
    """Host memory: the pool's size is a setting, and pages are backed when they are first used."""

    def __init__(self, device: Device, settings: WorkerSettings) -> None:
        self._device = device
        self._settings = settings

    @contextmanager
    def loading(self, config: Mapping[str, Any], dtype: torch.dtype) -> Iterator[None]:
        check_weights((count_weights(config) or 0) * dtype.itemsize, dtype_name(dtype))
        yield

    @contextmanager
    def stepping(self) -> Iterator[None]:
        try:
            yield
        except (MemoryError, RuntimeError) as error:
            # torch's own error for host memory has no class.
            if not isinstance(error, MemoryError) and "allocate memory" not in str(error):
                raise
            raise ConfigError(
                "the largest step does not fit into memory; lower max_num_batched_tokens, max_num_seqs or "
                "max_model_len",
                field="max_num_batched_tokens",
            ) from error

    def num_blocks(self, layout: KVLayout, context_length: int, probe: StepProbe) -> int:
        num_blocks = cpu_blocks(layout, self._settings)
        check_context(num_blocks, layout, self._settings, context_length, self._device)
        return num_blocks


class GpuMemoryPlan:
    """GPU memory: what is measured decides."""

    def __init__(self, device: Device, settings: WorkerSettings, ledger: MemoryLedger) -> None:
        self._device = device
        self._settings = settings
        self._ledger = ledger

    @contextmanager
    def loading(self, config: Mapping[str, Any], dtype: torch.dtype) -> Iterator[None]:
        num_bytes, name = (count_weights(config) or 0) * dtype.itemsize, dtype_name(dtype)
        self._ledger.check_weights(num_bytes, name)
        with self._ledger.loading(num_bytes, name):
            yield

    def stepping(self) -> AbstractContextManager[None]:
        return self._ledger.stepping()

    def num_blocks(self, layout: KVLayout, context_length: int, probe: StepProbe) -> int:
        use = self._ledger.measure(probe.run_largest_step, probe.capture_graphs, probe.num_graphs)
        return gpu_kv_budget(use, layout, self._settings, context_length, self._device)
