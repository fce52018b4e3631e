"""How tokens are drawn: the public parameters, their validation, and their one translation to and from protobuf."""

from __future__ import annotations

import hashlib
import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

from pagemill.errors import InvalidRequestError
from pagemill.v1 import common_pb2

MAX_N = 128
MAX_LOGPROBS = 20
MAX_STOP_STRINGS = 64
MAX_STOP_STRING_CHARS = 1024
MAX_STOP_TOKEN_IDS = 1024
MAX_LOGIT_BIAS = 1024
_UINT32_MAX = 2**32 - 1
_UINT64_MAX = 2**64 - 1


@dataclass(slots=True)
class SamplingParams:
    """How one request samples.

    Attributes:
        temperature: in [0, 100]; 0 is greedy.
        top_p: nucleus mass in (0, 1].
        top_k: most likely tokens kept; -1 and 0 are off.
        min_p: least probability relative to the most likely token, in [0, 1].
        presence_penalty: subtracted once per token present in the output, in [-2, 2].
        frequency_penalty: subtracted per occurrence in the output, in [-2, 2].
        repetition_penalty: in [0.01, 100]; over 1 makes tokens of prompt and output less likely.
        max_tokens: most output tokens of a sequence, at least 1.
        min_tokens: no sequence ends before this many output tokens.
        n: sequences per prompt.
        seed: of the counter-based generator, any 64-bit integer; None draws one.
        stop: strings that end a sequence.
        stop_token_ids: ids that end a sequence, besides the model's own.
        ignore_eos: go on past end-of-sequence tokens.
        include_stop_str_in_output: leave a matched stop string in the text.
        logprobs: alternatives reported per output token, 0 is the chosen token alone; None reports nothing.
        prompt_logprobs: the same for prompt tokens.
        logit_bias: added to the logits of these ids, each in [-100, 100].
        skip_special_tokens: leave special tokens out of the text.
    """

    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = -1
    min_p: float = 0.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    repetition_penalty: float = 1.0
    max_tokens: int = 16
    min_tokens: int = 0
    n: int = 1
    seed: int | None = None
    stop: str | list[str] | None = None
    stop_token_ids: list[int] = field(default_factory=list)
    ignore_eos: bool = False
    include_stop_str_in_output: bool = False
    logprobs: int | None = None
    prompt_logprobs: int | None = None
    logit_bias: dict[int, float] = field(default_factory=dict)
    skip_special_tokens: bool = True

    @property
    def stop_strings(self) -> list[str]:
        """`stop` as a list."""
        return [self.stop] if isinstance(self.stop, str) else list(self.stop or [])

    def validate(self, vocab_size: int | None = None) -> None:
        """Refuse what can never be sampled.

        Args:
            vocab_size: number of token ids of the model; None checks ids for their sign alone.

        Raises:
            InvalidRequestError: `field` names the parameter.
        """
        self._validate_distribution()
        self._validate_counts()
        self._validate_stops(vocab_size)
        self._validate_logit_bias(vocab_size)
        for name in ("ignore_eos", "include_stop_str_in_output", "skip_special_tokens"):
            if not isinstance(getattr(self, name), bool):
                raise _invalid(name, getattr(self, name), "true or false")

    def _validate_distribution(self) -> None:
        _check_number("temperature", self.temperature, 0, 100)
        _check_number("top_p", self.top_p, 0, 1)
        if self.top_p == 0:
            raise _invalid("top_p", self.top_p, "more than 0 and at most 1; use temperature 0 for greedy")
        _check_integer("top_k", self.top_k, -1, 2**31 - 1)
        _check_number("min_p", self.min_p, 0, 1)
        _check_number("presence_penalty", self.presence_penalty, -2, 2)
        _check_number("frequency_penalty", self.frequency_penalty, -2, 2)
        _check_number("repetition_penalty", self.repetition_penalty, 0.01, 100)

    def _validate_counts(self) -> None:
        _check_integer("max_tokens", self.max_tokens, 1, _UINT32_MAX)
        _check_integer("min_tokens", self.min_tokens, 0, _UINT32_MAX)
        if self.min_tokens > self.max_tokens:
            raise _invalid("min_tokens", self.min_tokens, f"at most max_tokens, which is {self.max_tokens}")
        _check_integer("n", self.n, 1, MAX_N)
        if self.seed is not None:
            _check_integer("seed", self.seed, -(2**63), _UINT64_MAX)
        for name in ("logprobs", "prompt_logprobs"):
            if getattr(self, name) is not None:
                _check_integer(name, getattr(self, name), 0, MAX_LOGPROBS)

    def _validate_stops(self, vocab_size: int | None) -> None:
        if self.stop is not None and not isinstance(self.stop, str | list | tuple):
            raise _invalid("stop", self.stop, "a string or a list of strings")
        if len(self.stop_strings) > MAX_STOP_STRINGS:
            raise _invalid("stop", f"{len(self.stop_strings)} strings", f"at most {MAX_STOP_STRINGS}")
        for text in self.stop_strings:
            if not isinstance(text, str) or not 1 <= len(text) <= MAX_STOP_STRING_CHARS:
                raise _invalid("stop", text, f"strings of 1 to {MAX_STOP_STRING_CHARS} characters")
        if not isinstance(self.stop_token_ids, list | tuple):
            raise _invalid("stop_token_ids", self.stop_token_ids, "a list of token ids")
        if len(self.stop_token_ids) > MAX_STOP_TOKEN_IDS:
            raise _invalid("stop_token_ids", f"{len(self.stop_token_ids)} ids", f"at most {MAX_STOP_TOKEN_IDS}")
        _check_token_ids("stop_token_ids", self.stop_token_ids, vocab_size)

    def _validate_logit_bias(self, vocab_size: int | None) -> None:
        if not isinstance(self.logit_bias, Mapping):
            raise _invalid("logit_bias", self.logit_bias, "a map of token ids to numbers")
        if len(self.logit_bias) > MAX_LOGIT_BIAS:
            raise _invalid("logit_bias", f"{len(self.logit_bias)} entries", f"at most {MAX_LOGIT_BIAS}")
        _check_token_ids("logit_bias", self.logit_bias, vocab_size)
        for bias in self.logit_bias.values():
            _check_number("logit_bias", bias, -100, 100)


def _invalid(name: str, value: object, expected: str) -> InvalidRequestError:
    shown = repr(value)
    shown = shown if len(shown) <= 80 else shown[:77] + "..."
    return InvalidRequestError(f"{name} is {shown}, must be {expected}", field=name)


def _check_number(name: str, value: object, low: float, high: float) -> None:
    # NaN compares false with everything, so a range check alone would let it pass.
    if isinstance(value, bool) or not isinstance(value, int | float) or not math.isfinite(value):
        raise _invalid(name, value, "a finite number")
    if not low <= value <= high:
        raise _invalid(name, value, f"in [{low}, {high}]")


def _check_integer(name: str, value: object, low: int, high: int) -> None:
    if isinstance(value, bool) or not isinstance(value, int):
        raise _invalid(name, value, "an integer")
    if not low <= value <= high:
        raise _invalid(name, value, f"in [{low}, {high}]")


def _check_token_ids(name: str, token_ids: Iterable[object], vocab_size: int | None) -> None:
    for token_id in token_ids:
        if isinstance(token_id, bool) or not isinstance(token_id, int) or not 0 <= token_id <= _UINT32_MAX:
            raise InvalidRequestError(f"{name} holds {token_id!r:.80}, which is not a token id", field=name)
        if vocab_size is not None and token_id >= vocab_size:
            raise InvalidRequestError(
                f"{name} holds token id {token_id}, but the model's vocabulary has {vocab_size} ids", field=name
            )


def sequence_seed(seed: int, index: int) -> int:
    """Seed of sequence `index` of a request, an unsigned 64-bit integer; index 0 keeps `seed` itself."""
    seed &= _UINT64_MAX
    if index == 0:
        return seed
    material = seed.to_bytes(8, "little") + index.to_bytes(4, "little")
    return int.from_bytes(hashlib.blake2b(material, digest_size=8, person=b"pagemill-seq").digest(), "little")


_OPTIONAL_IN_PROTO = (
    "temperature",
    "top_p",
    "top_k",
    "min_p",
    "presence_penalty",
    "frequency_penalty",
    "repetition_penalty",
    "max_tokens",
    "n",
    "seed",
    "logprobs",
    "prompt_logprobs",
    "skip_special_tokens",
)


def from_proto(msg: common_pb2.SamplingParams) -> SamplingParams:
    """Parameters of a message, absent fields at their defaults. Nothing is checked: call `validate`."""
    present: dict[str, Any] = {name: getattr(msg, name) for name in _OPTIONAL_IN_PROTO if msg.HasField(name)}
    return SamplingParams(
        **present,
        min_tokens=msg.min_tokens,
        stop=list(msg.stop) or None,
        stop_token_ids=list(msg.stop_token_ids),
        ignore_eos=msg.ignore_eos,
        include_stop_str_in_output=msg.include_stop_str_in_output,
        logit_bias=dict(msg.logit_bias),
    )


def to_proto(params: SamplingParams) -> common_pb2.SamplingParams:
    """The message of valid parameters. Negative seeds become the unsigned number with the same bits."""
    present = {name: getattr(params, name) for name in _OPTIONAL_IN_PROTO if getattr(params, name) is not None}
    if params.seed is not None:
        present["seed"] = params.seed & _UINT64_MAX
    return common_pb2.SamplingParams(
        **present,
        min_tokens=params.min_tokens,
        stop=params.stop_strings,
        stop_token_ids=params.stop_token_ids,
        ignore_eos=params.ignore_eos,
        include_stop_str_in_output=params.include_stop_str_in_output,
        logit_bias=params.logit_bias,
    )
