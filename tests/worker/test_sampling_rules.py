"""What sampling parameters do to the tokens of a tiny model, and what NaN logits do to nobody else."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from worker_harness import Driver, Sequence, reference_logprobs, runner_for, save_checkpoint, tiny_model

from pagemill.step import SlotSampling
from worker.model_runner import ModelRunner

PROMPT = [5, 9, 13, 5]


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_checkpoint(tiny_model("LlamaForCausalLM"), tmp_path_factory.mktemp("tiny"))


@pytest.fixture(scope="module")
def runner(checkpoint: Path) -> ModelRunner:
    return runner_for(checkpoint)


def greedy(runner: ModelRunner, num_tokens: int, **sampling: object) -> Sequence:
    """One greedy sequence with more rules, beside two that have none."""
    driver = Driver(runner)
    driver.add([7, 8])
    sequence = driver.add(PROMPT, SlotSampling(temperature=0.0, **sampling))  # type: ignore[arg-type]
    driver.add([8, 7, 6], SlotSampling(temperature=1.0, seed=4))
    driver.generate(num_tokens)
    return sequence


def adjusted(token_ids: list[int], sampling: SlotSampling, num_prompt: int) -> torch.Tensor:
    """The reference's logits after the penalties, as their definitions say."""
    logits = reference_logprobs(tiny_model("LlamaForCausalLM"), token_ids)[-1]
    outputs = torch.bincount(torch.tensor(token_ids[num_prompt:], dtype=torch.int64), minlength=logits.numel())
    logits -= sampling.frequency_penalty * outputs + sampling.presence_penalty * (outputs > 0)
    return logits


@pytest.mark.parametrize("penalty", [{"presence_penalty": 2.0}, {"frequency_penalty": 1.5}])
def test_output_penalties_follow_their_definition(runner: ModelRunner, penalty: dict[str, float]) -> None:
    sequence = greedy(runner, 20, **penalty)
    sampling = SlotSampling(**penalty)  # type: ignore[arg-type]
    for position, token_id in enumerate(sequence.outputs):
        logits = adjusted(PROMPT + sequence.outputs[:position], sampling, len(PROMPT))
        assert logits[token_id] >= logits.max() - 1e-3


def test_repetition_penalty_counts_prompt_and_output(runner: ModelRunner) -> None:
    plain = greedy(runner, 20).outputs
    penalized = greedy(runner, 20, repetition_penalty=100.0).outputs
    assert len(set(penalized)) == 20
    assert not set(penalized) & set(PROMPT)
    assert plain != penalized


def test_output_penalties_survive_preemption(runner: ModelRunner) -> None:
    expected = greedy(runner, 20, presence_penalty=2.0, frequency_penalty=1.0).outputs
    driver = Driver(runner)
    sequence = driver.add(PROMPT, SlotSampling(temperature=0.0, presence_penalty=2.0, frequency_penalty=1.0))
    for _ in range(9):
        driver.run_step()
    driver.preempt(sequence)
    driver.generate(20)
    assert sequence.outputs == expected


def test_min_tokens_masks_the_listed_ids_until_then(runner: ModelRunner) -> None:
    plain = greedy(runner, 8).outputs
    masked = greedy(runner, 8, min_tokens=3, masked_until_min_tokens=[*plain, 9999]).outputs
    assert not set(masked[:3]) & set(plain)
    # From then on the mask is gone: the ids that are best there are drawn again.
    expected = reference_logprobs(tiny_model("LlamaForCausalLM"), PROMPT + masked[:3])[-1].argmax()
    assert masked[3] == expected


def test_logit_bias_moves_a_token_to_the_top_and_another_away(runner: ModelRunner) -> None:
    plain = greedy(runner, 1).outputs[0]
    assert greedy(runner, 3, logit_bias={42: 100.0}).outputs == [42, 42, 42]
    assert greedy(runner, 1, logit_bias={plain: -100.0}).outputs[0] != plain


def test_logprobs_are_those_before_bias_and_temperature(runner: ModelRunner) -> None:
    sequence = greedy(runner, 2, logit_bias={42: 100.0}, num_logprobs=1)
    expected = reference_logprobs(tiny_model("LlamaForCausalLM"), [*PROMPT, 42])[len(PROMPT) - 1 :]
    assert sequence.logprobs.chosen == pytest.approx([float(row[42]) for row in expected], abs=2e-3)
    assert sequence.logprobs.top_ids == expected.argmax(-1).tolist()
    assert sequence.logprobs.ranks == ((expected > expected[:, 42:43]).sum(-1) + 1).tolist()


def test_top_k_one_and_a_tiny_top_p_are_greedy(runner: ModelRunner) -> None:
    expected = greedy(runner, 10).outputs
    driver = Driver(runner)
    for sampling in (
        SlotSampling(temperature=2.0, top_k=1, seed=5),
        SlotSampling(temperature=1.0, top_p=1e-6, seed=6),
        SlotSampling(temperature=1.0, min_p=1.0, seed=7),
    ):
        driver.add(PROMPT, sampling)
    assert driver.generate(10) == [expected] * 3


def test_draws_follow_the_distribution(runner: ModelRunner) -> None:
    """400 seeds: frequencies of the first token within five standard deviations of its probability."""
    counts = torch.zeros(320)
    for first in range(0, 400, 8):
        driver = Driver(runner)
        for seed in range(first, first + 8):
            driver.add(PROMPT, SlotSampling(temperature=2.0, seed=seed))
        for (token_id,) in driver.generate(1):
            counts[token_id] += 1
    logits = reference_logprobs(tiny_model("LlamaForCausalLM"), PROMPT)[-1]
    expected = torch.softmax(logits / 2.0, -1) * 400
    assert ((counts - expected).abs() <= 5 * expected.sqrt() + 3).all()


@pytest.fixture(scope="module")
def poisoned(tmp_path_factory: pytest.TempPathFactory) -> ModelRunner:
    """A model in which token 300 makes NaN."""
    model = tiny_model("LlamaForCausalLM")
    with torch.no_grad():
        model.model.embed_tokens.weight[300] = float("nan")
    return runner_for(save_checkpoint(model, tmp_path_factory.mktemp("poisoned")))


def test_nan_logits_end_their_own_sequence_alone(runner: ModelRunner, poisoned: ModelRunner) -> None:
    expected = greedy(runner, 6).outputs
    driver = Driver(poisoned)
    good = driver.add(PROMPT)
    bad = driver.add([4, 300, 5])
    for _ in range(3):
        driver.run_step()
    assert [failure.slot for failure in driver.failures] == [bad.slot]
    assert "NaN" in driver.failures[0].message
    assert bad.outputs == [0, 0, 0]
    # Its slot and blocks go to another sequence, which reads none of the NaN keys and values left behind.
    driver.remove(bad)
    heir = driver.add(PROMPT)
    driver.free_slots.append(heir.slot)
    heir.slot = bad.slot
    driver.generate(6)
    assert good.outputs == heir.outputs == expected
    assert len(driver.failures) == 1


def test_nan_in_prompt_logprobs_is_reported_once(poisoned: ModelRunner) -> None:
    driver = Driver(poisoned)
    sequence = driver.add([4, 300, 5], SlotSampling(temperature=0.0, num_prompt_logprobs=0))
    driver.run_step()
    assert [failure.slot for failure in driver.failures] == [sequence.slot]
    assert sequence.prompt_logprobs == []
