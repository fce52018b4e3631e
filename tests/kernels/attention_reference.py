"""Attention in float64 with plain tensors, and batches of paged sequences to compare on."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch

from worker import kernels

# Of an output that averages values of unit variance. bfloat16: weights and output are each rounded to 8 bits. An 8-bit
# cache changes nothing: the reference reads the stored numbers.
TOLERANCE = {torch.float32: 2e-5, torch.float16: 2e-3, torch.bfloat16: 1.6e-2}


def as_bytes(tensor: torch.Tensor) -> torch.Tensor:
    """A view that can be indexed and compared: torch has few operations on 8-bit floats."""
    return tensor.view(torch.uint8) if tensor.element_size() == 1 else tensor


@dataclass
class PagedBatch:
    """Sequences whose keys and values lie in randomly placed pages; unused slots hold NaN.

    Tensors that a kernel reads are on `device`. kv_dtype: of the cache; None is dtype. An 8-bit cache has a scale per
    KV head. version, partition_keys: of the plan, which only CUDA has.
    """

    context_lens: list[int]
    query_lens: list[int]
    num_query_heads: int = 6
    num_kv_heads: int = 2
    head_size: int = 64
    block_size: int = 16
    dtype: torch.dtype = torch.float32
    kv_dtype: torch.dtype | None = None
    device: str = "cpu"
    seed: int = 0
    permute: bool = True
    version: str = "auto"
    partition_keys: int = 0
    options: dict[str, object] = field(default_factory=dict)

    def __post_init__(self) -> None:
        rng = torch.Generator().manual_seed(self.seed)
        num_tokens, d = sum(self.query_lens), self.head_size
        query = torch.randn(num_tokens, self.num_query_heads, d, generator=rng).to(self.dtype)
        self.is_8_bit = self.kv_dtype is not None and self.kv_dtype is not self.dtype
        self.key_scale = self.value_scale = None
        if self.is_8_bit:
            self.key_scale = 0.5 + torch.rand(self.num_kv_heads, generator=rng)
            self.value_scale = 0.5 + torch.rand(self.num_kv_heads, generator=rng)
        keys = [self._stored(c, self.key_scale, rng) for c in self.context_lens]
        values = [self._stored(c, self.value_scale, rng) for c in self.context_lens]
        self._fill_pages(keys, values, rng)
        self.keys = [self._read(k, self.key_scale) for k in keys]
        self.values = [self._read(v, self.value_scale) for v in values]
        self.query_start = torch.tensor([0, *torch.tensor(self.query_lens).cumsum(0)], dtype=torch.int32)
        if not self.context_lens:
            self.query_start = torch.zeros(1, dtype=torch.int32)
        self.query = query.to(self.device)
        self.query_start = self.query_start.to(self.device)
        self.lens = torch.tensor(self.context_lens, dtype=torch.int32, device=self.device)
        if self.is_8_bit:
            self.key_scale, self.value_scale = self.key_scale.to(self.device), self.value_scale.to(self.device)
        self.scale = d**-0.5

    def _stored(self, context: int, scale: torch.Tensor | None, rng: torch.Generator) -> torch.Tensor:
        numbers = torch.randn(context, self.num_kv_heads, self.head_size, generator=rng)
        return numbers.to(self.dtype) if scale is None else (numbers / scale[:, None]).to(self.kv_dtype)

    def _read(self, stored: torch.Tensor, scale: torch.Tensor | None) -> torch.Tensor:
        return stored.double() if scale is None else stored.double() * scale.double()[:, None]

    def _fill_pages(self, keys: list[torch.Tensor], values: list[torch.Tensor], rng: torch.Generator) -> None:
        counts = [-(-c // self.block_size) for c in self.context_lens]
        num_blocks = sum(counts) + 3
        shape = (num_blocks, self.num_kv_heads, self.block_size, self.head_size)
        key_cache, value_cache = (torch.full(shape, math.nan).to(self.kv_dtype or self.dtype) for _ in range(2))
        order = torch.randperm(num_blocks, generator=rng) if self.permute else torch.arange(num_blocks)
        block_tables = torch.full((len(counts), max(counts, default=0) + 2), -1, dtype=torch.int32)
        used = 0
        for b, count in enumerate(counts):
            blocks = order[used : used + count]
            used += count
            block_tables[b, :count] = blocks.int()
            slots = torch.arange(self.context_lens[b])
            where = blocks[slots // self.block_size], slice(None), slots % self.block_size
            as_bytes(key_cache)[where] = as_bytes(keys[b])
            as_bytes(value_cache)[where] = as_bytes(values[b])
        self.key_cache, self.value_cache = key_cache.to(self.device), value_cache.to(self.device)
        self.block_tables = block_tables.to(self.device)

    def geometry(self, window: int = -1) -> kernels.AttentionGeometry:
        return kernels.AttentionGeometry(
            self.num_query_heads,
            self.num_kv_heads,
            self.head_size,
            self.dtype,
            self.device,
            kv_dtype=self.kv_dtype,
            window=window,
        )

    def plan(self, window: int = -1) -> kernels.AttentionPlan | None:
        if self.device == "cpu":
            return None
        return kernels.plan_attention(
            self.query_start.cpu(),
            self.lens.cpu(),
            self.geometry(window),
            version=self.version,
            partition_keys=self.partition_keys,
        )

    def run(
        self, kernel: Callable[..., None] = kernels.paged_attention, out: torch.Tensor | None = None, **options: Any
    ) -> torch.Tensor:
        """The output, on the CPU. Options are the kernel's; tensors among them are taken to the device."""
        options = {**self.options, **options}
        options = {k: v.to(self.device) if isinstance(v, torch.Tensor) else v for k, v in options.items()}
        if "plan" not in options:
            options["plan"] = self.plan(options.get("window", -1))
        out = torch.full_like(self.query, math.nan) if out is None else out
        kernel(
            out,
            self.query,
            self.key_cache,
            self.value_cache,
            self.block_tables,
            None,
            self.query_start,
            self.lens,
            self.scale,
            **{"key_scale": self.key_scale, "value_scale": self.value_scale, **options},
        )
        return out.cpu()

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
        query, query_start = self.query.cpu().double(), self.query_start.tolist()
        for b, (context, new) in enumerate(zip(self.context_lens, self.query_lens, strict=True)):
            q = query[query_start[b] : query_start[b + 1]].transpose(0, 1)
            k = self.keys[b].transpose(0, 1).repeat_interleave(group, 0)
            v = self.values[b].transpose(0, 1).repeat_interleave(group, 0)
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
            return query, query[..., 0]
        return torch.cat(outs), torch.cat(lses)


def assert_matches(batch: PagedBatch, kernel: Callable[..., None] = kernels.paged_attention, **options: object) -> None:
    expected, _ = batch.reference(**options)
    actual = batch.run(kernel, **options)
    torch.testing.assert_close(actual.double(), expected, rtol=TOLERANCE[batch.dtype], atol=TOLERANCE[batch.dtype])
