"""What a core takes in: limits of the scheduler, and the refusal of requests that can never run."""

from __future__ import annotations

from dataclasses import dataclass

from pagemill.errors import ContextLengthError, InvalidRequestError
from pagemill.step import WorkerCapacity
from scheduler.sequence import NewRequest


@dataclass(slots=True, frozen=True)
class SchedulerLimits:
    """Bounds of one scheduler core. The defaults of the last two are good for any of them.

    Attributes:
        max_num_batched_tokens: most tokens in one step.
        max_num_seqs: most sequences in slots at once.
        max_queued_requests: requests that wait for their first step; more are refused.
        max_queued_tokens: prompt tokens that wait; more are refused.
        enable_prefix_caching: share KV blocks of equal prefixes.
        ageing_steps: a sequence that waited this many steps is served before all others.
        max_overtakes: how often others may be admitted before the first in line, for which blocks are short.
    """

    max_num_batched_tokens: int = 2048
    max_num_seqs: int = 256
    max_queued_requests: int = 1024
    max_queued_tokens: int = 4 << 20
    enable_prefix_caching: bool = True
    ageing_steps: int = 256
    max_overtakes: int = 64


def longest_sequence(capacity: WorkerCapacity) -> int:
    """Tokens of the longest sequence, prompt and output together, that a worker can hold."""
    return min(capacity.max_model_len, capacity.num_blocks * capacity.block_size)


def check_request(new: NewRequest, capacity: WorkerCapacity) -> None:
    """Refuse what can never run on a worker of this capacity.

    Raises:
        ContextLengthError: the prompt leaves no room for one output token; the message has both numbers.
        InvalidRequestError: anything else, naming the field.
    """
    num_tokens = len(new.token_ids)
    if num_tokens == 0:
        raise InvalidRequestError("the prompt has no tokens", field="token_ids")
    if num_tokens >= capacity.max_model_len:
        raise ContextLengthError(
            f"the prompt has {num_tokens} tokens and the context length is {capacity.max_model_len}, "
            "with at least one token left for output",
            field="token_ids",
        )
    kv_tokens = capacity.num_blocks * capacity.block_size
    if num_tokens >= kv_tokens:
        raise ContextLengthError(
            f"the prompt has {num_tokens} tokens and the KV cache holds {kv_tokens}, less than this context length "
            "needs: the request can never run here",
            field="token_ids",
        )
    _check_ids("token_ids", new.token_ids, capacity.vocab_size)
    new.params.validate(capacity.vocab_size)
    for index, delivered in new.delivered.items():
        if not 0 <= index < new.params.n:
            raise InvalidRequestError(f"delivered names sequence {index} of {new.params.n}", field="delivered.index")
        _check_ids("delivered.token_ids", delivered.token_ids, capacity.vocab_size)
        if num_tokens + len(delivered.token_ids) > longest_sequence(capacity):
            raise ContextLengthError(
                f"prompt and delivered tokens are {num_tokens + len(delivered.token_ids)} and the context length is "
                f"{longest_sequence(capacity)}",
                field="delivered.token_ids",
            )


def _check_ids(field: str, token_ids: list[int], vocab_size: int) -> None:
    if token_ids and not 0 <= min(token_ids) <= max(token_ids) < vocab_size:
        position = next(i for i, token in enumerate(token_ids) if not 0 <= token < vocab_size)
        raise InvalidRequestError(
            f"{field}[{position}] is {token_ids[position]}, but the model's vocabulary has {vocab_size} ids",
            field=field,
        )
