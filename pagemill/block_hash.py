"""Keys of the prefix cache: one chained, collision-resistant hash per full block of tokens."""

from __future__ import annotations

import hashlib
from array import array
from collections.abc import Sequence


def root_hash(salt: bytes = b"") -> bytes:
    """Parent of a sequence's first block. Different salts never share blocks."""
    return hashlib.blake2b(salt, digest_size=16, person=b"pagemill-kv-root").digest()


def block_hash(parent: bytes, token_ids: Sequence[int]) -> bytes:
    """Key of a full block: 16 bytes over (parent, tokens). `parent` is the previous block's key or `root_hash`."""
    return hashlib.blake2b(parent + array("I", token_ids).tobytes(), digest_size=16).digest()


def block_hashes(token_ids: Sequence[int], block_size: int, salt: bytes = b"") -> list[bytes]:
    """Keys of all full blocks of `token_ids`, in order."""
    keys: list[bytes] = []
    parent = root_hash(salt)
    for start in range(0, len(token_ids) - block_size + 1, block_size):
        parent = block_hash(parent, token_ids[start : start + block_size])
        keys.append(parent)
    return keys


def short_key(key: bytes) -> int:
    """First 8 bytes of a key as an integer, as load reports carry it."""
    return int.from_bytes(key[:8], "little")
