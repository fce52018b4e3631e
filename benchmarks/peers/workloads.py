"""Workloads W1 to W4: fixed token-id prompts and output lengths, the same for every engine.

W1: 64 requests of 96 to 160 tokens in, 64 out, at once. W2: six requests of 128 in, 64 out, one after the other.
W3: 64 requests that share a prefix of 512 tokens, 32 more in, 32 out, at once. W4: 64 requests of 32 to 224 in, 8 to
256 out, at once. Prompts are seeded random sentences cut to an exact token count.
"""

from __future__ import annotations

import random
from dataclasses import dataclass
from pathlib import Path

from tokenizers import Tokenizer

ADJECTIVES = "the old a small every young that quiet this bright".split()
NOUNS = (
    "river teacher engine garden market window letter mountain doctor computer village song bridge "
    "kitchen student forest planet story machine road winter farmer ship question library"
).split()
VERBS = (
    "carries finds watches builds follows repairs remembers describes crosses visits paints measures keeps "
    "answers leaves"
).split()
PREPOSITIONS = "near under across behind without before after beside around through".split()
CONCURRENT = {"W1": True, "W2": False, "W3": True, "W4": True}


@dataclass(frozen=True)
class Request:
    """One request: prompt token ids, and the exact number of tokens to generate."""

    prompt: list[int]
    num_output_tokens: int


class _PromptWriter:
    def __init__(self, tokenizer: Tokenizer, seed: int) -> None:
        self.rng = random.Random(seed)
        self.tokenizer = tokenizer

    def prompt(self, num_tokens: int) -> list[int]:
        """num_tokens ids of seeded sentences; a word is at least one token, so as many words are enough."""
        words: list[str] = []
        pick = self.rng.choice
        while len(words) < num_tokens:
            words += [pick(ADJECTIVES), pick(NOUNS), pick(VERBS), pick(ADJECTIVES), pick(NOUNS), pick(PREPOSITIONS)]
            words += [pick(ADJECTIVES), pick(NOUNS) + pick([".", ".", ", and", ";"])]
        return self.tokenizer.encode(" ".join(words), add_special_tokens=False).ids[:num_tokens]


def make_workloads(model_dir: Path) -> dict[str, list[Request]]:
    """All four workloads for the tokenizer in model_dir."""
    tokenizer = Tokenizer.from_file(str(model_dir / "tokenizer.json"))
    w1, w2, w3, w4 = (_PromptWriter(tokenizer, seed) for seed in (1, 2, 3, 4))
    shared_prefix = w3.prompt(512)
    return {
        "W1": [Request(w1.prompt(w1.rng.randint(96, 160)), 64) for _ in range(64)],
        "W2": [Request(w2.prompt(128), 64) for _ in range(6)],
        "W3": [Request(shared_prefix + w3.prompt(32), 32) for _ in range(64)],
        "W4": [Request(w4.prompt(w4.rng.randint(32, 224)), w4.rng.randint(8, 256)) for _ in range(64)],
    }
