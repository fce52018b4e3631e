"""Llama 1-3, Mistral, Qwen2, SmolLM2: rotary attention with grouped heads, RMS norms, gated MLP."""

from __future__ import annotations

import gc
import logging
from collections.abc import Mapping
from typing import Any

import torch

from worker.batch import StepBatch
from worker.kernels import AttentionGeometry
from worker.kernels.device_linear import DeviceLinear
from worker.kernels.execution import AnyProgram
from worker.kernels.step_inputs import StepInputs
from worker.kv_cache import KVCache, KVSpec
from worker.layers.context import LayerContext
from worker.layers.linear import ColumnParallelLinear, GateUpLinear, RowParallelLinear
from worker.layers.rope import make_rope
from worker.loader import WeightReader
from worker.models.config import DecoderConfig, parse_decoder_config

logger = logging.getLogger(__name__)

_EMBEDDING = "model.embed_tokens.weight"
_HEAD = "lm_head.weight"
_ROPE_DIVISORS = "model.rope_frequency_divisors"


def build(config: Mapping[str, Any], context: LayerContext) -> LlamaForCausalLM:
    """The registry's factory. Raises ModelLoadError for a config that is malformed or not supported."""
    architecture = next(iter(config.get("architectures") or ["LlamaForCausalLM"]))
    return LlamaForCausalLM(parse_decoder_config(config, architecture), context)


class Workspace:
    """Buffers of one forward pass, for up to max_tokens tokens; all layers share them.

    The residual stream is float32 whatever the model's dtype: dozens of layers add to it, and rounding each sum to 16
    bits would be most of a 16-bit model's error.
    """

    def __init__(self, config: DecoderConfig, context: LayerContext, max_tokens: int) -> None:
        def buffer(width: int, dtype: torch.dtype = context.dtype) -> torch.Tensor:
            return torch.empty((max_tokens, width), dtype=dtype, device=context.device)

        heads, kv_heads = config.num_heads // context.size, config.num_kv_heads // context.size
        self.residual = buffer(config.hidden_size, torch.float32)
        # This rank's part of a sum over the group; a group of one adds straight to the residual.
        self.partial = buffer(config.hidden_size if context.size > 1 else 0, torch.float32)
        self.normed = buffer(config.hidden_size)
        self.qkv = buffer((heads + 2 * kv_heads) * config.head_size)
        self.attention = buffer(heads * config.head_size)
        self.activated = buffer(config.intermediate_size // context.size)


class LlamaLayer:
    """One decoder layer of this rank."""

    def __init__(self, config: DecoderConfig, context: LayerContext, index: int) -> None:
        heads, kv_heads, size = config.num_heads, config.num_kv_heads, config.head_size
        self._context = context
        self._prefix = f"model.layers.{index}"
        self._config = config
        self.num_heads = context.share(heads, "attention heads")
        self.num_kv_heads = context.share(kv_heads, "key-value heads")
        self.window = config.windows[index]
        self.qkv = ColumnParallelLinear(
            {
                "self_attn.q_proj": heads * size,
                "self_attn.k_proj": kv_heads * size,
                "self_attn.v_proj": kv_heads * size,
            },
            config.hidden_size,
            context,
            has_bias=config.qkv_bias,
        )
        self.attention_out = RowParallelLinear(
            "self_attn.o_proj", heads * size, config.hidden_size, context, has_bias=config.o_bias
        )
        self.gate_up = GateUpLinear(
            {"mlp.gate_proj": config.intermediate_size, "mlp.up_proj": config.intermediate_size},
            config.hidden_size,
            context,
            has_bias=config.mlp_bias,
        )
        self.down = RowParallelLinear(
            "mlp.down_proj", config.intermediate_size, config.hidden_size, context, has_bias=config.mlp_bias
        )

    def add_to(
        self, program: AnyProgram, space: Workspace, cache: tuple[torch.Tensor, torch.Tensor], following: torch.Tensor
    ) -> None:
        """Add this layer's calls: from the normed rows to the residual, normed again with the weight `following`."""
        config, (key_cache, value_cache) = self._config, cache
        heads, kv_heads, size, epsilon = self.num_heads, self.num_kv_heads, config.head_size, config.rms_norm_eps
        query = space.qkv[:, : heads * size].unflatten(1, (heads, size))
        attention_heads = space.attention.unflatten(1, (heads, size))
        self.qkv.add_to(program, space.normed, space.qkv)
        program.rope_and_store(space.qkv, key_cache, value_cache, heads, kv_heads)
        program.paged_attention(attention_heads, query, key_cache, value_cache, size**-0.5, window=self.window)
        sums = space.residual, space.partial, space.normed
        self.attention_out.add_to(program, space.attention, *sums, self.mlp_norm, epsilon)
        self.gate_up.add_to(program, space.normed, space.activated)
        self.down.add_to(program, space.activated, *sums, following, epsilon)

    def load(self, weights: WeightReader) -> int:
        """Take this rank's weights; returns their bytes."""
        shape = (self._config.hidden_size,)
        self.input_norm = weights.take(f"{self._prefix}.input_layernorm.weight", shape)
        self.mlp_norm = weights.take(f"{self._prefix}.post_attention_layernorm.weight", shape)
        for layer in (self.qkv, self.attention_out, self.gate_up, self.down):
            layer.load(weights, self._prefix)
        products = self.qkv.num_bytes + self.attention_out.num_bytes + self.gate_up.num_bytes + self.down.num_bytes
        return products + self.input_norm.nbytes + self.mlp_norm.nbytes


class LlamaForCausalLM:
    """The whole model on one rank; see `worker.models.registry.CausalLM` for the face."""

    def __init__(self, config: DecoderConfig, context: LayerContext) -> None:
        self._config = config
        self._context = context
        self._layers = [LlamaLayer(config, context, index) for index in range(config.num_layers)]
        self.kv_spec = KVSpec(config.num_layers, self._layers[0].num_kv_heads, config.head_size)
        self.vocab_size = config.vocab_size
        self.hidden_size = config.hidden_size
        self.max_positions = config.rope.max_positions
        self.kv_depends_on_prompt_length = config.rope.rope_type == "dynamic"
        self.optional_weights = frozenset({_HEAD, _ROPE_DIVISORS} if config.tie_word_embeddings else {_ROPE_DIVISORS})
        self.weight_bytes = 0

    def load_weights(self, weights: WeightReader) -> None:
        """Take all weights of this rank. Raises ModelLoadError."""
        config = self._config
        shape = (config.vocab_size, config.hidden_size)
        self._embedding = weights.take(_EMBEDDING, shape)
        layer_bytes = sum([layer.load(weights) for layer in self._layers])
        self._norm = weights.take("model.norm.weight", (config.hidden_size,))
        self._head = self._context.execution.linear(self._head_weight(weights))
        divisors = (config.rope.rotary_dim // 2,)
        rope_divisors = weights.take(_ROPE_DIVISORS, divisors) if weights.holds(_ROPE_DIVISORS) else None
        weights.finish()
        self._rope_divisors = None if rope_divisors is None else rope_divisors.float().cpu()
        is_shared = isinstance(self._head, DeviceLinear) and self._head.weight.data_ptr() == self._embedding.data_ptr()
        head_bytes = 0 if is_shared else self._head.num_bytes
        self.weight_bytes = layer_bytes + self._embedding.nbytes + self._norm.nbytes + head_bytes

    def _head_weight(self, weights: WeightReader) -> torch.Tensor:
        """The file decides about the head, not the config's flag."""
        tied = self._config.tie_word_embeddings
        if weights.holds(_HEAD):
            if tied:
                logger.warning("tie_word_embeddings is true but the checkpoint has %s, which is used", _HEAD)
            return weights.take(_HEAD, tuple(self._embedding.shape))
        if not tied:
            logger.warning("tie_word_embeddings is false but the checkpoint has no %s: the embedding is used", _HEAD)
        return self._embedding

    def allocate(self, max_tokens: int, num_positions: int) -> None:
        """Allocate work buffers for steps of up to max_tokens and rotary tables for num_positions."""
        self._max_tokens = max_tokens
        self._program: AnyProgram | None = None
        self._bound_cache: KVCache | None = None
        self._workspace = Workspace(self._config, self._context, max_tokens)
        self._rope = make_rope(self._config.rope, num_positions, max_tokens, self._rope_divisors, self._context.device)

    def bind(self, cache: KVCache) -> AnyProgram:
        """All kernel calls of a forward pass through `cache`."""
        space = self._workspace
        program = self._context.execution.program(self._max_tokens, self._config.rope.rotary_dim)
        program.embedding(space.residual, self._embedding)
        program.rms_norm(space.normed, space.residual, self._layers[0].input_norm, self._config.rms_norm_eps)
        following = [*(layer.input_norm for layer in self._layers[1:]), self._norm]
        for layer, norm, keys, values in zip(self._layers, following, cache.keys, cache.values, strict=True):
            layer.add_to(program, space, (keys, values), norm)
        return program

    def forward(self, batch: StepBatch, cache: KVCache) -> torch.Tensor:
        """Hidden states after the last norm, [T, hidden_size]. Valid until the next call."""
        if self._program is None or self._bound_cache is not cache:
            if self._program is not None:
                self._program = None
                gc.collect()  # a program refers to itself; its scratch memory goes before another one is made
            self._program, self._bound_cache = self.bind(cache), cache
        self._program.run(self.step_inputs(batch))
        return self._workspace.normed[: len(batch.token_ids)]

    def step_inputs(self, batch: StepBatch) -> StepInputs:
        """What the program reads in a step."""
        positions, cos_sin = self._rope.select(batch)
        return StepInputs(
            token_ids=batch.token_ids,
            positions=positions,
            cos_sin=cos_sin,
            slot_mapping=batch.slot_mapping,
            block_table=batch.block_table,
            seq_slots=batch.seq_slots,
            query_start=batch.query_start,
            context_lens=batch.context_lens,
            attention_plans=batch.attention_plans,
        )

    def attention_geometries(self, kv_dtype: torch.dtype | None = None) -> dict[int, AttentionGeometry]:
        """What a step's attention plans are made for: one for each window of a layer, by the window."""
        config, layer = self._config, self._layers[0]
        return {
            window: AttentionGeometry(
                layer.num_heads, layer.num_kv_heads, config.head_size, self._context.dtype, self._context.device,
                kv_dtype=kv_dtype, window=window,
            )
            for window in sorted(set(config.windows))
        }  # fmt: skip

    def compute_logits(self, hidden: torch.Tensor, logits: torch.Tensor) -> None:
        """Write float32 logits [R, vocab_size] of hidden states [R, hidden_size]."""
        self._head(hidden, logits)
