"""What a waiting sequence finds computed already when it enters a slot."""

from __future__ import annotations

from dataclasses import dataclass

from scheduler.block_manager import BlockManager
from scheduler.sequence import Sequence


@dataclass(slots=True)
class Entry:
    """Block table at entry: `shared` blocks, then `num_new` ones; the first of these is filled from `copy_source`."""

    shared: list[int]
    num_new: int
    num_computed: int
    copy_source: int | None = None
    is_fork: bool = False


def find_entry(sequence: Sequence, blocks: BlockManager, step: int, *, reads_cache: bool) -> Entry:
    """The best start for a sequence whose tokens are all known. Changes nothing.

    At least one token is left to compute, since its logits are needed: of a fully cached prompt, the last block is
    computed again in a block of its own.
    """
    request, block_size = sequence.request, blocks.block_size
    num_tokens = len(sequence.token_ids)
    num_blocks = -(-num_tokens // block_size)
    reads_prompt_logprobs = sequence.reads_prompt_logprobs
    shared: list[int] = []
    if reads_cache and not reads_prompt_logprobs:
        most = (num_tokens - 1) // block_size
        shared = blocks.find_cached(sequence.keys(most, block_size), most)
    entry = Entry(shared, num_blocks - len(shared), len(shared) * block_size)
    # Blocks kept for a fork are computed from the step after `fork_step` on.
    if request.fork_blocks and request.fork_step < step and not reads_prompt_logprobs:
        num_prompt = request.num_prompt_tokens
        num_shared = min(num_prompt, num_tokens - 1) // block_size
        num_computed = num_tokens - 1 if num_tokens == num_prompt else num_shared * block_size
        if num_computed > entry.num_computed:
            entry = Entry(request.fork_blocks[:num_shared], num_blocks - num_shared, num_computed, is_fork=True)
            if num_computed > num_shared * block_size:
                entry.copy_source = request.fork_blocks[num_shared]
    return entry
