"""What one run of a forward pass reads, and the check of it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import torch

from worker.kernels.attention_plan import AttentionPlan


@dataclass(slots=True)
class StepInputs:
    """What a run reads, T tokens of B sequences. All contiguous, on the device of the buffers.

    Attributes:
        token_ids: int32 [T].
        positions: int32 [T], rows of cos_sin.
        cos_sin: float32 [num_positions, rot_dim].
        slot_mapping: int64 [T].
        block_table: int32 [S, max_blocks].
        seq_slots: int32 [B], rows of block_table.
        query_start: int32 [B + 1].
        context_lens: int32 [B].
        attention_plans: the step's plan for each window that a layer has; needed on CUDA.
    """

    token_ids: torch.Tensor
    positions: torch.Tensor
    cos_sin: torch.Tensor
    slot_mapping: torch.Tensor
    block_table: torch.Tensor
    seq_slots: torch.Tensor
    query_start: torch.Tensor
    context_lens: torch.Tensor
    attention_plans: dict[int, AttentionPlan] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class StepSizes:
    """Sizes of a step's inputs, in the words of `StepInputs`."""

    num_tokens: int
    num_positions: int
    num_slots: int
    max_blocks: int
    num_seqs: int


_INPUT_TYPES: tuple[tuple[str, tuple[str, ...], torch.dtype], ...] = (
    ("token_ids", ("T",), torch.int32),
    ("positions", ("T",), torch.int32),
    ("cos_sin", ("num_positions", "rot_dim"), torch.float32),
    ("slot_mapping", ("T",), torch.int64),
    ("block_table", ("S", "max_blocks"), torch.int32),
    ("seq_slots", ("B",), torch.int32),
    ("query_start", ("B + 1",), torch.int32),
    ("context_lens", ("B",), torch.int32),
)


def check_inputs(inputs: StepInputs, rot_dim: int, device_index: int) -> tuple[list[int], StepSizes]:
    """Addresses of the tensors in the order of `StepInputs`, and the step's sizes.

    Args:
        rot_dim: columns that cos_sin has.
        device_index: where the tensors have to lie: -1 for the CPU, else the index of a CUDA device.

    Raises:
        TypeError, ValueError: a tensor has the wrong dtype, shape or device; names it.
    """
    known: dict[str, int] = {"rot_dim": rot_dim}
    addresses = []
    for name, dims, dtype in _INPUT_TYPES:
        tensor: torch.Tensor = getattr(inputs, name)
        shape = tensor.shape
        if tensor.dtype is not dtype or len(shape) != len(dims) or not tensor.is_contiguous():
            raise TypeError(_rejection(name, dims, dtype, tensor))
        if tensor.get_device() != device_index:
            place = "the CPU" if device_index < 0 else f"cuda:{device_index}"
            raise TypeError(f"program: {name} is on {tensor.device}; the program runs on {place}")
        for dim, size in zip(dims, shape, strict=True):
            if known.setdefault(dim, size) != size:
                raise ValueError(_rejection(name, dims, dtype, tensor))
        addresses.append(tensor.data_ptr())
    if known["B + 1"] != known["B"] + 1:
        raise ValueError(_rejection("query_start", ("B + 1",), torch.int32, inputs.query_start))
    return addresses, StepSizes(known["T"], known["num_positions"], known["S"], known["max_blocks"], known["B"])


def _rejection(name: str, dims: Sequence[str], dtype: torch.dtype, tensor: torch.Tensor) -> str:
    return (
        f"program: {name} must be contiguous [{', '.join(dims)}] of {dtype}, "
        f"not {list(tensor.shape)} of {tensor.dtype} with strides {list(tensor.stride())}"
    )
