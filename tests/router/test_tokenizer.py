from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import gguf
import pytest
import sentencepiece
import tokenizers
from tokenizers import pre_tokenizers
from transformers import AutoTokenizer

from pagemill.demo_model import demo_model_path
from pagemill.errors import ModelLoadError
from pagemill.model_source import ModelSource
from router.detokenizer import detokenize
from router.tokenizer import Tokenizer, TokenizerPool, load_tokenizer

CORPUS = [
    "Hello, world! It's the 1st of May, isn't it? WE'LL see; they'd've said so.",
    "👩‍👩‍👧‍👦 🇨🇿 👍🏽 ☃️ emoji and text",
    "漢字とかなカナ 한국어 中文字符,標點。",
    "Příliš žluťoučký kůň úpěl ďábelské ódy; e\u0301 o\u0308\u0323 Z\u0351\u036b\u0343",
    "def f(x: int) -> str:\n\treturn f'{x:>10}'  # tab\r\n    if x != 0b1011:\n        pass\n\n\n",
    "3.14159 1,234,567 1e-10 0xDEADBEEF 2024-11-30 ٣٤٥ ½ Ⅷ",
    " leading,  double,   triple \t tab \n \n newline   ",
    "\u200b\u00a0\u3000\u2028 odd spaces",
    "<|im_start|>user\nhi<|im_end|>\n<|endoftext|><|im_end",
    "العربية مرحبا עברית שלום ไทย हिन्दी",
    "a" * 300 + " " * 50 + "!" * 40,
    "'S 'Re ''LL ’s",
    "\x00\x01\x7f control",
    "",
]


@pytest.fixture(scope="module")
def reference() -> Any:
    path = demo_model_path()
    return AutoTokenizer.from_pretrained(path.parent, gguf_file=path.name)


@pytest.fixture(scope="module")
def hf_directory(reference: Any, tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("hf")
    reference.save_pretrained(directory)
    return directory


def load(path: Path) -> Tokenizer:
    return load_tokenizer(ModelSource("gguf" if path.suffix == ".gguf" else "hf", path, "test"))


@pytest.fixture(scope="module")
def hf_tokenizer(hf_directory: Path) -> Tokenizer:
    return load(hf_directory)


@pytest.mark.parametrize("text", CORPUS)
def test_a_hugging_face_directory_gives_the_ids_of_transformers(
    text: str, hf_tokenizer: Tokenizer, reference: Any
) -> None:
    assert hf_tokenizer.encode(text) == reference(text).input_ids
    assert hf_tokenizer.encode(text, add_special_tokens=False) == reference(text, add_special_tokens=False).input_ids


@pytest.mark.parametrize("text", CORPUS)
def test_a_gguf_file_gives_the_ids_of_the_models_published_tokenizer(
    text: str, tokenizer: Tokenizer, reference: Any
) -> None:
    # The GGUF names the cut "smollm": each digit by itself, then GPT-2's. transformers leaves the digits out when it
    # reads a GGUF, which shows where spaces stand before a number.
    published = tokenizers.Tokenizer.from_str(reference.backend_tokenizer.to_str())
    published.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False)]
    )
    assert tokenizer.encode(text) == published.encode(text).ids


def test_names_templates_and_end_ids_come_from_the_gguf_file(tokenizer: Tokenizer) -> None:
    assert tokenizer.vocab_size == 49152
    assert tokenizer.eos_token_ids == [2]
    assert tokenizer.special_tokens["bos_token"] == "<|im_start|>"
    assert "SmolLM" in tokenizer.chat_templates["default"]
    assert {0, 1, 2} <= tokenizer.special_ids


def test_end_ids_are_those_of_the_generation_config_and_the_tokenizer(hf_directory: Path, tmp_path: Path) -> None:
    shutil.copytree(hf_directory, tmp_path / "m")
    (tmp_path / "m" / "generation_config.json").write_text(json.dumps({"eos_token_id": [0, 7]}))
    assert load(tmp_path / "m").eos_token_ids == [0, 2, 7]


def test_tokenizer_json_decides_what_goes_around_a_text(hf_directory: Path, tmp_path: Path) -> None:
    shutil.copytree(hf_directory, tmp_path / "m")
    file = tmp_path / "m" / "tokenizer.json"
    content = json.loads(file.read_text())
    content["post_processor"] = {
        "type": "TemplateProcessing",
        "single": [{"SpecialToken": {"id": "<|im_start|>", "type_id": 0}}, {"Sequence": {"id": "A", "type_id": 0}}],
        "pair": [{"Sequence": {"id": "A", "type_id": 0}}, {"Sequence": {"id": "B", "type_id": 0}}],
        "special_tokens": {"<|im_start|>": {"id": "<|im_start|>", "ids": [1], "tokens": ["<|im_start|>"]}},
    }
    file.write_text(json.dumps(content))
    tokenizer = load(tmp_path / "m")
    assert tokenizer.encode("hi")[0] == 1
    assert tokenizer.encode("hi", add_special_tokens=False)[0] != 1
    assert tokenizer.encode("hi") == AutoTokenizer.from_pretrained(tmp_path / "m")("hi").input_ids


@pytest.mark.parametrize(("config", "first"), [({}, 1), ({"add_bos_token": True}, 1), ({"add_bos_token": False}, None)])
def test_a_sentencepiece_model_gets_bos_as_its_config_says(
    config: dict[str, bool], first: int | None, sentencepiece_model: Path, tmp_path: Path
) -> None:
    shutil.copy(sentencepiece_model, tmp_path)
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(config))
    tokenizer = load(tmp_path)
    assert (tokenizer.encode("the fox")[0] == 1) == (first is not None)


def test_the_fingerprint_follows_what_decides_ids(hf_directory: Path, tmp_path: Path) -> None:
    same, other = load(hf_directory), load(hf_directory)
    assert same.fingerprint == other.fingerprint
    shutil.copytree(hf_directory, tmp_path / "m")
    file = tmp_path / "m" / "tokenizer.json"
    content = json.loads(file.read_text())
    content["pre_tokenizer"] = None
    file.write_text(json.dumps(content))
    assert load(tmp_path / "m").fingerprint != same.fingerprint


def test_missing_files_are_named(tmp_path: Path) -> None:
    with pytest.raises(ModelLoadError, match=r"neither tokenizer\.json nor tokenizer\.model"):
        load(tmp_path)
    with pytest.raises(ModelLoadError, match="nowhere does not exist"):
        load_tokenizer(ModelSource("hf", tmp_path, "x"), override=str(tmp_path / "nowhere"))
    (tmp_path / "tokenizer.json").write_text("{")
    with pytest.raises(ModelLoadError, match=r"tokenizer\.json cannot be read"):
        load(tmp_path)


@pytest.fixture(scope="module", params=["bpe", "unigram"])
def sentencepiece_model(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp(f"sp-{request.param}")
    corpus = directory / "corpus.txt"
    words = "the quick brown fox jumps over a lazy dog while seven wizards make toxic brew Příliš žluťoučký kůň".split()
    lines = [" ".join(words[(i * k + j) % len(words)] for j in range(9)) for i in range(40) for k in (1, 3, 5, 7)]
    corpus.write_text("\n".join(lines))
    sentencepiece.SentencePieceTrainer.train(
        input=str(corpus),
        model_prefix=str(directory / "tokenizer"),
        model_type=request.param,
        vocab_size=400 if request.param == "bpe" else 310,
        byte_fallback=True,
        user_defined_symbols=["<tool>"],
        normalization_rule_name="nmt_nfkc" if request.param == "unigram" else "identity",
        minloglevel=2,
    )
    return directory / "tokenizer.model"


# Stacked marks under compiled normalization rules differ between the two libraries.
STACKED_MARKS = "o\u0308\u0323 Z\u0351\u036b\u0343"
SP_CORPUS = [t.replace(STACKED_MARKS, "") for t in CORPUS if t and "<|" not in t and "\x00" not in t]


@pytest.mark.parametrize("text", SP_CORPUS)
def test_a_sentencepiece_model_gives_the_ids_of_sentencepiece(text: str, sentencepiece_model: Path) -> None:
    processor = sentencepiece.SentencePieceProcessor(model_file=str(sentencepiece_model))
    tokenizer = load(sentencepiece_model.parent)
    expected = processor.encode(text)
    assert tokenizer.encode(text, add_special_tokens=False) == expected
    assert detokenize(tokenizer.table, expected, skip_special_tokens=True) == processor.decode(expected)


def test_a_llama_gguf_file_gives_the_ids_of_its_sentencepiece_model(sentencepiece_model: Path, tmp_path: Path) -> None:
    processor = sentencepiece.SentencePieceProcessor(model_file=str(sentencepiece_model))
    if "unigram" in str(sentencepiece_model):
        return  # GGUF's "llama" kind is BPE by scores
    size = processor.get_piece_size()
    kinds = [
        2 if processor.is_unknown(i) else 3 if processor.is_control(i) else 6 if processor.is_byte(i) else 1
        for i in range(size)
    ]
    kinds[processor.piece_to_id("<tool>")] = 4
    file = tmp_path / "llama.gguf"
    writer = gguf.GGUFWriter(file, "llama")
    writer.add_tokenizer_model("llama")
    writer.add_token_list([processor.id_to_piece(i) for i in range(size)])
    writer.add_token_scores([processor.get_score(i) for i in range(size)])
    writer.add_token_types(kinds)
    writer.add_bos_token_id(1)
    writer.add_eos_token_id(2)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.close()
    tokenizer = load(file)
    for text in ("the quick brown fox", "Příliš <tool> 漢 dog", "  two spaces"):
        assert tokenizer.encode(text, add_special_tokens=False)[-3:] == processor.encode(text)[-3:]
        assert tokenizer.encode(text)[0] == 1
    assert tokenizer.encode("the quick brown fox")[1:] == processor.encode("the quick brown fox")


@pytest.mark.parametrize(
    ("pre", "pattern"),
    [
        ("llama-bpe", r"\p{N}{1,3}"),
        ("qwen2", r"\p{N}"),
    ],
)
def test_gguf_cuts_of_other_families_group_digits_as_they_do(pre: str, pattern: str, tmp_path: Path) -> None:
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    merges = ["1 2", "12 3", "123 4", "Ġ 1"]
    tokens = [*alphabet, "12", "123", "1234", "Ġ1", "<|end|>"]
    file = tmp_path / "m.gguf"
    writer = gguf.GGUFWriter(file, "llama")
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre(pre)
    writer.add_token_list(tokens)
    writer.add_token_types([1] * (len(tokens) - 1) + [3])
    writer.add_token_merges(merges)
    writer.add_eos_token_id(len(tokens) - 1)
    writer.add_eot_token_id(0)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.close()
    tokenizer = load(file)
    names = [tokens[i] for i in tokenizer.encode(" 1234")]
    assert names == (["Ġ", "123", "4"] if pre == "llama-bpe" else ["Ġ", "1", "2", "3", "4"])
    assert tokenizer.eos_token_ids == [0, len(tokens) - 1]


def test_an_unknown_kind_of_gguf_tokenizer_lists_the_supported(tmp_path: Path) -> None:
    for key, value, message in [
        ("bert", "x", "supported are gpt2, llama"),
        ("gpt2", "strange", "supported are .*smollm"),
    ]:
        file = tmp_path / f"{key}.gguf"
        writer = gguf.GGUFWriter(file, "llama")
        writer.add_tokenizer_model(key)
        writer.add_tokenizer_pre(value)
        writer.add_token_list(["a", "b"])
        writer.write_header_to_file()
        writer.write_kv_data_to_file()
        writer.close()
        with pytest.raises(ModelLoadError, match=message):
            load(file)


async def test_long_texts_are_tokenized_off_the_event_loop_with_the_same_ids(tokenizer: Tokenizer) -> None:
    pool = TokenizerPool(tokenizer, 2)
    text = "The lazy dog. " * 5000
    assert await pool.encode(text) == tokenizer.encode(text)
    pool.close()


def test_the_lower_bound_of_tokens_holds(tokenizer: Tokenizer) -> None:
    for text in CORPUS:
        assert tokenizer.min_token_count(text) <= len(tokenizer.encode(text))
