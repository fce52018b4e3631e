"""Log-probabilities in the two shapes of the OpenAI API.

Tokens are shown as text, never in a tokenizer's internal spelling. A token that is only a part of a character is
written as `bytes:\\xf0\\x9f`. What the text leaves out (special tokens, where they are skipped) has its name as token
and no bytes, so that the bytes of the chosen tokens always join to the text.
"""

from __future__ import annotations

import codecs
import json
from collections.abc import Sequence
from functools import lru_cache
from typing import Any, Protocol

from pagemill.step import TokenLogprobs

LEAST_LOGPROB = -9999.0
_CACHED_TOKENS = 32768

_Utf8Decoder = codecs.getincrementaldecoder("utf-8")


class TokenSpelling(Protocol):
    """What is needed of a tokenizer."""

    special_ids: frozenset[int]

    def token_bytes(self, token_id: int) -> bytes:
        """Bytes of one token, special tokens by their name."""
        ...


def finite(logprob: float) -> float:
    """The value, or -9999 where the token is impossible: JSON has no infinity. NaN compares false, so it clamps too."""
    return logprob if logprob > LEAST_LOGPROB else LEAST_LOGPROB


def token_label(raw: bytes) -> str:
    """A token by itself as a string."""
    try:
        return raw.decode()
    except UnicodeDecodeError:
        return "bytes:" + "".join(f"\\x{byte:02x}" for byte in raw)


class ChatLogprobs:
    """`logprobs` of chat choices: stateless per token, so entries are joined from cached JSON."""

    def __init__(self, spelling: TokenSpelling, *, skip_special_tokens: bool) -> None:
        self._spelling = spelling
        self._skipped = spelling.special_ids if skip_special_tokens else frozenset()
        self._fragment = lru_cache(maxsize=_CACHED_TOKENS)(self._build_fragment)

    def content_json(self, token_ids: Sequence[int], logprobs: TokenLogprobs) -> str:
        """The array `content`, as JSON: one entry per token with `num_top` alternatives."""
        entries, k = [], logprobs.num_top
        for at, (token_id, logprob) in enumerate(zip(token_ids, logprobs.chosen, strict=True)):
            top = ",".join(
                self._entry(logprobs.top_ids[i], logprobs.top_logprobs[i]) + "}" for i in range(at * k, (at + 1) * k)
            )
            entries.append(f'{self._entry(token_id, logprob)},"top_logprobs":[{top}]}}')
        return f"[{','.join(entries)}]"

    def _entry(self, token_id: int, logprob: float) -> str:
        return f"{self._fragment(token_id)}{finite(logprob)!r}"

    def _build_fragment(self, token_id: int) -> str:
        raw = self._spelling.token_bytes(token_id)
        shown = [] if token_id in self._skipped else list(raw)
        return f'{{"token":{json.dumps(token_label(raw))},"bytes":{json.dumps(shown)},"logprob":'


class CompletionLogprobs:
    """`logprobs` of one choice of a completion, token by token: strings that join to the text, and their offsets.

    A character made of several tokens belongs to the last of them; the others have an empty string.
    """

    def __init__(self, spelling: TokenSpelling, *, skip_special_tokens: bool, text_offset: int = 0) -> None:
        self._spelling = spelling
        self._skipped = spelling.special_ids if skip_special_tokens else frozenset()
        self._decoder = _Utf8Decoder("replace")
        self._offset = text_offset

    def echo(self, text: str, token_ids: Sequence[int], logprobs: TokenLogprobs) -> dict[str, Any]:
        """Entries of the prompt; the first token has no log-probability.

        Args:
            text: the prompt as it is echoed.
            logprobs: of the tokens from the second on.
        """
        pieces = [self._piece(token_id) for token_id in token_ids]
        first = next((at for at, token_id in enumerate(token_ids) if token_id not in self._skipped), None)
        joined = "".join(
            piece for piece, token_id in zip(pieces, token_ids, strict=True) if token_id not in self._skipped
        )
        if first is not None and joined == f" {text}":
            pieces[first] = pieces[first][1:]  # SentencePiece puts a space before a text that has none
        if pieces:
            pieces[-1] += self._decoder.decode(b"", True)
        self._decoder.reset()
        block = self._block(token_ids[1:], pieces[1:], logprobs) if token_ids else _empty_block()
        if token_ids:
            block["tokens"].insert(0, pieces[0])
            block["token_logprobs"].insert(0, None)
            block["top_logprobs"].insert(0, None)
        block["text_offset"] = self._advance(token_ids, pieces)
        return block

    def output(self, token_ids: Sequence[int], logprobs: TokenLogprobs, *, last: bool) -> dict[str, Any]:
        """Entries of output tokens, in order of generation; `last` ends a character that remained incomplete."""
        pieces = [self._piece(token_id) for token_id in token_ids]
        if last and pieces:
            pieces[-1] += self._decoder.decode(b"", True)
        block = self._block(token_ids, pieces, logprobs)
        block["text_offset"] = self._advance(token_ids, pieces)
        return block

    def _piece(self, token_id: int) -> str:
        raw = self._spelling.token_bytes(token_id)
        return token_label(raw) if token_id in self._skipped else self._decoder.decode(raw)

    def _advance(self, token_ids: Sequence[int], pieces: Sequence[str]) -> list[int]:
        offsets = []
        for token_id, piece in zip(token_ids, pieces, strict=True):
            offsets.append(self._offset)
            self._offset += 0 if token_id in self._skipped else len(piece)
        return offsets

    def _block(self, token_ids: Sequence[int], pieces: Sequence[str], logprobs: TokenLogprobs) -> dict[str, Any]:
        k = logprobs.num_top
        top: list[dict[str, float]] = []
        for at, (token_id, piece) in enumerate(zip(token_ids, pieces, strict=True)):
            span = range(at * k, (at + 1) * k)
            labels = {logprobs.top_ids[i]: finite(logprobs.top_logprobs[i]) for i in span}
            labels[token_id] = finite(logprobs.chosen[at])
            named: dict[str, float] = {}
            for candidate, logprob in labels.items():
                own = piece if candidate == token_id and piece else token_label(self._spelling.token_bytes(candidate))
                named.setdefault(own, logprob)
            top.append(named)
        return {
            "tokens": list(pieces),
            "token_logprobs": [finite(logprob) for logprob in logprobs.chosen],
            "top_logprobs": top,
            "text_offset": [],
        }


def _empty_block() -> dict[str, Any]:
    return {"tokens": [], "token_logprobs": [], "top_logprobs": [], "text_offset": []}


def join_blocks(first: dict[str, Any] | None, second: dict[str, Any]) -> dict[str, Any]:
    """Two runs of entries of one choice as one."""
    return second if first is None else {name: first[name] + second[name] for name in second}
