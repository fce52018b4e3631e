"""Attention where each block of keys outweighs all before it, so that sums so far shrink again and again."""

from collections.abc import Iterator

import pytest
import torch
from attention_reference import PagedBatch, assert_matches
from conftest import AVAILABLE_ISAS

from worker import kernels

# By how much the score rises from key to key, in nats: from weights that grow within what a sum holds to such whose
# sum so far vanishes in every block.
RISES = [0.05, 0.11, 0.3, 2.0]


@pytest.fixture(params=AVAILABLE_ISAS)
def isa(request: pytest.FixtureRequest) -> Iterator[None]:
    kernels.set_cpu_isa(request.param)
    yield
    kernels.set_cpu_isa(kernels.best_cpu_isa())


def batch_of(queries: int, head_size: int = 64) -> PagedBatch:
    return PagedBatch([700], [queries], head_size=head_size, dtype=torch.bfloat16)


def slopes(rise: float) -> torch.Tensor:
    return torch.full((6,), rise)


@pytest.mark.parametrize("rise", RISES)
@pytest.mark.parametrize("queries", [1, 200], ids=["decode", "prefill"])
def test_rising_scores_match_float64(isa: None, rise: float, queries: int) -> None:
    assert_matches(batch_of(queries), alibi_slopes=slopes(rise))


@pytest.mark.parametrize("rise", RISES)
def test_a_token_is_the_same_decoded_alone_and_in_a_chunk(isa: None, rise: float) -> None:
    chunk, alone = batch_of(200, 80), batch_of(1, 80)
    alone.query = chunk.query[-1:]
    alone.key_cache, alone.value_cache, alone.block_tables = chunk.key_cache, chunk.value_cache, chunk.block_tables
    assert torch.equal(alone.run(alibi_slopes=slopes(rise))[0], chunk.run(alibi_slopes=slopes(rise))[-1])
