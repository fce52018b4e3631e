from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import AddedToken, Tokenizer, decoders, models

from pagemill.errors import ModelLoadError
from pagemill.model_source import resolve_model
from router.detokenizer import Detokenizer, detokenize
from router.token_bytes import TokenTable, build_token_table
from router.tokenizer import load_tokenizer

DEMO = load_tokenizer(resolve_model(""))
IDS = st.lists(st.integers(0, DEMO.vocab_size - 1), max_size=40)
# Tokens of one or two bytes that are no whole characters: what random ids alone rarely put side by side.
BROKEN_IDS = [i for i, data in enumerate(DEMO.table.token_bytes) if "\ufffd" in data.decode("utf-8", "replace")]


def pieces(table: TokenTable, token_ids: list[int], *, skip: bool = True, continues: bool = True) -> list[str]:
    detokenizer = Detokenizer(table, skip_special_tokens=skip, continues_text=continues)
    return [*(detokenizer.feed([i]) for i in token_ids), detokenizer.flush()]


@settings(max_examples=300)
@given(IDS | st.lists(st.sampled_from(BROKEN_IDS), max_size=30), st.booleans())
def test_joined_pieces_equal_the_librarys_decoding_of_everything(token_ids: list[int], skip: bool) -> None:
    expected = DEMO.decode(token_ids, skip_special_tokens=skip)
    assert "".join(pieces(DEMO.table, token_ids, skip=skip)) == expected
    assert detokenize(DEMO.table, token_ids, skip_special_tokens=skip) == expected


# The demo model's vocabulary has no token for some control characters and none for the last planes.
@given(
    st.text(
        st.characters(codec="utf-8", max_codepoint=0x3FFFF, exclude_categories=["Cc"], include_characters="\n\t"),
        max_size=40,
    )
)
def test_text_comes_back_from_its_tokens(text: str) -> None:
    assert "".join(pieces(DEMO.table, DEMO.encode(text), skip=False)) == text


@given(st.lists(st.sampled_from(BROKEN_IDS), max_size=30))
def test_at_most_three_bytes_are_held_back(token_ids: list[int]) -> None:
    detokenizer = Detokenizer(DEMO.table, skip_special_tokens=True, continues_text=True)
    for token_id in token_ids:
        detokenizer.feed([token_id])
        held, _ = detokenizer._decoder.getstate()
        assert len(held) <= 3


def test_ST01_no_piece_holds_half_a_character() -> None:
    line = "👩‍👩‍👧‍👦 漢字 Příliš žluťoučký kůň e\u0301"
    assert not any("\ufffd" in piece for piece in pieces(DEMO.table, DEMO.encode(line)))


def test_ST03_a_byte_that_can_not_become_a_character_is_released_at_once() -> None:
    lone = DEMO.table.token_bytes.index(b"\x9f")
    assert pieces(DEMO.table, [lone] * 4) == ["\ufffd"] * 4 + [""]


def test_an_unfinished_character_is_released_at_the_end() -> None:
    first_byte = DEMO.table.token_bytes.index(b"\xf0")
    assert pieces(DEMO.table, [first_byte]) == ["", "\ufffd"]


def test_ids_beyond_the_tokenizer_have_no_text() -> None:
    assert pieces(DEMO.table, [10**6, *DEMO.encode("hi")]) == ["", "hi", ""]


def sentencepiece_style() -> Tokenizer:
    names = ["<unk>", "<s>", "</s>", *(f"<0x{b:02X}>" for b in range(256)), "▁", "▁the", "▁▁", "cat", "s", "é", "▁x▁y"]
    backend = Tokenizer(models.BPE({n: i for i, n in enumerate(names)}, [], byte_fallback=True, unk_token="<unk>"))
    backend.add_special_tokens([AddedToken(n, special=True, normalized=False) for n in names[:3]])
    backend.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    return backend


SP_BACKEND = sentencepiece_style()
SP_TABLE = build_token_table(
    SP_BACKEND,
    {
        "type": "Sequence",
        "decoders": [
            {"type": "Replace"},
            {"type": "ByteFallback"},
            {"type": "Fuse"},
            {"type": "Strip", "content": " ", "start": 1, "stop": 0},
        ],
    },
)
SP_WORDS = st.sampled_from([0, 1, 2, *range(259, 266)]).map(lambda i: [i])
SP_CHARACTERS = st.characters(codec="utf-8").map(lambda c: [3 + byte for byte in c.encode()])


@given(st.lists(SP_WORDS | SP_CHARACTERS, max_size=20), st.booleans())
def test_sentencepiece_tokens_join_as_the_library_joins_them(parts: list[list[int]], skip: bool) -> None:
    token_ids = [i for part in parts for i in part]
    expected = SP_BACKEND.decode(token_ids, skip_special_tokens=skip)
    assert "".join(pieces(SP_TABLE, token_ids, skip=skip, continues=False)) == expected


def test_a_text_that_continues_keeps_its_leading_space() -> None:
    the, cat = 260, 262
    assert "".join(pieces(SP_TABLE, [the, cat], continues=True)) == " thecat"
    assert "".join(pieces(SP_TABLE, [the, cat], continues=False)) == "thecat"


def test_a_decoder_without_bytes_per_token_is_refused_by_name() -> None:
    with pytest.raises(ModelLoadError, match="WordPiece is not supported; supported are ByteLevel"):
        build_token_table(SP_BACKEND, {"type": "WordPiece"})
