"""Prompt blocks kept for the children of n > 1 until they have entered."""

from __future__ import annotations

from scheduler.block_manager import BlockManager
from scheduler.residents import Residents
from scheduler.sequence import Request, Sequence


class Forks:
    """Requests that hold references to their prompt's blocks for sequences to come."""

    def __init__(self, blocks: BlockManager, residents: Residents) -> None:
        self._blocks = blocks
        self._residents = residents
        self._requests: dict[int, Request] = {}  # by number

    def keep(self, leader: Sequence, step: int) -> None:
        """Hold on to the prompt's blocks of `leader`, whose last prompt chunk is planned for `step`."""
        request = leader.request
        num_blocks = -(-request.num_prompt_tokens // self._blocks.block_size)
        request.fork_blocks = leader.block_ids[:num_blocks]
        self._blocks.acquire(request.fork_blocks, 0)
        request.fork_step = request.fork_last_step = step
        self._requests[request.number] = request

    def drop(self, request: Request) -> None:
        """Give the blocks back, once no step in flight reads them."""
        if request.fork_blocks:
            block_ids, request.fork_blocks = request.fork_blocks, []
            self._residents.give_back(block_ids, request.fork_last_step)
            del self._requests[request.number]

    def drop_if_unneeded(self, request: Request) -> None:
        """Give the blocks back if no sequence of the request is to come."""
        if request.fork_blocks and not any(s.is_expecting_fork for s in request.sequences):
            self.drop(request)

    def drop_all(self) -> bool:
        """Give up all kept blocks; True where there were any. Children yet to come compute the prompt themselves."""
        requests = list(self._requests.values())
        for request in requests:
            self.drop(request)
        return bool(requests)
