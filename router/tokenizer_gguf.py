"""Tokenizer of a GGUF file, built from its metadata."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any

import tokenizers
from tokenizers import AddedToken, Regex, decoders, models, normalizers, pre_tokenizers

from pagemill.errors import ModelLoadError
from pagemill.gguf_file import read_gguf_head
from router.tokenizer import TokenizerParts
from router.tokenizer_hf import set_bos_eos
from router.tokenizer_sentencepiece import (
    CONTROL,
    NORMAL,
    UNKNOWN,
    USER_DEFINED,
    SentencePieceVocab,
    build_backend,
)

_log = logging.getLogger(__name__)

_CONTRACTIONS = "(?i:'s|'t|'re|'ve|'m|'ll|'d)"
_WORDS = r"[^\r\n\p{L}\p{N}]?\p{L}+"
_TAIL = r" ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
_CASED = (
    r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]*[\p{Ll}\p{Lm}\p{Lo}\p{M}]+|"
    r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]+[\p{Ll}\p{Lm}\p{Lo}\p{M}]*"
)

# How text is cut before BPE: a pattern, or None for the cut of GPT-2; `tokenizer.ggml.pre` names one.
_PATTERNS: dict[str, str] = {
    "llama-bpe": rf"{_CONTRACTIONS}|{_WORDS}|\p{{N}}{{1,3}}|{_TAIL}",
    "qwen2": rf"{_CONTRACTIONS}|{_WORDS}|\p{{N}}|{_TAIL}",
    "tekken": rf"{_CASED}|\p{{N}}| ?[^\s\p{{L}}\p{{N}}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+",
}
_ALIASES = {
    "gpt-2": "gpt2",
    "gpt2": "gpt2",
    "default": "gpt2",
    "": "gpt2",
    "smollm": "digits",
    "starcoder": "digits",
    "refact": "digits",
    "command-r": "digits",
    "llama3": "llama-bpe",
    "llama-v3": "llama-bpe",
    "llama-bpe": "llama-bpe",
    "qwen2": "qwen2",
    "deepseek-r1-qwen": "qwen2",
    "tekken": "tekken",
}
_WHOLE_WORDS_FIRST = {"llama-bpe", "tekken"}
_NORMALIZED = {"qwen2"}


def read_gguf(path: Path) -> TokenizerParts:
    """Read a file's tokenizer.

    Raises:
        ModelLoadError: the file has none, or one of an unsupported kind; the message lists the supported.
    """
    metadata = read_gguf_head(path).metadata
    tokens = metadata.get("tokenizer.ggml.tokens")
    kind = metadata.get("tokenizer.ggml.model")
    if not isinstance(tokens, list) or not tokens or kind is None:
        raise ModelLoadError(
            f"{path} holds no tokenizer (tokenizer.ggml.model and tokenizer.ggml.tokens)", field="model"
        )
    if kind == "gpt2":
        backend, adds_bos = _byte_level_bpe(metadata, tokens, path)
    elif kind == "llama":
        backend, adds_bos = _sentencepiece(metadata, tokens), True
    else:
        raise ModelLoadError(
            f"{path}: tokenizer model {kind!r} is not supported; supported are gpt2, llama", field="model"
        )
    special = _special_tokens(metadata, tokens)
    bos = special.get("bos_token") if metadata.get("tokenizer.ggml.add_bos_token", adds_bos) else None
    eos = special.get("eos_token") if metadata.get("tokenizer.ggml.add_eos_token", False) else None
    if bos or eos:
        set_bos_eos(backend, bos, eos)
    return TokenizerParts(backend, special, _eos_ids(metadata), _chat_templates(metadata))


def _byte_level_bpe(metadata: dict[str, Any], tokens: list[str], path: Path) -> tuple[tokenizers.Tokenizer, bool]:
    name = str(metadata.get("tokenizer.ggml.pre", ""))
    style = _ALIASES.get(name)
    if style is None:
        supported = ", ".join(sorted(filter(None, _ALIASES)))
        raise ModelLoadError(
            f"{path}: pre-tokenizer {name!r} is not supported; supported are {supported}", field="model"
        )
    if name in ("", "default"):
        _log.warning("the GGUF file names no pre-tokenizer; text is cut as GPT-2 does")
    merges = [_merge(line) for line in metadata.get("tokenizer.ggml.merges", [])]
    vocab = {token: i for i, token in enumerate(tokens)}
    try:
        model = models.BPE(vocab, merges, fuse_unk=False, ignore_merges=style in _WHOLE_WORDS_FIRST)
    except Exception as error:  # the library raises bare Exception
        raise ModelLoadError(f"{path}: tokens and merges do not fit together: {error}", field="model") from error
    backend = tokenizers.Tokenizer(model)
    if style in _NORMALIZED:
        backend.normalizer = normalizers.NFC()
    backend.pre_tokenizer = _pre_tokenizer(style)
    backend.decoder = decoders.ByteLevel()
    kinds = metadata.get("tokenizer.ggml.token_type") or [NORMAL] * len(tokens)
    added = [(t, k) for t, k in zip(tokens, kinds, strict=False) if k in (CONTROL, UNKNOWN, USER_DEFINED)]
    backend.add_tokens([AddedToken(t, special=k != USER_DEFINED, normalized=False) for t, k in added])
    return backend, style == "llama-bpe"


def _merge(line: str) -> tuple[str, str]:
    left, _, right = line.partition(" ")
    return left, right


def _pre_tokenizer(style: str) -> pre_tokenizers.PreTokenizer:
    if style == "gpt2":
        return pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True)
    if style == "digits":
        return pre_tokenizers.Sequence(
            [
                pre_tokenizers.Digits(individual_digits=True),
                pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True),
            ]
        )
    return pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(_PATTERNS[style]), "isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )


def _sentencepiece(metadata: dict[str, Any], tokens: list[str]) -> tokenizers.Tokenizer:
    vocab = SentencePieceVocab(
        pieces=tokens,
        scores=metadata.get("tokenizer.ggml.scores") or [-float(i) for i in range(len(tokens))],
        kinds=metadata.get("tokenizer.ggml.token_type") or [NORMAL] * len(tokens),
        add_dummy_prefix=bool(metadata.get("tokenizer.ggml.add_space_prefix", True)),
        remove_extra_whitespaces=bool(metadata.get("tokenizer.ggml.remove_extra_whitespaces", False)),
        charsmap=bytes(b & 0xFF for b in metadata.get("tokenizer.ggml.precompiled_charsmap", [])),
    )
    return build_backend(vocab)


def _special_tokens(metadata: dict[str, Any], tokens: list[str]) -> dict[str, str]:
    keys = {"bos_token": "bos", "eos_token": "eos", "unk_token": "unknown", "pad_token": "padding"}
    found: dict[str, str] = {}
    for name, key in keys.items():
        token_id = metadata.get(f"tokenizer.ggml.{key}_token_id")
        if token_id is not None and 0 <= int(token_id) < len(tokens):
            found[name] = tokens[int(token_id)]
    return found


def _eos_ids(metadata: dict[str, Any]) -> list[int]:
    keys = ("eos_token_id", "eot_token_id", "eom_token_id")
    return [int(v) for key in keys if (v := metadata.get(f"tokenizer.ggml.{key}")) is not None]


def _chat_templates(metadata: dict[str, Any]) -> dict[str, str]:
    templates: dict[str, str] = {}
    prefix = "tokenizer.chat_template."
    for key, value in metadata.items():
        if key == "tokenizer.chat_template" and isinstance(value, str):
            templates["default"] = value
        elif key.startswith(prefix) and isinstance(value, str):
            templates[key.removeprefix(prefix)] = value
    return templates
