"""Sampling parameters: what can never be sampled is refused by name, before it reaches anybody's batch."""

from __future__ import annotations

import math
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pagemill.errors import InvalidRequestError
from pagemill.sampling_params import MAX_N, SamplingParams, from_proto, sequence_seed, to_proto
from pagemill.v1 import common_pb2

VOCAB_SIZE = 100
NUMBERS = ["temperature", "top_p", "min_p", "presence_penalty", "frequency_penalty", "repetition_penalty"]


def refused_field(**values: Any) -> str:
    with pytest.raises(InvalidRequestError) as caught:
        SamplingParams(**values).validate(VOCAB_SIZE)
    assert caught.value.field in caught.value.message
    return caught.value.field


def test_defaults_are_the_documented_ones_and_valid() -> None:
    params = SamplingParams()
    params.validate(VOCAB_SIZE)
    assert (params.temperature, params.top_p, params.top_k, params.max_tokens, params.n) == (1.0, 1.0, -1, 16, 1)


# SV01: ids outside of the vocabulary must not reach the batch of others.
@pytest.mark.parametrize("token_id", [VOCAB_SIZE, VOCAB_SIZE + 5, 2**31, 2**32, -1, "AI", True, 1.0, None])
def test_sv01_a_token_id_outside_of_the_vocabulary_is_refused_by_field(token_id: Any) -> None:
    assert refused_field(logit_bias={token_id: 1.0}) == "logit_bias"
    assert refused_field(stop_token_ids=[token_id], min_tokens=1) == "stop_token_ids"


def test_sv01_the_last_id_of_the_vocabulary_is_fine() -> None:
    SamplingParams(logit_bias={VOCAB_SIZE - 1: -100.0}, stop_token_ids=[VOCAB_SIZE - 1]).validate(VOCAB_SIZE)


# SV03: top_p = 0 is refused; tiny temperatures, both ways to switch top_k off and min_p = 1 are fine.
def test_sv03_top_p_zero_is_refused_and_tiny_values_are_not() -> None:
    assert refused_field(top_p=0) == "top_p"
    for values in ({"temperature": 1e-4}, {"temperature": 1e-6}, {"top_k": 0}, {"top_k": -1}, {"min_p": 1}):
        SamplingParams(**values).validate(VOCAB_SIZE)


# SV04: a comparison with NaN is false, so NaN passes what is written as a range check alone.
@pytest.mark.parametrize("name", NUMBERS)
@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
def test_sv04_nan_and_infinity_are_refused_by_field(name: str, value: float) -> None:
    assert refused_field(**{name: value}) == name


@pytest.mark.parametrize("value", [math.nan, math.inf])
def test_sv04_nan_that_came_by_protobuf_is_refused_by_field(value: float) -> None:
    for name in NUMBERS:
        with pytest.raises(InvalidRequestError) as caught:
            from_proto(common_pb2.SamplingParams(**{name: value})).validate(VOCAB_SIZE)
        assert caught.value.field == name
    with pytest.raises(InvalidRequestError, match="logit_bias"):
        from_proto(common_pb2.SamplingParams(logit_bias={3: value})).validate(VOCAB_SIZE)


@pytest.mark.parametrize(
    ("values", "field"),
    [
        ({"temperature": -0.1}, "temperature"),
        ({"temperature": "hot"}, "temperature"),
        ({"top_p": 1.1}, "top_p"),
        ({"top_k": -2}, "top_k"),
        ({"top_k": 1.5}, "top_k"),
        ({"min_p": -0.1}, "min_p"),
        ({"presence_penalty": 2.1}, "presence_penalty"),
        ({"frequency_penalty": -2.1}, "frequency_penalty"),
        ({"repetition_penalty": 0}, "repetition_penalty"),
        ({"max_tokens": 0}, "max_tokens"),
        ({"max_tokens": True}, "max_tokens"),
        ({"min_tokens": -1}, "min_tokens"),
        ({"min_tokens": 17}, "min_tokens"),
        ({"n": 0}, "n"),
        ({"n": MAX_N + 1}, "n"),
        ({"seed": 2**64}, "seed"),
        ({"seed": 0.5}, "seed"),
        ({"stop": ""}, "stop"),
        ({"stop": ["a", ""]}, "stop"),
        ({"stop": ["a"] * 65}, "stop"),
        ({"stop": [1]}, "stop"),
        ({"stop": 5}, "stop"),
        ({"stop_token_ids": 5}, "stop_token_ids"),
        ({"stop_token_ids": [1] * 1025}, "stop_token_ids"),
        ({"logprobs": 21}, "logprobs"),
        ({"prompt_logprobs": -1}, "prompt_logprobs"),
        ({"logit_bias": [1]}, "logit_bias"),
        ({"logit_bias": {1: 101}}, "logit_bias"),
        ({"logit_bias": {1: "x"}}, "logit_bias"),
        ({"ignore_eos": "yes"}, "ignore_eos"),
    ],
)
def test_values_out_of_range_or_of_the_wrong_kind_name_their_field(values: dict[str, Any], field: str) -> None:
    assert refused_field(**values) == field


def test_a_long_bad_value_does_not_make_a_long_message() -> None:
    with pytest.raises(InvalidRequestError) as caught:
        SamplingParams(stop=["x" * 100_000]).validate()
    assert len(caught.value.message) < 300


FINITE = st.floats(width=32, allow_nan=False, allow_infinity=False)


@given(
    temperature=st.floats(0, 100, width=32),
    top_p=st.floats(2**-20, 1, width=32),
    top_k=st.integers(-1, 1000),
    max_tokens=st.integers(1, 2**32 - 1),
    n=st.integers(1, MAX_N),
    seed=st.none() | st.integers(-(2**63), 2**64 - 1),
    stop=st.lists(st.text(min_size=1, max_size=8).filter(lambda s: s.isprintable()), max_size=4),
    logprobs=st.none() | st.integers(0, 20),
    logit_bias=st.dictionaries(st.integers(0, 99), st.floats(-100, 100, width=32), max_size=4),
    skip_special_tokens=st.booleans(),
)
def test_a_trip_through_protobuf_changes_nothing(**values: Any) -> None:
    params = SamplingParams(**values)
    params.validate(VOCAB_SIZE)
    returned = from_proto(common_pb2.SamplingParams.FromString(to_proto(params).SerializeToString()))
    params.stop = params.stop or None
    params.seed = None if params.seed is None else params.seed % 2**64
    assert returned == params


def test_absent_fields_of_a_message_take_the_defaults() -> None:
    assert from_proto(common_pb2.SamplingParams()) == SamplingParams()
    assert from_proto(common_pb2.SamplingParams(temperature=0, skip_special_tokens=False)) == SamplingParams(
        temperature=0, skip_special_tokens=False
    )


def test_the_first_sequence_keeps_the_seed_and_the_others_draw_apart() -> None:
    assert sequence_seed(7, 0) == 7
    seeds = {sequence_seed(seed, index) for seed in range(50) for index in range(20)}
    assert len(seeds) == 1000
    assert all(0 <= seed < 2**64 for seed in seeds)
    assert sequence_seed(-1, 0) == 2**64 - 1
