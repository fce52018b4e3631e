"""The configuration of decoder-only models of the Llama family, from Hugging Face's config.json."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from pagemill.errors import ModelLoadError
from worker.kernels._checks import HEAD_SIZES
from worker.rope_config import RopeConfig, parse_rope

# What transformers takes where config.json says nothing.
_DEFAULT_MAX_POSITIONS = {"LlamaForCausalLM": 2048, "MistralForCausalLM": 131072, "Qwen2ForCausalLM": 32768}
_DEFAULT_MISTRAL_WINDOW = 4096
_DEFAULT_QWEN2_FIRST_WINDOW_LAYER = 28


@dataclass(frozen=True, slots=True)
class DecoderConfig:
    """Shapes and switches of one model.

    Attributes:
        windows: per layer, keys that a token sees, itself included; -1 is all.
        qkv_bias, o_bias, mlp_bias: which products have a bias.
        tie_word_embeddings: the config's claim; whether the file has a head decides.
    """

    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_size: int
    rms_norm_eps: float
    rope: RopeConfig
    windows: tuple[int, ...]
    qkv_bias: bool
    o_bias: bool
    mlp_bias: bool
    tie_word_embeddings: bool


def _count(config: Mapping[str, Any], key: str, default: int | None = None) -> int:
    value = config.get(key)
    if value is None:
        value = default
    if isinstance(value, bool) or not isinstance(value, int) or value < 1:
        raise ModelLoadError(f"config.json: {key} must be a positive integer, got {value!r}", field=key)
    return value


def _windows(config: Mapping[str, Any], architecture: str, num_layers: int) -> tuple[int, ...]:
    """Sliding window of each layer: Mistral's holds for all, Qwen2's for those that layer_types or the count says."""
    if architecture == "MistralForCausalLM":
        window = config.get("sliding_window", _DEFAULT_MISTRAL_WINDOW)
        return (int(window) if window else -1,) * num_layers
    if architecture == "Qwen2ForCausalLM" and config.get("use_sliding_window") and config.get("sliding_window"):
        window = _count(config, "sliding_window")
        layer_types = config.get("layer_types")
        if layer_types is None:
            first = int(config.get("max_window_layers", _DEFAULT_QWEN2_FIRST_WINDOW_LAYER))
            return tuple(window if layer >= first else -1 for layer in range(num_layers))
        if len(layer_types) != num_layers:
            raise ModelLoadError(
                f"config.json: {len(layer_types)} layer_types for {num_layers} layers", field="layer_types"
            )
        return tuple(window if kind == "sliding_attention" else -1 for kind in layer_types)
    return (-1,) * num_layers


def parse_decoder_config(config: Mapping[str, Any], architecture: str) -> DecoderConfig:
    """Read and check a config.

    Raises:
        ModelLoadError: a key is missing, malformed or asks for what is not supported; names the key.
    """
    if config.get("quantization_config"):
        method = dict(config["quantization_config"]).get("quant_method", "unknown")
        raise ModelLoadError(
            f"config.json: quantization_config {method!r} is not supported; supported: GGUF files, unquantized weights",
            field="quantization_config",
        )
    activation = config.get("hidden_act", "silu")
    if activation != "silu":
        raise ModelLoadError(
            f"config.json: hidden_act {activation!r} is not supported; supported: silu", field="hidden_act"
        )
    hidden_size, num_heads = _count(config, "hidden_size"), _count(config, "num_attention_heads")
    num_kv_heads = _count(config, "num_key_value_heads", num_heads)
    if num_heads % num_kv_heads:
        raise ModelLoadError(f"config.json: {num_heads} heads do not divide into {num_kv_heads} key-value heads")
    head_size = _count(config, "head_dim", hidden_size // num_heads)
    if head_size not in HEAD_SIZES:
        supported = ", ".join(map(str, HEAD_SIZES))
        raise ModelLoadError(f"config.json: head size {head_size} is not supported; supported: {supported}")
    max_positions = _count(config, "max_position_embeddings", _DEFAULT_MAX_POSITIONS.get(architecture))
    num_layers = _count(config, "num_hidden_layers")
    attention_bias = bool(config.get("attention_bias", False))
    is_qwen2 = architecture == "Qwen2ForCausalLM"
    return DecoderConfig(
        vocab_size=_count(config, "vocab_size"),
        hidden_size=hidden_size,
        intermediate_size=_count(config, "intermediate_size"),
        num_layers=num_layers,
        num_heads=num_heads,
        num_kv_heads=num_kv_heads,
        head_size=head_size,
        rms_norm_eps=float(config.get("rms_norm_eps", 1e-6)),
        rope=parse_rope(config, head_size, max_positions),
        windows=_windows(config, architecture, num_layers),
        qkv_bias=is_qwen2 or attention_bias,
        o_bias=attention_bias and not is_qwen2,
        mlp_bias=bool(config.get("mlp_bias", False)) and not is_qwen2,
        tie_word_embeddings=bool(config.get("tie_word_embeddings", False)),
    )
