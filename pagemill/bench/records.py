"""What became of each request, as the clients of the load generator note it."""

from __future__ import annotations

from array import array
from dataclasses import dataclass, field

# The kind of failure of an answer that has another length than was asked for: the measurement is wrong, not the server
# busy.
WRONG_LENGTH = "wrong_length"


def _no_times() -> array[float]:
    return array("d")


@dataclass(slots=True)
class Answer:
    """One request and its answer. Times are of `time.perf_counter`, which all processes of a machine share.

    Attributes:
        num_input_tokens, num_asked_tokens: what was sent and asked for.
        start_s: when it was sent.
        arrivals_s: when each piece of the answer came that holds text or tokens.
        end_s: when the answer was complete or failed.
        num_output_tokens, num_cached_tokens: as the server counts them.
        token_ids: the answer; empty unless it was asked for.
        late_s: how much later it was sent than it was to be.
        error: kind of the failure, empty where there was none.
        reason: the failure in a sentence.
    """

    num_input_tokens: int
    num_asked_tokens: int
    start_s: float
    arrivals_s: array[float] = field(default_factory=_no_times)
    end_s: float = 0.0
    num_output_tokens: int = 0
    num_cached_tokens: int = 0
    token_ids: list[int] = field(default_factory=list)
    late_s: float = 0.0
    error: str = ""
    reason: str = ""

    def fail(self, kind: str, reason: str) -> None:
        """Note the first failure; later ones follow from it."""
        if not self.error:
            self.error, self.reason = kind, reason

    def check_length(self) -> None:
        """Note it as a failure where the answer does not have exactly the tokens that were asked for."""
        if not self.error and self.num_output_tokens != self.num_asked_tokens:
            asked, came = self.num_asked_tokens, self.num_output_tokens
            self.fail(WRONG_LENGTH, f"an answer has {came} tokens, {asked} were asked for")

    @property
    def first_token_s(self) -> float:
        """Seconds from the request to the first piece of the answer."""
        return self.arrivals_s[0] - self.start_s

    @property
    def per_token_s(self) -> float | None:
        """Mean seconds of each token after the first; None for answers of one token."""
        if self.num_output_tokens < 2:
            return None
        return (self.arrivals_s[-1] - self.arrivals_s[0]) / (self.num_output_tokens - 1)

    @property
    def whole_s(self) -> float:
        """Seconds from the request to the end of the answer."""
        return self.end_s - self.start_s
