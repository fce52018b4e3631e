"""A model without a runner: batches made by hand, on any device and in any way of execution."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import torch

from pagemill.model_source import ModelSource, load_config
from worker.batch import StepBatch
from worker.kernels import AttentionPlan
from worker.kv_cache import KVCache
from worker.layers.context import LayerContext
from worker.loader import WeightReader, open_source
from worker.models import resolve

BLOCK_SIZE, BLOCKS_PER_SLOT, NUM_SLOTS, MAX_TOKENS = 8, 32, 4, 96


class ModelUnderTest:
    """A loaded model with a cache of its own.

    Args:
        context: arguments of `LayerContext` besides dtype and device.
    """

    def __init__(
        self,
        directory: Path,
        device: torch.device,
        dtype: torch.dtype,
        *,
        kv_dtype: torch.dtype | None = None,
        load_format: str = "auto",
        **context: Any,
    ) -> None:
        source = ModelSource("hf", directory, "tiny")
        config = load_config(source)
        self.device = device
        self.model = resolve(config)(config, LayerContext(dtype, device, **context))
        weights = open_source(source, load_format, seed=0, absent_if_random=self.model.optional_weights, device=device)
        self.model.load_weights(WeightReader(weights, dtype, device))
        self.model.allocate(MAX_TOKENS, BLOCK_SIZE * BLOCKS_PER_SLOT)
        spec = self.model.kv_spec
        shape = (NUM_SLOTS * BLOCKS_PER_SLOT, spec.num_kv_heads, BLOCK_SIZE, spec.head_size)

        def zeros() -> list[torch.Tensor]:
            return [torch.zeros(shape, dtype=kv_dtype or dtype, device=device) for _ in range(spec.num_layers)]

        self.cache = KVCache(zeros(), zeros(), BLOCK_SIZE, shape[0])
        # Blocks of a slot lie backwards and apart, so that no table is the identity.
        table = torch.arange(shape[0], dtype=torch.int32).view(BLOCKS_PER_SLOT, NUM_SLOTS).t().flip(1).contiguous()
        self.block_table_cpu, self.block_table = table, table.to(device)
        self._plans: dict[int, AttentionPlan] = {}
        if device.type == "cuda":
            geometries = self.model.attention_geometries(kv_dtype)
            self._plans = {window: AttentionPlan(geometry) for window, geometry in geometries.items()}

    def batch(self, rows: list[tuple[int, int, list[int], int]], num_padding: int = 0) -> StepBatch:
        """A batch of rows (slot, position of the first token, token ids, prompt length), and padding tokens."""
        counts = [len(ids) for _, _, ids, _ in rows]
        positions = [start + i for _, start, ids, _ in rows for i in range(len(ids))]
        slots = [slot for slot, _, ids, _ in rows for _ in ids]
        blocks = self.block_table_cpu[slots, [p // BLOCK_SIZE for p in positions]].tolist()
        mapping = [block * BLOCK_SIZE + p % BLOCK_SIZE for block, p in zip(blocks, positions, strict=True)]
        query_start = torch.tensor([0, *np.cumsum(counts).tolist()], dtype=torch.int32)
        context_lens = torch.tensor([start + len(ids) for _, start, ids, _ in rows], dtype=torch.int32)
        for plan in self._plans.values():
            plan.update(query_start, context_lens)

        def ints(values: list[int], dtype: torch.dtype = torch.int32) -> torch.Tensor:
            return torch.tensor(values, dtype=dtype, device=self.device)

        return StepBatch(
            num_tokens=len(positions),
            slots=np.array([slot for slot, *_ in rows], dtype=np.int32),
            starts=np.array([start for _, start, *_ in rows], dtype=np.int32),
            counts=np.array(counts, dtype=np.int32),
            prompt_lens=np.array([prompt_len for *_, prompt_len in rows], dtype=np.int32),
            token_ids=ints([i for _, _, ids, _ in rows for i in ids] + [0] * num_padding),
            positions=ints(positions + [0] * num_padding),
            slot_mapping=ints(mapping + [-1] * num_padding, torch.int64),
            block_table=self.block_table,
            seq_slots=ints([slot for slot, *_ in rows]),
            query_start=query_start.to(self.device),
            context_lens=context_lens.to(self.device),
            max_count=max(counts),
            attention_plans=self._plans,
        )

    def logits(self, rows: list[tuple[int, int, list[int], int]], num_padding: int = 0) -> torch.Tensor:
        """float32 logits [T, vocab_size] of all tokens of a step, on the CPU."""
        batch = self.batch(rows, num_padding)
        hidden = self.model.forward(batch, self.cache)[: batch.num_tokens]
        logits = torch.full((batch.num_tokens, self.model.vocab_size), float("nan"), device=self.device)
        self.model.compute_logits(hidden, logits)
        return logits.cpu()

    def prompt_logits(self, prompt: list[int], chunk: int = MAX_TOKENS, slot: int = 0) -> torch.Tensor:
        """Logits of a prompt's positions, computed in chunks in one slot."""
        parts = [
            self.logits([(slot, first, prompt[first : first + chunk], len(prompt))])
            for first in range(0, len(prompt), chunk)
        ]
        return torch.cat(parts)

    def greedy(self, prompt: list[int], num_tokens: int, slot: int = 0) -> list[int]:
        """Ids that follow a prompt, one step each."""
        token_ids = list(prompt)
        logits = self.prompt_logits(prompt, slot=slot)
        for _ in range(num_tokens):
            token_ids.append(int(logits[-1].argmax()))
            logits = self.logits([(slot, len(token_ids) - 1, token_ids[-1:], len(prompt))])
        return token_ids[len(prompt) :]
