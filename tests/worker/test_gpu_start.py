"""Starts on a real GPU: what is measured there, and what is refused."""

from __future__ import annotations

import json
import logging
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from worker_harness import TINY

from pagemill.config import WorkerSettings
from pagemill.errors import ConfigError
from pagemill.local_engine import free_device_memory
from worker.device import pick_device
from worker.gpu_memory import GIB
from worker.model_runner import ModelRunner

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]


@pytest.fixture
def tiny(tmp_path: Path) -> Path:
    (tmp_path / "config.json").write_text(json.dumps({**TINY, "architectures": ["LlamaForCausalLM"]}))
    return tmp_path


@pytest.fixture(autouse=True)
def empty_device() -> Iterator[None]:
    free_device_memory()
    yield
    free_device_memory()


def start(model: Path, **settings: Any) -> ModelRunner:
    return ModelRunner(WorkerSettings(model=str(model), device="cuda", load_format="dummy", **settings))


def used_and_total() -> tuple[int, int]:
    torch.cuda.synchronize()
    free, total = torch.cuda.mem_get_info()
    return total - free, total


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("graphs", [True, False], ids=["graphs", "eager"])
def test_memory_in_use_is_the_share_that_was_asked_for(
    tiny: Path, dtype: str, graphs: bool, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.INFO):
        runner = start(tiny, dtype=dtype, gpu_memory_utilization=0.4, enforce_eager=not graphs)
    used, total = used_and_total()
    assert 0.38 * total < used <= 0.402 * total
    assert (runner.num_graphs > 0) == graphs
    assert re.search(
        r"may be in use: other processes and CUDA context [\d.]+, weights [\d.]+, activations [\d.]+, graphs [\d.]+, "
        r"KV cache [\d.]+",
        caplog.text,
    )
    assert f"{runner.capacity.num_blocks} blocks of 16 tokens" in caplog.text


def test_memory_of_others_is_left_to_them(tiny: Path) -> None:
    # A tensor of the caller's own is what another process's would be.
    held = torch.empty(used_and_total()[1] // 5, dtype=torch.uint8, device="cuda")
    runner = start(tiny, gpu_memory_utilization=0.4)
    used, total = used_and_total()
    assert 0.38 * total < used <= 0.402 * total
    pool = runner.capacity.num_blocks * runner.capacity.block_size * runner.capacity.kv_bytes_per_token
    assert pool < 0.2 * total
    del held


def test_8_bits_hold_twice_as_many_tokens(tiny: Path) -> None:
    sizes = []
    for kv_cache_dtype in ("auto", "fp8"):
        runner = start(tiny, dtype="bfloat16", gpu_memory_utilization=0.4, kv_cache_dtype=kv_cache_dtype)
        sizes.append(runner.capacity.num_blocks)
        del runner
        free_device_memory()
    assert sizes[1] == pytest.approx(2 * sizes[0], rel=0.02)


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"gpu_memory_utilization": 0.0001}, "the model does not fit|no KV cache fits"),
        ({"kv_cache_gib": 10_000.0}, r"kv_cache_gib 10000 needs \d+ KV blocks, 10000.00 GiB, and \d+ fit; .*weights"),
        ({"num_blocks": 1 << 30}, r"num_blocks .* needs 1073741824 KV blocks"),
    ],
)
def test_what_does_not_fit_is_refused_in_one_line_with_numbers(
    tiny: Path, settings: dict[str, Any], words: str
) -> None:
    with pytest.raises(ConfigError, match=words) as refused:
        start(tiny, **settings)
    assert "\n" not in refused.value.message
    assert re.search(r"\d+\.\d\d", refused.value.message)


def test_a_model_that_is_too_large_is_refused_before_it_is_loaded(tiny: Path) -> None:
    total = used_and_total()[1]
    config = {**TINY, "architectures": ["LlamaForCausalLM"]}
    config["num_hidden_layers"] = total // (2 * 3 * 8192 * 28672) + 1
    config |= {"hidden_size": 8192, "intermediate_size": 28672, "num_attention_heads": 64, "num_key_value_heads": 8}
    (tiny / "config.json").write_text(json.dumps(config | {"head_dim": 128}))
    before = used_and_total()[0]
    with pytest.raises(ConfigError, match=r"the model does not fit: its weights need [\d.]+ GiB as bfloat16"):
        start(tiny, dtype="bfloat16")
    assert used_and_total()[0] - before < GIB


def test_a_device_with_no_room_for_a_context_is_refused(tiny: Path) -> None:
    assert pick_device("auto").kind == "cuda"
    held = torch.empty(int(0.97 * torch.cuda.mem_get_info()[0]), dtype=torch.uint8, device="cuda")
    with pytest.raises(ConfigError, match=r"no KV cache fits|the model does not fit|the largest step does not fit"):
        start(tiny)
    del held
