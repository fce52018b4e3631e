"""One decoder layer and batches for it, as the tests of programs run them."""

import torch

from worker import kernels
from worker.kernels.execution import AnyProgram, Execution, NativeExecution
from worker.kernels.step_inputs import StepInputs

HEADS, KV_HEADS, SIZE, HIDDEN, VOCAB = 4, 2, 64, 96, 40
MAX_TOKENS, BLOCK_SIZE, NUM_BLOCKS, NUM_SLOTS = 40, 8, 12, 3
WIDTH = (HEADS + 2 * KV_HEADS) * SIZE


class Layer:
    """Weights, cache and buffers of one layer on a device, and its program. Equal weights for every instance."""

    def __init__(
        self,
        dtype: torch.dtype,
        kv_dtype: torch.dtype | None = None,
        execution: Execution | None = None,
        device: str = "cpu",
    ) -> None:
        generator = torch.Generator("cpu").manual_seed(5)
        self.execution = execution or NativeExecution()

        def randn(*shape: int) -> torch.Tensor:
            return torch.randn(*shape, generator=generator, device="cpu").to(device)

        is_scaled = kv_dtype is not None
        self.scales = {
            "key_scale": torch.tensor([0.5, 0.03], device=device) if is_scaled else None,
            "value_scale": torch.tensor([0.25, 0.1], device=device) if is_scaled else None,
        }
        self.table = randn(VOCAB, HIDDEN).to(dtype)
        self.norm = randn(HIDDEN).to(dtype)
        self.qkv_weight = self.execution.linear((randn(WIDTH, HIDDEN) / 8).to(dtype))
        self.out_weight = self.execution.linear((randn(HIDDEN, HEADS * SIZE) / 16).to(dtype))
        self.gate_up = self.execution.gate_up((randn(2 * 80, HIDDEN) / 8).to(dtype))
        self.down_weight = self.execution.linear((randn(HIDDEN, 80) / 8).to(dtype), randn(HIDDEN).to(dtype))
        self.keys = torch.zeros(NUM_BLOCKS, KV_HEADS, BLOCK_SIZE, SIZE, dtype=kv_dtype or dtype, device=device)
        self.values = torch.zeros_like(self.keys)
        self.residual = torch.zeros(MAX_TOKENS, HIDDEN, device=device)
        self.normed = torch.zeros(MAX_TOKENS, HIDDEN, dtype=dtype, device=device)
        self.qkv = torch.zeros(MAX_TOKENS, WIDTH, dtype=dtype, device=device)
        self.attention = torch.zeros(MAX_TOKENS, HEADS * SIZE, dtype=dtype, device=device)
        self.activated = torch.zeros(MAX_TOKENS, 80, dtype=dtype, device=device)

    def query(self, rows: int) -> torch.Tensor:
        return self.qkv[:rows, : HEADS * SIZE].unflatten(1, (HEADS, SIZE))

    def program(self) -> AnyProgram:
        program = self.execution.program(MAX_TOKENS, SIZE)
        program.embedding(self.residual, self.table)
        program.rms_norm(self.normed, self.residual, self.norm, 1e-5)
        program.linear(self.qkv_weight, self.normed, self.qkv)
        program.rope_and_store(self.qkv, self.keys, self.values, HEADS, KV_HEADS, **self.scales)
        program.paged_attention(
            self.attention.unflatten(1, (HEADS, SIZE)), self.query(MAX_TOKENS), self.keys, self.values, 0.125,
            **self.scales,
        )  # fmt: skip
        program.accumulate_and_norm(self.out_weight, self.attention, self.residual, self.normed, self.norm, 1e-5)
        program.linear(self.gate_up, self.normed, self.activated)
        program.accumulate(self.down_weight, self.activated, self.residual)
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
        self.down_weight.accumulate(self.activated[:rows], residual)


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
