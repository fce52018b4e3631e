"""The KV block pool: reference counts, prefix cache index, least-recently-used reuse of cached blocks.

The pool knows block ids and keys, never sequences. Whoever holds a reference gives it back once with `release`.
Every call either does all that was asked or answers None and changes nothing.
"""

from __future__ import annotations

from collections import Counter, OrderedDict
from collections.abc import Iterable, Sequence

from pagemill.block_hash import short_key
from pagemill.errors import PagemillError


class CacheJournal:
    """Keys that entered and left the prefix cache since the last `take`, for load reports.

    Bounded: when more than `max_entries` changes pile up, the journal gives up on deltas and asks for a full report.
    """

    def __init__(self, max_entries: int = 8192) -> None:
        self._max_entries = max_entries
        self._added: set[bytes] = set()
        self._evicted: set[bytes] = set()
        self._overflowed = False

    def add(self, key: bytes) -> None:
        self._note(key, self._added, self._evicted)

    def evict(self, key: bytes) -> None:
        self._note(key, self._evicted, self._added)

    def _note(self, key: bytes, into: set[bytes], opposite: set[bytes]) -> None:
        if key in opposite:
            opposite.discard(key)
            return
        into.add(key)
        if len(self._added) + len(self._evicted) > self._max_entries:
            self._added.clear()
            self._evicted.clear()
            self._overflowed = True

    def take(self) -> tuple[list[int], list[int], bool]:
        """(short keys added, short keys evicted, overflowed) since the last call; starts a new journal."""
        taken = [short_key(k) for k in self._added], [short_key(k) for k in self._evicted], self._overflowed
        self._added.clear()
        self._evicted.clear()
        self._overflowed = False
        return taken


class BlockManager:
    """A pool of `num_blocks` KV blocks of `block_size` tokens.

    A block is used (referenced), cached (unreferenced, its key is in the index) or free (neither).
    """

    def __init__(self, num_blocks: int, block_size: int) -> None:
        if num_blocks < 1 or block_size < 1:
            raise ValueError("num_blocks and block_size must be at least 1")
        self.num_blocks = num_blocks
        self.block_size = block_size
        self.journal = CacheJournal()
        self._ref_counts = [0] * num_blocks
        self._keys: list[bytes | None] = [None] * num_blocks
        self._block_of_key: dict[bytes, int] = {}
        self._free = list(range(num_blocks - 1, -1, -1))  # taken from the end
        self._cached_free: OrderedDict[int, None] = OrderedDict()  # oldest release first

    @property
    def num_available(self) -> int:
        """Blocks that `acquire` could hand out: free ones and cached ones that nobody refers to."""
        return len(self._free) + len(self._cached_free)

    @property
    def num_used(self) -> int:
        return self.num_blocks - self.num_available

    def ref_count(self, block: int) -> int:
        return self._ref_counts[block]

    def find_cached(self, keys: Sequence[bytes], limit: int) -> list[int]:
        """Blocks of the longest cached run of leading `keys`, at most `limit` of them. Changes nothing."""
        blocks: list[int] = []
        get = self._block_of_key.get
        for key in keys[:limit]:
            block = get(key)
            if block is None:
                break
            blocks.append(block)
        return blocks

    def count_cached(self, keys: Sequence[bytes]) -> int:
        """Length of the longest cached run of leading `keys`. Safe from other threads: reads single entries only."""
        count = 0
        for key in keys:
            if key not in self._block_of_key:
                break
            count += 1
        return count

    def can_acquire(self, shared: Sequence[int], num_new: int, spare: int = 0) -> bool:
        """Whether `acquire` would succeed and leave at least `spare` blocks available."""
        revived = sum(1 for block in shared if self._ref_counts[block] == 0)
        return self.num_available - revived - spare >= num_new

    def acquire(self, shared: Sequence[int], num_new: int) -> list[int] | None:
        """One reference to each of `shared` and to `num_new` further blocks, whose ids are returned.

        Returns None and changes nothing when the pool has too few. New blocks are free ones first, then the cached
        ones that were released longest ago.
        """
        if not self.can_acquire(shared, num_new):
            return None
        ref_counts = self._ref_counts
        for block in shared:
            if ref_counts[block] == 0:
                del self._cached_free[block]
            ref_counts[block] += 1
        blocks = []
        for _ in range(num_new):
            if self._free:
                block = self._free.pop()
            else:
                block, _ = self._cached_free.popitem(last=False)
                self._forget(block)
            ref_counts[block] = 1
            blocks.append(block)
        return blocks

    def release(self, blocks: Sequence[int]) -> None:
        """Give back one reference to each of `blocks`, a table in order: its tail is evicted before its head."""
        ref_counts = self._ref_counts
        for block in reversed(blocks):
            count = ref_counts[block] - 1
            if count < 0:
                raise PagemillError(f"block {block} was released more often than acquired")
            ref_counts[block] = count
            if count == 0:
                if self._keys[block] is None:
                    self._free.append(block)
                else:
                    self._cached_free[block] = None

    def register(self, block: int, key: bytes) -> None:
        """Index a referenced, full block. A key's first block stays; later ones of equal content do not count."""
        if self._keys[block] is None and key not in self._block_of_key:
            self._keys[block] = key
            self._block_of_key[key] = block
            self.journal.add(key)

    def uncache(self, blocks: Iterable[int]) -> None:
        """Take blocks out of the index: their content is not to be trusted."""
        for block in blocks:
            if self._keys[block] is not None:
                self._forget(block)
                if self._ref_counts[block] == 0:
                    del self._cached_free[block]
                    self._free.append(block)

    def _forget(self, block: int) -> None:
        key = self._keys[block]
        assert key is not None
        self._keys[block] = None
        del self._block_of_key[key]
        self.journal.evict(key)

    def cached_short_keys(self, limit: int) -> list[int]:
        """Short keys of up to `limit` cached blocks."""
        return [short_key(key) for _, key in zip(range(limit), self._block_of_key, strict=False)]

    def check_integrity(self, owned: Counter[int]) -> None:
        """Prove that free + cached + used is the pool and that `owned` (references per block) explains every count.

        Raises PagemillError naming the first contradiction.
        """
        free, cached = set(self._free), set(self._cached_free)
        if len(free) != len(self._free) or free & cached:
            raise PagemillError("a block is listed as available twice")
        for block, count in enumerate(self._ref_counts):
            if count != owned[block]:
                raise PagemillError(f"block {block} has {count} references, {owned[block]} of them owned")
            if (count == 0) != (block in free or block in cached):
                raise PagemillError(f"block {block} with {count} references is in the wrong list")
            key = self._keys[block]
            if (block in free and key is not None) or (block in cached and key is None):
                raise PagemillError(f"block {block} is cached and free")
            if key is not None and self._block_of_key.get(key) != block:
                raise PagemillError(f"block {block} is indexed under another block's key")
        if len(self._block_of_key) != sum(key is not None for key in self._keys):
            raise PagemillError("the prefix index names a block that holds another key")
