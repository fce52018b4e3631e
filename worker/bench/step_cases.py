"""What a step reads about its tokens: ids, positions and slots from histories and block tables, and their changes."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial

import torch

from worker import kernels
from worker.bench.case import OURS, Call, Candidate, Case, Contender, Site, Work

_BLOCK_SIZE = 16
_ID_BYTES, _SLOT_BYTES = torch.int32.itemsize, torch.int64.itemsize


def step_cases(site: Site) -> Iterator[Case]:
    shapes = [(2, 3)] if site.is_dry else [(1, 1), (256, 1), (16, 512)]
    for rows, tokens_a_row in shapes:
        yield _prepare_case(site, rows, tokens_a_row, rows == shapes[-1][0])
    yield _scatter_case(site, 5 if site.is_dry else 4096)


def _case(kernel: str, shape: str, num_bytes: int, calls: Callable[[], list[Call]], is_quick: bool) -> Case:
    return Case(
        kernel, shape, torch.int32, Work(num_bytes), lambda: [Contender(OURS, lambda: Candidate(calls()))], is_quick
    )


def _prepare_case(site: Site, rows: int, tokens_a_row: int, is_quick: bool) -> Case:
    """Read of a token: its id and its block; written: id, position and slot."""
    num_tokens = rows * tokens_a_row
    num_bytes = num_tokens * (4 * _ID_BYTES + _SLOT_BYTES) + 3 * rows * _ID_BYTES

    def calls() -> list[Call]:
        length = 2 * tokens_a_row + _BLOCK_SIZE
        ints = partial(torch.zeros, dtype=torch.int32, device=site.device)
        lens = torch.full((rows,), length, dtype=torch.int32, device=site.device)
        starts = torch.arange(rows + 1, dtype=torch.int32, device=site.device) * tokens_a_row
        slots = torch.randperm(rows, dtype=torch.int32, device=site.device)
        slot_mapping = torch.zeros(num_tokens, dtype=torch.int64, device=site.device)
        blocks = torch.randperm(rows * -(-length // _BLOCK_SIZE), dtype=torch.int32, device=site.device)
        return [
            partial(
                kernels.prepare_step, ints(num_tokens), ints(num_tokens), slot_mapping, ints(rows, length),
                blocks.view(rows, -1), slots, starts, lens, _BLOCK_SIZE,
            )
        ]  # fmt: skip

    return _case("prepare_step", f"{rows} rows of {tokens_a_row} tokens", num_bytes, calls, is_quick)


def _scatter_case(site: Site, num_values: int) -> Case:
    def calls() -> list[Call]:
        target = torch.zeros(4 * num_values, dtype=torch.int32, device=site.device)
        indices = torch.randperm(4 * num_values, device=site.device)[:num_values]
        return [partial(kernels.scatter, target, indices, torch.zeros_like(indices))]

    return _case("scatter", f"{num_values} values", num_values * (2 * _SLOT_BYTES + _ID_BYTES), calls, True)
