"""Requests and sequences as the scheduler core keeps them, and the records that go in and come out of it."""

from __future__ import annotations

import enum
from collections.abc import Hashable
from dataclasses import dataclass, field

from pagemill.block_hash import block_hash, root_hash
from pagemill.errors import PagemillError
from pagemill.sampling_params import SamplingParams, sequence_seed
from pagemill.step import SlotSampling, TokenLogprobs

Rank = tuple[int, int, int]
"""Order of service: (effective priority, arrival number, sequence index); smaller is served first, evicted last."""

# Lower than any int32 priority: what has waited too long is served first and never evicted for priority.
PROMOTED_PRIORITY = -(2**31) - 1

_NEVER = 2**62


class FinishReason(enum.IntEnum):
    """Why a sequence stopped; values are those of the protobuf enum."""

    STOP = 1
    LENGTH = 2
    ABORT = 3
    ERROR = 4


class SequenceState(enum.IntEnum):
    """Where a sequence is in its life."""

    HELD = 0  # a child of n > 1 whose prompt is still to be computed by the first sequence
    WAITING = 1  # in the waiting queue
    PREFILL = 2  # in a slot, more than one known token to compute
    DECODE = 3  # in a slot, one token a step
    ENDING = 4  # in a slot, its last token is in flight; not planned any more
    EVICTED = 5  # preempted, its tokens in flight are still to come back
    FINISHED = 6


@dataclass(slots=True)
class DeliveredTokens:
    """Output tokens that the client already has."""

    token_ids: list[int] = field(default_factory=list)
    finished: bool = False


@dataclass(slots=True)
class NewRequest:
    """One request as it comes in.

    `owner` says who gets the output (one router's stream, say); `handle` is the owner's number for the request.
    The fields from `arrival_unix_ns` on are set when a request moves here from another worker.
    """

    handle: int
    token_ids: list[int]
    params: SamplingParams
    eos_token_ids: list[int] = field(default_factory=list)
    owner: Hashable = None
    request_id: str = ""
    priority: int = 0
    deadline_unix_ns: int = 0
    cache_salt: bytes = b""
    delivered: dict[int, DeliveredTokens] = field(default_factory=dict)
    traceparent: str = ""
    arrival_unix_ns: int = 0
    scheduled_unix_ns: int = 0
    first_token_unix_ns: int = 0
    cached_tokens: int | None = None


@dataclass(slots=True)
class Usage:
    """Token counts of a whole request; completion tokens include delivered ones."""

    prompt_tokens: int
    cached_tokens: int
    completion_tokens: int


@dataclass(slots=True)
class Timings:
    """Unix time in nanoseconds, 0 where it did not happen."""

    arrival_unix_ns: int
    scheduled_unix_ns: int
    first_token_unix_ns: int
    finished_unix_ns: int


@dataclass(slots=True)
class FinishedSequence:
    """One sequence ended. `usage` and `timings` are set with the request's last one."""

    handle: int
    index: int
    reason: FinishReason
    stop_token_id: int | None = None
    usage: Usage | None = None
    timings: Timings | None = None

    @property
    def request_finished(self) -> bool:
        return self.usage is not None


@dataclass(slots=True)
class RequestFailure:
    """A request failed as a whole."""

    handle: int
    error: PagemillError
    timings: Timings


@dataclass(slots=True)
class OwnerOutput:
    """What a step brought for one owner: a token per entry of `handles` and `indexes`."""

    handles: list[int] = field(default_factory=list)
    indexes: list[int] = field(default_factory=list)
    token_ids: list[int] = field(default_factory=list)
    logprobs: dict[int, TokenLogprobs] = field(default_factory=dict)  # by position in handles
    finished: list[FinishedSequence] = field(default_factory=list)
    failures: list[RequestFailure] = field(default_factory=list)
    prompt_logprobs: list[tuple[int, TokenLogprobs]] = field(default_factory=list)  # (handle, whole prompt)


StepOutputs = dict[Hashable, OwnerOutput]


class Request:
    """A live request: what its sequences share."""

    __slots__ = (
        "arrival_unix_ns",
        "cache_salt",
        "cached_tokens",
        "deadline_unix_ns",
        "eos_token_ids",
        "finished_unix_ns",
        "first_token_unix_ns",
        "fork_blocks",
        "fork_last_step",
        "fork_step",
        "handle",
        "is_queued",
        "num_prompt_tokens",
        "number",
        "owner",
        "params",
        "priority",
        "prompt_keys",
        "prompt_logprobs",
        "prompt_token_ids",
        "request_id",
        "scheduled_unix_ns",
        "sequences",
        "stop_token_ids",
        "traceparent",
    )

    def __init__(self, new: NewRequest, number: int, arrival_unix_ns: int) -> None:
        params = new.params
        self.handle = new.handle
        self.owner = new.owner
        self.number = number
        self.request_id = new.request_id
        self.priority = new.priority
        self.deadline_unix_ns = new.deadline_unix_ns
        self.cache_salt = new.cache_salt
        self.traceparent = new.traceparent
        self.params = params
        self.prompt_token_ids = new.token_ids
        self.num_prompt_tokens = len(new.token_ids)
        self.prompt_keys: list[bytes] = []  # block keys of the prompt, extended as needed, shared by all sequences
        self.eos_token_ids = new.eos_token_ids
        self.stop_token_ids = frozenset(params.stop_token_ids)
        self.arrival_unix_ns = new.arrival_unix_ns or arrival_unix_ns
        self.scheduled_unix_ns = new.scheduled_unix_ns
        self.first_token_unix_ns = new.first_token_unix_ns
        self.finished_unix_ns = 0
        self.cached_tokens = new.cached_tokens
        # Prompt blocks kept for children that have not entered yet, and the step that computes the last of them.
        self.fork_blocks: list[int] = []
        self.fork_step = -1
        self.fork_last_step = -1  # last step that reads them
        self.is_queued = True  # counted by the bound on waiting requests until its first tokens are planned
        # Whoever has output tokens of a request got its prompt log-probabilities along with the first.
        wants_prompt_logprobs = params.prompt_logprobs is not None and not any(
            d.token_ids for d in new.delivered.values()
        )
        self.prompt_logprobs: TokenLogprobs | None = TokenLogprobs() if wants_prompt_logprobs else None
        self.sequences = [Sequence(self, index, new.delivered.get(index)) for index in range(params.n)]

    @property
    def key(self) -> tuple[Hashable, int]:
        return self.owner, self.handle

    def live_sequences(self) -> list[Sequence]:
        return [s for s in self.sequences if s.state is not SequenceState.FINISHED]

    def usage(self) -> Usage:
        completion = sum(len(s.token_ids) - self.num_prompt_tokens for s in self.sequences)
        return Usage(self.num_prompt_tokens, self.cached_tokens or 0, completion)

    def timings(self) -> Timings:
        return Timings(self.arrival_unix_ns, self.scheduled_unix_ns, self.first_token_unix_ns, self.finished_unix_ns)

    def export(self) -> NewRequest:
        """The request as another core takes it in: what is known so far counts as delivered."""
        start = self.num_prompt_tokens
        return NewRequest(
            handle=self.handle,
            token_ids=self.prompt_token_ids,
            params=self.params,
            eos_token_ids=self.eos_token_ids,
            owner=self.owner,
            request_id=self.request_id,
            priority=self.priority,
            deadline_unix_ns=self.deadline_unix_ns,
            cache_salt=self.cache_salt,
            delivered={
                s.index: DeliveredTokens(s.token_ids[start:], s.state is SequenceState.FINISHED) for s in self.sequences
            },
            traceparent=self.traceparent,
            arrival_unix_ns=self.arrival_unix_ns,
            scheduled_unix_ns=self.scheduled_unix_ns,
            first_token_unix_ns=self.first_token_unix_ns,
            cached_tokens=self.cached_tokens,
        )


class Sequence:
    """One output of a request.

    `token_ids` are known tokens. `num_known` counts them plus sampled ones still in flight; `num_computed` counts those
    whose computation is planned. Both run ahead of the results by the steps in flight. While the state is DECODE,
    `num_known` is not kept up: it is `num_computed` + 1.
    """

    __slots__ = (
        "block_ids",
        "block_keys",
        "ending_ids",
        "event_at",
        "index",
        "last_step",
        "limit",
        "num_computed",
        "num_known",
        "num_registered",
        "num_sent_blocks",
        "overtaken",
        "plan_event_at",
        "priority",
        "queued_step",
        "request",
        "row",
        "slot",
        "state",
        "token_ids",
    )

    def __init__(self, request: Request, index: int, delivered: DeliveredTokens | None) -> None:
        self.request = request
        self.index = index
        self.token_ids = list(request.prompt_token_ids)
        self.state = SequenceState.HELD
        if delivered is not None:
            self.token_ids += delivered.token_ids
            if delivered.finished:
                self.state = SequenceState.FINISHED
        self.num_known = len(self.token_ids)
        self.num_computed = 0
        self.block_ids: list[int] = []
        self.num_sent_blocks = 0  # of block_ids, how many the worker has been told
        self.block_keys: list[bytes] | None = None  # own keys, once output fills blocks; else the request's
        self.num_registered = 0  # leading blocks that were offered to the prefix cache
        self.slot = -1
        self.row = -1  # position among the decode rows
        self.last_step = -1  # last step that computes prompt tokens of it, or its last token of all
        self.limit = 0  # most tokens, prompt included; set when the request is accepted
        self.event_at = 0  # number of known tokens at which the next one needs a closer look
        self.plan_event_at = 0  # number of computed tokens at which planning needs a closer look
        ids = set(request.params.stop_token_ids)
        if not request.params.ignore_eos:
            ids.update(request.eos_token_ids)
        self.ending_ids = frozenset(ids)
        self.priority = request.priority  # effective: falls to PROMOTED_PRIORITY after too long a wait
        self.queued_step = -1
        self.overtaken = 0

    @property
    def rank(self) -> Rank:
        return self.priority, self.request.number, self.index

    @property
    def num_output_tokens(self) -> int:
        return len(self.token_ids) - self.request.num_prompt_tokens

    @property
    def is_resident(self) -> bool:
        return SequenceState.PREFILL <= self.state <= SequenceState.ENDING

    def keys(self, count: int, block_size: int) -> list[bytes]:
        """Prefix-cache keys of at least the first `count` full blocks of known tokens."""
        request = self.request
        num_prompt_keys = request.num_prompt_tokens // block_size
        keys = self.block_keys
        if keys is None:
            keys = request.prompt_keys
            self._extend_keys(keys, min(count, num_prompt_keys), block_size)
            if count <= num_prompt_keys:
                return keys
            keys = self.block_keys = keys[:num_prompt_keys]
        self._extend_keys(keys, count, block_size)
        return keys

    def _extend_keys(self, keys: list[bytes], count: int, block_size: int) -> None:
        parent = keys[-1] if keys else root_hash(self.request.cache_salt)
        for number in range(len(keys), count):
            parent = block_hash(parent, self.token_ids[number * block_size : (number + 1) * block_size])
            keys.append(parent)

    def slot_sampling(self) -> SlotSampling:
        """What the worker needs to sample this sequence."""
        request, params = self.request, self.request.params
        prompt_logprobs = params.prompt_logprobs if self.reads_prompt_logprobs else None
        return SlotSampling(
            temperature=params.temperature,
            top_p=params.top_p,
            top_k=max(params.top_k, 0),
            min_p=params.min_p,
            presence_penalty=params.presence_penalty,
            frequency_penalty=params.frequency_penalty,
            repetition_penalty=params.repetition_penalty,
            seed=sequence_seed(params.seed or 0, self.index),
            min_tokens=params.min_tokens,
            masked_until_min_tokens=sorted(self.ending_ids) if params.min_tokens else [],
            logit_bias=dict(params.logit_bias),
            num_logprobs=-1 if params.logprobs is None else params.logprobs,
            num_prompt_logprobs=-1 if prompt_logprobs is None or request.prompt_logprobs is None else prompt_logprobs,
        )

    @property
    def is_expecting_fork(self) -> bool:
        """Waits, and never was in a slot: the blocks kept for forks serve it."""
        return self.last_step < 0 and self.state in (SequenceState.HELD, SequenceState.WAITING)

    @property
    def reads_prompt_logprobs(self) -> bool:
        """The sequence that computes the whole prompt for its log-probabilities, until they are complete."""
        request = self.request
        return request.prompt_logprobs is not None and self is next(
            (s for s in request.sequences if s.state is not SequenceState.FINISHED), None
        )
