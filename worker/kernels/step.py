"""What a step reads about its tokens, made where the sequences' histories and block tables lie."""

from __future__ import annotations

import torch

from worker.kernels._checks import BLOCK_SIZES, Dims, PlanCache, placement, stream_of
from worker.kernels._native import load_native

_C = load_native()
_INT32 = (torch.int32,)
_INT64 = (torch.int64,)
_INTEGERS = (torch.int32, torch.int64)

_prepare_plans = PlanCache()
_scatter_plans = PlanCache()


def prepare_step(
    token_ids: torch.Tensor,
    positions: torch.Tensor,
    slot_mapping: torch.Tensor,
    history: torch.Tensor,
    block_table: torch.Tensor,
    seq_slots: torch.Tensor,
    query_start: torch.Tensor,
    context_lens: torch.Tensor,
    block_size: int,
) -> None:
    """Id, position and KV slot of each new token of a step.

    Token t of row b (query_start[b] <= t < query_start[b + 1]) has position context_lens[b] - query_start[b + 1] + t.
    Its id is history[seq_slots[b], position], its slot block_table[seq_slots[b], position // block_size] * block_size +
    position % block_size. Rows may be empty. Tokens from query_start[-1] on are padding: id 0, position 0, slot -1.

    Shapes: outputs token_ids, positions int32 and slot_mapping int64 [num_tokens]; inputs int32: history [num_slots,
    max_model_len] and block_table [num_slots, max_blocks] (rows may be strided), seq_slots and context_lens [num_seqs],
    query_start [num_seqs + 1].

    On CUDA a token that lies outside the tables is given what padding is given; debug builds stop there.

    Raises:
        ValueError: on the CPU, a query_start that does not ascend from 0 to at most num_tokens, a row outside the
            tables, or a position outside its row; nothing is written then.
    """
    tensors = (token_ids, positions, slot_mapping, history, block_table, seq_slots, query_start, context_lens)
    key = (
        block_size, token_ids.shape, positions.shape, slot_mapping.shape, history.shape, history.stride(),
        block_table.shape, block_table.stride(), seq_slots.shape, query_start.shape, context_lens.shape,
        *[t.dtype for t in tensors], placement(*tensors),
    )  # fmt: skip
    plan = _prepare_plans.get(key)
    if plan is None:
        plan = _prepare_plans.remember(key, _prepare_plan(tensors, block_size))
    plan([t.data_ptr() for t in tensors], stream_of(token_ids))


def _prepare_plan(tensors: tuple[torch.Tensor, ...], block_size: int) -> object:
    token_ids, positions, slot_mapping, history, block_table, seq_slots, query_start, context_lens = tensors
    dims = Dims("prepare_step", block_size=block_size)
    dims.one_of("block_size", BLOCK_SIZES)
    dims.tensor("token_ids", token_ids, ("num_tokens",), _INT32)
    dims.tensor("positions", positions, ("num_tokens",), _INT32)
    dims.tensor("slot_mapping", slot_mapping, ("num_tokens",), _INT64)
    history_strides = dims.tensor("history", history, ("num_slots", "max_model_len"), _INT32, contiguous=False)
    table_strides = dims.tensor("block_table", block_table, ("num_slots", "max_blocks"), _INT32, contiguous=False)
    dims.tensor("seq_slots", seq_slots, ("num_seqs",), _INT32)
    dims.sizes["num_seqs + 1"] = dims["num_seqs"] + 1
    dims.tensor("query_start", query_start, ("num_seqs + 1",), _INT32)
    dims.tensor("context_lens", context_lens, ("num_seqs",), _INT32)
    sizes = [dims[name] for name in ("num_tokens", "num_seqs", "num_slots", "max_model_len", "max_blocks")]
    return _C.PrepareStep(dims.device_code, sizes, [history_strides[0], table_strides[0]], block_size).run


def scatter(target: torch.Tensor, indices: torch.Tensor, values: torch.Tensor) -> None:
    """target[indices[i]] = values[i]; negative indices are skipped, and of equal ones any one's value stays.

    Shapes: target int32 [size], indices int64 [num_values], values int32 or int64 [num_values] within int32's range. On
    CUDA an index past the target is skipped; debug builds stop there.

    Raises:
        ValueError: on the CPU, an index past the target; nothing is written then.
    """
    key = (
        target.shape, indices.shape, values.shape, target.dtype, indices.dtype, values.dtype,
        target.stride(), indices.stride(), values.stride(), placement(target, indices, values),
    )  # fmt: skip
    plan = _scatter_plans.get(key)
    if plan is None:
        dims = Dims("scatter")
        dims.tensor("target", target, ("size",), _INT32)
        dims.tensor("indices", indices, ("num_values",), _INT64)
        dims.tensor("values", values, ("num_values",), _INTEGERS)
        plan = _C.Scatter(
            dims.device_code, dims["size"], dims["num_values"], values.dtype == torch.int64
        ).run  # fmt: skip
        _scatter_plans.remember(key, plan)
    plan(target.data_ptr(), indices.data_ptr(), values.data_ptr(), stream_of(target))
