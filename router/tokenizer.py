"""Text to token ids and back, by the `tokenizers` library alone: neither torch nor transformers is imported.

A `Tokenizer` is immutable after it is built and may be used from any thread.
"""

from __future__ import annotations

import asyncio
import hashlib
import json
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path

import tokenizers

from pagemill.errors import InvalidRequestError, ModelLoadError
from pagemill.model_source import ModelSource
from router.token_bytes import TokenTable, build_token_table

# Shorter texts are tokenized on the event loop: below this a thread hop costs more than the work.
INLINE_TEXT_CHARS = 2048


@dataclass(slots=True)
class TokenizerParts:
    """What a format's reader found; `Tokenizer` is built from it."""

    backend: tokenizers.Tokenizer
    special_tokens: dict[str, str] = field(default_factory=dict)  # bos_token, eos_token, ... as templates see them
    eos_token_ids: list[int] = field(default_factory=list)
    chat_templates: dict[str, str] = field(default_factory=dict)  # by name; "default" is the usual one


class Tokenizer:
    """One model's tokenizer.

    Attributes:
        vocab_size: number of ids that the tokenizer knows, added tokens included.
        eos_token_ids: ids that end a sequence, from all of the model's files.
        fingerprint: hex digest over everything that decides ids and text.
        special_ids: ids left out of text by skip_special_tokens.
        max_token_bytes: length of the longest token.
    """

    def __init__(self, parts: TokenizerParts) -> None:
        self._backend = parts.backend
        self.special_tokens = dict(parts.special_tokens)
        self.eos_token_ids = sorted(set(parts.eos_token_ids))
        self.chat_templates = dict(parts.chat_templates)
        serialized = parts.backend.to_str()
        self.table: TokenTable = build_token_table(parts.backend, json.loads(serialized).get("decoder"))
        self.vocab_size = len(self.table.token_bytes)
        self.special_ids = self.table.special_ids
        self.max_token_bytes = max((len(b) for b in self.table.token_bytes), default=1) or 1
        self.fingerprint = hashlib.blake2b(serialized.encode(), digest_size=16).hexdigest()
        # A normalizer may shorten text, so that a text's length says nothing certain about its token count.
        self._keeps_length = parts.backend.normalizer is None

    def encode(self, text: str, *, add_special_tokens: bool = True) -> list[int]:
        """Token ids of `text`; names of special tokens in it become those tokens.

        Raises:
            InvalidRequestError: the text holds lone surrogates, which no UTF-8 text can.
        """
        try:
            return list(self._backend.encode_batch_fast([text], add_special_tokens=add_special_tokens)[0].ids)
        except (UnicodeEncodeError, TypeError) as error:
            raise InvalidRequestError("the prompt is no valid Unicode text", field="prompt") from error

    def decode(self, token_ids: list[int], *, skip_special_tokens: bool = True) -> str:
        """Text of `token_ids` by the library's own decoder: the reference for `Detokenizer`."""
        return str(self._backend.decode(token_ids, skip_special_tokens=skip_special_tokens))

    def min_token_count(self, text: str) -> int:
        """A lower bound of the number of tokens, without tokenizing."""
        return len(text) // self.max_token_bytes if self._keeps_length else 0

    def token_bytes(self, token_id: int) -> bytes:
        """Bytes of one token; empty for an id without a token."""
        table = self.table.token_bytes
        return table[token_id] if 0 <= token_id < len(table) else b""

    def token_id(self, token: str) -> int | None:
        """Id of a token by its name in the vocabulary."""
        found = self._backend.token_to_id(token)
        return None if found is None else int(found)


class TokenizerPool:
    """Encodes long texts on threads, short ones at once. Owns its threads; `close` ends them."""

    def __init__(self, tokenizer: Tokenizer, num_threads: int) -> None:
        self.tokenizer = tokenizer
        self._executor = ThreadPoolExecutor(num_threads, thread_name_prefix="tokenizer")

    async def encode(self, text: str, *, add_special_tokens: bool = True) -> list[int]:
        """As `Tokenizer.encode`; never blocks the event loop for long."""
        if len(text) <= INLINE_TEXT_CHARS:
            return self.tokenizer.encode(text, add_special_tokens=add_special_tokens)
        loop = asyncio.get_running_loop()
        return await loop.run_in_executor(
            self._executor, lambda: self.tokenizer.encode(text, add_special_tokens=add_special_tokens)
        )

    def close(self) -> None:
        """End the threads; texts being tokenized are finished, waiting ones are dropped."""
        self._executor.shutdown(wait=False, cancel_futures=True)


def load_tokenizer(source: ModelSource, override: str = "") -> Tokenizer:
    """The tokenizer of a model, or the one that `override` (a directory, tokenizer.json or .gguf) names.

    Raises:
        ModelLoadError: files are missing or of an unsupported kind; the message names them.
    """
    from router import tokenizer_gguf, tokenizer_hf

    path = Path(override).expanduser() if override else Path(source.path)
    if not path.exists():
        raise ModelLoadError(f"tokenizer {path} does not exist", field="tokenizer" if override else "model")
    if path.suffix == ".gguf":
        return Tokenizer(tokenizer_gguf.read_gguf(path))
    return Tokenizer(tokenizer_hf.read_hf(path))
