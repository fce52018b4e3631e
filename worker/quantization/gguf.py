"""Weights of a GGUF file under Hugging Face names, dequantised tensor by tensor.

The file's own order of query and key rows differs for the llama architecture: pairs that rotate together lie side by
side there and half a head apart in Hugging Face checkpoints, whose order the rotary kernel expects.
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import torch
from gguf.quants import dequantize

from pagemill.errors import ModelLoadError

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
    """A `worker.loader.WeightSource` over one GGUF model."""

    def __init__(self, path: Path) -> None:
        self._tensors: dict[str, tuple[Path, gguf.ReaderTensor]] = {}
        self._num_heads: dict[str, int] = {}
        self.files = split_files(path)
        for file in self.files:
            reader = self._open(file)
            for tensor in reader.tensors:
                self._tensors[hf_name(tensor.name)] = (file, tensor)
            if file == self.files[0]:
                self._read_head_counts(file, reader)

    @staticmethod
    def _open(file: Path) -> gguf.GGUFReader:
        try:
            return gguf.GGUFReader(file)
        except Exception as error:  # the reader raises whatever a short or foreign file makes numpy raise
            raise ModelLoadError(f"{file}: not a complete GGUF file ({error})") from error

    def _read_head_counts(self, file: Path, reader: gguf.GGUFReader) -> None:
        field = reader.get_field("general.architecture")
        architecture = field.contents() if field else ""
        if architecture != "llama":
            return
        heads = reader.get_field("llama.attention.head_count")
        if heads is None:
            raise ModelLoadError(f"{file}: metadata llama.attention.head_count is missing")
        kv_heads = reader.get_field("llama.attention.head_count_kv")
        self._num_heads["q_proj"] = int(heads.contents())
        self._num_heads["k_proj"] = int((kv_heads or heads).contents())

    def names(self) -> set[str]:
        return set(self._tensors)

    def location(self, name: str) -> str:
        return str(self._tensors[name][0]) if name in self._tensors else str(self.files[0])

    def read(self, name: str, shape: tuple[int, ...], index: tuple[slice, ...]) -> torch.Tensor:
        """The tensor's part at `index`, float32. Raises ModelLoadError for a wrong shape or an unsupported type."""
        file, tensor = self._tensors[name]
        try:
            if tensor.tensor_type == gguf.GGMLQuantizationType.F64:
                values = np.asarray(tensor.data, dtype=np.float32)
            else:
                values = dequantize(tensor.data, tensor.tensor_type)
        except NotImplementedError as error:
            raise ModelLoadError(
                f"{file}: tensor {tensor.name} has type {tensor.tensor_type.name}, which is not supported"
            ) from error
        if values.shape != shape:
            raise ModelLoadError(f"{file}: tensor {tensor.name} has shape {list(values.shape)}, expected {list(shape)}")
        num_heads = self._num_heads.get(name.split(".")[-2])
        if num_heads:
            values = half_split_rows(values, num_heads)
        return torch.from_numpy(np.ascontiguousarray(values[index], dtype=np.float32).copy())
