"""What a finished or growing request looks like to the people who sent it.

Plain records without a dependency on any service: the offline engine fills them from the scheduler core, the gRPC
client from protobuf.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Literal

FinishReasonName = Literal["stop", "length", "abort", "error"]


@dataclass(slots=True)
class Logprob:
    """Log-probability of one token at one position.

    Attributes:
        logprob: natural logarithm under the model's distribution before temperature, penalties and bias; never less
            than -9999.
        rank: 1 for the most likely token; None where the rank is unknown.
        decoded_token: the token as text, None where no tokenizer was at hand (the gRPC client has none).
    """

    logprob: float
    rank: int | None = None
    decoded_token: str | None = None


PositionLogprobs = dict[int, Logprob]
"""Token id to log-probability: the chosen token and the alternatives of one position."""


@dataclass(slots=True)
class CompletionOutput:
    """One of the n sequences of a request.

    Attributes:
        index: which of the n sequences, 0-based; not a position in a batch.
        text: decoded output, without a matched stop string unless it was asked for.
        token_ids: output ids in order, the one that ended the sequence included.
        cumulative_logprob: sum over the chosen tokens; None where no log-probabilities were asked for.
        logprobs: one mapping per output token; None where not asked for.
        finish_reason: None while the sequence runs.
        stop_reason: the stop string or stop token id that ended it; None for an end-of-sequence id of the model.
    """

    index: int
    text: str = ""
    token_ids: list[int] = field(default_factory=list)
    cumulative_logprob: float | None = None
    logprobs: list[PositionLogprobs] | None = None
    finish_reason: FinishReasonName | None = None
    stop_reason: int | str | None = None

    @property
    def finished(self) -> bool:
        """Nothing follows for this sequence."""
        return self.finish_reason is not None

    def extend(self, delta: CompletionOutput) -> None:
        """Appends what `delta`, of the same index, has new."""
        self.text += delta.text
        self.token_ids += delta.token_ids
        if delta.logprobs is not None:
            if self.logprobs is None:
                self.logprobs = []
            self.logprobs += delta.logprobs
        if delta.cumulative_logprob is not None:
            self.cumulative_logprob = (self.cumulative_logprob or 0.0) + delta.cumulative_logprob
        self.finish_reason = delta.finish_reason or self.finish_reason
        self.stop_reason = self.stop_reason if delta.stop_reason is None else delta.stop_reason


@dataclass(slots=True)
class RequestMetrics:
    """When things happened to a request: Unix time in seconds, None where it did not happen.

    Always arrival_time <= first_scheduled_time <= first_token_time <= finished_time.
    """

    arrival_time: float
    first_scheduled_time: float | None = None
    first_token_time: float | None = None
    finished_time: float | None = None

    @property
    def time_in_queue(self) -> float | None:
        """Seconds between arrival and the first step that held tokens of the request."""
        return None if self.first_scheduled_time is None else self.first_scheduled_time - self.arrival_time

    @property
    def time_to_first_token(self) -> float | None:
        """Seconds between arrival and the first output token."""
        return None if self.first_token_time is None else self.first_token_time - self.arrival_time


@dataclass(slots=True)
class RequestOutput:
    """A request and what it has produced: all of it, or what is new where a stream hands out deltas.

    Attributes:
        request_id: the submitted id, or the drawn one.
        prompt: the text as it was given; None for a prompt of token ids and for conversations.
        prompt_token_ids: ids that the model saw.
        prompt_logprobs: None where not asked for; else one entry per prompt token, the first is None.
        outputs: one entry per sequence, ordered by index; in a delta only those with something new.
        finished: all sequences ended; true exactly once, in the last output of a stream.
        metrics: set when finished.
        num_cached_tokens: prompt tokens whose KV came from the prefix cache; set when finished.
    """

    request_id: str
    prompt: str | None = None
    prompt_token_ids: list[int] = field(default_factory=list)
    prompt_logprobs: list[PositionLogprobs | None] | None = None
    outputs: list[CompletionOutput] = field(default_factory=list)
    finished: bool = False
    metrics: RequestMetrics | None = None
    num_cached_tokens: int | None = None

    def extend(self, delta: RequestOutput) -> None:
        """Appends the next delta of the same request's stream."""
        self.prompt_token_ids = self.prompt_token_ids or delta.prompt_token_ids
        self.prompt_logprobs = self.prompt_logprobs or delta.prompt_logprobs
        by_index = {output.index: output for output in self.outputs}
        for new in delta.outputs:
            if new.index not in by_index:
                by_index[new.index] = CompletionOutput(new.index)
            by_index[new.index].extend(new)
        self.outputs = [by_index[index] for index in sorted(by_index)]
        self.finished = delta.finished
        self.metrics = delta.metrics or self.metrics
        self.num_cached_tokens = self.num_cached_tokens if delta.num_cached_tokens is None else delta.num_cached_tokens


def position_logprobs(
    chosen_ids: Sequence[int],
    chosen: Sequence[float],
    ranks: Sequence[int],
    num_top: int,
    top_ids: Sequence[int],
    top_logprobs: Sequence[float],
) -> list[PositionLogprobs]:
    """Parallel columns to one mapping per token, the alternatives in order of likelihood.

    Args:
        chosen_ids, chosen, ranks: one entry per token.
        num_top: alternatives per token.
        top_ids, top_logprobs: `num_top` entries per token, most likely first.
    Raises:
        ValueError: the columns do not fit together.
    """
    if not len(chosen_ids) == len(chosen) == len(ranks) or not (
        len(top_ids) == len(top_logprobs) == num_top * len(chosen)
    ):
        raise ValueError("log-probability columns differ in length")
    positions: list[PositionLogprobs] = []
    for at, (token_id, logprob, rank) in enumerate(zip(chosen_ids, chosen, ranks, strict=True)):
        base = at * num_top
        entry = {top_ids[base + k]: Logprob(top_logprobs[base + k], k + 1) for k in range(num_top)}
        entry[token_id] = Logprob(logprob, rank)
        positions.append(entry)
    return positions
