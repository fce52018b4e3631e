"""Incremental detokenization: text as early as possible, never half a character.

The text of a request is defined as its joined deltas, streamed or not, so the two can not differ.
"""

from __future__ import annotations

import codecs
from collections.abc import Iterable

from router.token_bytes import TokenTable

_Utf8Decoder = codecs.getincrementaldecoder("utf-8")


class Detokenizer:
    """Text of one sequence, token by token, in constant time per token.

    Holds back at most the three bytes of an incomplete character. Bytes that can no longer become one are released as
    U+FFFD at once, so that a sequence of nonsense bytes never stalls.

    Args:
        table: the tokenizer's bytes.
        skip_special_tokens: leave special tokens out.
        continues_text: the output continues a text, so that its leading space is kept; otherwise it is a text by itself
            and loses the leading spaces that SentencePiece decoders take.
    """

    __slots__ = ("_decoder", "_holds_bytes", "_skipped", "_spaces_to_strip", "_token_bytes")

    def __init__(self, table: TokenTable, *, skip_special_tokens: bool, continues_text: bool) -> None:
        self._token_bytes = table.token_bytes
        self._skipped = table.special_ids if skip_special_tokens else frozenset()
        self._spaces_to_strip = 0 if continues_text else table.leading_spaces
        self._decoder = _Utf8Decoder("replace")
        self._holds_bytes = False  # the decoder waits for the rest of a character

    def feed(self, token_ids: Iterable[int]) -> str:
        """The text that `token_ids` complete. Ids without a token have no text."""
        table, skipped = self._token_bytes, self._skipped
        size = len(table)
        data = b"".join([table[i] for i in token_ids if i < size and i not in skipped])
        if self._spaces_to_strip:
            data = self._strip(data)
        if not self._holds_bytes:
            try:
                return data.decode()
            except UnicodeDecodeError:
                pass  # an incomplete character, or none at all
        text = self._decoder.decode(data)
        self._holds_bytes = bool(self._decoder.getstate()[0])
        return text

    def flush(self) -> str:
        """What is left at the end: an incomplete character becomes U+FFFD."""
        self._holds_bytes = False
        return self._decoder.decode(b"", True)

    def _strip(self, data: bytes) -> bytes:
        while self._spaces_to_strip and data:
            if not data.startswith(b" "):
                self._spaces_to_strip = 0
                break
            data = data[1:]
            self._spaces_to_strip -= 1
        return data


def detokenize(table: TokenTable, token_ids: Iterable[int], *, skip_special_tokens: bool) -> str:
    """Text of a whole list of ids, by the same rules."""
    detokenizer = Detokenizer(table, skip_special_tokens=skip_special_tokens, continues_text=False)
    return detokenizer.feed(token_ids) + detokenizer.flush()
