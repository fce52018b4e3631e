"""Workloads: the same from the same seed, whatever was drawn before, and as they say of themselves."""

from __future__ import annotations

import math
import pickle
import statistics

import numpy as np
import pytest

from pagemill.bench.arrivals import random_arrivals
from pagemill.bench.engines import FreshWorkloads
from pagemill.bench.workloads import (
    ChatLengths,
    FixedLengths,
    MultiTurn,
    SharedPrefixes,
    TokenSource,
    Workload,
    longest_sequence,
)

TOKENS = TokenSource(1000, 7)
WORKLOADS = [
    FixedLengths(TOKENS, 20, 5),
    ChatLengths(TOKENS, 100, 50, 0.8, 2048),
    SharedPrefixes(TOKENS, 32, 4, 24, 3),
    MultiTurn(TOKENS, 16, 8, 3, 0.5),
]


@pytest.mark.parametrize("workload", WORKLOADS, ids=lambda workload: type(workload).__name__)
def test_a_conversation_depends_on_seed_and_number_alone(workload: Workload) -> None:
    forwards = [workload.conversation(index) for index in range(20)]
    copied = pickle.loads(pickle.dumps(workload))
    assert [copied.conversation(index) for index in reversed(range(20))] == forwards[::-1]
    assert all(len(conversation.turns) == workload.num_turns for conversation in forwards)
    prompts = [tuple(turn.token_ids) for conversation in forwards for turn in conversation.turns]
    assert len(set(prompts)) == len(prompts)


@pytest.mark.parametrize("workload", WORKLOADS, ids=lambda workload: type(workload).__name__)
def test_no_conversation_is_longer_than_the_workload_says(workload: Workload) -> None:
    for index in range(300):
        turns = workload.conversation(index).turns
        assert sum(len(turn.token_ids) + turn.num_output_tokens for turn in turns) <= longest_sequence(workload)


def test_another_seed_gives_other_prompts() -> None:
    other = FixedLengths(TokenSource(1000, 8), 20, 5)
    assert other.conversation(0) != WORKLOADS[0].conversation(0)


def test_token_ids_are_those_of_the_vocabulary_without_its_first() -> None:
    generator = TOKENS.generator("any")
    drawn = TOKENS.draw(generator, 20_000)
    assert min(drawn) == 10
    assert max(drawn) == 999
    tiny = TokenSource(5, 0)
    assert set(tiny.draw(tiny.generator("any"), 50)) == {4}


def test_fixed_lengths_are_exact() -> None:
    (turn,) = FixedLengths(TOKENS, 20, 5).conversation(3).turns
    assert (len(turn.token_ids), turn.num_output_tokens, turn.pause_s) == (20, 5, 0.0)


def test_chat_lengths_are_log_normal_around_their_medians() -> None:
    workload = ChatLengths(TOKENS, 200, 100, 0.5, 1 << 20)
    turns = [workload.conversation(index).turns[0] for index in range(4000)]
    inputs = [len(turn.token_ids) for turn in turns]
    assert statistics.median(inputs) == pytest.approx(200, rel=0.05)
    assert statistics.median(turn.num_output_tokens for turn in turns) == pytest.approx(100, rel=0.05)
    assert statistics.stdev(math.log(length) for length in inputs) == pytest.approx(0.5, rel=0.05)
    assert len(set(inputs)) > 100


def test_chat_lengths_fit_a_short_context() -> None:
    workload = ChatLengths(TOKENS, 200, 100, 1.5, 256)
    for index in range(500):
        (turn,) = workload.conversation(index).turns
        assert len(turn.token_ids) >= 4
        assert turn.num_output_tokens >= 4
        assert len(turn.token_ids) + turn.num_output_tokens <= 256


def test_shared_prefixes_are_few_and_what_follows_is_new() -> None:
    workload = SharedPrefixes(TOKENS, 32, 4, 24, 3)
    prompts = [workload.conversation(index).turns[0].token_ids for index in range(60)]
    assert {len(prompt) for prompt in prompts} == {32}
    assert len({tuple(prompt[:24]) for prompt in prompts}) == 3
    assert len({tuple(prompt[24:]) for prompt in prompts}) == 60


def test_turns_pause_before_all_but_the_first() -> None:
    conversations = [MultiTurn(TOKENS, 4, 2, 5, 2.0).conversation(index) for index in range(400)]
    assert {conversation.turns[0].pause_s for conversation in conversations} == {0.0}
    pauses = [turn.pause_s for conversation in conversations for turn in conversation.turns[1:]]
    assert statistics.mean(pauses) == pytest.approx(2.0, rel=0.1)
    assert all(turn.pause_s == 0 for turn in MultiTurn(TOKENS, 4, 2, 5).conversation(0).turns)


@pytest.mark.parametrize("burstiness", [0.25, 1.0, 4.0])
def test_gaps_have_the_mean_of_the_rate_and_the_asked_variation(burstiness: float) -> None:
    times_s = random_arrivals(20.0, burstiness, 3, count=40_000).times_s
    gaps = np.diff(times_s, prepend=0.0)
    assert (gaps >= 0).all()
    assert gaps.mean() == pytest.approx(1 / 20, rel=0.05)
    assert gaps.var() / gaps.mean() ** 2 == pytest.approx(burstiness, rel=0.1)


def test_arrivals_are_bounded_by_count_and_by_time_and_repeat_with_the_seed() -> None:
    whole = random_arrivals(10.0, 1.0, 5, count=100)
    assert len(whole.times_s) == 100
    assert random_arrivals(10.0, 1.0, 5, count=100) == whole
    assert random_arrivals(10.0, 1.0, 6, count=100) != whole
    early = random_arrivals(10.0, 1.0, 5, duration_s=2.0)
    assert early.times_s == tuple(time_s for time_s in whole.times_s if time_s <= 2.0)
    assert random_arrivals(math.inf, 1.0, 5, count=3).times_s == (0.0, 0.0, 0.0)


def test_fresh_workloads_never_repeat_a_prompt() -> None:
    fresh = FreshWorkloads(1000, 1)
    prompts = [tuple(fresh.make(16, 4).conversation(index).turns[0].token_ids) for _ in range(5) for index in range(8)]
    assert len(set(prompts)) == 40
    again = FreshWorkloads(1000, 1)
    assert tuple(again.make(16, 4).conversation(0).turns[0].token_ids) == prompts[0]
