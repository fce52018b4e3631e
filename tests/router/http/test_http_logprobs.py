"""Log-probabilities: strict JSON, tokens as text, strings and bytes that join to the text."""

import json
import math

import pytest

from pagemill.step import TokenLogprobs
from router.http.logprobs import ChatLogprobs, CompletionLogprobs, finite, join_blocks, token_label


class Spelling:
    """Five tokens: a word, an emoji cut in two, an end-of-sequence name, a SentencePiece-style space."""

    special_ids = frozenset({3})
    _table = (b" word", b"\xf0\x9f", b"\x98\x80", b"<eos>", b" ")

    def token_bytes(self, token_id: int) -> bytes:
        return self._table[token_id]


def columns(chosen: list[float], num_top: int = 0, top: list[tuple[int, float]] | None = None) -> TokenLogprobs:
    top = top or []
    return TokenLogprobs(
        chosen, [1] * len(chosen), num_top, [token_id for token_id, _ in top], [logprob for _, logprob in top]
    )


@pytest.mark.parametrize(("value", "shown"), [(-math.inf, -9999.0), (math.nan, -9999.0), (-1.5, -1.5), (0.0, 0.0)])
def test_lp01_impossible_entries_are_clamped(value: float, shown: float) -> None:
    assert finite(value) == shown


def test_lp01_chat_entries_are_strict_json_with_infinities_clamped() -> None:
    text = ChatLogprobs(Spelling(), skip_special_tokens=True).content_json(
        [0], columns([-math.inf], 2, [(0, -0.5), (1, -math.inf)])
    )
    (entry,) = json.loads(text, parse_constant=pytest.fail)
    assert entry["logprob"] == -9999.0
    assert [top["logprob"] for top in entry["top_logprobs"]] == [-0.5, -9999.0]


def test_lp04_bytes_of_chosen_tokens_join_to_the_text() -> None:
    ids = [0, 1, 2, 3]
    entries = json.loads(ChatLogprobs(Spelling(), skip_special_tokens=True).content_json(ids, columns([-1.0] * 4)))
    assert len(entries) == len(ids)
    assert bytes(byte for entry in entries for byte in entry["bytes"]).decode() == " word😀"
    assert [entry["token"] for entry in entries] == [" word", "bytes:\\xf0\\x9f", "bytes:\\x98\\x80", "<eos>"]
    assert all(entry["top_logprobs"] == [] for entry in entries)


def test_special_tokens_have_bytes_where_the_text_shows_them() -> None:
    (entry,) = json.loads(ChatLogprobs(Spelling(), skip_special_tokens=False).content_json([3], columns([-1.0])))
    assert bytes(entry["bytes"]) == b"<eos>"


def test_lp03_completion_tokens_join_to_the_text_and_offsets_track_it() -> None:
    tracker = CompletionLogprobs(Spelling(), skip_special_tokens=True)
    block = tracker.output([0, 1], columns([-1.0, -2.0]), last=False)
    block = join_blocks(block, tracker.output([2, 0, 3], columns([-3.0, -4.0, -5.0]), last=True))
    assert block["tokens"] == [" word", "", "😀", " word", "<eos>"]
    assert block["text_offset"] == [0, 5, 5, 6, 11]
    assert block["token_logprobs"] == [-1.0, -2.0, -3.0, -4.0, -5.0]
    assert block["top_logprobs"][1] == {"bytes:\\xf0\\x9f": -2.0}


def test_lp03_a_character_cut_at_the_end_is_shown_as_in_the_text() -> None:
    block = CompletionLogprobs(Spelling(), skip_special_tokens=True).output([0, 1], columns([-1.0, -2.0]), last=True)
    assert "".join(block["tokens"]) == " word\ufffd"


@pytest.mark.parametrize(
    ("text", "ids", "tokens"),
    [(" word😀", [0, 1, 2], [" word", "", "😀"]), ("word word", [0, 0], ["word", " word"]), ("", [3], ["<eos>"])],
)
def test_lp03_echoed_prompt_is_exact_around_leading_space(text: str, ids: list[int], tokens: list[str]) -> None:
    tracker = CompletionLogprobs(Spelling(), skip_special_tokens=True)
    block = tracker.echo(text, ids, columns([-1.0] * (len(ids) - 1)))
    assert block["tokens"] == tokens
    assert block["token_logprobs"] == [None] + [-1.0] * (len(ids) - 1)
    assert block["top_logprobs"][0] is None
    after = tracker.output([0], columns([-2.0]), last=True)
    assert after["text_offset"] == [len(text)]


def test_alternatives_include_the_chosen_token() -> None:
    block = CompletionLogprobs(Spelling(), skip_special_tokens=True).output(
        [4], columns([-3.0], 2, [(0, -0.1), (1, -math.inf)]), last=True
    )
    assert block["top_logprobs"] == [{" word": -0.1, "bytes:\\xf0\\x9f": -9999.0, " ": -3.0}]


def test_labels_never_replace_bytes() -> None:
    assert token_label(b"\xe2\x80") == "bytes:\\xe2\\x80"
