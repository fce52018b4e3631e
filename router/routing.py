"""Which scheduler takes a request: filter, score, pick. Pure: no clock, no network."""

from __future__ import annotations

import random
from collections.abc import Collection, Sequence
from dataclasses import dataclass, field

from pagemill.block_hash import block_hashes, short_key

# A waiting request counts as this many running sequences: it has its prefill still to come.
WAITING_WEIGHT = 4.0
# Tokens of prefill that weigh as much as one running sequence on a scheduler.
TOKENS_PER_LOAD_UNIT = 256.0


@dataclass(slots=True)
class Candidate:
    """A scheduler as routing sees it."""

    address: str
    model_fingerprint: str = ""
    ready: bool = False
    draining: bool = False
    max_model_len: int = 0
    block_size: int = 0
    running: int = 0
    waiting: int = 0
    own_inflight: int = 0  # this router's requests there: counts what no report has told yet
    prefix_hashes: Collection[int] = field(default_factory=frozenset)


@dataclass(slots=True, frozen=True)
class RoutedRequest:
    """What routing needs to know of a request."""

    token_ids: Sequence[int]
    cache_salt: bytes = b""
    model_fingerprint: str = ""  # a stream that began on these weights must go on there; empty: any
    excluded: frozenset[str] = frozenset()  # addresses that just failed this request


def eligible(candidates: Sequence[Candidate], request: RoutedRequest) -> list[Candidate]:
    """Candidates that are ready, stay, and serve the right weights; excluded ones only where no other is left."""
    usable = [
        c
        for c in candidates
        if c.ready
        and not c.draining
        and (not request.model_fingerprint or c.model_fingerprint == request.model_fingerprint)
    ]
    return [c for c in usable if c.address not in request.excluded] or usable


def cached_prefix_tokens(candidate: Candidate, keys: Sequence[int]) -> int:
    """Leading tokens of the prompt whose KV the candidate holds; a prefix ends at its first missing block."""
    hits = 0
    for key in keys:
        if key not in candidate.prefix_hashes:
            break
        hits += 1
    return hits * candidate.block_size


def cost(candidate: Candidate, num_tokens: int, cached_tokens: int) -> float:
    """Load in running sequences, plus the prefill that is left to do; less is better."""
    load = max(candidate.running + WAITING_WEIGHT * candidate.waiting, float(candidate.own_inflight))
    return load + (num_tokens - cached_tokens) / TOKENS_PER_LOAD_UNIT


def pick(candidates: Sequence[Candidate], request: RoutedRequest, rng: random.Random) -> Candidate | None:
    """The scheduler for a request, None where none is eligible.

    Two random candidates are compared, and the one that holds the longest prefix joins them: routers that see the
    same stale reports do not all run to the same scheduler, and a cached prefix is still found.
    """
    usable = eligible(candidates, request)
    if len(usable) <= 1:
        return usable[0] if usable else None
    hits = _prefix_hits(usable, request)
    compared = rng.sample(usable, 2)
    compared.append(max(usable, key=lambda c: hits[c.address]))
    return min(compared, key=lambda c: cost(c, len(request.token_ids), hits[c.address]))


def _prefix_hits(candidates: Sequence[Candidate], request: RoutedRequest) -> dict[str, int]:
    keys_by_block_size: dict[int, list[int]] = {}
    hits: dict[str, int] = {}
    for candidate in candidates:
        size = candidate.block_size
        if size < 1 or not candidate.prefix_hashes:
            hits[candidate.address] = 0
            continue
        if size not in keys_by_block_size:
            keys_by_block_size[size] = [short_key(k) for k in block_hashes(request.token_ids, size, request.cache_salt)]
        hits[candidate.address] = cached_prefix_tokens(candidate, keys_by_block_size[size])
    return hits
