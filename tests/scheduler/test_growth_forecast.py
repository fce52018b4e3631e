"""The forecast of blocks equals what a run of all sequences to their expected ends needs."""

from __future__ import annotations

from hypothesis import given, settings
from hypothesis import strategies as st

from pagemill.sampling_params import SamplingParams
from scheduler.growth_forecast import GrowthForecast, OutputLengths
from scheduler.sequence import NewRequest, Request, Sequence

SIZE = 4
EOS = 2


def sequence_of(num_prompt: int, num_output: int, max_tokens: int, *, may_end: bool = False) -> Sequence:
    params = SamplingParams(max_tokens=max_tokens, seed=1)
    new = NewRequest(0, [3] * num_prompt, params, [EOS] if may_end else [])
    sequence = Request(new, 0, 1).sequences[0]
    sequence.token_ids += [5] * num_output
    sequence.limit = num_prompt + max_tokens
    sequence.block_ids = list(range(-(-len(sequence.token_ids) // SIZE)))
    return sequence


def most_needed(ends: list[tuple[int, int]]) -> int:
    """Most blocks in use, of (held, in the end) blocks: each grows by one a turn and leaves when it has grown."""
    most, running = 0, [list(pair) for pair in ends]
    while running:
        most = max(most, sum(held for held, _ in running))
        running = [pair for pair in running if pair[0] < pair[1]]
        for pair in running:
            pair[0] += 1
    return most


shapes = st.tuples(st.integers(1, 40), st.integers(0, 10), st.integers(11, 60))


@settings(max_examples=200, deadline=None)
@given(residents=st.lists(shapes, max_size=8), newcomers=st.lists(shapes, min_size=1, max_size=3))
def test_there_is_room_exactly_where_the_most_that_is_needed_fits(
    residents: list[tuple[int, int, int]], newcomers: list[tuple[int, int, int]]
) -> None:
    sequences = [sequence_of(*shape) for shape in residents]
    ends = [(len(s.block_ids), -(-s.limit // SIZE)) for s in sequences]
    joined = [sequence_of(*shape) for shape in newcomers]
    all_ends = ends + [(len(s.block_ids), -(-s.limit // SIZE)) for s in joined]
    need = most_needed(all_ends)
    for spare in (-1, 0, 1):
        num_available = need + spare - sum(held for held, _ in ends)
        forecast = GrowthForecast(sequences, num_available, OutputLengths(), SIZE)
        for sequence in joined[:-1]:
            forecast.enter(sequence, len(sequence.block_ids))
        last = joined[-1]
        assert forecast.has_room(last, len(last.block_ids), len(last.block_ids)) == (spare >= 0)


def test_nothing_is_expected_of_outputs_that_may_end_until_one_has() -> None:
    lengths = OutputLengths()
    sequence = sequence_of(10, 0, 1000, may_end=True)
    assert lengths.expected(sequence) == 11
    lengths.note(sequence_of(6, 40, 1000, may_end=True))
    assert lengths.expected(sequence) == 50
    lengths.note(sequence_of(6, 60, 1000, may_end=True))
    assert lengths.expected(sequence) == 60
    lengths.note(sequence_of(6, 0, 1000, may_end=True))
    assert lengths.expected(sequence) == 60
    assert lengths.expected(sequence_of(10, 80, 1000, may_end=True)) == 91
    assert lengths.expected(sequence_of(10, 0, 20, may_end=True)) == 30


def test_outputs_that_cannot_end_by_themselves_are_expected_at_their_limit_and_teach_nothing() -> None:
    lengths = OutputLengths()
    lengths.note(sequence_of(6, 40, 1000))
    assert lengths.expected(sequence_of(10, 0, 1000)) == 1010
    assert lengths.expected(sequence_of(10, 0, 1000, may_end=True)) == 11
