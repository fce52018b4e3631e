"""Weights of a GGUF file under Hugging Face names, dequantised tensor by tensor.

The file's own order of query and key rows differs for the llama architecture: pairs that rotate together lie side by
side there and half a head apart in Hugging Face checkpoints, whose order the rotary kernel expects.
"""

from __future__ import annotations

import math
import re
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import torch
from gguf.quants import dequantize

from pagemill.errors import ModelLoadError
from pagemill.gguf_file import GgufTensor, read_gguf_head
from worker import kernels
from worker.kernels.quantization import BLOCK_BYTES

_GLOBAL_NAMES = {
    "token_embd.weight": "model.embed_tokens.weight",
    "output_norm.weight": "model.norm.weight",
    "output.weight": "lm_head.weight",
    "rope_freqs.weight": "model.rope_frequency_divisors",
}
_LAYER_NAMES = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}
_LAYER_TENSOR = re.compile(r"blk\.(\d+)\.(\w+)\.(weight|bias)")
_SPLIT_FILE = re.compile(r"(.+)-(\d{5})-of-(\d{5})\.gguf")


def hf_name(name: str) -> str:
    """Hugging Face name of a GGUF tensor; the name itself where there is none."""
    if name in _GLOBAL_NAMES:
        return _GLOBAL_NAMES[name]
    match = _LAYER_TENSOR.fullmatch(name)
    if match and match[2] in _LAYER_NAMES:
        return f"model.layers.{match[1]}.{_LAYER_NAMES[match[2]]}.{match[3]}"
    return name


def half_split_rows(weight: np.ndarray[Any, Any], num_heads: int) -> np.ndarray[Any, Any]:
    """Rows of interleaved rotary pairs, [num_heads * head_size, ...], as rows whose pairs lie half a head apart."""
    rows = weight.shape[0]
    paired = weight.reshape(num_heads, rows // num_heads // 2, 2, *weight.shape[1:])
    return paired.swapaxes(1, 2).reshape(weight.shape)


def split_files(path: Path) -> list[Path]:
    """All files of a model that may be split as NAME-00001-of-0000N.gguf.

    Raises:
        ModelLoadError: one is missing; names it.
    """
    match = _SPLIT_FILE.fullmatch(path.name)
    if not match:
        return [path]
    files = [path.with_name(f"{match[1]}-{i:05d}-of-{match[3]}.gguf") for i in range(1, int(match[3]) + 1)]
    for file in files:
        if not file.is_file():
            raise ModelLoadError(f"{file}: split GGUF file is missing")
    return files


class GgufSource:
    """A `worker.loader.WeightSource` over one GGUF model, mapped into memory.

    Raises:
        ModelLoadError: a file is missing, damaged or ends before its last tensor; names it.
    """

    device = torch.device("cpu")

    def __init__(self, path: Path) -> None:
        self.files = split_files(path)
        self._maps: dict[Path, np.memmap[Any, np.dtype[np.uint8]]] = {}
        self._tensors: dict[str, tuple[Path, str, GgufTensor]] = {}
        heads = [read_gguf_head(file) for file in self.files]
        for file, head in zip(self.files, heads, strict=True):
            # Copy on write, since torch knows no read-only tensors; nothing writes.
            self._maps[file] = np.memmap(file, dtype=np.uint8, mode="c")
            for name, tensor in head.tensors.items():
                self._check_extent(file, name, tensor)
                self._tensors[hf_name(name)] = (file, name, tensor)
        self._num_heads = self._head_counts(self.files[0], heads[0].metadata)

    def _check_extent(self, file: Path, name: str, tensor: GgufTensor) -> None:
        end = tensor.offset_bytes + math.prod(self._byte_shape(file, name, tensor))
        size = len(self._maps[file])
        if end > size:
            raise ModelLoadError(f"{file}: not a complete GGUF file, tensor {name} ends at byte {end} of {size}")

    @staticmethod
    def _byte_shape(file: Path, name: str, tensor: GgufTensor) -> tuple[int, ...]:
        try:
            kind = gguf.GGMLQuantizationType(tensor.ggml_type)
            if tensor.shape:
                return tuple(gguf.quant_shape_to_byte_shape(tensor.shape, kind))
            return (gguf.GGML_QUANT_SIZES[kind][1],)
        except (ValueError, KeyError) as error:
            raise ModelLoadError(f"{file}: tensor {name} cannot be read ({error})") from error

    @staticmethod
    def _head_counts(file: Path, metadata: dict[str, Any]) -> dict[str, int]:
        """Heads of the products whose rows are in interleaved order; empty for architectures that have none."""
        if metadata.get("general.architecture") != "llama":
            return {}
        heads = metadata.get("llama.attention.head_count")
        if not isinstance(heads, int):
            raise ModelLoadError(f"{file}: metadata llama.attention.head_count is {heads!r}, expected a number")
        return {"q_proj": heads, "k_proj": int(metadata.get("llama.attention.head_count_kv", heads))}

    def names(self) -> set[str]:
        return set(self._tensors)

    def location(self, name: str) -> str:
        return str(self._tensors[name][0]) if name in self._tensors else str(self.files[0])

    def read(self, name: str, shape: tuple[int, ...], index: tuple[slice, ...]) -> torch.Tensor:
        """The tensor's part at `index`, float32. Raises ModelLoadError for a wrong shape or an unsupported type."""
        file, stored_name, tensor = self._tensors[name]
        if tensor.shape != shape:
            raise ModelLoadError(f"{file}: tensor {stored_name} has shape {list(tensor.shape)}, expected {list(shape)}")
        byte_shape = self._byte_shape(file, stored_name, tensor)
        start = tensor.offset_bytes
        data = np.asarray(self._maps[file][start : start + math.prod(byte_shape)]).reshape(byte_shape)
        values = self._dequantize(file, stored_name, data, tensor)
        num_heads = self._num_heads.get(name.split(".")[-2])
        if num_heads:
            values = half_split_rows(values, num_heads)
        return torch.from_numpy(np.ascontiguousarray(values[index], dtype=np.float32))

    @staticmethod
    def _dequantize(file: Path, name: str, data: np.ndarray[Any, Any], tensor: GgufTensor) -> np.ndarray[Any, Any]:
        """Values of a tensor, never a view of the file."""
        if tensor.ggml_type in BLOCK_BYTES:
            out = torch.empty(tensor.shape, dtype=torch.float32)
            kernels.dequantize(out, torch.from_numpy(data), tensor.ggml_type)
            return out.numpy()
        kind = gguf.GGMLQuantizationType(tensor.ggml_type)
        if kind == gguf.GGMLQuantizationType.F64:
            return data.view(np.float64)
        try:
            values: np.ndarray[Any, Any] = dequantize(data, kind)
        except NotImplementedError as error:
            raise ModelLoadError(f"{file}: tensor {name} has type {kind.name}, which is not supported") from error
        return values.copy() if kind == gguf.GGMLQuantizationType.F32 else values
