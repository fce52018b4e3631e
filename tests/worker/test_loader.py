"""Weights from files: which file counts, and what a broken checkpoint says."""

from __future__ import annotations

import json
import logging
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from pagemill.errors import ModelLoadError
from pagemill.model_source import ModelSource
from worker.loader import WeightReader, WeightSource, model_fingerprint, open_source

TENSORS = {
    "model.embed_tokens.weight": torch.arange(12.0).reshape(4, 3),
    "model.norm.weight": torch.ones(3),
    "lm_head.weight": torch.arange(12.0).reshape(4, 3) + 100,
}


def source_of(directory: Path, load_format: str = "auto") -> WeightSource:
    return open_source(
        ModelSource("hf", directory, "tiny"), load_format, seed=0, absent_if_random=frozenset({"lm_head.weight"})
    )


def reader_of(directory: Path, load_format: str = "auto") -> WeightReader:
    return WeightReader(source_of(directory, load_format), torch.float32)


def write_shards(directory: Path, assignment: dict[str, str] | None = None) -> dict[str, str]:
    """Two safetensors shards and their index."""
    names = list(TENSORS)
    shards = ["model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors"]
    save_file({names[0]: TENSORS[names[0]]}, directory / shards[0])
    save_file({name: TENSORS[name] for name in names[1:]}, directory / shards[1])
    weight_map = assignment or {names[0]: shards[0], names[1]: shards[1], names[2]: shards[1]}
    (directory / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weight_map}))
    return weight_map


def assert_all_tensors(reader: WeightReader) -> None:
    for name, tensor in TENSORS.items():
        assert torch.equal(reader.take(name, tuple(tensor.shape)), tensor)


def test_reads_one_safetensors_file(tmp_path: Path) -> None:
    save_file(TENSORS, tmp_path / "model.safetensors")
    assert_all_tensors(reader_of(tmp_path))


def test_reads_shards_by_index_and_without_one(tmp_path: Path) -> None:
    write_shards(tmp_path)
    assert_all_tensors(reader_of(tmp_path))
    (tmp_path / "model.safetensors.index.json").unlink()
    assert_all_tensors(reader_of(tmp_path))


def test_reads_pytorch_files_sharded_or_not(tmp_path: Path) -> None:
    torch.save(TENSORS, tmp_path / "pytorch_model.bin")
    assert_all_tensors(reader_of(tmp_path))
    (tmp_path / "pytorch_model.bin").unlink()
    weight_map = {}
    for number, (name, tensor) in enumerate(TENSORS.items(), 1):
        weight_map[name] = f"pytorch_model-{number:05d}-of-00003.bin"
        torch.save({name: tensor}, tmp_path / weight_map[name])
    (tmp_path / "pytorch_model.bin.index.json").write_text(json.dumps({"weight_map": weight_map}))
    assert_all_tensors(reader_of(tmp_path, "pt"))


def test_safetensors_win_over_pytorch_files(tmp_path: Path) -> None:
    save_file(TENSORS, tmp_path / "model.safetensors")
    (tmp_path / "pytorch_model.bin").write_bytes(b"never read")
    assert_all_tensors(reader_of(tmp_path))


def test_md06_missing_shard_is_named(tmp_path: Path) -> None:
    write_shards(tmp_path)
    (tmp_path / "model-00002-of-00002.safetensors").unlink()
    with pytest.raises(ModelLoadError, match=r"model-00002-of-00002\.safetensors: weight file is missing"):
        source_of(tmp_path)
    (tmp_path / "model.safetensors.index.json").unlink()
    with pytest.raises(ModelLoadError, match=r"model-00002-of-00002\.safetensors: weight file is missing"):
        source_of(tmp_path)


def test_md06_truncated_shard_is_named(tmp_path: Path) -> None:
    write_shards(tmp_path)
    shard = tmp_path / "model-00002-of-00002.safetensors"
    shard.write_bytes(shard.read_bytes()[:-8])
    with pytest.raises(ModelLoadError, match=r"model-00002-of-00002\.safetensors: not a complete safetensors file"):
        source_of(tmp_path)


def test_md06_truncated_pytorch_file_is_named(tmp_path: Path) -> None:
    file = tmp_path / "pytorch_model.bin"
    torch.save(TENSORS, file)
    file.write_bytes(file.read_bytes()[:-200])
    with pytest.raises(ModelLoadError, match=r"pytorch_model\.bin: not a complete PyTorch weight file"):
        source_of(tmp_path)


def test_md06_index_that_names_one_file_for_all_is_refused(tmp_path: Path) -> None:
    first = "model-00001-of-00002.safetensors"
    write_shards(tmp_path, dict.fromkeys(TENSORS, first))
    with pytest.raises(ModelLoadError, match=rf"{first}: tensor model\.norm\.weight is missing"):
        source_of(tmp_path)


def test_md06_index_that_lists_a_tensor_twice_is_refused(tmp_path: Path) -> None:
    write_shards(tmp_path)
    (tmp_path / "model.safetensors.index.json").write_text(
        '{"weight_map": {"lm_head.weight": "model-00001-of-00002.safetensors",'
        ' "lm_head.weight": "model-00002-of-00002.safetensors"}}'
    )
    with pytest.raises(ModelLoadError, match=r"index\.json.*lm_head\.weight is listed twice"):
        source_of(tmp_path)


def test_index_may_not_leave_its_directory(tmp_path: Path) -> None:
    write_shards(tmp_path, {"lm_head.weight": "../elsewhere.safetensors"})
    with pytest.raises(ModelLoadError, match="which is no file name"):
        source_of(tmp_path)


def test_md07_index_decides_and_strays_are_ignored_with_a_warning(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    weight_map = write_shards(tmp_path)
    stale = {"model.embed_tokens.weight": TENSORS["model.embed_tokens.weight"], "lm_head.weight": torch.zeros(4, 3)}
    save_file(stale, tmp_path / weight_map["model.embed_tokens.weight"])
    save_file({"lm_head.weight": torch.zeros(4, 3)}, tmp_path / "consolidated.safetensors")
    with caplog.at_level(logging.WARNING):
        assert_all_tensors(reader_of(tmp_path))
    assert "consolidated.safetensors" in caplog.text
    assert "the index assigns them elsewhere: lm_head.weight" in caplog.text


def test_missing_tensor_and_wrong_shape_are_named(tmp_path: Path) -> None:
    save_file(TENSORS, tmp_path / "model.safetensors")
    reader = reader_of(tmp_path)
    with pytest.raises(ModelLoadError, match=r"model\.safetensors: tensor model\.layers\.0\.x\.weight is missing"):
        reader.take("model.layers.0.x.weight", (3,))
    with pytest.raises(ModelLoadError, match=r"tensor model\.norm\.weight has shape \[3\], expected \[5\]"):
        reader.take("model.norm.weight", (5,))


def test_directory_without_weights_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ModelLoadError, match="no weight files"):
        source_of(tmp_path)


def test_unused_tensors_are_reported(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    save_file(
        {**TENSORS, "model.layers.0.self_attn.rotary_emb.inv_freq": torch.ones(2)}, tmp_path / "model.safetensors"
    )
    reader = reader_of(tmp_path)
    reader.take("model.norm.weight", (3,))
    reader.take("lm_head.weight", (4, 3))
    with caplog.at_level(logging.WARNING):
        reader.warn_unused()
    assert "1 tensors of the checkpoint are not used: model.embed_tokens.weight" in caplog.text


def test_ranks_get_equal_shards(tmp_path: Path) -> None:
    save_file(TENSORS, tmp_path / "model.safetensors")
    reader = reader_of(tmp_path)
    parts = [reader.take("lm_head.weight", (4, 3), shard_dim=0, rank=rank, size=2) for rank in (0, 1)]
    assert torch.equal(torch.cat(parts), TENSORS["lm_head.weight"])
    columns = [reader.take("lm_head.weight", (4, 3), shard_dim=1, rank=rank, size=3) for rank in range(3)]
    assert torch.equal(torch.cat(columns, dim=1), TENSORS["lm_head.weight"])
    with pytest.raises(ModelLoadError, match="does not divide into 3 ranks"):
        reader.take("lm_head.weight", (4, 3), shard_dim=0, rank=0, size=3)


def test_checkpoint_of_the_bare_decoder_is_read(tmp_path: Path) -> None:
    save_file({"embed_tokens.weight": torch.ones(4, 3), "norm.weight": torch.ones(3)}, tmp_path / "model.safetensors")
    reader = reader_of(tmp_path)
    assert reader.holds("model.norm.weight")
    assert not reader.holds("lm_head.weight")
    assert torch.equal(reader.take("model.embed_tokens.weight", (4, 3)), torch.ones(4, 3))


def test_random_weights_depend_on_seed_and_name_alone(tmp_path: Path) -> None:
    first, second = reader_of(tmp_path, "dummy"), reader_of(tmp_path, "dummy")
    second.take("other.weight", (7, 7))
    assert torch.equal(first.take("a.weight", (5, 5)), second.take("a.weight", (5, 5)))
    assert not torch.equal(first.take("a.weight", (5, 5)), first.take("b.weight", (5, 5)))
    assert not first.holds("lm_head.weight")


def test_fingerprint_follows_content_and_dtype_but_not_the_place(tmp_path: Path) -> None:
    for name in ("a", "b", "c"):
        (tmp_path / name).mkdir()
        tensors = {**TENSORS, "model.norm.weight": torch.full((3,), 2.0 if name == "c" else 1.0)}
        save_file(tensors, tmp_path / name / "model.safetensors")
    config = {"vocab_size": 4}
    prints = {name: model_fingerprint(config, source_of(tmp_path / name), torch.float32, 0) for name in ("a", "b", "c")}
    assert prints["a"] == prints["b"] != prints["c"]
    assert model_fingerprint(config, source_of(tmp_path / "a"), torch.bfloat16, 0) != prints["a"]
    assert model_fingerprint({"vocab_size": 5}, source_of(tmp_path / "a"), torch.float32, 0) != prints["a"]
    source = source_of(tmp_path / "a")
    assert model_fingerprint(config, source, torch.float32, 0, torch.float32) == prints["a"]
    assert model_fingerprint(config, source, torch.float32, 0, torch.float8_e4m3fn) != prints["a"]
