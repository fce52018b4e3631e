from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from router.stop import StopMatcher, StopStrings

TEXTS = st.text(alphabet="abcM:\n👩", max_size=40)
STOPS = st.lists(st.text(alphabet="abcM:\n👩", min_size=1, max_size=6), min_size=1, max_size=4)


def run(pieces: list[str], stops: list[str], *, include: bool = False) -> tuple[str, str | None, list[str]]:
    """Text, matched stop, and the pieces as they were delivered."""
    matcher = StopMatcher(StopStrings(stops), include_stop_str_in_output=include)
    delivered: list[str] = []
    for piece in pieces:
        match = matcher.feed(piece)
        delivered.append(match.text)
        if match.stop is not None:
            return "".join(delivered), match.stop, delivered
    delivered.append(matcher.flush())
    return "".join(delivered), None, delivered


def first_completed(text: str, stops: list[str]) -> tuple[str, str | None]:
    """The definition, in its slow form: the stop that is completed first, the longest of several."""
    for end in range(1, len(text) + 1):
        completed = [s for s in stops if text[:end].endswith(s)]
        if completed:
            stop = max(completed, key=len)
            return text[: end - len(stop)], stop
    return text, None


@given(TEXTS, STOPS, st.data())
def test_the_outcome_does_not_depend_on_how_text_is_cut(text: str, stops: list[str], data: st.DataObject) -> None:
    cuts = sorted(data.draw(st.lists(st.integers(0, len(text)), max_size=8)))
    pieces = [text[a:b] for a, b in zip([0, *cuts], [*cuts, len(text)], strict=True)]
    got, stop, _ = run(pieces, stops)
    assert (got, stop) == first_completed(text, stops)


@given(TEXTS, STOPS)
def test_held_back_is_less_than_the_longest_stop(text: str, stops: list[str]) -> None:
    matcher = StopMatcher(StopStrings(stops), include_stop_str_in_output=False)
    delivered = 0
    for fed, char in enumerate(text, start=1):
        match = matcher.feed(char)
        delivered += len(match.text)
        if match.stop is not None:
            break
        assert fed - delivered <= max(map(len, stops)) - 1


@given(TEXTS, STOPS)
def test_including_the_stop_adds_exactly_the_stop(text: str, stops: list[str]) -> None:
    without, stop, _ = run(list(text), stops)
    included, same, _ = run(list(text), stops, include=True)
    assert same == stop
    assert included == without + (stop or "")


def test_a_match_that_restarts_inside_of_a_partial_match_is_found() -> None:
    assert run(list("aaab"), ["aab"])[:2] == ("a", "aab")
    assert run(["xabab", "abac"], ["ababac"])[:2] == ("xab", "ababac")


def test_SP04_a_failed_partial_match_is_released_once() -> None:
    text, stop, delivered = run(["Mi", "ra", "!", " yes"], ["\n", "Mira:"])
    assert (text, stop) == ("Mira! yes", None)
    assert delivered == ["", "", "Mira!", " yes", ""]
