"""From tokens to text deltas: detokenization and stop strings for each sequence of one request."""

from __future__ import annotations

from dataclasses import dataclass, field

from pagemill.sampling_params import SamplingParams
from pagemill.step import TokenLogprobs
from router.detokenizer import Detokenizer
from router.generation import CompletedSequence, TextDelta
from router.stop import StopMatcher, StopStrings
from router.token_bytes import TokenTable
from router.wire import RequestUpdate, SequenceEnd, TokenRun


@dataclass(slots=True, frozen=True)
class TextRules:
    """How one request's tokens become text; shared by its sequences."""

    table: TokenTable
    sampling: SamplingParams
    stops: StopStrings
    ending_ids: frozenset[int]  # tokens whose text is left out where they end a sequence
    continues_text: bool

    @classmethod
    def of(
        cls, table: TokenTable, sampling: SamplingParams, eos_token_ids: list[int], *, continues_text: bool
    ) -> TextRules:
        """The rules of a request."""
        ending = frozenset() if sampling.include_stop_str_in_output else frozenset(sampling.stop_token_ids)
        if not sampling.ignore_eos:
            ending |= frozenset(eos_token_ids)
        return cls(table, sampling, StopStrings(sampling.stop_strings), ending, continues_text)


class SequenceText:
    """One sequence: tokens in, deltas out.

    A token is delivered with the delta that has text, or with the last one: while a character or a possible stop string
    is incomplete there is no delta at all, rather than an empty one.
    """

    def __init__(self, index: int, rules: TextRules) -> None:
        self.index = index
        self.num_tokens = 0
        self.finished = False
        self._rules = rules
        self._detokenizer = Detokenizer(
            rules.table,
            skip_special_tokens=rules.sampling.skip_special_tokens,
            continues_text=rules.continues_text,
        )
        self._matcher: StopMatcher | None = None
        if rules.stops:
            self._matcher = StopMatcher(
                rules.stops, include_stop_str_in_output=rules.sampling.include_stop_str_in_output
            )
        self._held: TextDelta | None = None  # tokens whose text is not complete

    def feed(self, run: TokenRun | None, end: SequenceEnd | None) -> TextDelta | None:
        """Take what one update brought; None while there is no text to deliver.

        A delta whose stop_reason is a string ends the sequence by a stop string: it must then be aborted.
        """
        if run is None:
            run = TokenRun()
        elif end is None and self._held is None and self._matcher is None and run.logprobs is None:
            # By far the most common: plain text that goes on.
            self.num_tokens += len(run.token_ids)
            delta = TextDelta(self.index, self._detokenizer.feed(run.token_ids), run.token_ids)
            if delta.text:
                return delta
            self._held = delta
            return None
        text, num_used, stop = self._text_of(run.token_ids, end)
        if stop is None and end is not None:
            tail, stop = self._finish_text()
            text += tail
        held = self._held or TextDelta(self.index)
        held.text += text
        held.token_ids += run.token_ids[:num_used]
        if run.logprobs is not None:
            used = run.logprobs if num_used == len(run.token_ids) else _first(run.logprobs, num_used)
            held.logprobs = _joined(held.logprobs, used)
        self.num_tokens += num_used
        if stop is not None:
            held.finish_reason, held.stop_reason = "stop", stop
        elif end is not None:
            held.finish_reason, held.stop_reason = end.reason, end.stop_token_id
        self.finished = held.finish_reason is not None
        if not held.text and not self.finished:
            self._held = held
            return None
        self._held = None
        return held

    def _text_of(self, token_ids: list[int], end: SequenceEnd | None) -> tuple[str, int, str | None]:
        """Text, number of tokens used, matched stop string."""
        visible = token_ids
        if end is not None and end.reason == "stop" and token_ids and token_ids[-1] in self._rules.ending_ids:
            visible = token_ids[:-1]
        if self._matcher is None:
            return self._detokenizer.feed(visible), len(token_ids), None
        texts: list[str] = []
        for position, token_id in enumerate(visible):
            text = self._detokenizer.feed((token_id,))
            if self.num_tokens + position < self._rules.sampling.min_tokens:
                texts.append(text)
                continue
            match = self._matcher.feed(text)
            texts.append(match.text)
            if match.stop is not None:
                return "".join(texts), position + 1, match.stop
        return "".join(texts), len(token_ids), None

    def _finish_text(self) -> tuple[str, str | None]:
        tail = self._detokenizer.flush()
        if self._matcher is None:
            return tail, None
        match = self._matcher.feed(tail)
        if match.stop is not None:
            return match.text, match.stop
        return match.text + self._matcher.flush(), None


def _first(logprobs: TokenLogprobs, count: int) -> TokenLogprobs:
    top = count * logprobs.num_top
    return TokenLogprobs(
        logprobs.chosen[:count],
        logprobs.ranks[:count],
        logprobs.num_top,
        logprobs.top_ids[:top],
        logprobs.top_logprobs[:top],
    )


def _joined(first: TokenLogprobs | None, second: TokenLogprobs) -> TokenLogprobs:
    if first is None:
        return second
    first.extend(second)
    return first


class RequestText:
    """All sequences of one request."""

    def __init__(self, rules: TextRules) -> None:
        self.sequences = [SequenceText(i, rules) for i in range(rules.sampling.n)]
        self._num_unfinished = len(self.sequences)

    def feed(self, update: RequestUpdate) -> list[TextDelta]:
        """Deltas of an update, in order of index."""
        deltas: list[TextDelta] = []
        for index in sorted(update.runs.keys() | update.ends.keys()) if update.ends else sorted(update.runs):
            if index < len(self.sequences) and not self.sequences[index].finished:
                sequence = self.sequences[index]
                delta = sequence.feed(update.runs.get(index), update.ends.get(index))
                if delta is not None:
                    deltas.append(delta)
                self._num_unfinished -= sequence.finished
        return deltas

    @property
    def finished(self) -> bool:
        return self._num_unfinished == 0

    @property
    def num_tokens(self) -> int:
        """Output tokens delivered or held, over all sequences."""
        return sum(s.num_tokens for s in self.sequences)


@dataclass(slots=True)
class DeltaJoiner:
    """Joins deltas to whole sequences: what a non-streamed answer is."""

    sequences: dict[int, CompletedSequence] = field(default_factory=dict)

    def add(self, delta: TextDelta) -> None:
        """Append a delta."""
        whole = self.sequences.get(delta.index)
        if whole is None:
            whole = self.sequences[delta.index] = CompletedSequence(delta.index)
        whole.text += delta.text
        whole.token_ids += delta.token_ids
        if delta.logprobs is not None:
            if whole.logprobs is None:
                whole.logprobs = TokenLogprobs()
            whole.logprobs.extend(delta.logprobs)
        if delta.finish_reason is not None:
            whole.finish_reason, whole.stop_reason = delta.finish_reason, delta.stop_reason

    def joined(self) -> list[CompletedSequence]:
        """Sequences in order of index."""
        return [self.sequences[i] for i in sorted(self.sequences)]
