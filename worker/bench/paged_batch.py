"""A batch of sequences of one length, whose cache lies in shuffled pages."""

from __future__ import annotations

import functools

import torch

from worker.bench.case import Site
from worker.bench.models import LayerShape

BLOCK_SIZE = 16


class PagedBatch:
    """Random queries and `copies` random caches, all reached through one block table.

    Attributes:
        query: [num_sequences * num_queries, num_query_heads, head_size] bfloat16, the last tokens of each sequence.
        caches: pairs of [num_blocks, num_kv_heads, BLOCK_SIZE, head_size].
        block_tables: [num_sequences, blocks of a sequence] int32.
        query_start, context_lens: as `paged_attention` takes them.
    """

    def __init__(
        self,
        site: Site,
        model: LayerShape,
        *,
        num_sequences: int,
        context: int,
        num_queries: int,
        copies: int,
        kv_dtype: torch.dtype | None = None,
    ) -> None:
        self.site = site
        self.model = model
        self.num_sequences = num_sequences
        self.context = context
        self.num_queries = num_queries
        self.scale = model.head_size**-0.5
        num_blocks = num_sequences * context // BLOCK_SIZE
        dtype = torch.bfloat16
        page = (model.num_kv_heads, BLOCK_SIZE, model.head_size)
        self.query = site.random(num_sequences * num_queries, model.num_query_heads, model.head_size, dtype=dtype)
        self.caches = [
            (
                site.random(num_blocks, *page, dtype=kv_dtype or dtype),
                site.random(num_blocks, *page, dtype=kv_dtype or dtype),
            )
            for _ in range(copies)
        ]
        order = torch.randperm(num_blocks, device=site.device).to(torch.int32)
        self.block_tables = order.view(num_sequences, context // BLOCK_SIZE)
        steps = torch.arange(num_sequences + 1, dtype=torch.int32, device=site.device)
        self.query_start = steps * num_queries
        self.context_lens = torch.full((num_sequences,), context, dtype=torch.int32, device=site.device)

    @property
    def is_decode(self) -> bool:
        return self.num_queries == 1

    @functools.cached_property
    def token_major_caches(self) -> list[tuple[torch.Tensor, torch.Tensor]]:
        """The same numbers with tokens before heads in a page: [num_blocks, BLOCK_SIZE, num_kv_heads, head_size]."""
        return [(k.transpose(1, 2).contiguous(), v.transpose(1, 2).contiguous()) for k, v in self.caches]

    def contiguous(self, copy: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Keys and values of one cache as [num_sequences, num_kv_heads, context, head_size], contiguous."""
        return self._gathered(self.caches[copy][0]), self._gathered(self.caches[copy][1])

    def _gathered(self, cache: torch.Tensor) -> torch.Tensor:
        pages = cache[self.block_tables.long().view(-1)]
        shape = (self.num_sequences, -1, self.model.num_kv_heads, BLOCK_SIZE, self.model.head_size)
        return (
            pages.view(shape)
            .transpose(1, 2)
            .reshape(self.num_sequences, self.model.num_kv_heads, self.context, self.model.head_size)
        )
