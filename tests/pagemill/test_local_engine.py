"""The engine in one process with two steps in flight: what it yields is what it yields with one."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.torch import save_file

from pagemill.demo_model import demo_model_path
from pagemill.engine_args import EngineArgs
from pagemill.local_engine import LocalEngine
from pagemill.outputs import RequestOutput
from pagemill.sampling_params import SamplingParams

VOCAB, HIDDEN, LAYERS = 320, 64, 2
CONFIG = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "vocab_size": VOCAB,
    "hidden_size": HIDDEN,
    "intermediate_size": 96,
    "num_hidden_layers": LAYERS,
    "num_attention_heads": 2,
    "head_dim": 64,
    "num_key_value_heads": 1,
    "max_position_embeddings": 256,
    "rms_norm_eps": 1e-5,
    "tie_word_embeddings": True,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
KINDS: list[dict[str, Any]] = [
    {"temperature": 0.0},
    {"temperature": 0.0, "stop": ["e", "a"]},
    {"temperature": 0.9, "seed": 4, "n": 3},
    {"temperature": 1.1, "seed": 5, "n": 2, "stop": ["th", "1"], "ignore_eos": True},
    {"temperature": 0.0, "stop_token_ids": list(range(20, 90)), "logprobs": 1},
]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny model whose logits are far from uniform, for the first 320 ids of the demo model's tokenizer."""
    directory = tmp_path_factory.mktemp("tiny")
    (directory / "config.json").write_text(json.dumps(CONFIG))
    generator = torch.Generator().manual_seed(0)

    def drawn(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=generator) * 0.2

    weights = {"model.embed_tokens.weight": drawn(VOCAB, HIDDEN), "model.norm.weight": torch.ones(HIDDEN)}
    for layer in range(LAYERS):
        name = f"model.layers.{layer}"
        weights |= {
            f"{name}.input_layernorm.weight": torch.ones(HIDDEN),
            f"{name}.post_attention_layernorm.weight": torch.ones(HIDDEN),
            f"{name}.self_attn.q_proj.weight": drawn(128, HIDDEN),
            f"{name}.self_attn.k_proj.weight": drawn(64, HIDDEN),
            f"{name}.self_attn.v_proj.weight": drawn(64, HIDDEN),
            f"{name}.self_attn.o_proj.weight": drawn(HIDDEN, 128),
            f"{name}.mlp.gate_proj.weight": drawn(96, HIDDEN),
            f"{name}.mlp.up_proj.weight": drawn(96, HIDDEN),
            f"{name}.mlp.down_proj.weight": drawn(HIDDEN, 96),
        }
    save_file(weights, directory / "model.safetensors")
    return directory


def engine(model: Path, steps_in_flight: int, num_blocks: int) -> LocalEngine:
    args = EngineArgs(
        model=str(model),
        tokenizer=str(demo_model_path()),
        device="cpu",
        dtype="float32",
        block_size=8,
        num_blocks=num_blocks,
        max_num_seqs=6,
        max_num_batched_tokens=48,
    )
    return LocalEngine(args.without_queue_bound(), steps_in_flight=steps_in_flight)


@pytest.fixture(scope="module")
def one(model: Path) -> LocalEngine:
    return engine(model, 1, 256)


@pytest.fixture(scope="module")
def two(model: Path) -> LocalEngine:
    return engine(model, 2, 32)


def run(
    engine: LocalEngine, requests: list[tuple[list[int], SamplingParams]], aborts: dict[int, int] | None = None
) -> list[RequestOutput]:
    """Outputs in the order of the requests, which are aborted after so many steps."""
    handles = [engine.add(engine.token_prompt(prompt), params) for prompt, params in requests]
    outputs = {handle: RequestOutput("") for handle in handles}
    steps = 0
    while engine.has_work:
        for event in engine.step():
            assert event.output is not None, event.error
            outputs[event.handle].extend(event.output)
        steps += 1
        for request, after in (aborts or {}).items():
            if steps == after:
                engine.abort(handles[request])
    engine.scheduler.check_integrity()
    assert engine.scheduler.num_in_flight == 0
    assert all(output.finished for output in outputs.values())
    return [outputs[handle] for handle in handles]


@settings(max_examples=40, deadline=None, derandomize=True)
@given(
    drawn=st.lists(
        st.tuples(
            st.integers(1, 40),
            st.integers(1, 20),
            st.integers(0, len(KINDS) - 1),
            st.one_of(st.none(), st.integers(1, 25)),
        ),
        min_size=1,
        max_size=8,
    )
)
def test_texts_and_ids_are_those_of_one_step_at_a_time(one: LocalEngine, two: LocalEngine, drawn: list[Any]) -> None:
    random = np.random.default_rng(len(drawn))
    requests = [
        (random.integers(3, VOCAB, length).tolist(), SamplingParams(max_tokens=max_tokens, **KINDS[kind]))
        for length, max_tokens, kind, _ in drawn
    ]
    aborts = {at: after for at, (_, _, _, after) in enumerate(drawn) if after is not None}
    for at, (expected, got) in enumerate(zip(run(one, requests), run(two, requests, aborts), strict=True)):
        for whole, output in zip(expected.outputs, got.outputs, strict=at not in aborts):
            if at in aborts:
                assert output.token_ids == whole.token_ids[: len(output.token_ids)]
                continue
            assert (output.token_ids, output.text) == (whole.token_ids, whole.text)
            assert (output.finish_reason, output.stop_reason) == (whole.finish_reason, whole.stop_reason)


def test_the_last_step_in_flight_is_taken_so_that_the_prefix_cache_lives(two: LocalEngine) -> None:
    prompt = list(range(100, 140))
    params = SamplingParams(temperature=0.0, max_tokens=5, ignore_eos=True)
    (first,) = run(two, [(prompt, params)])
    (second,) = run(two, [(prompt, params)])
    assert second.num_cached_tokens == 32
    assert first.outputs[0].token_ids == second.outputs[0].token_ids


def test_requests_are_forgotten_with_steps_in_flight(two: LocalEngine) -> None:
    params = SamplingParams(temperature=0.0, max_tokens=9, ignore_eos=True)
    (expected,) = run(two, [([5, 9, 13], params)])
    two.add(two.token_prompt([7] * 30), params)
    two.step()
    assert two.scheduler.num_in_flight > 0
    two.forget_all()
    assert not two.has_work
    (again,) = run(two, [([5, 9, 13], params)])
    assert again.outputs[0].token_ids == expected.outputs[0].token_ids
