"""Which prefix-cache keys the workers of this scheduler hold between them, for load reports."""

from __future__ import annotations

from collections import Counter
from collections.abc import Hashable

from scheduler.engine import CacheChanges

# A report stays far below the message limit; more keys than this are not announced.
MAX_REPORTED_KEYS = 1 << 17


class CacheDirectory:
    """Union of the engines' keys, and what changed in it since the last `take_changes`."""

    def __init__(self) -> None:
        self._keys_of: dict[Hashable, set[int]] = {}
        self._holders: Counter[int] = Counter()
        self._added: set[int] = set()
        self._evicted: set[int] = set()

    def apply(self, engine: Hashable, changes: CacheChanges) -> None:
        """Take over what one engine reports."""
        keys = self._keys_of.setdefault(engine, set())
        evicted = keys - set(changes.added) if changes.whole else set(changes.evicted) & keys
        added = set(changes.added) - keys
        if not changes.whole:
            added -= evicted
        self._remove(keys, evicted)
        for key in added:
            if len(keys) >= MAX_REPORTED_KEYS:
                break
            keys.add(key)
            self._holders[key] += 1
            if self._holders[key] == 1:
                self._note(key, self._added, self._evicted)

    def drop(self, engine: Hashable) -> None:
        """An engine is gone and its cache with it."""
        keys = self._keys_of.pop(engine, set())
        self._remove(keys, keys.copy())

    def _remove(self, keys: set[int], evicted: set[int]) -> None:
        for key in evicted:
            keys.discard(key)
            self._holders[key] -= 1
            if self._holders[key] == 0:
                del self._holders[key]
                self._note(key, self._evicted, self._added)

    @staticmethod
    def _note(key: int, into: set[int], opposite: set[int]) -> None:
        if key in opposite:
            opposite.discard(key)
        else:
            into.add(key)

    def take_changes(self) -> tuple[list[int], list[int]]:
        """(added, evicted) keys of the union since the last call."""
        changes = list(self._added), list(self._evicted)
        self._added.clear()
        self._evicted.clear()
        return changes

    def all_keys(self) -> list[int]:
        """The union as of the last `take_changes`, later changes not included."""
        return [key for key in self._holders if key not in self._added] + list(self._evicted)
