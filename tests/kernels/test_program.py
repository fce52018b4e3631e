"""A program does what its kernels do one by one, for any batch that fits."""

import sys
import threading
import time
from dataclasses import replace

import pytest
import torch
from program_layer import HEADS, KV_HEADS, MAX_TOKENS, SIZE, VOCAB, Layer, step_inputs

from worker.kernels.program import Program


@pytest.mark.parametrize("kv_dtype", [None, torch.float8_e4m3fn, torch.float8_e5m2], ids=["same", "e4m3", "e5m2"])
def test_a_program_equals_its_kernels_one_by_one(isa: str, dtype: torch.dtype, kv_dtype: torch.dtype | None) -> None:
    bound, reference = Layer(dtype, kv_dtype), Layer(dtype, kv_dtype)
    program = bound.program()
    for counts, context_lens in [([20], [20]), ([1, 9], [21, 9]), ([1, 1, 31], [22, 10, 31]), ([1], [23])]:
        step = step_inputs(counts, context_lens)
        program.run(step)
        reference.one_by_one(step)
        for name in ("residual", "normed", "qkv", "attention", "activated", "keys", "values"):
            one, other = getattr(bound, name), getattr(reference, name)
            if name in ("keys", "values"):
                one, other = one.view(torch.uint8), other.view(torch.uint8)
            assert torch.equal(one, other), name


def test_python_calls_run_between_kernels_on_the_steps_rows() -> None:
    layer, seen = Layer(torch.float32), []
    program = Program(MAX_TOKENS, SIZE)
    program.embedding(layer.residual, layer.table)
    program.call(lambda rows: seen.append(rows.clone()), layer.residual)
    program.rms_norm(layer.normed, layer.residual, layer.norm, 1e-5)
    step = step_inputs([2, 3], [2, 3])
    program.run(step)
    assert torch.equal(seen[0], layer.table[:5])
    assert layer.normed[:5].abs().sum() > 0
    assert set(program.time(step)) == {"embedding", "rms_norm"}


def test_other_threads_run_during_a_program() -> None:
    layer = Layer(torch.float32)
    program, step = layer.program(), step_inputs([32], [32])
    ticks, stop = [0], threading.Event()

    def tick() -> None:
        while not stop.is_set():
            ticks[0] += 1
            time.sleep(0)

    interval_s = sys.getswitchinterval()
    thread = threading.Thread(target=tick)
    thread.start()
    sys.setswitchinterval(1000)  # from here on this thread gives the lock away in native code alone
    try:
        before, deadline = ticks[0], time.monotonic() + 60
        while ticks[0] == before and time.monotonic() < deadline:
            program.run(step)
        after = ticks[0]
    finally:
        sys.setswitchinterval(interval_s)
        stop.set()
        thread.join()
    assert after > before


BAD_STEPS = [
    ("token_ids", torch.tensor([1, 2]), TypeError, "token_ids must be contiguous .T. of torch.int32"),
    ("token_ids", torch.tensor([1, VOCAB], dtype=torch.int32), ValueError, "ids.1. is 40"),
    ("positions", torch.tensor([1], dtype=torch.int32), ValueError, "positions must be contiguous"),
    ("positions", torch.tensor([1, 32], dtype=torch.int32), ValueError, "positions.1. is 32"),
    ("cos_sin", torch.zeros(32, 32), ValueError, "cos_sin must be contiguous"),
    ("slot_mapping", torch.tensor([0, 96]), ValueError, "slot_mapping.1. is 96"),
    ("block_table", torch.full((3, 4), 12, dtype=torch.int32), ValueError, "block_tables row 0"),
    ("seq_slots", torch.tensor([3], dtype=torch.int32), ValueError, "seq_slots.0. is 3"),
    ("query_start", torch.tensor([0], dtype=torch.int32), ValueError, "query_start must be contiguous"),
    ("context_lens", torch.tensor([1], dtype=torch.int32), ValueError, "context_lens.0. is 1"),
]


@pytest.mark.parametrize(("name", "value", "error", "message"), BAD_STEPS)
def test_a_wrong_input_is_named(name: str, value: torch.Tensor, error: type[Exception], message: str) -> None:
    program = Layer(torch.float32).program()
    with pytest.raises(error, match=message):
        program.run(replace(step_inputs([2], [2]), **{name: value}))


def test_more_tokens_than_the_buffers_hold_are_refused() -> None:
    program = Layer(torch.float32).program()
    with pytest.raises(ValueError, match="num_tokens is 41, the buffers hold 40"):
        program.run(step_inputs([20, 21], [20, 21]))


def test_wrong_buffers_are_refused_when_bound() -> None:
    layer, program = Layer(torch.bfloat16), Program(MAX_TOKENS, SIZE)
    with pytest.raises(ValueError, match="x has 4 rows"):
        program.linear(layer.qkv_weight, layer.normed[:4], layer.qkv[:4])
    with pytest.raises(ValueError, match="qkv has shape"):
        program.rope_and_store(layer.qkv, layer.keys, layer.values, HEADS + 1, KV_HEADS)
    with pytest.raises(TypeError, match="key_cache is bfloat16"):
        program.rope_and_store(layer.qkv.float(), layer.keys, layer.values, HEADS, KV_HEADS)
    with pytest.raises(ValueError, match="out has shape"):
        program.rms_norm(layer.normed[:, :8], layer.residual, layer.norm, 1e-5)
    with pytest.raises(ValueError, match="out has shape"):
        program.embedding(layer.residual[:3], layer.table)
