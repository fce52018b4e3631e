"""Where a GPU's memory goes: the arithmetic with numbers, refusals, and the measuring on a device that is simulated."""

from __future__ import annotations

import pytest
import torch
from simulated_gpu import GPU, H200_BYTES, LLAMA, SimulatedMemory

from pagemill.config import WorkerSettings
from pagemill.errors import ConfigError
from worker.gpu_memory import GIB, MemoryLedger, MemoryUse, gpu_kv_budget, pool_blocks
from worker.kv_cache import KVLayout

GRANULE = 2 << 20


def nothing(count: int) -> object:
    raise AssertionError("no graph is to be captured")


def use_of(left: int) -> MemoryUse:
    return MemoryUse(H200_BYTES, limit=20 * GIB + left, before=GIB, weights=16 * GIB, activations=2 * GIB, graphs=GIB)


def budget(left: int, layout: KVLayout = LLAMA, context_length: int = 8192, **settings: object) -> int:
    return gpu_kv_budget(use_of(left), layout, WorkerSettings(device="cuda", **settings), context_length, GPU)


def test_every_part_is_measured_and_the_rest_is_for_the_cache() -> None:
    memory = SimulatedMemory(outside=3 * GIB)
    ledger = MemoryLedger(memory, 0.9)
    with ledger.loading(15 * GIB, "bfloat16"):
        memory.allocate(15 * GIB)
    memory.allocate(GIB)  # work buffers, made before the step
    use = ledger.measure(memory.step(2 * GIB, modules=GIB // 4), memory.graphs(0, GIB // 8, GIB // 64), 32)
    assert use.limit == int(0.9 * H200_BYTES)
    assert use.before == 3 * GIB
    assert use.weights == 15 * GIB
    assert use.activations == 3 * GIB + GIB // 4
    # What all graphs share, and each of them: the first was counted twice, which is on the safe side.
    assert use.graphs == GIB // 8 + GIB // 64 + 32 * GIB // 64
    assert use.left == use.limit - 3 * GIB - 15 * GIB - 3 * GIB - GIB // 4 - use.graphs


def test_tensors_of_a_callers_own_are_not_taken_for_weights() -> None:
    memory = SimulatedMemory(outside=GIB, pool=4 * GIB)
    ledger = MemoryLedger(memory, 0.9)
    with ledger.loading(15 * GIB, "bfloat16"):
        memory.allocate(15 * GIB)
    use = ledger.measure(memory.step(GIB, 0), nothing, 0)
    assert (use.before, use.weights, use.activations) == (5 * GIB, 15 * GIB, GIB)


def test_without_graphs_none_is_captured() -> None:
    memory = SimulatedMemory()
    use = MemoryLedger(memory, 0.5).measure(memory.step(GIB, 0), nothing, 0)
    assert use.graphs == 0


def test_a_graph_that_shows_nothing_still_counts() -> None:
    memory = SimulatedMemory()
    use = MemoryLedger(memory, 0.5).measure(memory.step(GIB, 0), memory.graphs(0, 0, 0), 10)
    assert use.graphs == 10 << 20


def test_modules_that_the_first_graph_loads_count_once() -> None:
    memory = SimulatedMemory()
    use = MemoryLedger(memory, 0.5).measure(memory.step(GIB, 0), memory.graphs(GIB // 16, 1 << 25, 1 << 22), 64)
    assert use.graphs == GIB // 16 + (1 << 25) + (65 << 22)


def test_a_single_graph_is_measured_by_itself() -> None:
    memory = SimulatedMemory()
    use = MemoryLedger(memory, 0.5).measure(memory.step(GIB, 0), memory.graphs(0, 1 << 25, 1 << 22), 1)
    assert use.graphs == (1 << 25) + (1 << 22) + (1 << 20)


def test_what_other_processes_take_while_a_worker_starts_is_left_to_them() -> None:
    memory = SimulatedMemory()
    ledger = MemoryLedger(memory, 0.9)
    with ledger.loading(15 * GIB, "bfloat16"):
        memory.allocate(15 * GIB)
        memory.outside += 20 * GIB
    use = ledger.measure(memory.step(GIB, 0), nothing, 0)
    assert use.left == use.limit - memory.outside - 15 * GIB - GIB


def test_the_pool_fits_into_what_is_left_with_each_tensor_rounded_up() -> None:
    for left in (GIB, 3 * GIB + 12345, 105 * GIB + 1, LLAMA.num_tensors * GRANULE):
        blocks = pool_blocks(use_of(left), LLAMA)
        per_tensor = blocks * LLAMA.block_bytes // LLAMA.num_tensors
        rounded = -(-per_tensor // GRANULE) * GRANULE
        assert rounded * LLAMA.num_tensors <= left
        # What is wasted is less than the rounding of each tensor and one block.
        assert left - blocks * LLAMA.block_bytes < LLAMA.num_tensors * GRANULE + LLAMA.block_bytes
    assert pool_blocks(use_of(-GIB), LLAMA) == 0


def test_8_bits_hold_twice_as_many_tokens() -> None:
    halved = KVLayout(LLAMA.spec, torch.float8_e4m3fn, 16)
    assert halved.bytes_per_token * 2 == LLAMA.bytes_per_token == 128 << 10
    assert budget(64 * GIB, halved) == 2 * budget(64 * GIB)


def test_a_pool_that_was_asked_for_is_taken_where_it_fits() -> None:
    assert budget(8 * GIB, num_blocks=600) == 600
    assert budget(8 * GIB, kv_cache_gib=4.0) == 4 * GIB // LLAMA.block_bytes
    with pytest.raises(
        ConfigError, match=r"num_blocks 5000 needs 5000 KV blocks, 9\.77 GiB, and 4096 fit; .*weights 16"
    ):
        budget(8 * GIB, num_blocks=5000)
    with pytest.raises(ConfigError, match="kv_cache_gib 9 needs 4608 KV blocks"):
        budget(8 * GIB, kv_cache_gib=9)


def test_no_room_at_all_is_refused_with_every_part() -> None:
    with pytest.raises(ConfigError) as refused:
        budget(-GIB)
    for words in (
        "no KV cache fits",
        "-1.00 GiB are left",
        "19.00 of 140.00 GiB",
        "weights 16.00",
        "raise gpu_memory_ut",
    ):
        assert words in refused.value.message
    assert "\n" not in refused.value.message


def test_a_context_that_was_asked_for_must_fit() -> None:
    assert budget(GIB, max_model_len=8192) * 16 >= 8192
    with pytest.raises(ConfigError) as refused:
        budget(GIB, max_model_len=8193)
    assert "max_model_len 8193 needs 513 KV blocks of 16 tokens (1.00 GiB), there are 512" in refused.value.message
    assert "at most 8192" in refused.value.message
    assert "raise gpu_memory_utilization (0.9)" in refused.value.message


def test_the_models_own_context_may_be_longer_than_the_pool(caplog: pytest.LogCaptureFixture) -> None:
    assert budget(GIB, context_length=131072) == 512
    assert "holds 8192 tokens, the model's context length is 131072" in caplog.text
    with pytest.raises(
        ConfigError, match=r"context length 131072 needs 8192 KV blocks.*set max_model_len to at most 1024"
    ):
        budget(GIB // 8, context_length=131072)


def test_a_pool_for_the_whole_context_of_a_small_model_is_enough() -> None:
    assert budget(GIB // 8, context_length=512) == 64


def test_weights_that_cannot_fit_are_refused_before_they_are_loaded() -> None:
    ledger = MemoryLedger(SimulatedMemory(total=24 * GIB, outside=10 * GIB), 0.9)
    ledger.check_weights(11 * GIB, "bfloat16")
    with pytest.raises(ConfigError) as refused:
        ledger.check_weights(15 * GIB, "bfloat16")
    for words in (
        "weights need 15.00 GiB as bfloat16",
        "of the GPU's 24.00 GiB 14.00 are free",
        "at most 21.60 may be in use",
        "11.60 are left",
    ):
        assert words in refused.value.message
    with pytest.raises(ConfigError, match="use dtype bfloat16, a smaller model"):
        ledger.check_weights(30 * GIB, "float32")


def test_memory_that_runs_out_is_a_refusal_with_numbers() -> None:
    memory = SimulatedMemory(total=24 * GIB)
    ledger = MemoryLedger(memory, 0.9)
    with (
        pytest.raises(ConfigError, match=r"ran out while the weights were loaded, 30\.00 GiB"),
        ledger.loading(30 * GIB, "float16"),
    ):
        memory.allocate(30 * GIB)
    with ledger.loading(20 * GIB, "float16"):
        memory.allocate(20 * GIB)
    with pytest.raises(ConfigError, match=r"after the weights 3\.50 of the GPU's 24\.00 GiB were free"):
        ledger.measure(memory.step(4 * GIB, 0), nothing, 0)
