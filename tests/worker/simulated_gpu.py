"""A GPU whose memory is numbers."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch

from worker.device import Device
from worker.gpu_memory import GIB, MemoryReading
from worker.kv_cache import KVLayout, KVSpec

H200_BYTES = 140 * GIB
# Llama-3-8B in bfloat16: 128 KiB a token.
LLAMA = KVLayout(KVSpec(num_layers=32, num_kv_heads=8, head_size=128), torch.bfloat16, 16)
GPU = Device("cuda", "cuda (simulated)", torch.device("cuda", 0), H200_BYTES)


@dataclass
class SimulatedMemory:
    """A device whose memory is numbers: `pool` is torch's, `outside` that of contexts, modules and other processes."""

    total: int = H200_BYTES
    outside: int = GIB // 2
    pool: int = 0
    peak: int = 0

    def read(self) -> MemoryReading:
        return MemoryReading(self.total, self.total - self.outside - self.pool, self.pool, self.peak)

    def forget_peak(self) -> None:
        self.peak = self.pool

    def allocate(self, num_bytes: int) -> None:
        if self.outside + self.pool + num_bytes > self.total:
            raise torch.OutOfMemoryError("CUDA out of memory")
        self.pool += num_bytes
        self.peak = max(self.peak, self.pool)

    def step(self, activations: int, modules: int) -> Callable[[], None]:
        def run() -> None:
            self.allocate(activations)
            self.pool -= activations
            self.outside += modules

        return run

    def graphs(self, modules: int, shared: int, each: int) -> Callable[[int], object]:
        """Captures that load modules once, and take memory that those of one call share, and some for each."""
        loaded = [modules]

        def capture(count: int) -> object:
            self.outside += (loaded.pop() if loaded else 0) + shared + count * each
            return object()

        return capture
