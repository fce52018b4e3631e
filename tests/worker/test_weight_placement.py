"""Weights reach a GPU whole, cast and cut as a CPU would have them."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from pagemill.errors import ModelLoadError
from pagemill.model_source import ModelSource
from worker import weight_placement
from worker.loader import WeightReader, open_source

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")]


@pytest.fixture
def tensors(tmp_path: Path) -> dict[str, torch.Tensor]:
    """Stored tensors, one of them larger than the staging buffers together."""
    generator = torch.Generator().manual_seed(3)
    stored = {
        "large.weight": torch.randn(1200, 6000, generator=generator),
        "small.weight": torch.randn(64, 6000, generator=generator),
        "bias": torch.randn(64, generator=generator),
    }
    save_file(stored, tmp_path / "model.safetensors")
    return stored


def reader_on(device: torch.device, directory: Path, dtype: torch.dtype, load_format: str = "auto") -> WeightReader:
    source = open_source(
        ModelSource("hf", directory, "tiny"), load_format, seed=0, absent_if_random=frozenset(), device=device
    )
    return WeightReader(source, dtype, device)


CUDA, CPU = torch.device("cuda", 0), torch.device("cpu")


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("shard_dim", [None, 0, 1])
def test_tensors_and_their_parts_arrive_as_on_a_cpu(
    tensors: dict[str, torch.Tensor],
    dtype: torch.dtype,
    shard_dim: int | None,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(weight_placement, "_STAGING_BYTES", 1 << 20)
    results = {}
    for device in (CPU, CUDA):
        reader = reader_on(device, tmp_path, dtype)
        shapes = {name: tuple(tensors[name].shape) for name in ("large.weight", "small.weight")}
        stacked = reader.stack(shapes, shard_dim=shard_dim, rank=1, size=2)
        bias = reader.take("bias", (64,))
        reader.finish()
        results[device.type] = (stacked, bias)
    for on_cpu, on_cuda in zip(results["cpu"], results["cuda"], strict=True):
        assert on_cuda.is_cuda
        assert on_cuda.is_contiguous()
        assert torch.equal(on_cuda.cpu(), on_cpu)


def test_an_error_of_a_reading_thread_comes_with_finish(tensors: dict[str, torch.Tensor], tmp_path: Path) -> None:
    reader = reader_on(CUDA, tmp_path, torch.bfloat16)
    reader.take("large.weight", (6000, 1200))
    with pytest.raises(ModelLoadError, match=r"tensor large\.weight has shape \[1200, 6000\]"):
        reader.finish()


def test_random_weights_are_drawn_on_the_device_from_the_name(tmp_path: Path) -> None:
    first, second = (reader_on(CUDA, tmp_path, torch.bfloat16, "dummy") for _ in range(2))
    second.take("other.weight", (7, 7))
    one, other = first.take("a.weight", (512, 300)), second.take("a.weight", (512, 300))
    assert one.is_cuda
    assert torch.equal(one, other)
    assert not torch.equal(one, first.take("b.weight", (512, 300)))
    assert 0.019 < float(one.float().std()) < 0.021
    assert torch.equal(first.take("model.norm.weight", (5,)).cpu(), torch.ones(5, dtype=torch.bfloat16))
