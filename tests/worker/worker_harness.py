"""What worker tests share: tiny transformers checkpoints, a driver of step plans, comparison of greedy ids."""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file

from pagemill.config import WorkerSettings
from pagemill.step import NewSequence, PromptChunkLogprobs, SlotFailure, SlotSampling, StepPlan, TokenLogprobs
from worker.model_runner import ModelRunner
from worker.step_device import StepDevice

TINY: dict[str, Any] = {
    "vocab_size": 320,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "head_dim": 64,
    "num_key_value_heads": 2,
    "max_position_embeddings": 256,
    "rms_norm_eps": 1e-5,
    "tie_word_embeddings": False,
    "bos_token_id": 1,
    "eos_token_id": 2,
}


def tiny_model(architecture: str, seed: int = 0, **overrides: Any) -> Any:
    """A random float32 transformers model whose logits are far from uniform."""
    import transformers

    model_class = getattr(transformers, architecture)
    config = model_class.config_class(**{**TINY, **overrides}, architectures=[architecture])
    config._attn_implementation = "eager"
    torch.manual_seed(seed)
    model = model_class(config).float().eval()
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "norm" in name:
                parameter.uniform_(0.5, 1.5)
            elif name.endswith("bias"):
                parameter.normal_(0.0, 2.0)
            else:
                parameter.normal_(0.0, 0.15)
    return model


def save_checkpoint(model: Any, directory: Path, **config_overrides: Any) -> Path:
    """config.json and one model.safetensors of a transformers model, the head as a tensor of its own."""
    directory.mkdir(parents=True, exist_ok=True)
    config = json.loads(model.config.to_json_string(use_diff=False))
    config["architectures"] = [type(model).__name__]
    config.update(config_overrides)
    (directory / "config.json").write_text(json.dumps(config))
    save_file({name: t.clone().contiguous() for name, t in model.state_dict().items()}, directory / "model.safetensors")
    return directory


def runner_for(model: Path | str, *, step_device: StepDevice | None = None, **overrides: Any) -> ModelRunner:
    """A float32 runner on the CPU with a small pool."""
    settings: dict[str, Any] = {
        "model": str(model),
        "device": "cpu",
        "dtype": "float32",
        "num_blocks": 256,
        "max_num_seqs": 8,
        "max_num_batched_tokens": 512,
        **overrides,
    }
    return ModelRunner(WorkerSettings(**settings), step_device)


@dataclass
class Sequence:
    """One sequence as the driver keeps it."""

    slot: int
    prompt: list[int]
    sampling: SlotSampling
    outputs: list[int] = field(default_factory=list)
    blocks: list[int] = field(default_factory=list)
    num_computed: int = 0
    entered: bool = False
    num_known: int = 0
    logprobs: TokenLogprobs = field(default_factory=TokenLogprobs)
    prompt_logprobs: list[PromptChunkLogprobs] = field(default_factory=list)

    @property
    def token_ids(self) -> list[int]:
        return self.prompt + self.outputs


class Driver:
    """A scheduler of a few lines: plans steps by hand for one runner and keeps what came back."""

    def __init__(self, runner: ModelRunner, epoch: int = 1) -> None:
        self.runner = runner
        self.epoch = epoch
        self.step = 0
        runner.begin_epoch(epoch)
        # The highest blocks first, so that block tables are never the identity.
        self.free_blocks = list(range(runner.capacity.num_blocks))
        self.free_slots = list(range(runner.capacity.num_slots))
        self.released: list[int] = []
        self.sequences: list[Sequence] = []
        self.failures: list[SlotFailure] = []

    def add(self, prompt: list[int], sampling: SlotSampling | None = None) -> Sequence:
        sequence = Sequence(self.free_slots.pop(), list(prompt), sampling or SlotSampling(temperature=0.0))
        sequence.num_known = len(prompt)
        self.sequences.append(sequence)
        return sequence

    def remove(self, sequence: Sequence) -> None:
        """Release a sequence's slot and blocks with the next step."""
        self.sequences.remove(sequence)
        if sequence.entered:
            self.released.append(sequence.slot)
        self.free_blocks += sequence.blocks
        self.free_slots.append(sequence.slot)

    def preempt(self, sequence: Sequence) -> None:
        """Take a sequence's blocks and slot; it enters again with all its tokens known and none computed."""
        self.remove(sequence)
        self.free_slots.remove(sequence.slot)
        sequence.slot = self.free_slots.pop(0)
        sequence.blocks, sequence.num_computed, sequence.entered = [], 0, False
        sequence.num_known = len(sequence.token_ids)
        self.sequences.append(sequence)

    def plan(self, budget: int) -> tuple[StepPlan, list[Sequence], list[Sequence]]:
        """A plan over all sequences in order, its rows' sequences, and those that sample."""
        plan = StepPlan(self.epoch, self.step, released_slots=self.released)
        self.released = []
        rows, sampled = [], []
        block_size = self.runner.capacity.block_size
        for sequence in self.sequences:
            count = min(budget, sequence.num_known - sequence.num_computed)
            if count <= 0:
                continue
            budget -= count
            needed = -(-(sequence.num_computed + count) // block_size) - len(sequence.blocks)
            new_blocks = [self.free_blocks.pop() for _ in range(needed)]
            sequence.blocks += new_blocks
            plan.new_block_counts.append(len(new_blocks) if sequence.entered else 0)
            if sequence.entered:
                plan.new_block_ids += new_blocks
            else:
                plan.new_sequences.append(
                    NewSequence(
                        sequence.slot,
                        sequence.token_ids,
                        len(sequence.prompt),
                        sequence.num_computed,
                        list(sequence.blocks),
                        sequence.sampling,
                    )
                )
                sequence.entered = True
            sequence.num_computed += count
            plan.slots.append(sequence.slot)
            plan.num_tokens.append(count)
            plan.sample.append(sequence.num_computed == sequence.num_known)
            rows.append(sequence)
            if plan.sample[-1]:
                sampled.append(sequence)
                sequence.num_known += 1
        self.step += 1
        return plan, rows, sampled

    def run_step(self, budget: int = 512) -> None:
        """Plan and execute one step."""
        plan, rows, sampled = self.plan(budget)
        result = self.runner.execute(plan)
        assert (result.epoch, result.step) == (plan.epoch, plan.step)
        assert len(result.sampled_token_ids) == len(sampled)
        for position, (sequence, token_id) in enumerate(zip(sampled, result.sampled_token_ids, strict=True)):
            sequence.outputs.append(token_id)
            if position in result.logprobs:
                sequence.logprobs.extend(result.logprobs[position])
        by_slot = {sequence.slot: sequence for sequence in rows}
        for chunk in result.prompt_logprobs:
            by_slot[chunk.slot].prompt_logprobs.append(chunk)
        self.failures += result.failures

    def generate(self, num_tokens: int, budget: int = 512) -> list[list[int]]:
        """Run until each sequence has num_tokens output tokens; those that are done leave. Returns all outputs."""
        everything = list(self.sequences)
        while self.sequences:
            self.run_step(budget)
            for sequence in [s for s in self.sequences if len(s.outputs) >= num_tokens]:
                self.remove(sequence)
        return [sequence.outputs for sequence in everything]


def reference_greedy(model: Any, prompt: list[int], num_tokens: int) -> tuple[list[int], list[float]]:
    """transformers' greedy ids, and the gap between its two best logits at each."""
    with torch.no_grad():
        out = model.generate(
            torch.tensor([prompt]),
            attention_mask=torch.ones((1, len(prompt)), dtype=torch.int64),
            max_new_tokens=num_tokens,
            min_new_tokens=num_tokens,
            do_sample=False,
            output_logits=True,
            return_dict_in_generate=True,
            pad_token_id=0,
            eos_token_id=None,
        )
    best = [torch.topk(logits[0], 2).values for logits in out.logits]
    return out.sequences[0, len(prompt) :].tolist(), [float(b[0] - b[1]) for b in best]


def assert_greedy_equal(actual: list[int], reference: tuple[list[int], list[float]]) -> None:
    """Ids are equal, up to a position where the reference's two best logits are within 1e-4."""
    expected, gaps = reference
    assert len(actual) == len(expected)
    for position, (a, e, gap) in enumerate(zip(actual, expected, gaps, strict=True)):
        if a != e:
            assert gap < 1e-4, f"position {position}: got {a}, expected {e}, the two best logits are {gap:.2e} apart"
            return


def assert_greedy(model: Any, prompt: list[int], output: list[int]) -> None:
    """Each output id is transformers' best after what comes before it, or its two best logits are within 1e-4."""
    with torch.no_grad():
        logits = model(torch.tensor([prompt + output])).logits[0, len(prompt) - 1 : -1]
    best = torch.topk(logits, 2)
    for position, token_id in enumerate(output):
        expected, gap = int(best.indices[position, 0]), float(best.values[position, 0] - best.values[position, 1])
        near = gap < 1e-4 and token_id in best.indices[position].tolist()
        assert token_id == expected or near, f"position {position}: got {token_id}, expected {expected}, gap {gap:.1e}"


def reference_logprobs(model: Any, token_ids: list[int]) -> torch.Tensor:
    """transformers' log-probabilities [len, vocab_size] from one forward pass."""
    with torch.no_grad():
        return torch.log_softmax(model(torch.tensor([token_ids])).logits[0].double(), dim=-1)


def prompt_logprobs_of(runner: ModelRunner, token_ids: list[int], budget: int = 512, num_top: int = 0) -> TokenLogprobs:
    """The runner's log-probabilities of token_ids[1:], computed in chunks of `budget`."""
    driver = Driver(runner)
    sequence = driver.add(token_ids, SlotSampling(temperature=0.0, num_prompt_logprobs=num_top))
    driver.generate(1, budget)
    assert not driver.failures
    columns = TokenLogprobs(num_top=num_top)
    for chunk in sequence.prompt_logprobs:
        assert chunk.first_position == 1 + len(columns.chosen)
        columns.extend(chunk.logprobs)
    return columns
