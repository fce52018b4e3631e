"""What is asked of a server: conversations of random token ids, each drawn from the seed and its own number.

A workload is a small value that travels to other processes; `conversation(index)` is the same in all of them and does
not depend on which others were drawn before.
"""

from __future__ import annotations

import math
import random
from dataclasses import dataclass
from typing import Protocol

# The lowest ids are special tokens in most vocabularies.
_LOWEST_ID = 10
_SHORTEST = 4
# Lengths of the chat mix end here, in multiples of the median.
_LONGEST_OF_MEDIAN = 8


@dataclass(frozen=True, slots=True)
class Turn:
    """One request of a conversation.

    Attributes:
        token_ids: what the turn adds behind everything that was said before.
        num_output_tokens: exact length of the answer.
        pause_s: time between the answer before and this turn.
    """

    token_ids: list[int]
    num_output_tokens: int
    pause_s: float = 0.0


@dataclass(frozen=True, slots=True)
class Conversation:
    """Turns that follow each other; a single request is a conversation of one turn."""

    turns: tuple[Turn, ...]


class Workload(Protocol):
    """A source of conversations."""

    def conversation(self, index: int) -> Conversation:
        """Conversation number `index`, from 0; any number can be asked for, in any order."""
        ...

    @property
    def num_turns(self) -> int:
        """Requests of each conversation."""
        ...


@dataclass(frozen=True, slots=True)
class TokenSource:
    """Random token ids below `vocab_size`, special ones at the beginning of the vocabulary left out."""

    vocab_size: int
    seed: int

    def generator(self, *key: object) -> random.Random:
        """A generator of its own for each key."""
        return random.Random(":".join(map(str, (self.seed, *key))))

    def draw(self, generator: random.Random, count: int) -> list[int]:
        return generator.choices(range(min(_LOWEST_ID, self.vocab_size - 1), self.vocab_size), k=count)


@dataclass(frozen=True, slots=True)
class FixedLengths:
    """Every prompt and every answer is as long as the others."""

    tokens: TokenSource
    input_len: int
    output_len: int
    num_turns: int = 1

    def conversation(self, index: int) -> Conversation:
        generator = self.tokens.generator("fixed", index)
        return Conversation((Turn(self.tokens.draw(generator, self.input_len), self.output_len),))


@dataclass(frozen=True, slots=True)
class ChatLengths:
    """Lengths as in chats: log-normal around the medians `input_len` and `output_len`, many short ones and a long tail.

    `sigma` is the standard deviation of the logarithm. Lengths are cut at 4 and at eight times the median, and so that
    both together fit `max_model_len`.
    """

    tokens: TokenSource
    input_len: int
    output_len: int
    sigma: float
    max_model_len: int
    num_turns: int = 1

    def conversation(self, index: int) -> Conversation:
        generator = self.tokens.generator("chat", index)
        num_output = min(self._length(generator, self.output_len), self.max_model_len - _SHORTEST)
        num_input = min(self._length(generator, self.input_len), self.max_model_len - num_output)
        return Conversation((Turn(self.tokens.draw(generator, num_input), num_output),))

    def _length(self, generator: random.Random, median: int) -> int:
        drawn = round(median * math.exp(generator.gauss(0.0, self.sigma)))
        return max(_SHORTEST, min(drawn, _LONGEST_OF_MEDIAN * median))


@dataclass(frozen=True, slots=True)
class SharedPrefixes:
    """Prompts of `input_len` that begin with one of `num_prefixes` prefixes of `prefix_len`, as system prompts do."""

    tokens: TokenSource
    input_len: int
    output_len: int
    prefix_len: int
    num_prefixes: int
    num_turns: int = 1

    def conversation(self, index: int) -> Conversation:
        generator = self.tokens.generator("shared-prefix", index)
        which = generator.randrange(self.num_prefixes)
        prefix = self.tokens.draw(self.tokens.generator("prefix", which), self.prefix_len)
        rest = self.tokens.draw(generator, self.input_len - self.prefix_len)
        return Conversation((Turn(prefix + rest, self.output_len),))


@dataclass(frozen=True, slots=True)
class MultiTurn:
    """Conversations that grow: each turn sends all turns and answers before it and `input_len` new tokens.

    `mean_pause_s` is the mean of the exponential time for which a person thinks before a turn.
    """

    tokens: TokenSource
    input_len: int
    output_len: int
    num_turns: int
    mean_pause_s: float = 0.0

    def conversation(self, index: int) -> Conversation:
        generator = self.tokens.generator("multi-turn", index)
        turns = []
        for number in range(self.num_turns):
            pause_s = generator.expovariate(1 / self.mean_pause_s) if number and self.mean_pause_s else 0.0
            turns.append(Turn(self.tokens.draw(generator, self.input_len), self.output_len, pause_s))
        return Conversation(tuple(turns))


def longest_sequence(workload: Workload) -> int:
    """Tokens of the longest sequence that the workload can ask for, prompt and answer together."""
    if isinstance(workload, ChatLengths):
        return workload.max_model_len
    if isinstance(workload, FixedLengths | SharedPrefixes | MultiTurn):
        return workload.num_turns * (workload.input_len + workload.output_len)
    raise TypeError(f"unknown workload {type(workload).__name__}")
