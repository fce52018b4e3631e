"""Rotary frequencies of every scaling rule against transformers, and the rule for the longest sequence."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

from pagemill.errors import ModelLoadError
from worker.layers.rope import DynamicRope, cos_sin_table, inverse_frequencies
from worker.rope_config import parse_rope

SCALINGS: dict[str, dict[str, Any]] = {
    "default": {},
    "linear": {"factor": 4.0},
    "yarn": {"factor": 4.0, "original_max_position_embeddings": 64},
    "yarn_mscale": {
        "rope_type": "yarn",
        "factor": 8.0,
        "original_max_position_embeddings": 64,
        "mscale": 0.7,
        "mscale_all_dim": 0.4,
        "beta_fast": 16,
        "truncate": False,
    },
    "llama3": {
        "factor": 8.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 64,
    },
}


@pytest.mark.parametrize("name", SCALINGS)
def test_md08_frequencies_match_transformers(name: str) -> None:
    from transformers import LlamaConfig
    from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding

    scaling = {"rope_type": name, "rope_theta": 50000.0, **SCALINGS[name]}
    reference = LlamaRotaryEmbedding(
        LlamaConfig(hidden_size=64, num_attention_heads=2, max_position_embeddings=256, rope_parameters=dict(scaling))
    )
    ours, scale = inverse_frequencies(parse_rope({"rope_parameters": scaling}, 32, 256))
    torch.testing.assert_close(ours, reference.inv_freq, rtol=1e-6, atol=0)
    assert scale == pytest.approx(reference.attention_scaling)


def test_md08_dynamic_rows_match_transformers_for_a_prompt_and_for_each_token_after_it() -> None:
    from transformers import LlamaConfig
    from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding

    scaling = {"rope_type": "dynamic", "rope_theta": 10000.0, "factor": 4.0}
    config = LlamaConfig(
        hidden_size=64, num_attention_heads=2, max_position_embeddings=16, rope_parameters=dict(scaling)
    )
    ours = DynamicRope(parse_rope({"rope_parameters": scaling}, 32, 16), 64, 64, torch.device("cpu"))
    for prompt_len in (8, 40):
        reference = LlamaRotaryEmbedding(config)
        expected = []
        chunks = [torch.arange(prompt_len), *torch.arange(prompt_len, 60).split(1)]
        for positions in chunks:
            cos, sin = reference(torch.zeros(1), positions[None])
            expected.append(torch.cat((cos[0, :, :16], sin[0, :, :16]), dim=-1))
        positions = np.arange(60, dtype=np.int32)
        rows = ours.rows(positions, np.full(60, prompt_len, dtype=np.int32))
        torch.testing.assert_close(torch.from_numpy(rows), torch.cat(expected), rtol=1e-5, atol=1e-5)


def test_md08_both_spellings_mean_the_same() -> None:
    new = parse_rope({"rope_parameters": {"rope_type": "linear", "factor": 2.0, "rope_theta": 5e5}}, 32, 128)
    assert parse_rope({"rope_theta": 5e5, "rope_scaling": {"type": "linear", "factor": 2.0}}, 32, 128) == new
    assert parse_rope({"rope_theta": 5e5, "rope_scaling": {"rope_type": "linear", "factor": 2.0}}, 32, 128) == new


@pytest.mark.parametrize(
    ("scaling", "longest"),
    [
        (None, 128),
        ({"type": "linear", "factor": 4.0}, 512),
        ({"type": "linear", "factor": 4.0, "original_max_position_embeddings": 32}, 128),
        ({"type": "dynamic", "factor": 2.0}, 256),
        ({"type": "yarn", "factor": 4.0}, 512),
        ({"type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32}, 128),
        ({"rope_type": "llama3", "factor": 8.0, "original_max_position_embeddings": 16}, 128),
    ],
)
def test_md08_longest_sequence_is_derived_once(scaling: dict[str, Any] | None, longest: int) -> None:
    assert parse_rope({"rope_scaling": scaling}, 32, 128).max_positions == longest


def test_unsupported_and_malformed_scalings_are_refused() -> None:
    with pytest.raises(ModelLoadError, match="'longrope' is not supported; supported: default, linear, dynamic, yarn"):
        parse_rope({"rope_scaling": {"rope_type": "longrope", "factor": 2.0}}, 32, 128)
    with pytest.raises(ModelLoadError, match=r"rope_scaling\.factor must be a positive number, got 'two'"):
        parse_rope({"rope_scaling": {"rope_type": "linear", "factor": "two"}}, 32, 128)
    with pytest.raises(ModelLoadError, match="rope_scaling must be an object"):
        parse_rope({"rope_scaling": 3}, 32, 128)


def test_table_starts_with_cosines() -> None:
    table = cos_sin_table(parse_rope({}, 8, 128), 3)
    assert table.shape == (3, 8)
    assert torch.equal(table[0], torch.tensor([1.0] * 4 + [0.0] * 4))
