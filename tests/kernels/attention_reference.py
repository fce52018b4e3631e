"""Attention in float64 with plain tensors, and batches of paged sequences to compare on."""

from __future__ import annotations

import math
from dataclasses import dataclass, field

import torch

from worker import kernels


@dataclass
class PagedBatch:
    """Sequences whose keys and values lie in randomly placed pages; unused slots hold NaN."""

    context_lens: list[int]
    query_lens: list[int]
    num_query_heads: int = 6
    num_kv_heads: int = 2
    head_size: int = 64
    block_size: int = 16
    dtype: torch.dtype = torch.float32
    seed: int = 0
    permute: bool = True
    options: dict[str, object] = field(default_factory=dict)

    def __post_init__(self) -> None:
        rng = torch.Generator().manual_seed(self.seed)
        n, d = len(self.context_lens), self.head_size
        self.keys = [torch.randn(c, self.num_kv_heads, d, generator=rng).to(self.dtype) for c in self.context_lens]
        self.values = [torch.randn(c, self.num_kv_heads, d, generator=rng).to(self.dtype) for c in self.context_lens]
        num_tokens = sum(self.query_lens)
        self.query = torch.randn(num_tokens, self.num_query_heads, d, generator=rng).to(self.dtype)
        counts = [-(-c // self.block_size) for c in self.context_lens]
        num_blocks = sum(counts) + 3
        shape = (num_blocks, self.num_kv_heads, self.block_size, d)
        self.key_cache = torch.full(shape, math.nan, dtype=self.dtype)
        self.value_cache = torch.full(shape, math.nan, dtype=self.dtype)
        order = torch.randperm(num_blocks, generator=rng) if self.permute else torch.arange(num_blocks)
        self.block_tables = torch.full((n, max(counts, default=0) + 2), -1, dtype=torch.int32)
        used = 0
        for b, count in enumerate(counts):
            blocks = order[used : used + count]
            used += count
            self.block_tables[b, :count] = blocks.int()
            slots = torch.arange(self.context_lens[b])
            where = blocks[slots // self.block_size], slice(None), slots % self.block_size
            self.key_cache[where] = self.keys[b]
            self.value_cache[where] = self.values[b]
        self.query_start = torch.tensor([0, *torch.tensor(self.query_lens).cumsum(0)], dtype=torch.int32)
        if n == 0:
            self.query_start = torch.zeros(1, dtype=torch.int32)
        self.lens = torch.tensor(self.context_lens, dtype=torch.int32)
        self.scale = d**-0.5

    def run(self, **options: object) -> torch.Tensor:
        out = torch.full_like(self.query, math.nan)
        kernels.paged_attention(
            out,
            self.query,
            self.key_cache,
            self.value_cache,
            self.block_tables,
            None,
            self.query_start,
            self.lens,
            self.scale,
            **{**self.options, **options},
        )
        return out

    def reference(
        self,
        window: int = -1,
        soft_cap: float = 0.0,
        alibi_slopes: torch.Tensor | None = None,
        sinks: torch.Tensor | None = None,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """The output and the log of the softmax denominator, both float64."""
        group = self.num_query_heads // self.num_kv_heads
        outs, lses = [], []
        for b, (context, new) in enumerate(zip(self.context_lens, self.query_lens, strict=True)):
            q = self.query[self.query_start[b] : self.query_start[b + 1]].double().transpose(0, 1)
            k = self.keys[b].double().transpose(0, 1).repeat_interleave(group, 0)
            v = self.values[b].double().transpose(0, 1).repeat_interleave(group, 0)
            scores = q @ k.transpose(1, 2) * self.scale
            if soft_cap:
                scores = soft_cap * torch.tanh(scores / soft_cap)
            distance = torch.arange(context)[None] - (context - new + torch.arange(new))[:, None]
            if alibi_slopes is not None:
                scores = scores + alibi_slopes.double()[:, None, None] * distance
            hidden = distance > 0
            if window >= 0:
                hidden |= distance <= -window
            scores = scores.masked_fill(hidden, -math.inf)
            if sinks is not None:
                sink = sinks.double()[:, None, None].expand(-1, new, 1)
                scores = torch.cat([scores, sink], -1)
                v = torch.cat([v, torch.zeros_like(v[:, :1])], 1)
            outs.append((scores.softmax(-1) @ v).transpose(0, 1))
            lses.append(scores.logsumexp(-1).transpose(0, 1))
        if not outs:
            return self.query.double(), self.query[..., 0].double()
        return torch.cat(outs), torch.cat(lses)


# Of an output that averages values of unit variance. bfloat16: weights and output are each rounded to 8 bits.
TOLERANCE = {torch.float32: 2e-5, torch.float16: 2e-3, torch.bfloat16: 1.6e-2}


def assert_matches(batch: PagedBatch, **options: object) -> None:
    expected, _ = batch.reference(**options)
    actual = batch.run(**options)
    torch.testing.assert_close(actual.double(), expected, rtol=TOLERANCE[batch.dtype], atol=TOLERANCE[batch.dtype])
