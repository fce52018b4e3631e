"""Bytes of every token, read once from a tokenizer: what incremental detokenization works on."""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import tokenizers

from pagemill.errors import ModelLoadError

_SPACE_MARK = "\u2581"  # stands for a space in SentencePiece vocabularies
_BYTE_TOKEN = re.compile(r"<0x([0-9A-Fa-f]{2})>")


@dataclass(slots=True, frozen=True)
class TokenTable:
    """Bytes by token id, and how runs of tokens join.

    `leading_spaces` is how many spaces the decoder takes from the start of a text.
    """

    token_bytes: list[bytes]
    special_ids: frozenset[int]
    leading_spaces: int = 0


def _byte_level_alphabet() -> dict[str, int]:
    """The printable stand-in of each byte in byte-level BPE vocabularies, inverted."""
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [b for b in range(256) if b not in set(printable)]
    alphabet = {chr(b): b for b in printable}
    alphabet.update({chr(0x100 + i): b for i, b in enumerate(others)})
    return alphabet


_ALPHABET = _byte_level_alphabet()


def _byte_level(token: str) -> bytes:
    try:
        return bytes([_ALPHABET[char] for char in token])
    except KeyError:
        # An added token with characters outside of the alphabet is plain text.
        return token.encode("utf-8", "surrogatepass")


def _sentencepiece(token: str, *, byte_fallback: bool) -> bytes:
    if byte_fallback and (match := _BYTE_TOKEN.fullmatch(token)):
        return bytes([int(match[1], 16)])
    return token.replace(_SPACE_MARK, " ").encode("utf-8", "surrogatepass")


def _decoder_steps(decoder: dict[str, Any]) -> list[dict[str, Any]]:
    if decoder.get("type") == "Sequence":
        return [step for inner in decoder["decoders"] for step in _decoder_steps(inner)]
    return [decoder]


def _reader_for(decoder: dict[str, Any] | None) -> tuple[Callable[[str], bytes], int]:
    """How a token's name becomes bytes, and the number of leading spaces taken from a text."""
    steps = _decoder_steps(decoder) if decoder else []
    kinds = [step.get("type") for step in steps]
    if kinds == ["ByteLevel"]:
        return _byte_level, 0
    known = {"Replace", "ByteFallback", "Fuse", "Strip", "Metaspace"}
    if not kinds or not set(kinds) <= known or not ({"Replace", "Metaspace"} & set(kinds)):
        raise ModelLoadError(
            f"tokenizer decoder {'+'.join(map(str, kinds)) or 'none'} is not supported; supported are ByteLevel and "
            "SentencePiece styles (Replace, ByteFallback, Fuse, Strip, Metaspace)",
            field="tokenizer",
        )
    spaces = 0
    for step in steps:
        if step["type"] == "Strip" and step.get("content") == " ":
            spaces += int(step.get("start", 0))
        if step["type"] == "Metaspace" and step.get("prepend_scheme", "always") != "never":
            spaces += 1
    fallback = "ByteFallback" in kinds
    return (lambda token: _sentencepiece(token, byte_fallback=fallback)), spaces


def build_token_table(backend: tokenizers.Tokenizer, decoder: dict[str, Any] | None) -> TokenTable:
    """Read the table of a tokenizer.

    Args:
        backend: the tokenizer.
        decoder: the `decoder` entry of its JSON form.

    Raises:
        ModelLoadError: the decoder is of a kind that has no bytes per token.
    """
    to_bytes, leading_spaces = _reader_for(decoder)
    vocab = backend.get_vocab(with_added_tokens=True)
    table = [b""] * (max(vocab.values(), default=-1) + 1)
    for token, token_id in vocab.items():
        table[token_id] = to_bytes(token)
    special = frozenset(i for i, added in backend.get_added_tokens_decoder().items() if added.special)
    return TokenTable(table, special, leading_spaces)
