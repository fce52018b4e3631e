"""Fixtures of the worker's tests: the demo model's weights in a transformers model, and prompts for it."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from pagemill.demo_model import demo_model_path
from pagemill.model_source import ModelSource, load_config
from worker.quantization.gguf import GgufSource

# Token ids of the demo model's tokenizer for the texts beside them.
PROMPTS = {
    "The capital of France is": [504, 3575, 282, 4649, 314],
    "Once upon a time, in a village by the sea, there lived an old fisherman who": [
        6403,
        1980,
        253,
        655,
        28,
        281,
        253,
        6560,
        411,
        260,
        3426,
        28,
        665,
        4161,
        354,
        1573,
        43663,
        617,
    ],
    "def fibonacci(n):\n    if n < 2:\n        return n\n": [
        1604,
        3987,
        46477,
        24,
        94,
        727,
        472,
        585,
        304,
        2067,
        216,
        34,
        42,
        448,
        1003,
        304,
        198,
    ],
    "Explain in simple words how photosynthesis works, step by step, for a child of ten years who likes plants.": [
        36971,
        281,
        2232,
        1924,
        638,
        19173,
        1806,
        28,
        1833,
        411,
        1833,
        28,
        327,
        253,
        811,
        282,
        3772,
        929,
        617,
        15044,
        2109,
        30,
    ],
    "Привет! Как": [155, 249, 46879, 16464, 32547, 17, 5470, 244, 6511, 13760],
}


@pytest.fixture(scope="session")
def demo_reference() -> Any:
    """transformers' Llama with the demo model's dequantised weights, float32."""
    import transformers

    path = demo_model_path()
    config = transformers.LlamaConfig(**load_config(ModelSource("gguf", path, "demo")))
    with torch.device("meta"):
        model = transformers.LlamaForCausalLM(config)
    source = GgufSource(path)
    state = {}
    for name, tensor in model.state_dict().items():
        stored = name if name in source.names() else "model.embed_tokens.weight"
        state[name] = source.read(stored, tuple(tensor.shape), (slice(None),) * tensor.dim())
    model.load_state_dict(state, assign=True)
    model.model.rotary_emb = type(model.model.rotary_emb)(config)  # its buffers are no weights
    return model.float().eval()


@pytest.fixture(scope="session")
def demo_prompts() -> list[list[int]]:
    """PROMPTS, and one long prompt made of all of them."""
    prompts = list(PROMPTS.values())
    return [*prompts, [token_id for prompt in prompts for token_id in prompt] * 2]
