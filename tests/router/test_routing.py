from __future__ import annotations

import random
from collections import Counter

from pagemill.block_hash import block_hashes, short_key
from router.routing import Candidate, RoutedRequest, cached_prefix_tokens, eligible, pick

TOKENS = list(range(1000))


def ready(address: str, **changes: object) -> Candidate:
    values: dict[str, object] = {"ready": True, "model_fingerprint": "w", "block_size": 16}
    return Candidate(address, **(values | changes))  # type: ignore[arg-type]


def held(num_blocks: int, salt: bytes = b"") -> frozenset[int]:
    return frozenset(short_key(k) for k in block_hashes(TOKENS, 16, salt)[:num_blocks])


def picks(candidates: list[Candidate], request: RoutedRequest, count: int = 300) -> Counter[str]:
    rng = random.Random(0)
    chosen = [pick(candidates, request, rng) for _ in range(count)]
    return Counter(c.address for c in chosen if c is not None)


def test_only_ready_staying_schedulers_of_the_right_weights_are_eligible() -> None:
    candidates = [
        ready("ok"),
        ready("draining", draining=True),
        ready("waiting", ready=False),
        ready("other", model_fingerprint="v"),
    ]
    request = RoutedRequest(TOKENS, model_fingerprint="w")
    assert [c.address for c in eligible(candidates, request)] == ["ok"]
    assert picks(candidates[1:3], request) == Counter()


def test_a_scheduler_that_just_failed_is_taken_only_when_it_is_the_last() -> None:
    request = RoutedRequest(TOKENS, excluded=frozenset({"a"}))
    assert set(picks([ready("a"), ready("b")], request)) == {"b"}
    assert set(picks([ready("a")], request)) == {"a"}


def test_equal_schedulers_share_requests() -> None:
    shares = picks([ready(a) for a in "abcd"], RoutedRequest(TOKENS))
    assert min(shares[a] for a in "abcd") > 20


def test_the_less_loaded_of_two_is_taken() -> None:
    assert set(picks([ready("busy", running=50), ready("idle")], RoutedRequest(TOKENS))) == {"idle"}
    assert set(picks([ready("queue", waiting=9), ready("runs", running=9)], RoutedRequest(TOKENS))) == {"runs"}
    assert set(picks([ready("ours", own_inflight=9), ready("idle")], RoutedRequest(TOKENS))) == {"idle"}


def test_a_long_cached_prefix_outweighs_some_load_but_not_any() -> None:
    cached = ready("cached", prefix_hashes=held(60), running=2)
    assert set(picks([cached, *(ready(a) for a in "abc")], RoutedRequest(TOKENS))) == {"cached"}
    cached.running = 100
    assert "cached" not in picks([cached, *(ready(a) for a in "abc")], RoutedRequest(TOKENS))


def test_a_prefix_ends_at_its_first_missing_block() -> None:
    keys = [short_key(k) for k in block_hashes(TOKENS, 16)]
    assert cached_prefix_tokens(ready("a", prefix_hashes=frozenset(keys[:3] + keys[4:])), keys) == 48
    assert cached_prefix_tokens(ready("a", prefix_hashes=held(5, b"salt")), keys) == 0
