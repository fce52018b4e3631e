"""How many numbers a model's weights and KV cache have, from its config alone."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

# Families whose shapes the counts below know; of others nothing is said.
_COUNTED_ARCHITECTURES = frozenset({"LlamaForCausalLM", "MistralForCausalLM", "Qwen2ForCausalLM"})
_NEEDED = ("vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads")


def count_weights(config: Mapping[str, Any]) -> int | None:
    """Numbers in all weight tensors, a tied head once; None for a family or a config that is not understood."""
    sizes = _sizes(config)
    if sizes is None:
        return None
    vocab_size, hidden, intermediate, num_layers, num_heads = sizes
    head_size, num_kv_heads = _head_size(config, hidden, num_heads), _num_kv_heads(config, num_heads)
    attention = hidden * head_size * 2 * (num_heads + num_kv_heads)
    if "Qwen2ForCausalLM" in _architectures(config):
        attention += head_size * (num_heads + 2 * num_kv_heads)
    elif config.get("attention_bias"):
        attention += head_size * (num_heads + 2 * num_kv_heads) + hidden
    mlp = 3 * hidden * intermediate
    heads = 1 if config.get("tie_word_embeddings") else 2
    return heads * vocab_size * hidden + num_layers * (attention + mlp + 2 * hidden) + hidden


def count_kv_numbers(config: Mapping[str, Any]) -> int | None:
    """Numbers that the KV cache holds per token; None as for `count_weights`."""
    sizes = _sizes(config)
    if sizes is None:
        return None
    _, hidden, _, num_layers, num_heads = sizes
    return 2 * num_layers * _num_kv_heads(config, num_heads) * _head_size(config, hidden, num_heads)


def _sizes(config: Mapping[str, Any]) -> tuple[int, int, int, int, int] | None:
    if not _COUNTED_ARCHITECTURES & set(_architectures(config)):
        return None
    sizes = [config.get(name) for name in _NEEDED]
    if not all(isinstance(size, int) and not isinstance(size, bool) and size > 0 for size in sizes):
        return None
    vocab_size, hidden, intermediate, num_layers, num_heads = (int(size) for size in sizes if size)
    return vocab_size, hidden, intermediate, num_layers, num_heads


def _architectures(config: Mapping[str, Any]) -> list[str]:
    named = config.get("architectures") or []
    return [str(name) for name in (named if isinstance(named, list) else [named])]


def _head_size(config: Mapping[str, Any], hidden: int, num_heads: int) -> int:
    return int(config.get("head_dim") or hidden // num_heads)


def _num_kv_heads(config: Mapping[str, Any], num_heads: int) -> int:
    return int(config.get("num_key_value_heads") or num_heads)
