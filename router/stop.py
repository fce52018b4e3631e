"""Stop strings on streamed text: matched inside and across tokens, never leaked in part."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass


class StopStrings:
    """The stop strings of one request with their failure functions (Knuth, Morris, Pratt).

    Immutable: the sequences of the request share it.
    """

    __slots__ = ("failures", "strings")

    def __init__(self, strings: Sequence[str]) -> None:
        self.strings = [s for s in dict.fromkeys(strings) if s]
        self.failures = [_failure_function(s) for s in self.strings]

    def __bool__(self) -> bool:
        return bool(self.strings)


def _failure_function(pattern: str) -> list[int]:
    failure = [0] * len(pattern)
    matched = 0
    for i in range(1, len(pattern)):
        while matched and pattern[i] != pattern[matched]:
            matched = failure[matched - 1]
        matched += pattern[i] == pattern[matched]
        failure[i] = matched
    return failure


@dataclass(slots=True, frozen=True)
class StopMatch:
    """What feeding a piece of text brought: text to deliver, and the stop string if one was completed."""

    text: str
    stop: str | None = None


class StopMatcher:
    """Stop strings of one sequence.

    The stop that is completed first wins, the longest one where several end at the same character: the outcome
    does not depend on how the text was cut into tokens. Held back is the longest end of the text that a stop
    string starts with: at most (longest stop - 1) characters.
    """

    __slots__ = ("_include", "_pending", "_states", "_stops")

    def __init__(self, stops: StopStrings, *, include_stop_str_in_output: bool) -> None:
        self._stops = stops
        self._include = include_stop_str_in_output
        self._states = [0] * len(stops.strings)
        self._pending = ""

    def feed(self, text: str) -> StopMatch:
        """Take more text. After a match nothing more may be fed."""
        for position, char in enumerate(text):
            matched = self._advance(char)
            if matched is not None:
                seen = self._pending + text[: position + 1]
                self._pending = ""
                return StopMatch(seen if self._include else seen[: len(seen) - len(matched)], matched)
        seen = self._pending + text
        held = max(self._states, default=0)
        self._pending = seen[len(seen) - held :]
        return StopMatch(seen[: len(seen) - held])

    def flush(self) -> str:
        """The text held back, when the sequence ended otherwise."""
        pending, self._pending = self._pending, ""
        self._states = [0] * len(self._states)
        return pending

    def _advance(self, char: str) -> str | None:
        completed: str | None = None
        for which, pattern in enumerate(self._stops.strings):
            failure = self._stops.failures[which]
            state = self._states[which]
            while state and char != pattern[state]:
                state = failure[state - 1]
            state += char == pattern[state]
            self._states[which] = state
            if state == len(pattern) and (completed is None or len(pattern) > len(completed)):
                completed = pattern
        return completed
