"""The paged KV cache: two tensors per layer, carved into blocks that the scheduler hands out."""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np
import torch

from pagemill.errors import ConfigError
from worker.device import Device
from worker.memory import available_bytes

BLOCK_SIZES = (8, 16, 32, 64)


@dataclass(frozen=True, slots=True)
class KVSpec:
    """What a model stores per token."""

    num_layers: int
    num_kv_heads: int  # of this rank
    head_size: int

    def bytes_per_token(self, dtype: torch.dtype) -> int:
        return 2 * self.num_layers * self.num_kv_heads * self.head_size * dtype.itemsize


@dataclass(frozen=True, slots=True)
class KVCache:
    """Keys and values of all layers, each [num_blocks, num_kv_heads, block_size, head_size], zeroed at start."""

    keys: list[torch.Tensor]
    values: list[torch.Tensor]
    block_size: int
    num_blocks: int


def choose_num_blocks(spec: KVSpec, dtype: torch.dtype, block_size: int, num_blocks: int | None, gib: float) -> int:
    """Blocks in the pool: as set, else as many as fit into `gib` GiB.

    Raises:
        ConfigError: block size without a kernel, or memory for less than two blocks; the message has the numbers.
    """
    if block_size not in BLOCK_SIZES:
        raise ConfigError(
            f"block_size is {block_size}, must be one of {', '.join(map(str, BLOCK_SIZES))}", field="block_size"
        )
    block_bytes = spec.bytes_per_token(dtype) * block_size
    if num_blocks is None:
        num_blocks = int(gib * (1 << 30)) // block_bytes
        if num_blocks < 2:
            raise ConfigError(
                f"kv_cache_gib {gib} holds {num_blocks} blocks of {block_size} tokens ({block_bytes} bytes each), "
                "at least 2 are needed",
                field="kv_cache_gib",
            )
    return num_blocks


def allocate_cache(spec: KVSpec, dtype: torch.dtype, block_size: int, num_blocks: int, device: Device) -> KVCache:
    """The pool.

    Raises:
        ConfigError: the memory is not there.
    """
    shape = (num_blocks, spec.num_kv_heads, block_size, spec.head_size)
    total_bytes = spec.bytes_per_token(dtype) * block_size * num_blocks
    try:
        if total_bytes > available_bytes():
            raise MemoryError
        keys = [_zeros(shape, dtype).to(device.torch_device) for _ in range(spec.num_layers)]
        values = [_zeros(shape, dtype).to(device.torch_device) for _ in range(spec.num_layers)]
    except (MemoryError, RuntimeError, ValueError) as error:
        raise ConfigError(
            f"the KV cache of {num_blocks} blocks needs {total_bytes} bytes, which are not available",
            field="num_blocks",
        ) from error
    return KVCache(keys, values, block_size, num_blocks)


def _zeros(shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
    """Zeros in pages that the system backs when they are first used: to write them all would cost half the start."""
    return torch.from_numpy(np.zeros(math.prod(shape) * dtype.itemsize, dtype=np.uint8)).view(dtype).view(shape)
