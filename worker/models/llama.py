"""Llama 1-3, Mistral, Qwen2, SmolLM2: rotary attention with grouped heads, RMS norms, gated MLP."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from typing import Any

import torch

from worker import kernels
from worker.batch import StepBatch
from worker.kernels.linear import PackedLinear, linear
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
    """Buffers of one forward pass, for up to max_tokens tokens; all layers share them."""

    def __init__(self, config: DecoderConfig, context: LayerContext, max_tokens: int) -> None:
        def buffer(width: int) -> torch.Tensor:
            return torch.empty((max_tokens, width), dtype=context.dtype, device=context.device)

        heads, kv_heads = config.num_heads // context.size, config.num_kv_heads // context.size
        self.residual = buffer(config.hidden_size)
        self.normed = buffer(config.hidden_size)
        self.projected = buffer(config.hidden_size)
        self.qkv = buffer((heads + 2 * kv_heads) * config.head_size)
        self.attention = buffer(heads * config.head_size)
        self.activated = buffer(config.intermediate_size // context.size)


class LlamaLayer:
    """One decoder layer of this rank."""

    def __init__(self, config: DecoderConfig, context: LayerContext, index: int) -> None:
        heads, kv_heads, size = config.num_heads, config.num_kv_heads, config.head_size
        self._context = context
        self._prefix = f"model.layers.{index}"
        self._hidden_size = config.hidden_size
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

    def load(self, weights: WeightReader) -> int:
        """Take this rank's weights; returns their bytes."""
        shape = (self._hidden_size,)
        self.input_norm = weights.take(f"{self._prefix}.input_layernorm.weight", shape).to(self._context.device)
        self.mlp_norm = weights.take(f"{self._prefix}.post_attention_layernorm.weight", shape).to(self._context.device)
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
        self._scale = config.head_size**-0.5
        self.kv_spec = KVSpec(config.num_layers, self._layers[0].num_kv_heads, config.head_size)
        self.vocab_size = config.vocab_size
        self.hidden_size = config.hidden_size
        self.max_positions = config.rope.max_positions
        self.kv_depends_on_prompt_length = config.rope.rope_type == "dynamic"
        self.optional_weights = frozenset({_HEAD, _ROPE_DIVISORS} if config.tie_word_embeddings else {_ROPE_DIVISORS})
        self.weight_bytes = 0

    def load_weights(self, weights: WeightReader) -> None:
        """Take all weights of this rank. Raises ModelLoadError."""
        config, device = self._config, self._context.device
        shape = (config.vocab_size, config.hidden_size)
        self._embedding = weights.take(_EMBEDDING, shape).to(device)
        layer_bytes = sum([layer.load(weights) for layer in self._layers])
        self._norm = weights.take("model.norm.weight", (config.hidden_size,)).to(device)
        self._head = PackedLinear(self._head_weight(weights))
        divisors = (config.rope.rotary_dim // 2,)
        self._rope_divisors = weights.take(_ROPE_DIVISORS, divisors).float() if weights.holds(_ROPE_DIVISORS) else None
        self.weight_bytes = layer_bytes + self._embedding.nbytes + self._norm.nbytes + self._head.num_bytes

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
        self._workspace = Workspace(self._config, self._context, max_tokens)
        self._rope = make_rope(self._config.rope, num_positions, max_tokens, self._rope_divisors)

    def forward(self, batch: StepBatch, cache: KVCache) -> torch.Tensor:
        """Hidden states after the last norm, [T, hidden_size]. Valid until the next call."""
        config, space, tokens = self._config, self._workspace, batch.num_tokens
        residual, normed, projected = space.residual[:tokens], space.normed[:tokens], space.projected[:tokens]
        qkv, attention, activated = space.qkv[:tokens], space.attention[:tokens], space.activated[:tokens]
        heads, kv_heads, size = self._layers[0].num_heads, self._layers[0].num_kv_heads, config.head_size
        query = qkv[:, : heads * size].view(tokens, heads, size)
        attention_heads = attention.view(tokens, heads, size)
        positions, cos_sin = self._rope.select(batch)
        epsilon = config.rms_norm_eps

        kernels.embedding(residual, batch.token_ids, self._embedding)
        kernels.rms_norm(normed, residual, self._layers[0].input_norm, epsilon)
        for index, layer in enumerate(self._layers):
            key_cache, value_cache = cache.keys[index], cache.values[index]
            layer.qkv(normed, qkv)
            kernels.rope_and_store(qkv, positions, cos_sin, key_cache, value_cache, batch.slot_mapping, heads, kv_heads)
            kernels.paged_attention(
                attention_heads,
                query,
                key_cache,
                value_cache,
                batch.block_table,
                batch.seq_slots,
                batch.query_start,
                batch.context_lens,
                self._scale,
                window=layer.window,
            )
            layer.attention_out(attention, projected)
            kernels.fused_add_rms_norm(normed, projected, residual, layer.mlp_norm, epsilon)
            layer.gate_up(normed, activated)
            layer.down(activated, projected)
            following = self._layers[index + 1].input_norm if index + 1 < len(self._layers) else self._norm
            kernels.fused_add_rms_norm(normed, projected, residual, following, epsilon)
        return normed

    def compute_logits(self, hidden: torch.Tensor, logits: torch.Tensor) -> None:
        """Write float32 logits [R, vocab_size] of hidden states [R, hidden_size]."""
        linear(self._head, hidden, logits)
