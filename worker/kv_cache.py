"""The paged KV cache: two tensors per layer, carved into blocks that the scheduler hands out."""

from __future__ import annotations

import logging
import math
from dataclasses import dataclass

import numpy as np
import torch

from pagemill.config import DEFAULT_CPU_KV_CACHE_GIB, DEFAULT_GPU_MEMORY_UTILIZATION, WorkerSettings
from pagemill.errors import ConfigError
from worker.device import Device, dtype_name
from worker.memory import available_bytes

logger = logging.getLogger(__name__)

# A sequence holds one block while another is copied.
MIN_BLOCKS = 2
# Less serves nobody who did not ask for it.
MIN_CONTEXT_TOKENS = 2048


@dataclass(frozen=True, slots=True)
class KVSpec:
    """What a model stores per token."""

    num_layers: int
    num_kv_heads: int  # of this rank
    head_size: int

    def bytes_per_token(self, dtype: torch.dtype) -> int:
        return 2 * self.num_layers * self.num_kv_heads * self.head_size * dtype.itemsize


@dataclass(frozen=True, slots=True)
class KVLayout:
    """How a pool holds what a model stores."""

    spec: KVSpec
    dtype: torch.dtype
    block_size: int  # tokens

    @property
    def bytes_per_token(self) -> int:
        return self.spec.bytes_per_token(self.dtype)

    @property
    def block_bytes(self) -> int:
        return self.bytes_per_token * self.block_size

    @property
    def num_tensors(self) -> int:
        """Keys and values of each layer."""
        return 2 * self.spec.num_layers


@dataclass(frozen=True, slots=True)
class KVCache:
    """Keys and values of all layers, each [num_blocks, num_kv_heads, block_size, head_size], zeroed at start."""

    keys: list[torch.Tensor]
    values: list[torch.Tensor]
    block_size: int
    num_blocks: int


def requested_blocks(layout: KVLayout, settings: WorkerSettings) -> int | None:
    """Blocks by `num_blocks` or `kv_cache_gib`; None where neither is set.

    Raises:
        ConfigError: memory for less than two blocks; the message has the numbers.
    """
    if settings.num_blocks is not None or settings.kv_cache_gib is None:
        return settings.num_blocks
    return _blocks_in(layout, settings.kv_cache_gib)


def cpu_blocks(layout: KVLayout, settings: WorkerSettings) -> int:
    """Blocks of a pool in host memory: as set, else of 1 GiB. Raises as `requested_blocks`."""
    requested = requested_blocks(layout, settings)
    return requested if requested is not None else _blocks_in(layout, DEFAULT_CPU_KV_CACHE_GIB)


def _blocks_in(layout: KVLayout, gib: float) -> int:
    num_blocks = int(gib * (1 << 30)) // layout.block_bytes
    if num_blocks < MIN_BLOCKS:
        raise ConfigError(
            f"kv_cache_gib {gib:g} holds {num_blocks} blocks of {layout.block_size} tokens ({layout.block_bytes} bytes "
            f"each), at least {MIN_BLOCKS} are needed",
            field="kv_cache_gib",
        )
    return num_blocks


def check_context(
    num_blocks: int, layout: KVLayout, settings: WorkerSettings, context_length: int, device: Device
) -> None:
    """Compare the pool with the longest sequence.

    A `max_model_len` that was asked for must fit. The model's own may be longer than the pool: the scheduler refuses
    what is longer, and a warning says so. A pool of what a GPU has left must hold MIN_CONTEXT_TOKENS of it.

    Args:
        context_length: the model's own, which holds where `max_model_len` is not set.

    Raises:
        ConfigError: with the numbers.
    """
    tokens = num_blocks * layout.block_size
    longest = settings.max_model_len or context_length
    if tokens >= longest:
        return
    more = f"raise {_sized_by(settings, device)}"
    is_asked_for = settings.max_model_len is not None
    is_what_was_left = device.kind == "cuda" and settings.num_blocks is None and settings.kv_cache_gib is None
    if is_asked_for or (is_what_was_left and tokens < MIN_CONTEXT_TOKENS):
        needed = -(-longest // layout.block_size)
        name = "max_model_len" if is_asked_for else "the model's context length"
        shorter = f"set max_model_len to at most {tokens}, or {more}" if num_blocks >= MIN_BLOCKS else more
        raise ConfigError(
            f"not one request of full length fits: {name} {longest} needs {needed} KV blocks of {layout.block_size} "
            f"tokens ({needed * layout.block_bytes / (1 << 30):.2f} GiB), there are {num_blocks}; {shorter}",
            field="max_model_len",
        )
    logger.warning(
        "the KV cache holds %d tokens, the model's context length is %d: longer requests are refused; %s",
        tokens,
        longest,
        more,
    )


def _sized_by(settings: WorkerSettings, device: Device) -> str:
    """The setting that decided the pool's size, and its value."""
    if settings.num_blocks is not None:
        return f"num_blocks ({settings.num_blocks})"
    if device.kind == "cpu" or settings.kv_cache_gib is not None:
        return f"kv_cache_gib ({settings.kv_cache_gib or DEFAULT_CPU_KV_CACHE_GIB:g})"
    return f"gpu_memory_utilization ({settings.gpu_memory_utilization or DEFAULT_GPU_MEMORY_UTILIZATION:g})"


def log_pool(num_blocks: int, layout: KVLayout, max_model_len: int) -> None:
    """Say what the pool holds."""
    tokens = num_blocks * layout.block_size
    logger.info(
        "KV cache: %d blocks of %d tokens, %d bytes a token as %s: %d tokens, %.1f requests of %d tokens at once",
        num_blocks,
        layout.block_size,
        layout.bytes_per_token,
        dtype_name(layout.dtype),
        tokens,
        tokens / max_model_len,
        max_model_len,
    )


def allocate_cache(spec: KVSpec, dtype: torch.dtype, block_size: int, num_blocks: int, device: Device) -> KVCache:
    """The pool, on the device.

    Raises:
        ConfigError: the memory is not there.
    """
    shape = (num_blocks, spec.num_kv_heads, block_size, spec.head_size)
    total_bytes = spec.bytes_per_token(dtype) * block_size * num_blocks
    make = _device_zeros if device.kind == "cuda" else _host_zeros
    try:
        if device.kind == "cpu" and total_bytes > available_bytes():
            raise MemoryError
        keys = [make(shape, dtype, device) for _ in range(spec.num_layers)]
        values = [make(shape, dtype, device) for _ in range(spec.num_layers)]
    except (MemoryError, RuntimeError, ValueError) as error:
        raise ConfigError(
            f"the KV cache of {num_blocks} blocks needs {total_bytes} bytes, which are not available on {device.name}",
            field="num_blocks",
        ) from error
    return KVCache(keys, values, block_size, num_blocks)


def _device_zeros(shape: tuple[int, ...], dtype: torch.dtype, device: Device) -> torch.Tensor:
    return (
        torch.zeros(math.prod(shape) * dtype.itemsize, dtype=torch.uint8, device=device.torch_device)
        .view(dtype)
        .view(shape)
    )


def _host_zeros(shape: tuple[int, ...], dtype: torch.dtype, device: Device) -> torch.Tensor:
    """Zeros in pages that the system backs when they are first used: to write them all would cost half the start."""
    return torch.from_numpy(np.zeros(math.prod(shape) * dtype.itemsize, dtype=np.uint8)).view(dtype).view(shape)
