"""A program does what its kernels do one by one, for any batch that fits."""

import sys
import threading
import time
from dataclasses import replace

import pytest
import torch

from worker import kernels
from worker.kernels.linear import PackedGateUp, PackedLinear
from worker.kernels.program import Program, StepInputs

HEADS, KV_HEADS, SIZE, HIDDEN, VOCAB = 4, 2, 64, 96, 40
MAX_TOKENS, BLOCK_SIZE, NUM_BLOCKS, NUM_SLOTS = 40, 8, 12, 3
WIDTH = (HEADS + 2 * KV_HEADS) * SIZE


class Layer:
    """Weights, cache and buffers of one layer, and its program."""

    def __init__(self, dtype: torch.dtype, kv_dtype: torch.dtype | None = None) -> None:
        torch.manual_seed(5)
        is_scaled = kv_dtype is not None
        self.scales = {
            "key_scale": torch.tensor([0.5, 0.03]) if is_scaled else None,
            "value_scale": torch.tensor([0.25, 0.1]) if is_scaled else None,
        }
        self.table = torch.randn(VOCAB, HIDDEN).to(dtype)
        self.norm = torch.randn(HIDDEN).to(dtype)
        self.qkv_weight = PackedLinear((torch.randn(WIDTH, HIDDEN) / 8).to(dtype))
        self.out_weight = PackedLinear((torch.randn(HIDDEN, HEADS * SIZE) / 16).to(dtype))
        self.gate_up = PackedGateUp((torch.randn(2 * 80, HIDDEN) / 8).to(dtype))
        self.keys = torch.zeros(NUM_BLOCKS, KV_HEADS, BLOCK_SIZE, SIZE, dtype=kv_dtype or dtype)
        self.values = torch.zeros_like(self.keys)
        self.residual = torch.zeros(MAX_TOKENS, HIDDEN)
        self.normed = torch.zeros(MAX_TOKENS, HIDDEN, dtype=dtype)
        self.qkv = torch.zeros(MAX_TOKENS, WIDTH, dtype=dtype)
        self.attention = torch.zeros(MAX_TOKENS, HEADS * SIZE, dtype=dtype)
        self.activated = torch.zeros(MAX_TOKENS, 80, dtype=dtype)

    def query(self, rows: int) -> torch.Tensor:
        return self.qkv[:rows, : HEADS * SIZE].unflatten(1, (HEADS, SIZE))

    def program(self) -> Program:
        program = Program(MAX_TOKENS, SIZE)
        program.embedding(self.residual, self.table)
        program.rms_norm(self.normed, self.residual, self.norm, 1e-5)
        program.linear(self.qkv_weight, self.normed, self.qkv)
        program.rope_and_store(self.qkv, self.keys, self.values, HEADS, KV_HEADS, **self.scales)
        program.paged_attention(
            self.attention.unflatten(1, (HEADS, SIZE)), self.query(MAX_TOKENS), self.keys, self.values, 0.125,
            **self.scales,
        )  # fmt: skip
        program.accumulate(self.out_weight, self.attention, self.residual)
        program.rms_norm(self.normed, self.residual, self.norm, 1e-5)
        program.linear(self.gate_up, self.normed, self.activated)
        return program

    def one_by_one(self, step: StepInputs) -> None:
        rows = len(step.token_ids)
        residual, normed, qkv, attention = (
            buffer[:rows] for buffer in (self.residual, self.normed, self.qkv, self.attention)
        )
        kernels.embedding(residual, step.token_ids, self.table)
        kernels.rms_norm(normed, residual, self.norm, 1e-5)
        self.qkv_weight(normed, qkv)
        kernels.rope_and_store(
            qkv, step.positions, step.cos_sin, self.keys, self.values, step.slot_mapping, HEADS, KV_HEADS, **self.scales
        )
        kernels.paged_attention(
            attention.unflatten(1, (HEADS, SIZE)), self.query(rows), self.keys, self.values, step.block_table,
            step.seq_slots, step.query_start, step.context_lens, 0.125, **self.scales,
        )  # fmt: skip
        self.out_weight.accumulate(attention, residual)
        kernels.rms_norm(normed, residual, self.norm, 1e-5)
        self.gate_up(normed, self.activated[:rows])


def step_inputs(counts: list[int], context_lens: list[int]) -> StepInputs:
    """A batch of len(counts) sequences in slots 0, 1, ..., each with 4 blocks."""
    block_table = torch.arange(NUM_BLOCKS, dtype=torch.int32).view(NUM_SLOTS, 4)
    positions = [p for n, c in zip(counts, context_lens, strict=True) for p in range(c - n, c)]
    slots = [slot for slot, n in enumerate(counts) for _ in range(n)]
    mapping = [
        int(block_table[s, p // BLOCK_SIZE]) * BLOCK_SIZE + p % BLOCK_SIZE
        for s, p in zip(slots, positions, strict=True)
    ]
    angles = torch.arange(32)[:, None] / 100 ** (torch.arange(0, SIZE, 2) / SIZE)
    return StepInputs(
        token_ids=torch.arange(len(positions), dtype=torch.int32) % VOCAB,
        positions=torch.tensor(positions, dtype=torch.int32),
        cos_sin=torch.cat([angles.cos(), angles.sin()], -1),
        slot_mapping=torch.tensor(mapping, dtype=torch.int64),
        block_table=block_table,
        seq_slots=torch.arange(len(counts), dtype=torch.int32),
        query_start=torch.tensor([0, *torch.tensor(counts).cumsum(0).tolist()], dtype=torch.int32),
        context_lens=torch.tensor(context_lens, dtype=torch.int32),
    )


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
