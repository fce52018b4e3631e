"""A GPU's series: read at each scrape, absent while they cannot be read."""

from __future__ import annotations

import logging
import shutil
import subprocess
from pathlib import Path

import pytest
import torch
from prometheus_client import CollectorRegistry

from worker.device import Device
from worker.gpu_metrics import GpuGauges, export_gpu
from worker.nvml import GpuReading, NvmlError, NvmlGpu

PAGE = Path(__file__).resolve().parents[2] / "docs" / "observability.md"
UUID = "GPU-0c1d2e3f-0000-1111-2222-333344445555"
# As the library is declared by its vendor: the layout of version 2 is told by its size.
SOURCE = """
#include <stdio.h>
#include <string.h>
typedef struct { unsigned version; unsigned long long total, reserved, free, used; } memory_v2;
typedef struct { unsigned gpu, memory; } utilization;
static int gpu;
int nvmlInit_v2(void) { return 0; }
const char *nvmlErrorString(int status) { return status == 6 ? "Not Found" : "Unknown Error"; }
int nvmlDeviceGetHandleByUUID(const char *uuid, void **device) {
    if (strcmp(uuid, "%(uuid)s")) return 6;
    *device = &gpu;
    return 0;
}
int nvmlDeviceGetMemoryInfo_v2(void *device, memory_v2 *memory) {
    if (device != &gpu || memory->version != (sizeof(memory_v2) | 2 << 24)) return 25;
    memory->total = 150ull << 30; memory->reserved = 1ull << 30;
    memory->used = 100ull << 30; memory->free = 49ull << 30;
    return 0;
}
int nvmlDeviceGetUtilizationRates(void *device, utilization *rates) { rates->gpu = 37; return %(status)d; }
"""


def library(folder: Path, status: int) -> str:
    """A management library that knows one GPU and answers `status` when asked for its utilization."""
    compiler = shutil.which("cc") or shutil.which("gcc")
    assert compiler, "the kernels are built with a C compiler, so one is here"
    source, built = folder / "nvml.c", folder / "libnvidia-ml.so.1"
    source.write_text(SOURCE % {"uuid": UUID, "status": status})
    subprocess.run([compiler, "-shared", "-fPIC", "-o", str(built), str(source)], check=True)
    return str(built)


@pytest.mark.parametrize(("status", "utilization"), [(0, 0.37), (3, None)], ids=["told", "not supported"])
def test_memory_and_utilization_come_from_the_library(tmp_path: Path, status: int, utilization: float | None) -> None:
    gpu = NvmlGpu(UUID, library(tmp_path, status))
    assert gpu.read() == GpuReading(100 << 30, 150 << 30, utilization)


def test_a_library_that_fails_says_how(tmp_path: Path) -> None:
    path = library(tmp_path, 999)
    with pytest.raises(NvmlError, match=r"nvmlDeviceGetHandleByUUID\(GPU-other\): Not Found \(6\)"):
        NvmlGpu("GPU-other", path)
    with pytest.raises(NvmlError, match=r"nvmlDeviceGetUtilizationRates: Unknown Error \(999\)"):
        NvmlGpu(UUID, path).read()
    with pytest.raises(NvmlError, match="nowhere"):
        NvmlGpu(UUID, "/nowhere/libnvidia-ml.so.1")


def test_gauges_have_one_series_per_gpu_and_none_while_reading_fails(caplog: pytest.LogCaptureFixture) -> None:
    readings: list[GpuReading | NvmlError] = [GpuReading(3, 4, 0.5), NvmlError("lost"), NvmlError("lost")]

    def read() -> GpuReading:
        reading = readings.pop(0)
        if isinstance(reading, NvmlError):
            raise reading
        return reading

    registry = CollectorRegistry()
    registry.register(GpuGauges(UUID, read))
    samples = [(s.name, s.labels, s.value) for family in registry.collect() for s in family.samples]
    assert samples == [
        ("pagemill:gpu_memory_used_bytes", {"gpu": UUID}, 3),
        ("pagemill:gpu_memory_total_bytes", {"gpu": UUID}, 4),
        ("pagemill:gpu_utilization_ratio", {"gpu": UUID}, 0.5),
    ]
    with caplog.at_level(logging.WARNING):
        assert [*registry.collect(), *registry.collect()] == []
    assert [record.getMessage() for record in caplog.records] == ["no metrics of the GPU: lost"]


def test_the_documentation_names_the_gauges() -> None:
    registry = CollectorRegistry()
    registry.register(GpuGauges(UUID, lambda: GpuReading(3, 4, 0.5)))
    names = [f"| `{family.name}` | {family.type} | `gpu` | worker on a GPU " for family in registry.collect()]
    lines = [line for line in PAGE.read_text().splitlines() if "| worker on a GPU |" in line]
    assert [line[: len(name)] for line, name in zip(lines, names, strict=True)] == names


def test_a_cpu_has_no_series_of_a_gpu() -> None:
    registry = CollectorRegistry()
    export_gpu(registry, Device("cpu", "cpu", torch.device("cpu")))
    assert [*registry.collect()] == []


@pytest.mark.gpu
def test_the_gpu_that_torch_uses_is_found_and_read() -> None:
    if not torch.cuda.is_available():
        pytest.skip("there is no GPU here")
    device = torch.device("cuda", 0)
    registry = CollectorRegistry()
    export_gpu(registry, Device("cuda", "cuda", device))
    free, total = torch.cuda.mem_get_info(device)
    values = {s.name: s.value for family in registry.collect() for s in family.samples}
    assert values["pagemill:gpu_memory_total_bytes"] == pytest.approx(total, rel=0.02)
    assert values["pagemill:gpu_memory_used_bytes"] == pytest.approx(total - free, abs=0.02 * total)
