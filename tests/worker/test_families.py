"""Tiny random models of each family against transformers, float32: log-probabilities and greedy ids."""

from __future__ import annotations

import json
import logging
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file
from worker_harness import (
    Driver,
    assert_greedy_equal,
    prompt_logprobs_of,
    reference_greedy,
    reference_logprobs,
    runner_for,
    save_checkpoint,
    tiny_model,
)

from pagemill.errors import ConfigError, ModelLoadError
from worker.models import register, supported_architectures
from worker.models.llama import build


def prompt_of(length: int, seed: int = 0) -> list[int]:
    return np.random.default_rng(seed).integers(3, 320, length).tolist()


def assert_prompt_logprobs_equal(runner: Any, model: Any, prompt: list[int], budget: int = 512) -> None:
    expected = reference_logprobs(model, prompt)
    chosen = expected[torch.arange(len(prompt) - 1), torch.tensor(prompt[1:])]
    actual = torch.tensor(prompt_logprobs_of(runner, prompt, budget).chosen).double()
    torch.testing.assert_close(actual, chosen, rtol=2e-3, atol=2e-3)


def assert_same_model(model: Any, directory: Path, num_tokens: int = 12, **settings: Any) -> None:
    """Log-probabilities of a prompt, whole and in chunks, and greedy ids of several prompts at once."""
    runner = runner_for(directory, **settings)
    assert_prompt_logprobs_equal(runner, model, prompt_of(60))
    assert_prompt_logprobs_equal(runner, model, prompt_of(60), budget=17)
    driver = Driver(runner)
    prompts = [prompt_of(length, length) for length in (1, 7, 33, 50)]
    for prompt in prompts:
        driver.add(prompt)
    for output, prompt in zip(driver.generate(num_tokens, 40), prompts, strict=True):
        assert_greedy_equal(output, reference_greedy(model, prompt, num_tokens))


LLAMA3_ROPE = {
    "rope_type": "llama3",
    "rope_theta": 5000.0,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 32,
}
FAMILIES: dict[str, tuple[str, dict[str, Any]]] = {
    "llama-2": ("LlamaForCausalLM", {}),
    "llama-3": ("LlamaForCausalLM", {"rope_parameters": LLAMA3_ROPE}),
    "llama-with-all-biases": ("LlamaForCausalLM", {"attention_bias": True, "mlp_bias": True}),
    "llama-wide-heads": ("LlamaForCausalLM", {"head_dim": 80, "num_key_value_heads": 4}),
    "mistral-sliding-window": ("MistralForCausalLM", {"sliding_window": 9}),
    "mistral-full": ("MistralForCausalLM", {"sliding_window": None}),
    "qwen2": ("Qwen2ForCausalLM", {}),
    "qwen2-some-layers-slide": (
        "Qwen2ForCausalLM",
        {"use_sliding_window": True, "sliding_window": 11, "max_window_layers": 1},
    ),
}


@pytest.mark.parametrize("family", FAMILIES)
def test_family_matches_transformers(family: str, tmp_path: Path) -> None:
    architecture, overrides = FAMILIES[family]
    model = tiny_model(architecture, **overrides)
    assert_same_model(model, save_checkpoint(model, tmp_path))


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_narrow_dtypes_stay_close(dtype: str, tmp_path: Path) -> None:
    model = tiny_model("Qwen2ForCausalLM")
    runner = runner_for(save_checkpoint(model, tmp_path), dtype=dtype)
    prompt = prompt_of(50)
    expected = reference_logprobs(model, prompt)[torch.arange(49), torch.tensor(prompt[1:])]
    actual = torch.tensor(prompt_logprobs_of(runner, prompt).chosen).double()
    assert torch.cosine_similarity(actual, expected, dim=0) > 0.999


@pytest.mark.parametrize("tied", [True, False])
@pytest.mark.parametrize("head", ["different", "absent"])
def test_md05_the_file_decides_about_the_head(
    tied: bool, head: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    model = tiny_model("LlamaForCausalLM")
    save_checkpoint(model, tmp_path, tie_word_embeddings=tied)
    if head == "absent":
        tensors = load_file(tmp_path / "model.safetensors")
        del tensors["lm_head.weight"]
        save_file(tensors, tmp_path / "model.safetensors")
        model.lm_head.weight = model.model.embed_tokens.weight
    with caplog.at_level(logging.WARNING):
        assert_same_model(model, tmp_path, num_tokens=4)
    warned = [record.getMessage() for record in caplog.records if "tie_word_embeddings" in record.getMessage()]
    assert bool(warned) == (tied == (head == "different"))


ROPE_SCALINGS: dict[str, dict[str, Any]] = {
    "linear": {"factor": 4.0},
    "dynamic": {"factor": 4.0},
    "yarn": {"factor": 4.0, "original_max_position_embeddings": 32},
    "llama3": {k: v for k, v in LLAMA3_ROPE.items() if k not in ("rope_type", "rope_theta")},
}


@pytest.mark.parametrize("spelling", ["type", "rope_type", "rope_parameters"])
@pytest.mark.parametrize("rope", ROPE_SCALINGS)
def test_md08_rope_scaling_up_to_the_last_position(rope: str, spelling: str, tmp_path: Path) -> None:
    """Prompts that end at positions 0, 100, original length + 1 and the last; then the last positions one by one."""
    longest = 128
    max_positions = longest if rope == "llama3" else 32
    scaling = {"rope_type": rope, "rope_theta": 10000.0, **ROPE_SCALINGS[rope]}
    model = tiny_model("LlamaForCausalLM", max_position_embeddings=max_positions, rope_parameters=scaling)
    save_checkpoint(model, tmp_path)
    if spelling != "rope_parameters":
        config = json.loads((tmp_path / "config.json").read_text())
        old = config.pop("rope_parameters")
        config["rope_theta"] = old.pop("rope_theta")
        old[spelling] = old.pop("rope_type")
        config["rope_scaling"] = old
        (tmp_path / "config.json").write_text(json.dumps(config))
    runner = runner_for(tmp_path)
    assert runner.capacity.max_model_len == longest
    prompt = prompt_of(longest)
    for length in (2, 34, 101, longest):
        assert_prompt_logprobs_equal(runner, model, prompt[:length], budget=41)
    for start in (25, longest - 6):  # across the original length, and into the last position
        driver = Driver(runner)
        driver.add(prompt[:start])
        output = driver.generate(12 if start == 25 else 6)[0]
        assert_greedy_equal(output, reference_greedy(model, prompt[:start], len(output)))


def test_md08_longer_than_the_model_is_refused(tmp_path: Path) -> None:
    model = tiny_model("LlamaForCausalLM")
    with pytest.raises(ConfigError, match="max_model_len is 257, but the model's context length is 256"):
        runner_for(save_checkpoint(model, tmp_path), max_model_len=257)


def test_md10_large_qwen2_biases_count_without_an_attention_bias_key(tmp_path: Path) -> None:
    model = tiny_model("Qwen2ForCausalLM")
    directory = save_checkpoint(model, tmp_path)
    assert "attention_bias" not in json.loads((directory / "config.json").read_text())
    assert_same_model(model, directory)
    # The biases matter: without them the log-probabilities are far off.
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if name.endswith("bias"):
                parameter.zero_()
    with pytest.raises(AssertionError):
        assert_same_model(model, directory)


def write_gguf(model: Any, path: Path, architecture: str) -> None:
    """A transformers model as float32 GGUF, query and key rows of the llama architecture interleaved."""
    config = model.config
    writer = gguf.GGUFWriter(path, architecture)
    writer.add_block_count(config.num_hidden_layers)
    writer.add_context_length(config.max_position_embeddings)
    writer.add_embedding_length(config.hidden_size)
    writer.add_feed_forward_length(config.intermediate_size)
    writer.add_head_count(config.num_attention_heads)
    writer.add_head_count_kv(config.num_key_value_heads)
    writer.add_key_length(config.head_dim)
    writer.add_layer_norm_rms_eps(config.rms_norm_eps)
    writer.add_rope_freq_base(config.rope_parameters["rope_theta"])
    kind = gguf.MODEL_ARCH.LLAMA if architecture == "llama" else gguf.MODEL_ARCH.QWEN2
    names = gguf.get_tensor_name_map(kind, config.num_hidden_layers)
    heads = {"q_proj": config.num_attention_heads, "k_proj": config.num_key_value_heads}
    if config.rope_parameters["rope_type"] == "llama3":
        dims = np.arange(0, config.head_dim, 2, dtype=np.float64) / config.head_dim
        plain = config.rope_parameters["rope_theta"] ** -dims
        divisors = plain / model.model.rotary_emb.inv_freq.double().numpy()
        writer.add_tensor("rope_freqs.weight", divisors.astype(np.float32))
    for name, tensor in model.state_dict().items():
        values = tensor.numpy()
        num_heads = heads.get(name.split(".")[-2])
        if architecture == "llama" and num_heads:
            half = values.shape[0] // num_heads // 2
            values = values.reshape(num_heads, 2, half, *values.shape[1:]).swapaxes(1, 2).reshape(values.shape)
        writer.add_tensor(names.get_name(name, try_suffixes=(".weight", ".bias")), np.ascontiguousarray(values))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


@pytest.mark.parametrize("architecture", ["llama", "qwen2"])
def test_md10_gguf_files_match_transformers(architecture: str, tmp_path: Path) -> None:
    model = tiny_model("LlamaForCausalLM" if architecture == "llama" else "Qwen2ForCausalLM")
    write_gguf(model, tmp_path / "tiny.gguf", architecture)
    assert_same_model(model, tmp_path / "tiny.gguf")


def test_a_gguf_file_of_llama_3_carries_its_rotary_scaling_as_a_tensor(tmp_path: Path) -> None:
    model = tiny_model("LlamaForCausalLM", rope_parameters=LLAMA3_ROPE)
    write_gguf(model, tmp_path / "tiny.gguf", "llama")
    assert_same_model(model, tmp_path / "tiny.gguf")


def test_truncated_gguf_is_named(tmp_path: Path) -> None:
    path = tmp_path / "tiny.gguf"
    write_gguf(tiny_model("LlamaForCausalLM"), path, "llama")
    path.write_bytes(path.read_bytes()[:-4096])
    with pytest.raises(ModelLoadError, match=r"tiny\.gguf"):
        runner_for(path)


def test_pytorch_checkpoint_runs(tmp_path: Path) -> None:
    model = tiny_model("LlamaForCausalLM")
    save_checkpoint(model, tmp_path)
    (tmp_path / "model.safetensors").unlink()
    torch.save(model.state_dict(), tmp_path / "pytorch_model.bin")
    assert_same_model(model, tmp_path, num_tokens=3)


def test_unsupported_architecture_lists_the_supported(tmp_path: Path) -> None:
    directory = save_checkpoint(tiny_model("LlamaForCausalLM"), tmp_path, architectures=["BloomForCausalLM"])
    with pytest.raises(ModelLoadError) as caught:
        runner_for(directory)
    assert "\n" not in caught.value.message
    assert "BloomForCausalLM is not supported; supported: LlamaForCausalLM, MistralForCausalLM" in caught.value.message


def test_an_architecture_from_outside_can_be_registered(tmp_path: Path) -> None:
    model = tiny_model("LlamaForCausalLM")
    directory = save_checkpoint(model, tmp_path, architectures=["OutsideForCausalLM"])
    register("OutsideForCausalLM", build)
    assert "OutsideForCausalLM" in supported_architectures()
    assert_prompt_logprobs_equal(runner_for(directory), model, prompt_of(20))
    register("OutsideForCausalLM", "worker.models.llama:build")
    assert_prompt_logprobs_equal(runner_for(directory), model, prompt_of(20))
    register("OutsideForCausalLM", "no.such.module:build")
    with pytest.raises(ModelLoadError, match=r"no\.such\.module:build cannot be imported"):
        runner_for(directory)


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        ({"head_dim": 48}, "head size 48 is not supported; supported: 64, 80"),
        ({"hidden_act": "gelu"}, "hidden_act 'gelu' is not supported"),
        ({"num_hidden_layers": "three"}, "num_hidden_layers must be a positive integer, got 'three'"),
        ({"num_key_value_heads": 3}, "4 heads do not divide into 3"),
        ({"quantization_config": {"quant_method": "gptq"}}, "quantization_config 'gptq' is not supported"),
        ({"intermediate_size": 128}, r"model\.safetensors: tensor model\.layers\.0\.mlp\.gate_proj\.weight has shape"),
        ({"num_hidden_layers": 4}, r"tensor model\.layers\.3\.input_layernorm\.weight is missing"),
    ],
)
def test_configs_that_cannot_be_served_are_refused(overrides: dict[str, Any], message: str, tmp_path: Path) -> None:
    directory = save_checkpoint(tiny_model("LlamaForCausalLM"), tmp_path, **overrides)
    with pytest.raises(ModelLoadError, match=message):
        runner_for(directory)


def test_random_weights_run_without_files(tmp_path: Path) -> None:
    directory = save_checkpoint(tiny_model("LlamaForCausalLM"), tmp_path)
    (directory / "model.safetensors").unlink()
    outputs = []
    for seed in (0, 0, 1):
        driver = Driver(runner_for(directory, load_format="dummy", seed=seed))
        driver.add(prompt_of(10))
        outputs.append(driver.generate(8))
    assert outputs[0] == outputs[1] != outputs[2]
