"""Model families by architecture name. Code outside this package adds its own.

Three ways in: `register("MyArch", factory)`, `register("MyArch", "package.module:factory")`, and an entry point of the
group `pagemill.models` whose name is the architecture.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from importlib import import_module
from importlib.metadata import entry_points
from typing import Any, Protocol

import torch

from pagemill.errors import ModelLoadError
from worker.batch import StepBatch
from worker.kernels import AttentionGeometry
from worker.kv_cache import KVCache, KVSpec
from worker.layers.context import LayerContext
from worker.loader import WeightReader

ENTRY_POINT_GROUP = "pagemill.models"


class CausalLM(Protocol):
    """What the model runner needs of a model."""

    kv_spec: KVSpec
    vocab_size: int
    hidden_size: int
    weight_bytes: int  # after loading
    max_positions: int  # longest sequence in tokens
    kv_depends_on_prompt_length: bool  # KV of equal tokens differs between prompts of different lengths
    optional_weights: frozenset[str]  # names that random weights leave out

    def load_weights(self, weights: WeightReader) -> None:
        """Take all weights. Raises ModelLoadError."""

    def allocate(self, max_tokens: int, num_positions: int) -> None:
        """Allocate work buffers for steps of up to max_tokens and tables for num_positions."""

    def attention_geometries(self, kv_dtype: torch.dtype | None = None) -> dict[int, AttentionGeometry]:
        """What the plans in `StepBatch.attention_plans` are made for, by window.

        Args:
            kv_dtype: of the cache; None is the model's dtype.
        """

    def forward(self, batch: StepBatch, cache: KVCache) -> torch.Tensor:
        """Hidden states after the last norm, [T, hidden_size]. Valid until the next call.

        On a CUDA device it launches, and neither waits nor (after the first steps) allocates: it can be captured in a
        CUDA graph. The tensors of the batch are on the model's device and may hold more tokens than its rows.
        """

    def compute_logits(self, hidden: torch.Tensor, logits: torch.Tensor) -> None:
        """Write float32 logits [R, vocab_size] of hidden states [R, hidden_size]."""


Factory = Callable[[Mapping[str, Any], LayerContext], CausalLM]

_factories: dict[str, Factory | str] = {
    "LlamaForCausalLM": "worker.models.llama:build",
    "MistralForCausalLM": "worker.models.llama:build",
    "Qwen2ForCausalLM": "worker.models.llama:build",
}


def register(architecture: str, factory: Factory | str) -> None:
    """Add or replace a family.

    Args:
        architecture: name as in config.json's `architectures`.
        factory: called with the config and the layer context, or its import path `module:attribute`.
    """
    _factories[architecture] = factory


def supported_architectures() -> list[str]:
    """Names that `resolve` finds, sorted."""
    return sorted({*_factories, *(point.name for point in entry_points(group=ENTRY_POINT_GROUP))})


def resolve(config: Mapping[str, Any]) -> Factory:
    """The factory for a config's first known architecture.

    Raises:
        ModelLoadError: none is supported; one line lists those that are.
    """
    architectures = config.get("architectures") or []
    if not isinstance(architectures, list):
        architectures = [architectures]
    for architecture in architectures:
        found = _factories.get(architecture)
        if found is None:
            points = entry_points(group=ENTRY_POINT_GROUP, name=architecture)
            found = next((point.value for point in points), None)
        if found is not None:
            return _import(architecture, found) if isinstance(found, str) else found
    named = ", ".join(map(str, architectures)) or "none named in config.json"
    raise ModelLoadError(
        f"architecture {named} is not supported; supported: {', '.join(supported_architectures())}", field="model"
    )


def _import(architecture: str, path: str) -> Factory:
    module, _, attribute = path.partition(":")
    try:
        factory: Factory = getattr(import_module(module), attribute)
    except (ImportError, AttributeError) as error:
        raise ModelLoadError(f"architecture {architecture}: {path} cannot be imported ({error})") from error
    return factory
