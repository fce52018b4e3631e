"""The real demo model in float32: greedy ids equal transformers', however steps are cut."""

from __future__ import annotations

from typing import Any

import gguf
import numpy as np
import pytest
import torch
from worker_harness import Driver, Sequence, assert_greedy, prompt_logprobs_of, reference_logprobs, runner_for

from pagemill.demo_model import demo_model_path
from pagemill.errors import DesyncError
from pagemill.gguf_file import read_gguf_head
from pagemill.step import NewSequence, SlotSampling, StepPlan
from worker.model_runner import ModelRunner
from worker.quantization.gguf import GgufSource

NUM_TOKENS = 16
PARIS = 7042


@pytest.fixture(scope="module")
def runner() -> ModelRunner:
    return runner_for("")


class Greedy:
    """Checks greedy outputs against the reference, each distinct one once."""

    def __init__(self, model: Any) -> None:
        self._model = model
        self._checked: set[tuple[tuple[int, ...], tuple[int, ...]]] = set()

    def check(self, sequence: Sequence) -> None:
        key = (tuple(sequence.prompt), tuple(sequence.outputs))
        assert len(sequence.outputs) >= NUM_TOKENS
        if key not in self._checked:
            assert_greedy(self._model, sequence.prompt, sequence.outputs)
            self._checked.add(key)


@pytest.fixture(scope="module")
def greedy(demo_reference: Any) -> Greedy:
    return Greedy(demo_reference)


def test_gguf_rows_of_query_and_key_are_put_in_half_split_order() -> None:
    """Row by row, by the definition: pair i of a head lies at rows 2 i and 2 i + 1 of the file."""
    path = demo_model_path()
    source = GgufSource(path)
    stored = read_gguf_head(path).tensors
    data = np.memmap(path, dtype=np.uint8, mode="r")
    for part, heads in (("q", 9), ("k", 3)):
        tensor = stored[f"blk.7.attn_{part}.weight"]
        kind = gguf.GGMLQuantizationType(tensor.ggml_type)
        num_bytes = heads * 64 * 576 // 32 * 20  # Q4_1: 20 bytes for 32 weights
        packed = data[tensor.offset_bytes : tensor.offset_bytes + num_bytes].reshape(heads * 64, -1)
        in_file = gguf.quants.dequantize(packed, kind)
        ours = source.read(f"model.layers.7.self_attn.{part}_proj.weight", (heads * 64, 576), (slice(None),) * 2)
        for head in range(heads):
            for pair in range(32):
                for half in (0, 1):
                    row = ours[64 * head + pair + 32 * half]
                    assert torch.equal(row, torch.from_numpy(in_file[64 * head + 2 * pair + half]))


def test_the_demo_model_knows_the_capital_of_france(runner: ModelRunner, demo_prompts: list[list[int]]) -> None:
    driver = Driver(runner)
    paris = driver.add(demo_prompts[0])
    driver.generate(2)
    assert PARIS in paris.outputs


def test_prompts_alone(runner: ModelRunner, demo_prompts: list[list[int]], greedy: Greedy) -> None:
    for prompt in demo_prompts:
        driver = Driver(runner)
        sequence = driver.add(prompt)
        driver.generate(NUM_TOKENS)
        greedy.check(sequence)


@pytest.mark.parametrize("budget", [512, 32])
def test_all_prompts_at_once(runner: ModelRunner, demo_prompts: list[list[int]], greedy: Greedy, budget: int) -> None:
    driver = Driver(runner)
    sequences = [driver.add(prompt) for prompt in demo_prompts]
    driver.generate(NUM_TOKENS, budget)
    for sequence in sequences:
        greedy.check(sequence)


@pytest.mark.parametrize("block_size", [8, 32])
def test_other_block_sizes(demo_prompts: list[list[int]], greedy: Greedy, block_size: int) -> None:
    driver = Driver(runner_for("", block_size=block_size, num_blocks=2048 // block_size))
    sequences = [driver.add(prompt) for prompt in demo_prompts]
    driver.generate(NUM_TOKENS, 96)
    for sequence in sequences:
        greedy.check(sequence)


def test_preemption_and_resumption(runner: ModelRunner, demo_prompts: list[list[int]], greedy: Greedy) -> None:
    driver = Driver(runner)
    sequences = [driver.add(prompt) for prompt in demo_prompts]
    for _ in range(6):
        driver.run_step()
    driver.preempt(sequences[1])
    driver.preempt(sequences[3])
    assert len(driver.generate(NUM_TOKENS, 40)) == len(sequences)
    for sequence in sequences:
        greedy.check(sequence)


def test_children_share_the_prompt_and_copy_its_last_block(
    runner: ModelRunner, demo_prompts: list[list[int]], greedy: Greedy
) -> None:
    """As n > 1 is planned: the child refers to full blocks, copies the last one and computes one token again."""
    prompt, block_size = demo_prompts[3], runner.capacity.block_size
    driver = Driver(runner)
    parent = driver.add(prompt)
    driver.run_step()
    child = driver.add(prompt)
    num_full = (len(prompt) - 1) // block_size
    copied = driver.free_blocks.pop()
    child.blocks = [*parent.blocks[:num_full], copied]
    child.num_computed = len(prompt) - 1
    plan, _rows, sampled = driver.plan(512)
    plan.copy_sources, plan.copy_destinations = [parent.blocks[num_full]], [copied]
    for sequence, token_id in zip(sampled, runner.execute(plan).sampled_token_ids, strict=True):
        sequence.outputs.append(token_id)
    driver.generate(NUM_TOKENS)
    greedy.check(parent)
    greedy.check(child)
    assert child.outputs == parent.outputs[: len(child.outputs)]


def test_prompt_logprobs_match_transformers(
    runner: ModelRunner, demo_reference: Any, demo_prompts: list[list[int]]
) -> None:
    prompt = demo_prompts[5]
    expected = reference_logprobs(demo_reference, prompt)
    columns = prompt_logprobs_of(runner, prompt, budget=37, num_top=2)
    chosen = expected[torch.arange(len(prompt) - 1), torch.tensor(prompt[1:])]
    torch.testing.assert_close(torch.tensor(columns.chosen).double(), chosen, rtol=1e-3, atol=1e-3)
    top = torch.topk(expected[:-1], 2)
    torch.testing.assert_close(
        torch.tensor(columns.top_logprobs).double().view(-1, 2), top.values, rtol=1e-3, atol=1e-3
    )
    ranks = (expected[:-1] > chosen[:, None]).sum(-1) + 1
    assert (torch.tensor(columns.ranks) - ranks).abs().float().mean() < 0.1


def test_logprobs_of_sampled_tokens(runner: ModelRunner, demo_reference: Any, demo_prompts: list[list[int]]) -> None:
    driver = Driver(runner)
    with_top = driver.add(demo_prompts[0], SlotSampling(temperature=0.0, num_logprobs=3))
    chosen_only = driver.add(demo_prompts[1], SlotSampling(temperature=0.8, seed=3, num_logprobs=0))
    without = driver.add(demo_prompts[2])
    driver.generate(6)
    assert without.logprobs.chosen == []
    assert (len(chosen_only.logprobs.chosen), chosen_only.logprobs.top_ids) == (6, [])
    for sequence in (with_top, chosen_only):
        expected = reference_logprobs(demo_reference, sequence.token_ids)[len(sequence.prompt) - 1 : -1]
        chosen = expected[torch.arange(6), torch.tensor(sequence.outputs)]
        torch.testing.assert_close(torch.tensor(sequence.logprobs.chosen).double(), chosen, rtol=1e-3, atol=1e-3)
    assert with_top.logprobs.ranks == [1] * 6
    assert with_top.logprobs.top_ids[::3] == with_top.outputs


def test_a_seed_draws_the_same_tokens_in_any_company(runner: ModelRunner, demo_prompts: list[list[int]]) -> None:
    sampling = SlotSampling(temperature=1.0, top_p=0.95, top_k=50, seed=2**63 + 11)
    alone = Driver(runner)
    alone.add(demo_prompts[0], sampling)
    (expected,) = alone.generate(12)
    crowd = Driver(runner)
    crowd.add(demo_prompts[4], SlotSampling(temperature=1.5, seed=1))
    same = crowd.add(demo_prompts[0], sampling)
    other = crowd.add(demo_prompts[0], SlotSampling(temperature=1.0, top_p=0.95, top_k=50, seed=12))
    for _ in range(5):
        crowd.run_step(20)
    crowd.preempt(same)
    crowd.generate(12)
    assert same.outputs == expected
    assert other.outputs != expected


def test_an_overshot_token_and_a_reused_slot_do_no_harm(
    runner: ModelRunner, demo_prompts: list[list[int]], greedy: Greedy
) -> None:
    driver = Driver(runner)
    ended = driver.add(demo_prompts[1])
    driver.generate(NUM_TOKENS + 1)
    again = driver.add(demo_prompts[2])
    driver.free_slots.append(again.slot)
    again.slot = ended.slot
    driver.generate(NUM_TOKENS)
    greedy.check(again)


@pytest.mark.parametrize(("epoch", "step"), [(2, 0), (1, 1)])
def test_foreign_epoch_or_step_is_a_desync(runner: ModelRunner, epoch: int, step: int) -> None:
    runner.begin_epoch(1)
    with pytest.raises(DesyncError, match="expected step 0 of epoch 1"):
        runner.execute(StepPlan(epoch, step))


def test_sampling_before_all_tokens_are_computed_is_a_desync(runner: ModelRunner) -> None:
    runner.begin_epoch(1)
    sequence = NewSequence(0, [1, 2, 3], 3, 0, [0], SlotSampling())
    plan = StepPlan(1, 0, [], [sequence], [0], [2], [True], [0])
    with pytest.raises(DesyncError, match="before all its known tokens are computed"):
        runner.execute(plan)


def test_a_step_without_rows_only_releases(runner: ModelRunner) -> None:
    driver = Driver(runner)
    driver.add([1, 2, 3])
    driver.generate(1)
    result = runner.execute(StepPlan(driver.epoch, driver.step, released_slots=driver.released))
    assert result.sampled_token_ids == []


def test_capacity_has_the_numbers_of_the_model(runner: ModelRunner) -> None:
    capacity = runner.capacity
    assert (capacity.vocab_size, capacity.max_model_len, capacity.num_blocks) == (49152, 8192, 256)
    assert capacity.kv_bytes_per_token == 2 * 30 * 3 * 64 * 4
    assert capacity.max_step_tokens == 512
