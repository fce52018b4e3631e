"""Layer shapes of the models that cases are named after."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class LayerShape:
    name: str
    hidden: int
    intermediate: int
    num_query_heads: int
    num_kv_heads: int
    vocab_size: int
    num_layers: int
    head_size: int = 128


LLAMA_3_8B = LayerShape("8B", 4096, 14336, 32, 8, 128256, 32)
LLAMA_2_7B = LayerShape("7B", 4096, 11008, 32, 32, 32000, 32)
# Small enough that a run on a CPU takes minutes; the heads of a 1B model.
LLAMA_3_1B = LayerShape("1B", 2048, 8192, 32, 8, 128256, 16, head_size=64)
TINY = LayerShape("tiny", 256, 512, 4, 2, 1000, 2, head_size=64)
