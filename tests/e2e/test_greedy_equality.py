"""Greedy ids of the three real processes are transformers' ids, however the work is cut, shared or interrupted."""

from __future__ import annotations

import asyncio

import pytest
import torch
from processes import Server, serve
from transformers import AutoModelForCausalLM

from pagemill.client import AsyncClient
from pagemill.demo_model import demo_model_path
from pagemill.sampling_params import SamplingParams

NUM_TOKENS = 64
NEAR_TIE = 1e-4
PROMPTS = [
    "The capital of France is",
    "Once upon a time, in a small village by the sea,",
    "def fibonacci(n):\n    ",
    "Water boils at",
    "1, 1, 2, 3, 5, 8,",
    "The three primary colours are",
    "Dear Sir or Madam,\n\nI am writing to",
    "Q: What is photosynthesis?\nA:",
    "SELECT name, age FROM users WHERE",
    "Die Hauptstadt von Deutschland ist",
    "東京は",
    "🙂🙃 is an emoji that",
    "The quick brown fox jumps over the lazy dog. " * 6,
    "import numpy as np\n\nx = np.",
    "To be, or not to be, that is",
    '{"name": "Ada", "born":',
    "In 1969, Neil Armstrong",
    "The recipe needs two eggs, a cup of flour and",
    "Breaking news:",
    "x",
]


class Reference:
    """transformers in float32 on the same weights. Outputs that it confirmed once are not computed again."""

    def __init__(self) -> None:
        path = demo_model_path()
        model = AutoModelForCausalLM.from_pretrained(path.parent, gguf_file=path.name, dtype=torch.float32)
        self._model = model.eval()
        self._confirmed: set[tuple[int, ...]] = set()

    def assert_greedy(self, prompt_ids: list[int], output_ids: list[int]) -> None:
        """Each id is the reference's best after the same prefix, or within NEAR_TIE of it."""
        tokens = (*prompt_ids, *output_ids)
        if tokens in self._confirmed:
            return
        with torch.inference_mode():
            logits = self._model(torch.tensor([tokens])).logits[0, len(prompt_ids) - 1 : -1]
        chosen = logits[torch.arange(len(output_ids)), torch.tensor(output_ids)]
        gaps = logits.max(dim=-1).values - chosen
        assert gaps.max().item() <= NEAR_TIE, (prompt_ids, int(gaps.argmax()), gaps.max().item())
        self._confirmed.add(tokens)


@pytest.fixture(scope="module")
def reference() -> Reference:
    return Reference()


async def _ids(client: AsyncClient, prompt: str) -> tuple[list[int], list[int]]:
    # With a stop token, even one that never comes, the scheduler cannot foresee how long an output gets.
    params = SamplingParams(temperature=0.0, max_tokens=NUM_TOKENS, ignore_eos=True, stop_token_ids=[16])
    prompt_ids = list(await client.tokenize(prompt))
    output = await client.generate(prompt_ids, params)
    return prompt_ids, list(output.outputs[0].token_ids)


async def _all_ids(server: Server, at_once: bool) -> list[tuple[list[int], list[int]]]:
    async with AsyncClient(server.grpc_address) as client:
        if at_once:
            return list(await asyncio.gather(*(_ids(client, p) for p in PROMPTS)))
        return [await _ids(client, p) for p in PROMPTS]


def _assert_greedy(reference: Reference, runs: list[tuple[list[int], list[int]]]) -> None:
    for prompt, (prompt_ids, output_ids) in zip(PROMPTS, runs, strict=True):
        assert len(output_ids) == NUM_TOKENS, prompt
        reference.assert_greedy(prompt_ids, output_ids)


VARIANTS = {
    "defaults": [],
    "no prefix cache": ["--no-enable-prefix-caching"],
    "blocks of 8": ["--block-size", "8"],
    "blocks of 32": ["--block-size", "32"],
    "chunks of 32": ["--max-num-batched-tokens", "32"],
    # 20 prompts of up to 70 tokens with 64 outputs want about 110 blocks of 16.
    "pool of 32 blocks": ["--num-blocks", "32"],
}


@pytest.mark.e2e
@pytest.mark.slow
@pytest.mark.parametrize("variant", VARIANTS)
def test_greedy_ids_are_those_of_transformers(variant: str, reference: Reference) -> None:
    options = ["--dtype", "float32", "--max-model-len", "256", "--no-cache-responses", *VARIANTS[variant]]
    with serve(*options) as server:
        _assert_greedy(reference, asyncio.run(_all_ids(server, at_once=True)))
        if variant == "pool of 32 blocks":
            assert server.metric("pagemill:preemptions_total", of="scheduler") > 0
        _assert_greedy(reference, asyncio.run(_all_ids(server, at_once=False)))
        if variant == "defaults":
            assert server.metric("pagemill:prefix_cache_hit_tokens_total", of="scheduler") > 0
        server.wait_until_idle()
