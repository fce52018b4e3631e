"""The step plan and its outcome: what a scheduler core and a worker exchange, in one process or over gRPC.

Both sides see these plain records; `scheduler/wire.py` and `worker/wire.py` translate them to and from protobuf at the
edge. Columns are parallel lists, one entry per row of the batch, so that neither side loops over attributes.
"""

from __future__ import annotations

from dataclasses import dataclass, field


@dataclass(slots=True)
class SlotSampling:
    """How one sequence samples: resolved values, no defaults left open."""

    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0  # 0 is off
    min_p: float = 0.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    repetition_penalty: float = 1.0
    seed: int = 0  # of this sequence, n > 1 already mixed in; the draw depends on (seed, position) alone
    min_tokens: int = 0
    masked_until_min_tokens: list[int] = field(default_factory=list)
    logit_bias: dict[int, float] = field(default_factory=dict)
    num_logprobs: int = -1  # -1 is none at all, 0 is the chosen token's alone
    num_prompt_logprobs: int = -1


@dataclass(slots=True)
class NewSequence:
    """A sequence that enters a slot. It also has a row in the same plan."""

    slot: int
    token_ids: list[int]  # prompt, then output tokens from before a preemption or resubmission
    num_prompt_tokens: int
    num_computed_tokens: int  # already have KV in block_ids
    block_ids: list[int]  # block table at entry, blocks for this step's tokens included
    sampling: SlotSampling


@dataclass(slots=True)
class StepPlan:
    """One step. Applied in this order: releases, new sequences, new blocks, copies, forward pass, sampling.

    A row's tokens are the next `num_tokens[row]` known tokens of its slot. The token sampled for a slot last is known
    to the worker alone until its result is back: a decode row needs no token id.
    """

    epoch: int
    step: int
    released_slots: list[int] = field(default_factory=list)
    new_sequences: list[NewSequence] = field(default_factory=list)
    slots: list[int] = field(default_factory=list)
    num_tokens: list[int] = field(default_factory=list)
    sample: list[bool] = field(default_factory=list)
    new_block_counts: list[int] = field(default_factory=list)
    new_block_ids: list[int] = field(default_factory=list)  # end to end over rows; NewSequence.block_ids not repeated
    copy_sources: list[int] = field(default_factory=list)
    copy_destinations: list[int] = field(default_factory=list)
    trace_links: list[str] = field(default_factory=list)

    @property
    def num_rows(self) -> int:
        return len(self.slots)


@dataclass(slots=True)
class TokenLogprobs:
    """Log-probabilities of a run of tokens; `top_ids` and `top_logprobs` hold `num_top` entries per token."""

    chosen: list[float] = field(default_factory=list)
    ranks: list[int] = field(default_factory=list)
    num_top: int = 0
    top_ids: list[int] = field(default_factory=list)
    top_logprobs: list[float] = field(default_factory=list)

    def extend(self, other: TokenLogprobs) -> None:
        """Append another run with the same num_top."""
        self.num_top = other.num_top
        self.chosen += other.chosen
        self.ranks += other.ranks
        self.top_ids += other.top_ids
        self.top_logprobs += other.top_logprobs


@dataclass(slots=True)
class PromptChunkLogprobs:
    """Log-probabilities of the prompt tokens first_position, first_position + 1, ... of one slot."""

    slot: int
    first_position: int
    logprobs: TokenLogprobs


@dataclass(slots=True)
class SlotFailure:
    """A row whose logits were NaN or infinite, or whose step ran out of memory. The slot samples nothing more."""

    slot: int
    message: str


@dataclass(slots=True)
class StepResult:
    """Outcome of one plan: one token per row with `sample` set, in row order (0 where the row failed).

    The last two fields are the worker's own and do not travel.
    """

    epoch: int
    step: int
    sampled_token_ids: list[int] = field(default_factory=list)
    logprobs: dict[int, TokenLogprobs] = field(default_factory=dict)  # by position in sampled_token_ids
    prompt_logprobs: list[PromptChunkLogprobs] = field(default_factory=list)
    failures: list[SlotFailure] = field(default_factory=list)
    forward_ns: int = 0
    sample_ns: int = 0
    gap_ns: int = 0
    ran_out_of_memory: bool = False  # all rows failed
    is_decode: bool = False  # one token per row, all sampled
    is_replay: bool = False  # of a CUDA graph


@dataclass(slots=True, frozen=True)
class WorkerCapacity:
    """What a worker can hold: all that a scheduler core needs to know about it."""

    num_blocks: int
    block_size: int  # tokens
    num_slots: int
    max_model_len: int  # tokens, prompt and output together
    vocab_size: int
    max_step_tokens: int
    kv_bytes_per_token: int = 0
    shares_prefixes: bool = True  # KV of equal prefixes is equal: not where rotary scaling follows the prompt length
