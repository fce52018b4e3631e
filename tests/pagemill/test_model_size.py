"""What a config says about a model's size, against the modules that transformers makes of it."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from pagemill.model_size import count_kv_numbers, count_weights

SIZES: dict[str, Any] = {
    "vocab_size": 320,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 32,
}


@pytest.mark.parametrize(
    ("architecture", "overrides"),
    [
        ("LlamaForCausalLM", {"tie_word_embeddings": False}),
        ("LlamaForCausalLM", {"tie_word_embeddings": True, "attention_bias": True}),
        ("MistralForCausalLM", {"tie_word_embeddings": False}),
        ("Qwen2ForCausalLM", {"tie_word_embeddings": True, "head_dim": 16}),
    ],
)
def test_the_count_is_that_of_transformers(architecture: str, overrides: dict[str, Any]) -> None:
    import transformers

    model_class = getattr(transformers, architecture)
    config = {**SIZES, **overrides, "architectures": [architecture]}
    with torch.device("meta"):
        model = model_class(model_class.config_class(**config))
    assert count_weights(config) == sum(parameter.numel() for parameter in model.parameters())
    assert count_kv_numbers(config) == 2 * 3 * 2 * config["head_dim"]


@pytest.mark.parametrize("change", [{"architectures": ["MadeUp"]}, {"hidden_size": None}, {"vocab_size": "many"}])
def test_nothing_is_said_about_what_is_not_understood(change: dict[str, Any]) -> None:
    config = {**SIZES, "architectures": ["LlamaForCausalLM"], **change}
    assert count_weights(config) is None
    assert count_kv_numbers(config) is None
