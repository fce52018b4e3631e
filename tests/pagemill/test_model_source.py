"""From MODEL to files, and the head of GGUF files against the reference reader."""

from __future__ import annotations

import json
import struct
from pathlib import Path

import gguf
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from pagemill.demo_model import DEMO_MODEL_NAME, demo_model_path
from pagemill.errors import ModelLoadError
from pagemill.gguf_file import read_gguf_head
from pagemill.model_source import ModelSource, eos_token_ids, load_config, resolve_model


def test_no_model_is_the_demo_model_with_the_config_of_its_metadata() -> None:
    source = resolve_model("")
    assert (source.kind, source.name) == ("gguf", DEMO_MODEL_NAME)
    config = load_config(source)
    expected = {
        "architectures": ["LlamaForCausalLM"],
        "hidden_size": 576,
        "num_hidden_layers": 30,
        "num_attention_heads": 9,
        "num_key_value_heads": 3,
        "head_dim": 64,
        "intermediate_size": 1536,
        "max_position_embeddings": 8192,
        "vocab_size": 49152,
        "rope_theta": 100000.0,
        "tie_word_embeddings": True,
        "attention_bias": False,
    }
    assert {key: config[key] for key in expected} == expected
    assert config["rms_norm_eps"] == pytest.approx(1e-5)
    assert eos_token_ids(source) == [2]


def test_a_gguf_file_is_named_without_its_quantization() -> None:
    assert resolve_model(str(demo_model_path())).name == DEMO_MODEL_NAME


def test_the_demo_model_may_be_named_by_the_environment(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    file = tmp_path / "mine.gguf"
    file.write_bytes(b"GGUF")
    monkeypatch.setenv("PAGEMILL_DEMO_MODEL", str(file))
    assert demo_model_path() == file
    monkeypatch.setenv("PAGEMILL_DEMO_MODEL", str(tmp_path / "absent.gguf"))
    with pytest.raises(ModelLoadError, match=r"absent\.gguf is not a file"):
        demo_model_path()


def test_a_directory_with_a_config_is_a_hugging_face_model(tmp_path: Path) -> None:
    directory = tmp_path / "Some-Model"
    directory.mkdir()
    (directory / "config.json").write_text(json.dumps({"model_type": "llama", "eos_token_id": 5}))
    source = resolve_model(str(directory))
    assert source == ModelSource("hf", directory, "Some-Model")
    assert load_config(source)["model_type"] == "llama"
    assert eos_token_ids(source) == [5]
    (directory / "generation_config.json").write_text(json.dumps({"eos_token_id": [9, 7, 9]}))
    assert eos_token_ids(source) == [7, 9]


def test_a_directory_with_one_gguf_file_is_that_file_and_with_several_is_refused(tmp_path: Path) -> None:
    (tmp_path / "a.gguf").write_bytes(b"GGUF")
    assert resolve_model(str(tmp_path)).path == tmp_path / "a.gguf"
    (tmp_path / "b.gguf").write_bytes(b"GGUF")
    with pytest.raises(ModelLoadError, match=r"several .gguf files, name one: a.gguf, b.gguf"):
        resolve_model(str(tmp_path))


@pytest.mark.parametrize("model", ["./no/such/model", "/no/such", "absent.gguf", "a/b/c", "~nobody/x", "two words"])
def test_a_path_that_does_not_exist_is_named_and_never_asked_for_at_the_hub(model: str) -> None:
    with pytest.raises(ModelLoadError, match="does not exist") as caught:
        resolve_model(model)
    assert model in caught.value.message


def test_a_hub_id_without_network_says_what_to_do(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    import huggingface_hub.constants

    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", True)
    with pytest.raises(ModelLoadError, match="'nobody/nothing' is no local path") as caught:
        resolve_model("nobody/nothing", download_dir=str(tmp_path))
    assert "\n" not in caught.value.message


def test_wrong_kinds_of_file_and_broken_configs_are_refused(tmp_path: Path) -> None:
    (tmp_path / "model.bin").write_bytes(b"x")
    with pytest.raises(ModelLoadError, match=r"is a file but not \.gguf"):
        resolve_model(str(tmp_path / "model.bin"))
    with pytest.raises(ModelLoadError, match=r"neither config\.json nor"):
        resolve_model(str(tmp_path))
    for text in ("{", "[]"):
        (tmp_path / "config.json").write_text(text)
        with pytest.raises(ModelLoadError, match=r"config\.json"):
            load_config(resolve_model(str(tmp_path)))


def test_the_head_equals_what_the_reference_reader_says() -> None:
    head = read_gguf_head(demo_model_path())
    reference = gguf.GGUFReader(demo_model_path())
    assert len(head.tensors) == len(reference.tensors)
    for tensor in reference.tensors:
        mine = head.tensors[tensor.name]
        assert mine.shape == tuple(int(size) for size in reversed(tensor.shape))
        assert (mine.ggml_type, mine.offset_bytes) == (int(tensor.tensor_type), tensor.data_offset)
    for key in ("llama.context_length", "llama.rope.freq_base", "general.languages", "tokenizer.ggml.add_bos_token"):
        assert head.metadata[key] == reference.fields[key].contents()
    tokens = reference.fields["tokenizer.ggml.tokens"]
    assert head.metadata["tokenizer.ggml.tokens"][17:300] == [tokens.contents(i) for i in range(17, 300)]


def test_a_head_is_read_once_for_each_version_of_its_file(tmp_path: Path) -> None:
    path = tmp_path / "model.gguf"
    path.write_bytes(demo_model_path().read_bytes()[: 4 << 20])
    head = read_gguf_head(path)
    assert read_gguf_head(path) is head
    with path.open("ab") as file:
        file.write(b"more")
    assert read_gguf_head(path) is not head


def test_every_kind_of_value_is_read(tmp_path: Path) -> None:
    path = tmp_path / "all.gguf"
    writer = gguf.GGUFWriter(path, "llama")
    writer.add_uint8("u8", 255)
    writer.add_int8("i8", -5)
    writer.add_uint64("u64", 2**63)
    writer.add_int64("i64", -(2**40))
    writer.add_float64("f64", 0.1)
    writer.add_bool("yes", True)
    writer.add_array("words", ["é", "", "x"])
    writer.add_array("numbers", [1, -2, 3])
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.close()
    metadata = read_gguf_head(path).metadata
    assert [metadata[key] for key in ("u8", "i8", "u64", "i64", "f64", "yes")] == [255, -5, 2**63, -(2**40), 0.1, True]
    assert (metadata["words"], metadata["numbers"]) == (["é", "", "x"], [1, -2, 3])


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture], max_examples=60, deadline=None)
@given(data=st.binary(max_size=200), version=st.integers(0, 4), cut=st.integers(0, 4000))
def test_damaged_files_are_refused_and_nothing_else_happens(
    tmp_path: Path, data: bytes, version: int, cut: int
) -> None:
    path = tmp_path / "broken.gguf"
    for content in (data, b"GGUF" + struct.pack("<I", version) + data, demo_model_path().open("rb").read(cut)):
        path.write_bytes(content)
        try:
            read_gguf_head(path)
        except ModelLoadError as err:
            assert "broken.gguf" in err.message


def test_a_scaling_that_cannot_be_expressed_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "yarn.gguf"
    writer = gguf.GGUFWriter(path, "llama")
    for add, value in (
        (writer.add_context_length, 64),
        (writer.add_embedding_length, 64),
        (writer.add_block_count, 1),
        (writer.add_feed_forward_length, 64),
        (writer.add_head_count, 1),
        (writer.add_layer_norm_rms_eps, 1e-5),
    ):
        add(value)
    writer.add_string("llama.rope.scaling.type", "yarn")
    import numpy as np

    writer.add_tensor("token_embd.weight", np.zeros((8, 64), dtype=np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    with pytest.raises(ModelLoadError, match="yarn"):
        load_config(resolve_model(str(path)))
