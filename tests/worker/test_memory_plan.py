"""The start's dealings with memory: one face for host and GPU."""

from __future__ import annotations

import gc
import json
from pathlib import Path
from typing import Any

import pytest
import torch
from simulated_gpu import GPU, LLAMA, SimulatedMemory
from worker_harness import TINY, Driver

from pagemill.config import MAX_COUNT, WorkerSettings
from pagemill.errors import ConfigError
from worker import memory as host_memory
from worker import runner_parts
from worker.batch import StepRows
from worker.device import pick_device
from worker.forward_pass import ForwardPass, Hidden
from worker.gpu_memory import GIB, MemoryLedger
from worker.kernels.launch_program import LaunchProgram
from worker.kv_cache import KVLayout, KVSpec
from worker.memory_plan import GpuMemoryPlan, MemoryPlan, make_memory_plan
from worker.model_runner import ModelRunner
from worker.step_device import CopyingDevice

# Llama-3-8B: 14.96 GiB in bfloat16.
CONFIG: dict[str, Any] = {
    "architectures": ["LlamaForCausalLM"],
    "vocab_size": 128256,
    "hidden_size": 4096,
    "intermediate_size": 14336,
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
}


class Probe:
    """A step that takes 2 GiB of a simulated GPU, and graphs of 4 MiB."""

    num_graphs = 8

    def __init__(self, memory: SimulatedMemory) -> None:
        self._step = memory.step(2 * GIB, modules=0)
        self.capture_graphs = memory.graphs(modules=0, shared=0, each=4 << 20)

    def run_largest_step(self) -> None:
        self._step()


def gpu_plan(memory: SimulatedMemory, **settings: Any) -> GpuMemoryPlan:
    return GpuMemoryPlan(GPU, WorkerSettings(device="cuda", **settings), MemoryLedger(memory, 0.9))


def host_plan(**settings: Any) -> MemoryPlan:
    return make_memory_plan(pick_device("cpu"), WorkerSettings(device="cpu", **settings))


def test_a_gpus_pool_takes_what_weights_step_and_graphs_leave() -> None:
    memory = SimulatedMemory()
    plan = gpu_plan(memory)
    with plan.loading(CONFIG, torch.bfloat16):
        memory.allocate(15 * GIB)
    blocks = plan.num_blocks(LLAMA, 8192, Probe(memory))
    left = int(0.9 * memory.total) - memory.outside - 17 * GIB
    assert 0 <= left - blocks * LLAMA.block_bytes < GIB // 4


def test_a_model_that_does_not_fit_is_refused_before_it_is_loaded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(host_memory, "available_bytes", lambda root: 8 * GIB)
    plans: list[tuple[MemoryPlan, str]] = [
        (host_plan(), r"14\.96 GiB as bfloat16, 8\.00 GiB of memory are available"),
        (gpu_plan(SimulatedMemory(total=16 * GIB)), r"14\.96 GiB as bfloat16, of the GPU's 16\.00 GiB"),
    ]
    for plan, words in plans:
        refusal = pytest.raises(ConfigError, match=f"the model does not fit: its weights need {words}")
        with refusal, plan.loading(CONFIG, torch.bfloat16):
            raise AssertionError("it was loaded")


def test_a_model_of_an_unknown_family_is_tried() -> None:
    memory = SimulatedMemory(total=16 * GIB)
    refusal = pytest.raises(ConfigError, match="memory ran out while the weights were loaded")
    with refusal, gpu_plan(memory).loading({"architectures": ["MadeUp"]}, torch.bfloat16):
        memory.allocate(20 * GIB)


@pytest.mark.parametrize(
    ("limit", "reason"),
    [
        ("max_num_batched_tokens", "the largest step does not fit into memory; lower max_num_batched_tokens"),
        ("max_num_seqs", "sequences of max_model_len 2048 tokens are too many"),
    ],
)
def test_work_buffers_that_no_host_can_hold_are_refused_by_name(tmp_path: Path, limit: str, reason: str) -> None:
    config = {**TINY, "architectures": ["LlamaForCausalLM"], "hidden_size": 1024, "max_position_embeddings": 2048}
    (tmp_path / "config.json").write_text(json.dumps(config))
    settings = WorkerSettings(model=str(tmp_path), device="cpu", load_format="dummy", **{limit: MAX_COUNT})
    with pytest.raises(ConfigError, match=reason) as refusal:
        ModelRunner(settings)
    assert limit in refusal.value.message


def test_the_hosts_pool_is_a_setting() -> None:
    class NoProbe:
        num_graphs = 0

        def run_largest_step(self) -> None:
            raise AssertionError("nothing is measured on a CPU")

        def capture_graphs(self, count: int) -> object:
            raise AssertionError("nothing is captured on a CPU")

    assert host_plan().num_blocks(LLAMA, 8192, NoProbe()) * LLAMA.block_bytes == GIB
    assert host_plan(kv_cache_gib=2.5).num_blocks(LLAMA, 8192, NoProbe()) * LLAMA.block_bytes == 2.5 * GIB
    assert host_plan(num_blocks=7).num_blocks(LLAMA, 8192, NoProbe()) == 7
    assert host_plan(kv_cache_gib=0.1).num_blocks(LLAMA, 8192, NoProbe()) == 51
    with pytest.raises(
        ConfigError, match=r"max_model_len 8193 needs 513 .*there are 512; .*or raise kv_cache_gib \(1\)"
    ):
        host_plan(max_model_len=8193).num_blocks(LLAMA, 8193, NoProbe())


def test_a_start_rehearses_its_largest_step_and_takes_what_is_left(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """On CPU tensors by launches, as on a GPU, with a memory that is numbers."""

    def num_programs() -> int:
        return sum(type(item) is LaunchProgram for item in gc.get_objects())

    gc.collect()
    num_before = num_programs()
    (tmp_path / "config.json").write_text(json.dumps({**TINY, "architectures": ["LlamaForCausalLM"]}))
    memory = SimulatedMemory(total=GIB, outside=GIB // 4)
    rehearsed: list[int] = []
    run = ForwardPass.run

    def watched(self: ForwardPass, rows: StepRows, graph_rows: int | None) -> Hidden:
        rehearsed.append(rows.num_tokens)
        memory.peak = GIB // 8
        return run(self, rows, graph_rows)

    monkeypatch.setattr(ForwardPass, "run", watched)
    monkeypatch.setattr(
        runner_parts,
        "make_memory_plan",
        lambda device, settings: GpuMemoryPlan(GPU, settings, MemoryLedger(memory, 0.5)),
    )
    runner = ModelRunner(
        WorkerSettings(
            model=str(tmp_path), device="cpu", dtype="float32", load_format="dummy", max_num_seqs=24, max_model_len=64
        ),
        CopyingDevice(torch.device("cpu")),
    )
    assert rehearsed == [512]
    layout = KVLayout(KVSpec(3, 2, 64), torch.float32, 16)
    # 128 MiB are left, a sixth of them for each tensor, which comes in multiples of 2 MiB.
    assert runner.capacity.num_blocks == (20 << 20) // (layout.block_bytes // 6)
    driver = Driver(runner)
    driver.add([5, 6, 7])
    gc.disable()
    try:
        assert len(driver.generate(4)[0]) == 4
        # The program of the rehearsal is gone: the pool left no room for the scratch memory of two.
        assert num_programs() == num_before + 1
    finally:
        gc.enable()
