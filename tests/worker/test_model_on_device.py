"""Models whose passes are launches, on a CPU and on a GPU: against transformers and against the native program."""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from model_harness import ModelUnderTest
from worker_harness import assert_greedy_equal, reference_greedy, reference_logprobs, save_checkpoint, tiny_model

from worker.kernels.execution import LaunchExecution

PLACES = [pytest.param(torch.device("cpu"), id="cpu")]
if torch.cuda.is_available():
    PLACES.append(pytest.param(torch.device("cuda", 0), id="cuda", marks=pytest.mark.gpu))
LLAMA3_ROPE = {
    "rope_type": "llama3",
    "rope_theta": 5000.0,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 32,
}
FAMILIES: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("LlamaForCausalLM", {}),
    "llama-3-tied": ("LlamaForCausalLM", {"rope_parameters": LLAMA3_ROPE, "tie_word_embeddings": True}),
    "llama-with-all-biases": ("LlamaForCausalLM", {"attention_bias": True, "mlp_bias": True}),
    "mistral-sliding-window": ("MistralForCausalLM", {"sliding_window": 9}),
    "qwen2-some-layers-slide": (
        "Qwen2ForCausalLM",
        {"use_sliding_window": True, "sliding_window": 11, "max_window_layers": 1},
    ),
}
DYNAMIC_ROPE = {"rope_type": "dynamic", "rope_theta": 10000.0, "factor": 4.0}
TOLERANCES = {torch.bfloat16: 3e-2, torch.float16: 4e-3}


def prompt_of(length: int, seed: int = 0) -> list[int]:
    return np.random.default_rng(seed).integers(3, 320, length).tolist()


def launched(
    directory: Path, place: torch.device, dtype: torch.dtype = torch.float32, **options: Any
) -> ModelUnderTest:
    return ModelUnderTest(directory, place, dtype, execution=LaunchExecution(place), **options)


def assert_logits_match(logits: torch.Tensor, model: Any, prompt: list[int]) -> None:
    expected = reference_logprobs(model, prompt).double()
    torch.testing.assert_close(torch.log_softmax(logits.double(), -1), expected, rtol=2e-3, atol=2e-3)


@pytest.mark.parametrize("place", PLACES)
@pytest.mark.parametrize("family", FAMILIES)
def test_logits_and_greedy_ids_match_transformers(family: str, place: torch.device, tmp_path: Path) -> None:
    architecture, overrides = FAMILIES[family]
    reference = tiny_model(architecture, **overrides)
    ours = launched(save_checkpoint(reference, tmp_path), place)
    prompt = prompt_of(60)
    assert_logits_match(ours.prompt_logits(prompt), reference, prompt)
    assert_logits_match(ours.prompt_logits(prompt, chunk=17, slot=1), reference, prompt)
    assert_greedy_equal(ours.greedy(prompt[:9], 8, slot=2), reference_greedy(reference, prompt[:9], 8))


@pytest.mark.parametrize("place", PLACES)
@pytest.mark.parametrize("dtype", list(TOLERANCES))
@pytest.mark.parametrize("kv_dtype", [None, torch.float8_e4m3fn], ids=["kv-same", "kv-e4m3"])
def test_narrow_logits_stay_close_to_those_of_the_native_program(
    dtype: torch.dtype, kv_dtype: torch.dtype | None, place: torch.device, tmp_path: Path
) -> None:
    directory = save_checkpoint(tiny_model("Qwen2ForCausalLM"), tmp_path)
    prompt = prompt_of(50)
    native = ModelUnderTest(directory, torch.device("cpu"), dtype, kv_dtype=kv_dtype).prompt_logits(prompt)
    ours = launched(directory, place, dtype, kv_dtype=kv_dtype).prompt_logits(prompt, chunk=20)
    # Keys and values in 8 bits make a coarser model, and a number at the border of two makes more of a difference.
    tolerance = TOLERANCES[dtype] if kv_dtype is None else 0.1
    assert float((ours - native).norm() / native.norm()) < tolerance


@pytest.mark.parametrize("place", PLACES)
def test_prefill_and_decode_rows_and_padding_share_a_step(place: torch.device, tmp_path: Path) -> None:
    reference = tiny_model("LlamaForCausalLM")
    ours = launched(save_checkpoint(reference, tmp_path), place)
    first, second = prompt_of(21), prompt_of(30, seed=1)
    ours.logits([(0, 0, first[:20], 20)])
    logits = ours.logits([(0, 20, first[20:], 20), (1, 0, second, 30)], num_padding=5)
    assert_logits_match(torch.cat([ours.prompt_logits(first[:20], slot=2), logits[:1]]), reference, first)
    assert_logits_match(logits[1:], reference, second)


@pytest.mark.parametrize("place", PLACES)
@pytest.mark.parametrize("prompt_len", [20, 50])
def test_dynamic_rotation_of_short_and_long_prompts(prompt_len: int, place: torch.device, tmp_path: Path) -> None:
    reference = tiny_model("LlamaForCausalLM", max_position_embeddings=32, rope_parameters=DYNAMIC_ROPE)
    ours = launched(save_checkpoint(reference, tmp_path), place)
    prompt = prompt_of(prompt_len)
    assert_logits_match(ours.prompt_logits(prompt), reference, prompt)
    assert_logits_match(ours.prompt_logits(prompt, chunk=9, slot=1), reference, prompt)
    assert_greedy_equal(ours.greedy(prompt, 16, slot=2), reference_greedy(reference, prompt, 16))


@pytest.mark.parametrize("place", PLACES)
def test_random_weights_depend_on_the_seed_and_the_device_alone(place: torch.device, tmp_path: Path) -> None:
    directory = save_checkpoint(tiny_model("LlamaForCausalLM"), tmp_path)
    (directory / "model.safetensors").unlink()
    one, other = (launched(directory, place, load_format="dummy").prompt_logits(prompt_of(9)) for _ in range(2))
    assert torch.equal(one, other)
    assert one.std() > 0


class GroupSum:
    """An all-reduce over threads."""

    def __init__(self, size: int) -> None:
        self._parts: list[torch.Tensor] = [torch.empty(0)] * size
        self._barrier = threading.Barrier(size, timeout=60)

    def of_rank(self, rank: int) -> Callable[[torch.Tensor], None]:
        def all_reduce(tensor: torch.Tensor) -> None:
            self._parts[rank] = tensor.clone()
            self._barrier.wait()
            total = sum(self._parts[1:], self._parts[0])
            self._barrier.wait()
            tensor.copy_(total)

        return all_reduce


@pytest.mark.parametrize("place", PLACES)
@pytest.mark.parametrize("overrides", [{}, {"attention_bias": True, "mlp_bias": True}], ids=["plain", "biases"])
def test_two_ranks_compute_what_one_does(overrides: dict[str, Any], place: torch.device, tmp_path: Path) -> None:
    reference = tiny_model("LlamaForCausalLM", **overrides)
    directory = save_checkpoint(reference, tmp_path)
    group, prompt = GroupSum(2), prompt_of(20)

    def logits_of(rank: int) -> torch.Tensor:
        ours = launched(directory, place, rank=rank, size=2, all_reduce=group.of_rank(rank))
        return ours.prompt_logits(prompt)

    with ThreadPoolExecutor(2) as pool:
        logits = list(pool.map(logits_of, (0, 1)))
    torch.testing.assert_close(logits[0], logits[1])
    assert_logits_match(logits[0], reference, prompt)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_pass_in_a_graph_reads_what_the_step_left_in_its_buffers(dtype: torch.dtype, tmp_path: Path) -> None:
    """Decode steps by replays of one graph, whose batch is changed in place."""
    directory = save_checkpoint(tiny_model("LlamaForCausalLM"), tmp_path)
    place, prompt = torch.device("cuda", 0), prompt_of(20)
    ours, eager = launched(directory, place, dtype), launched(directory, place, dtype)
    expected = eager.greedy(prompt, 6)
    token_ids = [*prompt, int(ours.prompt_logits(prompt)[-1].argmax())]
    batch = ours.batch([(0, 20, token_ids[-1:], 20)])
    logits = torch.empty((1, ours.model.vocab_size), device=place)

    def step() -> None:
        ours.model.compute_logits(ours.model.forward(batch, ours.cache), logits)

    step()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        step()
    for position in range(20, 25):
        following = ours.batch([(0, position, token_ids[-1:], 20)])
        for name in ("token_ids", "positions", "slot_mapping", "context_lens"):
            getattr(batch, name).copy_(getattr(following, name))
        graph.replay()
        token_ids.append(int(logits[0].argmax()))
    assert token_ids[20:] == expected
