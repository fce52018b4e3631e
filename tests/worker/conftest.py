"""Fixtures of the worker's tests: the demo model and what transformers makes of it."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from pagemill.demo_model import demo_model_path

# Short and long, prose and code, other scripts; ids of the demo model's tokenizer are found by the fixture.
PROMPTS = [
    "The capital of France is",
    "Once upon a time, in a village by the sea, there lived an old fisherman who",
    "def fibonacci(n):\n    if n < 2:\n        return n\n",
    "Explain in simple words how photosynthesis works, step by step, for a child of ten years who likes plants.",
    "Привет! Как",
]
NUM_TOKENS = 24


@pytest.fixture(scope="session")
def demo_reference() -> Any:
    """The demo model as transformers reads the same GGUF file, float32."""
    import transformers

    path = demo_model_path()
    threads = torch.get_num_threads()
    model = transformers.AutoModelForCausalLM.from_pretrained(path.parent, gguf_file=path.name, dtype=torch.float32)
    torch.set_num_threads(threads)
    return model.eval()


@pytest.fixture(scope="session")
def demo_prompts() -> list[list[int]]:
    """PROMPTS as token ids of the demo model, and one long prompt made of all of them."""
    import transformers

    path = demo_model_path()
    tokenizer = transformers.AutoTokenizer.from_pretrained(path.parent, gguf_file=path.name)
    prompts: list[list[int]] = [tokenizer(text)["input_ids"] for text in PROMPTS]
    return [*prompts, [token_id for prompt in prompts for token_id in prompt] * 2]


@pytest.fixture(scope="session")
def demo_greedy(demo_reference: Any, demo_prompts: list[list[int]]) -> list[tuple[list[int], list[float]]]:
    """transformers' greedy ids of demo_prompts and the gaps between the two best logits."""
    from worker_harness import reference_greedy

    return [reference_greedy(demo_reference, prompt, NUM_TOKENS) for prompt in demo_prompts]
