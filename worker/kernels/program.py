"""A forward pass bound once: a list of kernel calls on fixed buffers that a step runs in one native call."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Literal

import torch

from worker.kernels._checks import CPU_ONLY, DTYPE_CODES, Dims, address
from worker.kernels._native import load_native
from worker.kernels.attention import check_attention_sizes
from worker.kernels.elementwise import check_embedding, check_norm
from worker.kernels.kv_cache import LAYOUTS, check_rope_and_store, check_scales
from worker.kernels.linear import ACCUMULATE, PackedGateUp, PackedLinear
from worker.kernels.step_inputs import StepInputs, check_inputs

__all__ = ["Program", "StepInputs"]

_C = load_native()


class _HostCall:
    """A Python function between native calls."""

    num_calls = 0

    def __init__(self, function: Callable[..., object], buffers: tuple[torch.Tensor, ...]) -> None:
        self._function = function
        self._buffers = buffers

    def run(self, addresses: list[int], sizes: list[int], elapsed_ns: int) -> None:
        self._function(*[buffer[: sizes[0]] for buffer in self._buffers])


class Program:
    """Kernel calls in order. The methods named after kernels add a call; `run` executes all of them.

    Buffers are [max_tokens, ...] tensors; a run touches the first T rows. Adding checks what the kernel of that name
    checks (TypeError, ValueError). The program keeps what it was given alive, and the addresses are those of that
    moment: the tensors must not be resized.
    """

    def __init__(self, max_tokens: int, rot_dim: int) -> None:
        self._max_tokens = max_tokens
        self._rot_dim = rot_dim
        self._kept: list[Any] = []
        # Native calls, with Python's between them where a group of ranks has to meet.
        self._parts: list[Any] = [_C.Program(max_tokens)]
        self._names: list[str] = []

    def _native(self, name: str, *kept: Any) -> Any:
        if not isinstance(self._parts[-1], _C.Program):
            self._parts.append(_C.Program(self._max_tokens))
        self._names.append(name)
        self._kept.extend(kept)
        return self._parts[-1]

    def _dims(self, op: str) -> Dims:
        return Dims(op, devices=CPU_ONLY, num_tokens=self._max_tokens)

    def embedding(self, out: torch.Tensor, table: torch.Tensor) -> None:
        """out = table[token_ids]; out [max_tokens, hidden] of the table's dtype or float32."""
        dims = Dims("embedding", devices=CPU_ONLY, num_rows=self._max_tokens)
        out_stride, table_stride = check_embedding(dims, out, table)
        if table_stride != dims["hidden"]:
            raise ValueError(f"embedding: table must be contiguous, its rows are {table_stride} apart")
        self._native("embedding", out, table).add_embedding(
            out.data_ptr(), table.data_ptr(), dims["num_table_rows"], dims["hidden"], out_stride,
            DTYPE_CODES[table.dtype], out.dtype is not table.dtype,
        )  # fmt: skip

    def rms_norm(self, out: torch.Tensor, x: torch.Tensor, weight: torch.Tensor, eps: float) -> None:
        """As `kernels.rms_norm`."""
        self._norm("rms_norm", out, x, None, weight, eps)

    def fused_add_rms_norm(
        self, out: torch.Tensor, x: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor, eps: float
    ) -> None:
        """As `kernels.fused_add_rms_norm`, with one dtype for x and residual."""
        if residual.dtype is not x.dtype:
            raise TypeError(f"fused_add_rms_norm: residual is {residual.dtype}; expected {x.dtype} like x")
        self._norm("fused_add_rms_norm", out, x, residual, weight, eps)

    def _norm(
        self,
        op: str,
        out: torch.Tensor,
        x: torch.Tensor,
        residual: torch.Tensor | None,
        weight: torch.Tensor,
        eps: float,
    ) -> None:
        dims = self._dims(op)
        strides = check_norm(dims, out, x, weight, residual)
        self._native(op, out, x, residual, weight).add_rms_norm(
            out.data_ptr(), x.data_ptr(), address(residual), weight.data_ptr(), dims["hidden"], strides, eps,
            DTYPE_CODES[out.dtype], x.dtype is not out.dtype,
        )  # fmt: skip

    def linear(self, packed: PackedLinear | PackedGateUp, x: torch.Tensor, out: torch.Tensor) -> None:
        """out = x · Wᵀ, or the activated product of a gated MLP."""
        self._product("gate_up" if isinstance(packed, PackedGateUp) else "linear", packed, x, out, packed.epilogue)

    def accumulate(self, packed: PackedLinear, x: torch.Tensor, out: torch.Tensor) -> None:
        """out += x · Wᵀ, summed in float32."""
        self._product("accumulate", packed, x, out, ACCUMULATE)

    def accumulate_and_norm(
        self,
        packed: PackedLinear,
        x: torch.Tensor,
        residual: torch.Tensor,
        normed: torch.Tensor,
        weight: torch.Tensor,
        eps: float,
    ) -> None:
        """residual += x · Wᵀ in float32; normed = rms_norm(residual)."""
        self.accumulate(packed, x, residual)
        self.rms_norm(normed, residual, weight, eps)

    def _product(
        self, op: str, packed: PackedLinear | PackedGateUp, x: torch.Tensor, out: torch.Tensor, epilogue: int
    ) -> None:
        if x.shape[0] != self._max_tokens:
            raise ValueError(f"{op}: x has {x.shape[0]} rows; expected [num_tokens={self._max_tokens}]")
        packed.check(x, out)
        self._native(op, packed, x, out).add_linear(
            packed.native, x.data_ptr(), x.stride(0), out.data_ptr(), out.stride(0), DTYPE_CODES[out.dtype], epilogue
        )

    def rope_and_store(
        self,
        qkv: torch.Tensor,
        key_cache: torch.Tensor,
        value_cache: torch.Tensor,
        num_query_heads: int,
        num_kv_heads: int,
        layout: Literal["neox", "interleaved"] = "neox",
        *,
        key_scale: torch.Tensor | None = None,
        value_scale: torch.Tensor | None = None,
    ) -> None:
        """As `kernels.rope_and_store`, with positions, cos_sin and slots of the step."""
        dims = Dims("rope_and_store", devices=CPU_ONLY, num_tokens=self._max_tokens, num_kv_heads=num_kv_heads)
        row_stride, kv_dtype = check_rope_and_store(
            dims, qkv, key_cache, value_cache, num_query_heads, self._rot_dim, layout
        )
        check_scales(dims, key_scale, value_scale)
        self._native(dims.op, qkv, key_cache, value_cache, key_scale, value_scale).add_rope_and_store(
            qkv.data_ptr(), row_stride, key_cache.data_ptr(), value_cache.data_ptr(), dims["num_blocks"],
            [num_query_heads, num_kv_heads, dims["head_size"], self._rot_dim, dims["block_size"]],
            LAYOUTS[layout], DTYPE_CODES[qkv.dtype], kv_dtype, address(key_scale), address(value_scale),
        )  # fmt: skip

    def paged_attention(
        self,
        out: torch.Tensor,
        query: torch.Tensor,
        key_cache: torch.Tensor,
        value_cache: torch.Tensor,
        scale: float,
        *,
        window: int = -1,
        soft_cap: float = 0.0,
        key_scale: torch.Tensor | None = None,
        value_scale: torch.Tensor | None = None,
    ) -> None:
        """As `kernels.paged_attention`, with block tables, starts and lengths of the step."""
        dims = self._dims("paged_attention")
        strides, kv_dtype = check_attention_sizes(dims, out, query, key_cache, value_cache)
        check_scales(dims, key_scale, value_scale)
        self._native(dims.op, out, query, key_cache, value_cache, key_scale, value_scale).add_paged_attention(
            out.data_ptr(), query.data_ptr(), key_cache.data_ptr(), value_cache.data_ptr(), dims["num_blocks"],
            strides, [dims["num_query_heads"], dims["num_kv_heads"], dims["head_size"], dims["block_size"]],
            scale, window, soft_cap, DTYPE_CODES[query.dtype], kv_dtype, address(key_scale), address(value_scale),
        )  # fmt: skip

    def call(self, function: Callable[..., object], *buffers: torch.Tensor) -> None:
        """Call a Python function with the first T rows of each buffer, between the kernels before and after."""
        self._parts.append(_HostCall(function, buffers))

    def run(self, inputs: StepInputs) -> None:
        """Execute all calls. The interpreter lock is free while kernels run.

        Raises:
            TypeError, ValueError: an input has the wrong dtype or shape, or a slot, block, token id or position is out
                of range; the buffers and caches may be partly written then.
        """
        addresses, sizes = self._check(inputs)
        for part in self._parts:
            part.run(addresses, sizes, 0)

    def time(self, inputs: StepInputs) -> dict[str, int]:
        """Run, and return the nanoseconds spent per kind of kernel."""
        addresses, sizes = self._check(inputs)
        counters = torch.zeros(len(self._names), dtype=torch.int64)
        first = 0
        for part in self._parts:
            part.run(addresses, sizes, counters[first:].data_ptr())
            first += part.num_calls
        total = dict.fromkeys(self._names, 0)
        for name, elapsed_ns in zip(self._names, counters.tolist(), strict=True):
            total[name] += elapsed_ns
        return total

    def _check(self, inputs: StepInputs) -> tuple[list[int], list[int]]:
        addresses, sizes = check_inputs(inputs, self._rot_dim, -1)
        return addresses, [
            sizes.num_tokens, sizes.num_positions, sizes.num_slots, sizes.max_blocks, sizes.max_blocks, sizes.num_seqs,
        ]  # fmt: skip
