"""Python's cyclic garbage collector, set for a process that makes many short-lived objects beside many lasting ones."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from contextlib import contextmanager

# Objects made before a young collection; by default 700, which here is a fraction of one step. What a step makes is
# freed by its reference counts, so that a collection finds next to nothing and only walks what lives.
_YOUNG_THRESHOLD = 50_000
_MIDDLE_THRESHOLD = 20
_OLD_THRESHOLD = 50


def settle_garbage_collector() -> None:
    """Leave what the process has loaded out of all later collections, and collect rarely. Call it once, after start."""
    gc.collect()
    gc.freeze()
    gc.set_threshold(_YOUNG_THRESHOLD, _MIDDLE_THRESHOLD, _OLD_THRESHOLD)


@contextmanager
def collecting_rarely() -> Iterator[None]:
    """The same thresholds for a while, in a process that belongs to somebody else. May be nested.

    A full collection walks everything that the caller holds, prompts and answers of thousands of requests among it,
    for longer than a step takes.
    """
    before = gc.get_threshold()
    gc.set_threshold(_YOUNG_THRESHOLD, _MIDDLE_THRESHOLD, _OLD_THRESHOLD)
    try:
        yield
    finally:
        gc.set_threshold(*before)
