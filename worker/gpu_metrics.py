"""Series of the GPU that a worker runs on."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator

import torch
from prometheus_client import CollectorRegistry
from prometheus_client.core import GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from worker.device import Device
from worker.nvml import GpuReading, NvmlError, NvmlGpu

logger = logging.getLogger(__name__)


class GpuGauges(Collector):
    """One series per gauge, with the GPU's UUID, so that workers that share a GPU show the same.

    While the reading fails there are none; why is logged once.
    """

    def __init__(self, uuid: str, read: Callable[[], GpuReading]) -> None:
        self._uuid, self._read = uuid, read
        self._last_reason = ""

    def collect(self) -> Iterator[Metric]:
        try:
            reading = self._read()
        except NvmlError as error:
            if error.message != self._last_reason:
                logger.warning("no metrics of the GPU: %s", error.message)
                self._last_reason = error.message
            return
        for name, text, value in (
            ("gpu_memory_used_bytes", "Memory of the GPU that any process holds", reading.used_bytes),
            ("gpu_memory_total_bytes", "Memory of the GPU", reading.total_bytes),
            ("gpu_utilization_ratio", "Share of the last moments in which a kernel ran", reading.utilization),
        ):
            if value is not None:
                family = GaugeMetricFamily(f"pagemill:{name}", text, labels=["gpu"])
                family.add_metric([self._uuid], value)
                yield family


def export_gpu(registry: CollectorRegistry, device: Device) -> None:
    """Add the gauges of a CUDA device; on a CPU there are none, and without the management library neither."""
    if device.kind != "cuda":
        return
    uuid = f"GPU-{torch.cuda.get_device_properties(device.torch_device).uuid}"
    try:
        gpu = NvmlGpu(uuid)
    except NvmlError as error:
        logger.warning("no metrics of the GPU: %s", error.message)
        return
    registry.register(GpuGauges(uuid, gpu.read))
