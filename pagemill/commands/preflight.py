"""What `pagemill serve` can tell about a start before it makes one: everything here is cheap and needs no torch.

The processes check the same again; these checks only come sooner. What they cannot judge they leave to them.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from importlib.metadata import entry_points
from pathlib import Path
from typing import Any

from pagemill.config import RouterSettings, WorkerSettings
from pagemill.cuda_driver import NoCudaError, cuda_devices, pick_cuda_device
from pagemill.errors import ConfigError, ModelLoadError
from pagemill.gguf_file import read_gguf_head
from pagemill.model_size import count_kv_numbers, count_weights
from pagemill.model_source import ModelSource, load_config

# Families that the worker brings along; others come in by entry points of the group.
BUILT_IN_ARCHITECTURES = ("LlamaForCausalLM", "MistralForCausalLM", "Qwen2ForCausalLM")
ENTRY_POINT_GROUP = "pagemill.models"

_GIB = 1 << 30
_WEIGHT_PATTERNS = {
    "auto": ("*.safetensors", "*.bin"),
    "hf": ("*.safetensors", "*.bin"),
    "safetensors": ("*.safetensors",),
    "pt": ("*.bin",),
}


@dataclass(frozen=True, slots=True)
class _Memory:
    """What weights and KV cache have to fit into at most."""

    num_bytes: int
    where: str


def check_worker(settings: WorkerSettings) -> None:
    """What can be said without the model.

    Raises:
        ConfigError: a device that is not there, or more KV memory than the machine has.
    """
    memory = _memory(settings)
    if settings.num_blocks is None and settings.kv_cache_gib is not None:
        _check_memory("kv_cache_gib", f"{settings.kv_cache_gib:g}", settings.kv_cache_gib * _GIB, memory)


def _memory(settings: WorkerSettings) -> _Memory:
    """Of the device that the worker is going to pick, all that a CUDA device has. Raises ConfigError as the worker."""
    if settings.device != "cpu":
        try:
            devices = cuda_devices()
            device = devices[pick_cuda_device(devices)]
            return _Memory(device.memory_bytes, f"the memory of {device}")
        except NoCudaError as error:
            if settings.device == "cuda":
                raise ConfigError(f"device cuda: {error.message}; or use device cpu", field="device") from error
    from worker.memory import available_bytes

    return _Memory(available_bytes(), "memory that is available")


def check_model(
    router_source: ModelSource, worker_source: ModelSource, router: RouterSettings, worker: WorkerSettings
) -> None:
    """What the files say besides the weights.

    Raises:
        ModelLoadError: unreadable config, unknown architecture, no tokenizer, no weight files.
        ConfigError: settings that do not fit the model.
    """
    config = load_config(worker_source)
    _check_architecture(config)
    _check_tokenizer(router_source, router.tokenizer)
    _check_context_length(config, worker.max_model_len)
    _check_weight_files(worker_source, worker)
    _check_sizes(config, worker)


def _architectures(config: Mapping[str, Any]) -> list[str]:
    named = config.get("architectures") or []
    return [str(name) for name in (named if isinstance(named, list) else [named])]


def _check_architecture(config: Mapping[str, Any]) -> None:
    added = {point.name for point in entry_points(group=ENTRY_POINT_GROUP)}
    supported = sorted({*BUILT_IN_ARCHITECTURES, *added})
    named = _architectures(config)
    if not set(named) & set(supported):
        raise ModelLoadError(
            f"architecture {', '.join(named) or 'none named in config.json'} is not supported; "
            f"supported: {', '.join(supported)}",
            field="model",
        )


def _check_tokenizer(source: ModelSource, override: str) -> None:
    path = Path(override).expanduser() if override else source.path
    if not path.exists():
        raise ModelLoadError(f"tokenizer {str(path)!r} does not exist", field="tokenizer")
    if path.suffix == ".gguf":
        if not read_gguf_head(path).metadata.get("tokenizer.ggml.tokens"):
            raise ModelLoadError(f"{str(path)!r} holds no tokenizer; name one with --tokenizer", field="tokenizer")
    elif path.is_dir() and not any((path / name).is_file() for name in ("tokenizer.json", "tokenizer.model")):
        raise ModelLoadError(
            f"no tokenizer in {str(path)!r}: neither tokenizer.json nor tokenizer.model is there", field="tokenizer"
        )


def _check_context_length(config: Mapping[str, Any], max_model_len: int | None) -> None:
    positions = config.get("max_position_embeddings")
    # Other families may have rules of their own, and the worker its defaults where the config says nothing.
    if max_model_len is None or not isinstance(positions, int):
        return
    if not set(_architectures(config)) & set(BUILT_IN_ARCHITECTURES):
        return
    from worker.rope_config import parse_rope

    # The head size decides nothing about the length.
    longest = parse_rope(config, 64, positions).max_positions
    if max_model_len > longest:
        raise ConfigError(
            f"max_model_len is {max_model_len}, but the model's context length is {longest}", field="max_model_len"
        )


def _check_weight_files(source: ModelSource, worker: WorkerSettings) -> None:
    """Of a local directory: a hub model's weights are fetched later."""
    patterns = _WEIGHT_PATTERNS.get(worker.load_format)
    if source.kind != "hf" or patterns is None or not Path(worker.model).expanduser().is_dir():
        return
    if not any(True for pattern in patterns for _ in source.path.glob(pattern)):
        raise ModelLoadError(
            f"{str(source.path)!r} has no weight files for load_format {worker.load_format}", field="model"
        )


def _check_sizes(config: Mapping[str, Any], worker: WorkerSettings) -> None:
    """By lower bounds: two bytes a number unless float32 is asked for, in an 8-bit KV cache one."""
    memory = _memory(worker)
    item_bytes = 4 if worker.dtype == "float32" else 2
    num_weights, num_kv_numbers = count_weights(config), count_kv_numbers(config)
    if num_weights is not None and num_weights * item_bytes > memory.num_bytes:
        raise ConfigError(
            f"the model does not fit: {num_weights / 1e9:.1f} billion weights need at least "
            f"{num_weights * item_bytes / _GIB:.1f} GiB, {memory.where} is {memory.num_bytes / _GIB:.1f} GiB; use a "
            "smaller model" + (" or dtype bfloat16" if worker.dtype == "float32" else ""),
            field="model",
        )
    if num_kv_numbers is not None and worker.num_blocks is not None:
        kv_bytes = 1 if worker.kv_cache_dtype.startswith("fp8") else item_bytes
        num_bytes = num_kv_numbers * kv_bytes * worker.num_blocks * worker.block_size
        _check_memory("num_blocks", str(worker.num_blocks), num_bytes, memory)


def _check_memory(field: str, value: str, num_bytes: float, memory: _Memory) -> None:
    if num_bytes > memory.num_bytes:
        raise ConfigError(
            f"{field} is {value}: a KV cache of {num_bytes / _GIB:.1f} GiB, "
            f"but {memory.where} is {memory.num_bytes / _GIB:.1f} GiB",
            field=field,
        )
