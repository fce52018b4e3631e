"""The block pool: all or nothing, least recently used first, and books that balance after any history."""

from __future__ import annotations

from collections import Counter

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from pagemill.block_hash import block_hashes, short_key
from pagemill.errors import PagemillError
from scheduler.block_manager import BlockManager, CacheJournal


def test_a_refused_acquisition_changes_nothing() -> None:
    pool = BlockManager(4, 2)
    held = pool.acquire((), 2)
    assert held is not None
    assert pool.acquire(held, 3) is None
    assert pool.num_available == 2
    pool.check_integrity(Counter(held))


def test_cached_blocks_are_found_until_others_need_them_oldest_tail_first() -> None:
    pool = BlockManager(4, 2)
    keys = block_hashes([1, 2, 3, 4, 5, 6], 2)
    held = pool.acquire((), 3)
    assert held is not None
    for block, key in zip(held, keys, strict=True):
        pool.register(block, key)
    pool.release(held)
    assert pool.num_used == 0
    assert pool.find_cached(keys, 8) == held
    taken = pool.acquire((), 2)  # the free block, then the tail of the cached run
    assert taken is not None and taken[1] == held[2]
    assert pool.find_cached(keys, 8) == held[:2]
    pool.check_integrity(Counter(taken))


def test_a_cached_block_can_be_shared_again() -> None:
    pool = BlockManager(2, 1)
    held = pool.acquire((), 1)
    assert held is not None
    pool.register(held[0], b"k" * 16)
    pool.release(held)
    assert pool.acquire(held, 0) == []
    assert pool.acquire(held, 0) == []
    pool.check_integrity(Counter({held[0]: 2}))
    assert not pool.can_acquire((), 2)


def test_releasing_twice_is_an_error() -> None:
    pool = BlockManager(2, 1)
    held = pool.acquire((), 1)
    assert held is not None
    pool.release(held)
    with pytest.raises(PagemillError, match="released more often"):
        pool.release(held)


def test_untrusted_blocks_leave_the_index() -> None:
    pool = BlockManager(2, 1)
    held = pool.acquire((), 2)
    assert held is not None
    pool.register(held[0], b"a" * 16)
    pool.register(held[1], b"b" * 16)
    pool.release(held[:1])
    pool.uncache(held)
    assert pool.find_cached([b"a" * 16], 1) == []
    pool.check_integrity(Counter(held[1:]))


def test_the_journal_cancels_opposites_and_gives_up_on_deltas_when_full() -> None:
    journal = CacheJournal(max_entries=3)
    a, b = b"a" * 16, b"b" * 16
    journal.add(a)
    journal.evict(b)
    journal.evict(a)
    assert journal.take() == ([], [short_key(b)], False)
    for number in range(5):
        journal.add(bytes([number] * 16))
    assert journal.take()[2]
    assert journal.take() == ([], [], False)


class PoolMachine(RuleBasedStateMachine):
    """Tables come and go on a small pool; a model of who owns what predicts the books."""

    def __init__(self) -> None:
        super().__init__()
        self.pool = BlockManager(8, 2)
        self.tables: list[list[int]] = []
        self.next_key = 0

    @rule(num_new=st.integers(0, 6), sharer=st.integers(0, 99), num_shared=st.integers(0, 3))
    def acquire(self, num_new: int, sharer: int, num_shared: int) -> None:
        shared = self.tables[sharer % len(self.tables)][:num_shared] if self.tables else []
        before = self.pool.num_available
        blocks = self.pool.acquire(shared, num_new)
        assert (blocks is None) == (num_new > before)
        if blocks is not None:
            self.tables.append(shared + blocks)

    @precondition(lambda self: self.tables)
    @rule(which=st.integers(0, 99))
    def release(self, which: int) -> None:
        self.pool.release(self.tables.pop(which % len(self.tables)))

    @precondition(lambda self: any(self.tables))
    @rule(which=st.integers(0, 99), fresh=st.booleans())
    def register(self, which: int, fresh: bool) -> None:
        blocks = [b for table in self.tables for b in table]
        self.next_key += fresh
        self.pool.register(blocks[which % len(blocks)], self.next_key.to_bytes(16, "little"))

    @rule(key=st.integers(0, 20))
    def revive(self, key: int) -> None:
        shared = self.pool.find_cached([key.to_bytes(16, "little")], 1)
        if shared:
            assert self.pool.acquire(shared, 0) == []
            self.tables.append(shared)

    @rule(blocks=st.lists(st.integers(0, 7), max_size=3, unique=True))
    def uncache(self, blocks: list[int]) -> None:
        self.pool.uncache(blocks)

    @invariant()
    def books_balance(self) -> None:
        self.pool.check_integrity(Counter(b for table in self.tables for b in table))
        assert self.pool.num_used == len({b for table in self.tables for b in table})


TestPool = PoolMachine.TestCase
TestPool.settings = settings(max_examples=60, stateful_step_count=40, deadline=None)
