"""GGUF tensors of every storage type, split files, and damage."""

from __future__ import annotations

from pathlib import Path

import gguf
import numpy as np
import pytest
import torch
from gguf.quants import dequantize

from pagemill.errors import ModelLoadError
from worker.quantization.gguf import GgufSource, half_split_rows, hf_name

ROWS, COLUMNS = 3, 512
ALL = (slice(None), slice(None))


def dequantizable() -> list[gguf.GGMLQuantizationType]:
    """The storage types that the gguf package can dequantise."""
    kinds = []
    for kind in gguf.GGMLQuantizationType:
        try:
            dequantize(random_bytes(kind), kind)
        except NotImplementedError:
            continue
        kinds.append(kind)
    return kinds


def random_bytes(kind: gguf.GGMLQuantizationType) -> np.ndarray:
    """Any bytes are weights of any type; small ones keep scales finite."""
    block, size = gguf.GGML_QUANT_SIZES[kind]
    data = np.random.default_rng(int(kind)).integers(0, 60, (ROWS, COLUMNS // block * size), dtype=np.uint8)
    return data.view(np.float32) if kind == gguf.GGMLQuantizationType.F32 else data


def write(path: Path, kind: gguf.GGMLQuantizationType, data: np.ndarray, name: str = "blk.0.ffn_up.weight") -> None:
    writer = gguf.GGUFWriter(path, "qwen2")
    raw = data.view(np.uint8)
    writer.add_tensor(name, raw, raw_shape=raw.shape, raw_dtype=kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


@pytest.mark.parametrize("kind", dequantizable(), ids=lambda kind: kind.name)
def test_every_dequantizable_type_is_read(kind: gguf.GGMLQuantizationType, tmp_path: Path) -> None:
    data = random_bytes(kind)
    write(tmp_path / "m.gguf", kind, data)
    source = GgufSource(tmp_path / "m.gguf")
    expected = np.asarray(dequantize(data, kind), dtype=np.float32)
    whole = source.read("model.layers.0.mlp.up_proj.weight", (ROWS, COLUMNS), ALL)
    np.testing.assert_array_equal(whole.numpy(), expected)
    part = source.read("model.layers.0.mlp.up_proj.weight", (ROWS, COLUMNS), (slice(1, 3), slice(None)))
    np.testing.assert_array_equal(part.numpy(), expected[1:3])


def test_other_types_are_refused_by_name(tmp_path: Path) -> None:
    kind = gguf.GGMLQuantizationType.Q8_K
    write(tmp_path / "m.gguf", kind, random_bytes(kind))
    with pytest.raises(ModelLoadError, match=r"m\.gguf: tensor blk\.0\.ffn_up\.weight has type Q8_K"):
        GgufSource(tmp_path / "m.gguf").read("model.layers.0.mlp.up_proj.weight", (ROWS, COLUMNS), ALL)


def test_split_files_are_one_model_and_a_missing_one_is_named(tmp_path: Path) -> None:
    kind = gguf.GGMLQuantizationType.F32
    data = random_bytes(kind)
    for number, name in enumerate(("token_embd.weight", "output.weight"), 1):
        write(tmp_path / f"m-{number:05d}-of-00002.gguf", kind, data, name)
    first = tmp_path / "m-00001-of-00002.gguf"
    assert GgufSource(first).names() == {"model.embed_tokens.weight", "lm_head.weight"}
    (tmp_path / "m-00002-of-00002.gguf").unlink()
    with pytest.raises(ModelLoadError, match=r"m-00002-of-00002\.gguf: split GGUF file is missing"):
        GgufSource(first)


def test_md06_truncated_file_is_named(tmp_path: Path) -> None:
    path = tmp_path / "m.gguf"
    kind = gguf.GGMLQuantizationType.Q4_K
    write(path, kind, random_bytes(kind))
    path.write_bytes(path.read_bytes()[:-64])
    with pytest.raises(ModelLoadError, match=r"m\.gguf: not a complete GGUF file, tensor blk\.0\.ffn_up\.weight ends"):
        GgufSource(path)


def test_names_are_those_of_hugging_face() -> None:
    assert hf_name("blk.12.attn_output.weight") == "model.layers.12.self_attn.o_proj.weight"
    assert hf_name("blk.3.attn_q.bias") == "model.layers.3.self_attn.q_proj.bias"
    assert hf_name("output_norm.weight") == "model.norm.weight"
    assert hf_name("something.else") == "something.else"


def test_interleaved_pairs_move_half_a_head_apart() -> None:
    rows = torch.arange(12.0)[:, None].numpy()
    assert half_split_rows(rows, 2).ravel().tolist() == [0, 2, 4, 1, 3, 5, 6, 8, 10, 7, 9, 11]
