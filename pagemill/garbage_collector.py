"""Python's cyclic garbage collector, set for a process that makes many short-lived objects beside many lasting ones."""

from __future__ import annotations

import gc

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
