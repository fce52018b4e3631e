"""Gathers what a step brought, per owner, and who is told about it."""

from __future__ import annotations

from collections.abc import Hashable
from typing import Protocol

from pagemill.step import StepResult
from scheduler.sequence import FinishReason, OwnerOutput, Request, Sequence, StepOutputs


class SchedulerObserver(Protocol):
    """Told about turns in a request's life, for metrics and traces. Called on the core's thread; must be quick."""

    def first_token(self, request: Request) -> None:
        """The first output token came back."""

    def tokens(self, num_tokens: int) -> None:
        """A result brought tokens, this many of them of sequences that had one before; called also where none had."""

    def sequence_finished(self, reason: FinishReason) -> None:
        """One sequence ended."""

    def request_ended(self, request: Request, error_code: int) -> None:
        """No sequence of the request is left; `error_code` is 0 where it did not fail."""


class NullObserver:
    """Observes nothing."""

    def first_token(self, request: Request) -> None:
        pass

    def tokens(self, num_tokens: int) -> None:
        pass

    def sequence_finished(self, reason: FinishReason) -> None:
        pass

    def request_ended(self, request: Request, error_code: int) -> None:
        pass


class OutputCollector:
    """Output since the last `take`."""

    def __init__(self) -> None:
        self._outputs: StepOutputs = {}
        # Handle and index per row of the rows seen last: the same list comes again while nobody joins or leaves.
        self._rows: list[Sequence] = []
        self._columns: tuple[list[int], list[int]] = ([], [])
        self._has_one_owner = False

    def __bool__(self) -> bool:
        return bool(self._outputs)

    def of(self, owner: Hashable) -> OwnerOutput:
        output = self._outputs.get(owner)
        if output is None:
            output = self._outputs[owner] = OwnerOutput()
        return output

    def take(self) -> StepOutputs:
        outputs, self._outputs = self._outputs, {}
        return outputs

    def add_tokens(self, rows: list[Sequence], result: StepResult, dropped: set[Sequence]) -> None:
        """One sampled token per row, but for the `dropped` ones."""
        if rows is not self._rows:
            self._rows = rows
            self._columns = [s.request.handle for s in rows], [s.index for s in rows]
            owners = {s.request.owner for s in rows}
            self._has_one_owner = len(owners) == 1
        handles, indexes = self._columns
        tokens = result.sampled_token_ids
        if self._has_one_owner and not dropped:
            # By far the most common step: one router, all rows alive, the rows of the step before.
            output = self.of(rows[0].request.owner)
            start = len(output.handles)
            output.handles += handles
            output.indexes += indexes
            output.token_ids += tokens
            output.logprobs.update((start + position, entry) for position, entry in result.logprobs.items())
            return
        for position, sequence in enumerate(rows):
            if sequence in dropped:
                continue
            output = self.of(sequence.request.owner)
            output.handles.append(handles[position])
            output.indexes.append(indexes[position])
            output.token_ids.append(tokens[position])
            if position in result.logprobs:
                output.logprobs[len(output.handles) - 1] = result.logprobs[position]
