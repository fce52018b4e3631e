"""How one step's attention is cut into work for a GPU: made on the host once a step, used by every layer."""

from __future__ import annotations

from typing import Any, Literal

import torch

from worker.kernels._checks import CPU_ONLY, DTYPE_CODES, HEAD_SIZES, KV_DTYPE_CODES, Dims, names_of
from worker.kernels._native import load_native

_C = load_native()
_INT32 = (torch.int32,)
_VERSIONS = {"auto": 0, "v1": 1, "v2": 2}
# Thread blocks that a plan for no GPU is balanced over.
_CPU_WORKERS = 1


class AttentionGeometry:
    """What all steps of a model have in common.

    Args:
        head_size: one of the supported head sizes.
        dtype: of queries; float32, bfloat16 or float16.
        kv_dtype: of the cache: dtype, float8_e4m3fn or float8_e5m2; None is dtype.
        window: keys that a token sees, itself included; -1 is all.
        device: where attention runs.

    Raises:
        TypeError, ValueError: a number or dtype that is not supported, naming it.
    """

    def __init__(
        self,
        num_query_heads: int,
        num_kv_heads: int,
        head_size: int,
        dtype: torch.dtype,
        device: torch.device | str,
        *,
        kv_dtype: torch.dtype | None = None,
        window: int = -1,
    ) -> None:
        if dtype not in DTYPE_CODES:
            raise TypeError(f"plan_attention: dtype {dtype} is not supported; supported: {names_of(list(DTYPE_CODES))}")
        if kv_dtype is not None and kv_dtype is not dtype and kv_dtype not in KV_DTYPE_CODES:
            supported = names_of([dtype, *KV_DTYPE_CODES])
            raise TypeError(f"plan_attention: kv_dtype {kv_dtype} is not supported; supported: {supported}")
        if num_kv_heads < 1 or num_query_heads < 1 or num_query_heads % num_kv_heads:
            raise ValueError(
                f"plan_attention: num_query_heads {num_query_heads} is not a multiple of num_kv_heads {num_kv_heads}"
            )
        Dims("plan_attention", head_size=head_size).one_of("head_size", HEAD_SIZES)
        self.num_query_heads = num_query_heads
        self.num_kv_heads = num_kv_heads
        self.head_size = head_size
        self.window = window
        self.device = torch.device(device)
        if self.device.type == "cuda":
            kv_code = 0 if kv_dtype is None else KV_DTYPE_CODES.get(kv_dtype, 0)
            with torch.cuda.device(self.device):
                self.num_workers = _C.attention_workers(
                    num_query_heads, num_kv_heads, head_size, DTYPE_CODES[dtype], kv_code
                )
        else:
            self.num_workers = _CPU_WORKERS


class AttentionPlan:
    """A plan in device memory, and the workspace in which pieces of attention leave what is joined later.

    Buffers grow when a plan needs more and are otherwise reused, so launches captured in a CUDA graph stay valid after
    `update` as long as `num_reallocations` and `flags` stay what they were at the capture.

    Args:
        num_host_buffers: pinned host buffers, used in turn: the copies of so many plans less one may still be to be
            made when `update` is called.
        capacity_ints: length of a plan that the buffers hold at first; `reserve` makes them large enough for good.
        workspace_bytes: of the workspace at first.

    Attributes:
        buffer: int32, the plan on the device.
        workspace: uint8, zero when made; kernels leave it reusable.

    Raises:
        ValueError: num_host_buffers is less than 1.
    """

    def __init__(
        self,
        geometry: AttentionGeometry,
        *,
        capacity_ints: int = 1024,
        workspace_bytes: int = 0,
        num_host_buffers: int = 1,
    ) -> None:
        if num_host_buffers < 1:
            raise ValueError(f"plan_attention: num_host_buffers is {num_host_buffers}; it must be at least 1")
        self._geometry = geometry
        self._result: Any = None
        self._num_host_buffers = num_host_buffers
        self._turn = 0
        self.num_reallocations = 0
        self._allocate(capacity_ints, workspace_bytes)

    def _allocate(self, capacity_ints: int, workspace_bytes: int) -> None:
        device = self._geometry.device
        # Copies from buffers before these may still be to be made: torch keeps pinned memory until they are.
        self._host_buffers = [
            torch.zeros(capacity_ints, dtype=torch.int32, pin_memory=device.type == "cuda")
            for _ in range(self._num_host_buffers)
        ]
        buffer_cpu = self.buffer_cpu
        self.buffer = buffer_cpu if device.type == "cpu" else torch.zeros_like(buffer_cpu, device=device)
        self.workspace = torch.zeros(workspace_bytes, dtype=torch.uint8, device=device)

    def reserve(self, max_tokens: int, max_seqs: int, max_model_len: int, *, partition_keys: int = 0) -> None:
        """Make the buffers large enough for any step, so that no `update` within these bounds reallocates them.

        To be called before launches are captured: it may reallocate itself, which counts as one reallocation.

        Args:
            max_tokens: new tokens of a step.
            max_seqs: sequences of a step.
            max_model_len: tokens of a sequence.
            partition_keys: the smallest that `update` will be given, other than 0.

        Raises:
            ValueError: a bound that is negative, or partition_keys that is not supported.
        """
        g = self._geometry
        needed = _C.attention_plan_capacity(
            [max_tokens, max_seqs, max_model_len], [g.num_query_heads, g.num_kv_heads, g.head_size], g.num_workers,
            partition_keys,
        )  # fmt: skip
        workspace_bytes = self.workspace.numel() if g.device.type == "cpu" else needed.workspace_bytes
        if needed.plan_ints > self.buffer_cpu.numel() or workspace_bytes > self.workspace.numel():
            self._allocate(max(needed.plan_ints, self.buffer_cpu.numel()), max(workspace_bytes, self.workspace.numel()))
            self.num_reallocations += 1

    @property
    def buffer_cpu(self) -> torch.Tensor:
        """int32: the newest plan in (for CUDA: pinned) host memory."""
        return self._host_buffers[self._turn]

    @property
    def version(self) -> int:
        """1 or 2: the decode kernel that the plan is for."""
        return int(self._result.version)

    @property
    def flags(self) -> tuple[int, bool, bool]:
        """Version, and whether the plan has decode and prefill work."""
        return self.version, bool(self._result.has_decode), bool(self._result.has_prefill)

    @property
    def launch(self) -> Any:
        """The native description of this plan's launches."""
        return self._launch

    def update(
        self,
        query_start: torch.Tensor,
        context_lens: torch.Tensor,
        *,
        version: Literal["auto", "v1", "v2"] = "auto",
        partition_keys: int = 0,
    ) -> None:
        """Plan a step; the copy to the device is ordered by the current stream.

        A host buffer is written at once: the copy of the plan `num_host_buffers` before this one must have been made by
        then.

        Args:
            query_start: int32 [num_seqs + 1] on the CPU.
            context_lens: int32 [num_seqs] on the CPU.
            version: "v1" runs over all keys of a sequence in one pass, "v2" cuts them into pieces where that pays;
                "auto" is whichever that makes it. Captured launches follow plans of any version: "v2" says the same of
                all of them.
            partition_keys: for v2: keys of a piece, a multiple of 64, which makes a result independent of the batch; 0
                balances the pieces over the GPU.

        Raises:
            TypeError, ValueError: a tensor, batch or option that does not fit.
        """
        if version not in _VERSIONS:
            raise ValueError(f"plan_attention: version {version!r} is not supported; supported: {', '.join(_VERSIONS)}")
        dims = Dims("plan_attention", devices=CPU_ONLY)
        dims.tensor("context_lens", context_lens, ("num_seqs",), _INT32)
        dims.sizes["num_seqs + 1"] = dims["num_seqs"] + 1
        dims.tensor("query_start", query_start, ("num_seqs + 1",), _INT32)
        g = self._geometry
        self._turn = (self._turn + 1) % self._num_host_buffers
        for _ in range(2):
            self._result = _C.plan_attention(
                query_start.data_ptr(), context_lens.data_ptr(),
                [dims["num_seqs"], g.num_query_heads, g.num_kv_heads, g.head_size], g.window, g.num_workers,
                _VERSIONS[version], partition_keys, self.buffer_cpu.data_ptr(), self.buffer_cpu.numel(),
            )  # fmt: skip
            if self._fits():
                break
            self._allocate(
                max(2 * self._result.plan_ints, self.buffer_cpu.numel()),
                max(self._result.workspace_bytes, self.workspace.numel()),
            )
            self.num_reallocations += 1
        if g.device.type == "cuda":
            num_ints = self._result.plan_ints
            self.buffer[:num_ints].copy_(self.buffer_cpu[:num_ints], non_blocking=True)
        else:
            self.buffer = self.buffer_cpu
        self._launch = _C.AttentionLaunch(
            self.buffer.data_ptr(), self.workspace.data_ptr(), self.workspace.numel(), g.num_workers, self._result
        )

    def _fits(self) -> bool:
        if self._result.plan_ints > self.buffer_cpu.numel():
            return False
        return self._geometry.device.type == "cpu" or self._result.workspace_bytes <= self.workspace.numel()


def plan_attention(
    query_start: torch.Tensor,
    context_lens: torch.Tensor,
    geometry: AttentionGeometry,
    *,
    version: Literal["auto", "v1", "v2"] = "auto",
    partition_keys: int = 0,
) -> AttentionPlan:
    """A new plan for one step; see `AttentionPlan.update`. A server keeps one plan and updates it instead."""
    plan = AttentionPlan(geometry)
    plan.update(query_start, context_lens, version=version, partition_keys=partition_keys)
    return plan
