"""A forward pass bound once: a list of kernel calls on fixed buffers that a step runs in one native call."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import torch

from worker.kernels._checks import CPU_ONLY, DTYPE_CODES, Dims, address
from worker.kernels._native import load_native
from worker.kernels.attention import check_attention_sizes
from worker.kernels.elementwise import check_embedding, check_norm
from worker.kernels.kv_cache import LAYOUTS, check_caches, check_scales
from worker.kernels.linear import ACCUMULATE, PackedGateUp, PackedLinear

_C = load_native()
_ACTIVATIONS = tuple(DTYPE_CODES)


@dataclass(slots=True)
class StepInputs:
    """What a run reads, T tokens of B sequences. All contiguous.

    Attributes:
        token_ids: int32 [T].
        positions: int32 [T], rows of cos_sin.
        cos_sin: float32 [num_positions, rot_dim].
        slot_mapping: int64 [T].
        block_table: int32 [S, max_blocks].
        seq_slots: int32 [B], rows of block_table.
        query_start: int32 [B + 1].
        context_lens: int32 [B].
    """

    token_ids: torch.Tensor
    positions: torch.Tensor
    cos_sin: torch.Tensor
    slot_mapping: torch.Tensor
    block_table: torch.Tensor
    seq_slots: torch.Tensor
    query_start: torch.Tensor
    context_lens: torch.Tensor


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
        dims = self._dims("rms_norm")
        strides = check_norm(dims, out, x, weight, None)
        self._native(dims.op, out, x, weight).add_rms_norm(
            out.data_ptr(), x.data_ptr(), 0, weight.data_ptr(), dims["hidden"], strides, eps,
            DTYPE_CODES[out.dtype], x.dtype is not out.dtype,
        )  # fmt: skip

    def linear(self, packed: PackedLinear | PackedGateUp, x: torch.Tensor, out: torch.Tensor) -> None:
        """out = x · Wᵀ, or the activated product of a gated MLP."""
        self._product("gate_up" if isinstance(packed, PackedGateUp) else "linear", packed, x, out, packed.epilogue)

    def accumulate(self, packed: PackedLinear, x: torch.Tensor, out: torch.Tensor) -> None:
        """out += x · Wᵀ, summed in float32."""
        self._product("accumulate", packed, x, out, ACCUMULATE)

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
        if layout not in LAYOUTS:
            raise ValueError(f"{dims.op}: layout {layout!r} is not supported; supported: {', '.join(LAYOUTS)}")
        kv_dtype = check_caches(dims, key_cache, value_cache, qkv.dtype)
        check_scales(dims, key_scale, value_scale)
        dims.sizes["width"] = (num_query_heads + 2 * num_kv_heads) * dims["head_size"]
        row_stride = dims.tensor("qkv", qkv, ("num_tokens", "width"), _ACTIVATIONS, contiguous=False)[0]
        if self._rot_dim % 2 or not 0 < self._rot_dim <= dims["head_size"]:
            raise ValueError(f"{dims.op}: rot_dim {self._rot_dim} must be even and at most {dims['head_size']}")
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
        known: dict[str, int] = {"rot_dim": self._rot_dim}
        addresses = []
        for name, dims, dtype in _INPUT_TYPES:
            tensor: torch.Tensor = getattr(inputs, name)
            shape = tensor.shape
            if tensor.dtype is not dtype or len(shape) != len(dims) or not tensor.is_contiguous():
                raise TypeError(_rejection(name, dims, dtype, tensor))
            for dim, size in zip(dims, shape, strict=True):
                if known.setdefault(dim, size) != size:
                    raise ValueError(_rejection(name, dims, dtype, tensor))
            addresses.append(tensor.data_ptr())
        if known["B + 1"] != known["B"] + 1:
            raise ValueError(_rejection("query_start", ("B + 1",), torch.int32, inputs.query_start))
        sizes = [known["T"], known["num_positions"], known["S"], known["max_blocks"], known["max_blocks"], known["B"]]
        return addresses, sizes


def _rejection(name: str, dims: Sequence[str], dtype: torch.dtype, tensor: torch.Tensor) -> str:
    return (
        f"program: {name} must be contiguous [{', '.join(dims)}] of {dtype}, "
        f"not {list(tensor.shape)} of {tensor.dtype} with strides {list(tensor.stride())}"
    )
