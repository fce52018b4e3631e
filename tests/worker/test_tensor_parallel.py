"""Two ranks of a model, one thread each, summed by an all-reduce in memory: the same logits as one rank."""

from __future__ import annotations

import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import pytest
import torch
from worker_harness import reference_logprobs, save_checkpoint, tiny_model

from pagemill.errors import ModelLoadError
from pagemill.model_source import ModelSource, load_config
from pagemill.step import NewSequence, SlotSampling, StepPlan
from worker.batch import BatchBuilder
from worker.device import pick_device
from worker.kv_cache import allocate_cache
from worker.layers.context import LayerContext
from worker.loader import WeightReader, open_source
from worker.models import resolve
from worker.slots import SlotTable

PROMPT = [5, 9, 13, 200, 41, 7]


class GroupSum:
    """An all-reduce over threads."""

    def __init__(self, size: int) -> None:
        self._parts: list[torch.Tensor] = [torch.empty(0)] * size
        self._barrier = threading.Barrier(size, timeout=60)

    def of_rank(self, rank: int, tensor: torch.Tensor) -> None:
        self._parts[rank] = tensor.clone()
        self._barrier.wait()
        tensor.copy_(sum(self._parts[1:], self._parts[0]))
        self._barrier.wait()


def logits_of_rank(directory: Path, rank: int, size: int, group: GroupSum) -> torch.Tensor:
    """Logits of PROMPT's last position, from a whole forward pass of one rank."""
    source = ModelSource("hf", directory, "tiny")
    config = load_config(source)
    device = pick_device("cpu")
    context = LayerContext(torch.float32, device.torch_device, rank, size, lambda tensor: group.of_rank(rank, tensor))
    model = resolve(config)(config, context)
    weights = open_source(source, "auto", seed=0, absent_if_random=frozenset())
    model.load_weights(WeightReader(weights, torch.float32))
    model.allocate(16, 32)
    table = SlotTable(1, 32, 8, 4)
    table.enter(NewSequence(0, PROMPT, len(PROMPT), 0, [2], SlotSampling()))
    plan = StepPlan(1, 0, slots=[0], num_tokens=[len(PROMPT)], sample=[True], new_block_counts=[0])
    batch = BatchBuilder(table, 16).build(plan, np.zeros(1, dtype=np.int32))
    hidden = model.forward(batch, allocate_cache(model.kv_spec, torch.float32, 8, 4, device))
    logits = torch.empty((1, model.vocab_size))
    model.compute_logits(hidden[-1:], logits)
    return logits[0]


@pytest.mark.parametrize("architecture", ["LlamaForCausalLM", "Qwen2ForCausalLM"])
def test_two_ranks_compute_what_one_does(architecture: str, tmp_path: Path) -> None:
    biases = {"attention_bias": True, "mlp_bias": True} if architecture == "LlamaForCausalLM" else {}
    model = tiny_model(architecture, **biases)
    directory = save_checkpoint(model, tmp_path)
    group = GroupSum(2)
    with ThreadPoolExecutor(2) as pool:
        ranks = [pool.submit(logits_of_rank, directory, rank, 2, group) for rank in (0, 1)]
        logits = [future.result(timeout=60) for future in ranks]
    torch.testing.assert_close(logits[0], logits[1])
    expected = reference_logprobs(model, PROMPT)[-1]
    torch.testing.assert_close(torch.log_softmax(logits[0].double(), -1), expected, rtol=2e-3, atol=2e-3)


def test_a_group_that_does_not_divide_the_heads_is_refused(tmp_path: Path) -> None:
    directory = save_checkpoint(tiny_model("LlamaForCausalLM"), tmp_path)
    with pytest.raises(ModelLoadError, match="4 attention heads do not divide into 3 tensor-parallel ranks"):
        logits_of_rank(directory, 0, 3, GroupSum(1))
