"""SentencePiece vocabularies, BPE and unigram, as `tokenizers` models: from a .model file or from GGUF's columns."""

from __future__ import annotations

import struct
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

import tokenizers
from tokenizers import AddedToken, decoders, models, normalizers

from pagemill.errors import ModelLoadError
from router.tokenizer import TokenizerParts

# Kinds of piece; GGUF's token types use the same numbers.
NORMAL, UNKNOWN, CONTROL, USER_DEFINED, UNUSED, BYTE = 1, 2, 3, 4, 5, 6

_SPACE_MARK = "\u2581"


@dataclass(slots=True)
class SentencePieceVocab:
    """Pieces in id order and the rules around them."""

    pieces: list[str] = field(default_factory=list)
    scores: list[float] = field(default_factory=list)
    kinds: list[int] = field(default_factory=list)
    is_unigram: bool = False
    add_dummy_prefix: bool = True
    remove_extra_whitespaces: bool = False
    charsmap: bytes = b""  # compiled normalization rules


def build_backend(vocab: SentencePieceVocab) -> tokenizers.Tokenizer:
    """The tokenizer of a vocabulary, without beginning and end tokens around texts."""
    ids = {piece: i for i, piece in enumerate(vocab.pieces)}
    unknown = next((i for i, kind in enumerate(vocab.kinds) if kind == UNKNOWN), None)
    has_bytes = BYTE in vocab.kinds
    if vocab.is_unigram:
        scored = list(zip(vocab.pieces, vocab.scores, strict=True))
        model: models.Model = models.Unigram(scored, unk_id=unknown, byte_fallback=has_bytes)
    else:
        model = models.BPE(
            ids,
            _merges(vocab, ids),
            unk_token=None if unknown is None else vocab.pieces[unknown],
            fuse_unk=True,
            byte_fallback=has_bytes,
        )
    backend = tokenizers.Tokenizer(model)
    steps: list[normalizers.Normalizer] = []
    if vocab.charsmap:
        steps.append(normalizers.Precompiled(vocab.charsmap))
    if vocab.remove_extra_whitespaces:
        steps += [
            normalizers.Replace(tokenizers.Regex(r"\A +| +\z"), ""),
            normalizers.Replace(tokenizers.Regex(" {2,}"), " "),
        ]
    if vocab.add_dummy_prefix:
        steps.append(normalizers.Prepend(_SPACE_MARK))
    steps.append(normalizers.Replace(" ", _SPACE_MARK))
    backend.normalizer = normalizers.Sequence(steps)
    after = [decoders.Strip(" ", 1, 0)] if vocab.add_dummy_prefix else []
    backend.decoder = decoders.Sequence(
        [decoders.Replace(_SPACE_MARK, " "), decoders.ByteFallback(), decoders.Fuse(), *after]
    )
    special = {CONTROL, UNKNOWN}
    named = zip(vocab.pieces, vocab.kinds, strict=True)
    backend.add_tokens(
        [AddedToken(p, special=k in special, normalized=False) for p, k in named if k in special | {USER_DEFINED}]
    )
    return backend


def _merges(vocab: SentencePieceVocab, ids: dict[str, int]) -> list[tuple[str, str]]:
    """SentencePiece joins the neighbours whose joined piece scores best; this is that order as a list of merges."""
    ranked: list[tuple[float, int, int, str, str]] = []
    mergeable = {p for p, kind in zip(vocab.pieces, vocab.kinds, strict=True) if kind in (NORMAL, USER_DEFINED, UNUSED)}
    for piece in mergeable:
        score = vocab.scores[ids[piece]]
        for cut in range(1, len(piece)):
            left, right = piece[:cut], piece[cut:]
            if left in mergeable and right in mergeable:
                ranked.append((-score, ids[left], ids[right], left, right))
    ranked.sort()
    return [(left, right) for *_, left, right in ranked]


def read_sentencepiece(file: Path) -> TokenizerParts:
    """Read a SentencePiece .model file.

    Raises:
        ModelLoadError: no such model.
    """
    try:
        vocab = _parse_model(file.read_bytes())
        named = _control_names(vocab)
    except (OSError, ValueError, IndexError, struct.error) as error:
        raise ModelLoadError(f"{file} is no SentencePiece model: {error}", field="tokenizer") from error
    return TokenizerParts(build_backend(vocab), named)


def _control_names(vocab: SentencePieceVocab) -> dict[str, str]:
    if not vocab.pieces:
        raise ValueError("it has no pieces")
    usual = {"bos_token": "<s>", "eos_token": "</s>", "unk_token": "<unk>", "pad_token": "<pad>"}
    control = {p for p, k in zip(vocab.pieces, vocab.kinds, strict=True) if k in (CONTROL, UNKNOWN)}
    return {name: token for name, token in usual.items() if token in control}


def _parse_model(data: bytes) -> SentencePieceVocab:
    """The fields of sentencepiece's ModelProto that decide tokens."""
    vocab = SentencePieceVocab(remove_extra_whitespaces=True)
    for number, value in _fields(data):
        if number == 1 and isinstance(value, bytes):
            piece = dict(_fields(value))
            text = piece.get(1, b"")
            score = piece.get(2, b"\0\0\0\0")
            vocab.pieces.append(text.decode("utf-8") if isinstance(text, bytes) else "")
            vocab.scores.append(struct.unpack("<f", score)[0] if isinstance(score, bytes) else 0.0)
            vocab.kinds.append(int(piece.get(3, NORMAL)))
        elif number == 2 and isinstance(value, bytes):
            kind = dict(_fields(value)).get(3, 1)
            if kind not in (1, 2):
                raise ValueError("it is neither unigram nor BPE")
            vocab.is_unigram = kind == 1
        elif number == 3 and isinstance(value, bytes):
            rules = dict(_fields(value))
            charsmap = rules.get(2, b"")
            vocab.charsmap = charsmap if isinstance(charsmap, bytes) else b""
            vocab.add_dummy_prefix = bool(rules.get(3, 1))
            vocab.remove_extra_whitespaces = bool(rules.get(4, 1))
    return vocab


def _fields(data: bytes) -> Iterator[tuple[int, int | bytes]]:
    """Fields of a protobuf message: number, and an integer (varint) or the raw bytes."""
    at = 0
    while at < len(data):
        key, at = _varint(data, at)
        wire_type = key & 7
        if wire_type == 0:
            value, at = _varint(data, at)
            yield key >> 3, value
            continue
        if wire_type == 2:
            length, at = _varint(data, at)
        elif wire_type in (1, 5):
            length = 8 if wire_type == 1 else 4
        else:
            raise ValueError(f"it is no protobuf message (wire type {wire_type})")
        if at + length > len(data):
            raise ValueError("it ends in the middle of a field")
        yield key >> 3, data[at : at + length]
        at += length


def _varint(data: bytes, at: int) -> tuple[int, int]:
    value = shift = 0
    while True:
        byte = data[at]
        at += 1
        value |= (byte & 0x7F) << shift
        shift += 7
        if byte < 0x80:
            return value, at
        if shift > 63:
            raise ValueError("it holds a number of more than 64 bits")
