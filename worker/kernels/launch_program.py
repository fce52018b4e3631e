"""A forward pass as launches from Python: what `Program` is on a CPU, for tensors on any device.

Adding a call checks it and keeps what does not change. Everything that depends on the number of tokens is bound when a
number first comes, and kept for those seen last: one list of small functions that a run goes through. A run allocates
nothing on CUDA and does not wait for the device, so that it can be captured in a CUDA graph.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Hashable, Iterable, Iterator
from dataclasses import dataclass
from functools import partial
from typing import Any, Literal

import torch

from worker.kernels import attention, elementwise, kv_cache
from worker.kernels._checks import Dims, PlanCache, address, stream_of
from worker.kernels.device_linear import DeviceGateUp, DeviceLinear
from worker.kernels.launch_clock import launch_clock
from worker.kernels.step_inputs import StepInputs, check_inputs

# Numbers of tokens that stay bound: the decode batches of a server, and the prompt chunks of the moment.
_MAX_BOUND = 64


@dataclass(slots=True)
class _Step:
    """One run's inputs and their addresses, for the launches that read them."""

    inputs: StepInputs
    stream: int
    token_ids: int
    positions: int
    cos_sin: int
    slot_mapping: int
    tables: list[int]  # block_table, seq_slots, query_start, context_lens
    calls: list[Callable[..., object]]  # native calls whose sizes are the step's, by their number
    attention_launches: dict[int, Any]  # native descriptions of the step's attention by window; empty on a CPU


Launch = Callable[[_Step], object]


class _Frame:
    """The first T rows of every buffer, and native calls for them, while launches are bound."""

    def __init__(self, num_tokens: int) -> None:
        self.num_tokens = num_tokens
        self._rows: dict[int, torch.Tensor] = {}
        self._plans: dict[Hashable, Any] = {}

    def rows(self, buffer: torch.Tensor) -> torch.Tensor:
        """The first T rows of a buffer that outlives the frame."""
        rows = self._rows.get(id(buffer))
        if rows is None:
            rows = self._rows[id(buffer)] = buffer[: self.num_tokens]
        return rows

    def plan(self, signature: Hashable, make: Callable[..., Any], *arguments: Any) -> Any:
        """A native call that all layers share whose tensors look alike."""
        plan = self._plans.get(signature)
        if plan is None:
            plan = self._plans[signature] = make(*arguments)
        return plan


def _signature(op: str, *tensors: torch.Tensor | None) -> Hashable:
    return (op, *(None if t is None else (t.shape[1:], t.stride(), t.dtype) for t in tensors))


class LaunchProgram:
    """Kernel calls in order, as `worker.kernels.program.Program` has them; weights are `DeviceLinear`, `DeviceGateUp`.

    Buffers are [max_tokens, ...] tensors on one device; a run touches the first T rows. Adding checks what the kernel
    of that name checks (TypeError, ValueError). The program keeps what it was given alive; it owns one scratch buffer
    per dtype for products that a kernel reads at once, allocated by the first run.
    """

    def __init__(self, max_tokens: int, rot_dim: int, device: torch.device) -> None:
        self._max_tokens = max_tokens
        self._rot_dim = rot_dim
        self._device = device
        self._device_index = torch.empty(0, device=device).get_device()
        self._names: list[str] = []
        self._binders: list[Callable[[_Frame], Launch]] = []
        self._kept: list[Any] = []
        self._scratch_widths: dict[torch.dtype, int] = {}
        self._scratch: dict[torch.dtype, torch.Tensor] = {}
        self._bound: OrderedDict[int, list[Launch]] = OrderedDict()
        # What makes the native calls whose sizes are the step's; calls that look alike share one.
        self._step_calls: dict[Hashable, Callable[[StepInputs], Any]] = {}
        self._bound_step_calls = PlanCache()
        self._windows: set[int] = set()

    def _add(self, name: str, bind: Callable[[_Frame], Launch], *kept: Any) -> None:
        self._bound.clear()
        self._names.append(name)
        self._binders.append(bind)
        self._kept.extend(kept)

    def _dims(self, op: str, **sizes: int) -> Dims:
        return Dims(op, devices=(self._device.type,), **sizes)

    def _step_call(self, key: Hashable, make: Callable[[StepInputs], Any]) -> int:
        """The number of a native call that is made for the sizes of a step."""
        self._step_calls.setdefault(key, make)
        self._bound_step_calls.clear()
        return list(self._step_calls).index(key)

    def embedding(self, out: torch.Tensor, table: torch.Tensor) -> None:
        """out = table[token_ids]; out [max_tokens, hidden] of the table's dtype or float32."""
        elementwise.check_embedding(self._dims("embedding", num_rows=self._max_tokens), out, table)
        call = self._step_call(
            _signature("embedding", out, table),
            lambda step: elementwise.bind_gather("embedding", out[: len(step.token_ids)], table, step.token_ids),
        )
        addresses = out.data_ptr(), table.data_ptr()

        def launch(step: _Step) -> None:
            step.calls[call](*addresses, step.token_ids, step.stream)

        self._add("embedding", lambda frame: launch, out, table)

    def rms_norm(self, out: torch.Tensor, x: torch.Tensor, weight: torch.Tensor, eps: float) -> None:
        """As `kernels.rms_norm`."""
        elementwise.check_norm(self._dims("rms_norm", num_tokens=self._max_tokens), out, x, weight, None)
        self._add("rms_norm", partial(self._bind_norm, "rms_norm", out, x, None, weight, eps), out, x, weight)

    def fused_add_rms_norm(
        self, out: torch.Tensor, x: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor, eps: float
    ) -> None:
        """As `kernels.fused_add_rms_norm`."""
        op = "fused_add_rms_norm"
        elementwise.check_norm(self._dims(op, num_tokens=self._max_tokens), out, x, weight, residual)
        self._add(op, partial(self._bind_norm, op, out, x, residual, weight, eps), out, x, residual, weight)

    def _bind_norm(
        self,
        op: str,
        out: torch.Tensor,
        x: torch.Tensor,
        residual: torch.Tensor | None,
        weight: torch.Tensor,
        eps: float,
        frame: _Frame,
    ) -> Launch:
        rows = None if residual is None else frame.rows(residual)
        run = frame.plan(
            _signature(op, out, x, residual), elementwise.bind_norm, op, frame.rows(out), frame.rows(x), weight, rows
        )
        arguments = out.data_ptr(), x.data_ptr(), address(residual), weight.data_ptr(), eps
        return lambda step: run(*arguments, step.stream)

    def linear(self, weight: DeviceLinear | DeviceGateUp, x: torch.Tensor, out: torch.Tensor) -> None:
        """out = x · Wᵀ, or the activated product of a gated MLP."""
        self._check_product("linear", weight, x, out)
        if isinstance(weight, DeviceGateUp):
            self._gate_up(weight, x, out)
        else:
            self._product("linear", weight, x, out)

    def _product(self, name: str, weight: DeviceLinear, x: torch.Tensor, out: torch.Tensor) -> None:
        def bind(frame: _Frame) -> Launch:
            launch = weight.bind(frame.rows(x), frame.rows(out))
            return lambda step: launch()

        self._add(name, bind, weight, x, out)

    def _gate_up(self, weight: DeviceGateUp, x: torch.Tensor, out: torch.Tensor) -> None:
        width = 2 * weight.out_features
        self._need_scratch(width, weight.dtype)

        def bind(frame: _Frame) -> Launch:
            activated = weight.bind_activated(frame.rows(x), frame.rows(out))
            if activated is not None:
                return lambda step: activated()
            gate_up = self._scratch_rows(frame, width, weight.dtype)
            product = weight.bind_product(frame.rows(x), gate_up)
            run = frame.plan(
                _signature("silu_and_mul", out), elementwise.bind_activation, frame.rows(out), gate_up, "silu"
            )
            addresses = out.data_ptr(), gate_up.data_ptr()

            def launch(step: _Step) -> None:
                product()
                run(*addresses, step.stream)

            return launch

        self._add("gate_up", bind, weight, x, out)

    def accumulate(self, weight: DeviceLinear, x: torch.Tensor, out: torch.Tensor) -> None:
        """out += x · Wᵀ, summed in float32."""
        self._check_product("accumulate", weight, x, out)
        self._scratch_product("accumulate", weight, x, torch.float32)

        def bind(frame: _Frame) -> Launch:
            add = partial(frame.rows(out).add_, self._scratch_rows(frame, weight.out_features, torch.float32))
            return lambda step: add()

        self._add("add", bind, out)

    def accumulate_and_norm(
        self,
        weight: DeviceLinear,
        x: torch.Tensor,
        residual: torch.Tensor,
        normed: torch.Tensor,
        norm_weight: torch.Tensor,
        eps: float,
    ) -> None:
        """residual += x · Wᵀ in float32; normed = rms_norm(residual)."""
        op = "accumulate_and_norm"
        self._check_product(op, weight, x, residual)
        elementwise.check_norm(self._dims(op, num_tokens=self._max_tokens), normed, residual, norm_weight, None)
        self._scratch_product("accumulate", weight, x, weight.dtype)

        def bind(frame: _Frame) -> Launch:
            summand = self._scratch_rows(frame, weight.out_features, weight.dtype)
            return self._bind_norm("fused_add_rms_norm", normed, summand, residual, norm_weight, eps, frame)

        self._add("fused_add_rms_norm", bind, residual, normed, norm_weight)

    def _check_product(self, op: str, weight: DeviceLinear | DeviceGateUp, x: torch.Tensor, out: torch.Tensor) -> None:
        if x.shape[0] != self._max_tokens:
            raise ValueError(f"{op}: x has {x.shape[0]} rows; expected [num_tokens={self._max_tokens}]")
        weight.check(x, out)

    def _scratch_product(self, name: str, weight: DeviceLinear, x: torch.Tensor, dtype: torch.dtype) -> None:
        """A product into scratch rows, for the call that is added next."""
        self._need_scratch(weight.out_features, dtype)

        def bind(frame: _Frame) -> Launch:
            launch = weight.bind(frame.rows(x), self._scratch_rows(frame, weight.out_features, dtype))
            return lambda step: launch()

        self._add(name, bind, weight, x)

    def _need_scratch(self, width: int, dtype: torch.dtype) -> None:
        self._scratch_widths[dtype] = max(width, self._scratch_widths.get(dtype, 0))

    def _scratch_rows(self, frame: _Frame, width: int, dtype: torch.dtype) -> torch.Tensor:
        """The first T rows of `width` columns in scratch memory."""
        scratch = self._scratch.get(dtype)
        if scratch is None:
            size = self._max_tokens * self._scratch_widths[dtype]
            scratch = self._scratch[dtype] = torch.empty(size, dtype=dtype, device=self._device)
        return frame.plan(
            ("scratch", width, dtype), lambda: scratch[: frame.num_tokens * width].view(frame.num_tokens, width)
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
        dims = self._dims("rope_and_store", num_tokens=self._max_tokens, num_kv_heads=num_kv_heads)
        kv_cache.check_rope_and_store(dims, qkv, key_cache, value_cache, num_query_heads, self._rot_dim, layout)
        kv_cache.check_scales(dims, key_scale, value_scale)
        heads = num_query_heads, num_kv_heads, layout
        call = self._step_call(
            (_signature("rope_and_store", qkv, key_cache, value_cache), len(key_cache), heads),
            lambda step: kv_cache.bind_rope_and_store(
                qkv[: len(step.token_ids)], step.positions, step.cos_sin, key_cache, value_cache, step.slot_mapping,
                *heads, key_scale, value_scale,
            ),
        )  # fmt: skip
        base, caches = qkv.data_ptr(), (key_cache.data_ptr(), value_cache.data_ptr())
        scales = address(key_scale), address(value_scale)

        def launch(step: _Step) -> None:
            step.calls[call](base, step.positions, step.cos_sin, *caches, step.slot_mapping, *scales, step.stream)

        self._add(dims.op, lambda frame: launch, qkv, key_cache, value_cache, key_scale, value_scale)

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
        """As `kernels.paged_attention`, with block tables, starts, lengths and the window's plan of the step."""
        dims = self._dims("paged_attention", num_tokens=self._max_tokens)
        attention.check_attention_sizes(dims, out, query, key_cache, value_cache)
        kv_cache.check_scales(dims, key_scale, value_scale)

        def make(step: StepInputs) -> Any:
            rows = len(step.token_ids)
            return attention.bind_attention(
                out[:rows], query[:rows], key_cache, value_cache, step.block_table, step.seq_slots, step.query_start,
                step.context_lens, None, None, None, key_scale, value_scale,
            )  # fmt: skip

        call = self._step_call((_signature(dims.op, out, query, key_cache, value_cache), len(key_cache)), make)
        self._windows.add(window)
        before = [out.data_ptr(), query.data_ptr(), key_cache.data_ptr(), value_cache.data_ptr()]
        after = [0, 0, 0, address(key_scale), address(value_scale)]

        def launch(step: _Step) -> None:
            if step.attention_launches and attention.is_tracing():
                inputs = step.inputs
                attention.trace(key_cache, inputs.block_table, inputs.seq_slots, inputs.context_lens)
            plan = step.attention_launches.get(window)
            step.calls[call](0, before + step.tables + after, scale, window, soft_cap, plan, step.stream)

        self._add(dims.op, lambda frame: launch, out, query, key_cache, value_cache, key_scale, value_scale)

    def call(self, function: Callable[..., object], *buffers: torch.Tensor) -> None:
        """Call a Python function with the first T rows of each buffer, between the kernels before and after."""

        def bind(frame: _Frame) -> Launch:
            rows = [frame.rows(buffer) for buffer in buffers]
            return lambda step: function(*rows)

        self._add("call", bind, *buffers)

    def run(self, inputs: StepInputs) -> None:
        """Launch all calls on the current stream.

        Raises:
            TypeError, ValueError: an input has the wrong dtype, shape or device, or an attention plan is missing; on a
                CPU also where a slot, block, token id or position is out of range.
        """
        step = self._begin(inputs)
        with torch.inference_mode():
            for launch in self._launches(len(inputs.token_ids)):
                launch(step)

    def time(self, inputs: StepInputs) -> dict[str, int]:
        """Run, and return the nanoseconds spent per kind of kernel, by the device's clock. Waits for the device."""
        step = self._begin(inputs)
        clock = launch_clock(self._device)
        with torch.inference_mode():
            clock.mark()
            for launch in self._launches(len(inputs.token_ids)):
                launch(step)
                clock.mark()
        total = dict.fromkeys(self._names, 0)
        for name, elapsed_ns in zip(self._names, clock.intervals_ns(), strict=True):
            total[name] += elapsed_ns
        return total

    def _begin(self, inputs: StepInputs) -> _Step:
        addresses, sizes = check_inputs(inputs, self._rot_dim, self._device_index)
        if sizes.num_tokens > self._max_tokens:
            raise ValueError(f"num_tokens is {sizes.num_tokens}, the buffers hold {self._max_tokens}")
        calls = self._bound_step_calls.get(sizes)
        if calls is None:
            calls = [make(inputs) for make in self._step_calls.values()]
            self._bound_step_calls.remember(sizes, calls)
        token_ids, positions, cos_sin, slot_mapping, *tables = addresses
        return _Step(
            inputs, stream_of(inputs.token_ids), token_ids, positions, cos_sin, slot_mapping, tables, calls,
            self._attention_launches(inputs),
        )  # fmt: skip

    def _attention_launches(self, inputs: StepInputs) -> dict[int, Any]:
        if self._device.type == "cpu":
            return {}
        plans = inputs.attention_plans
        missing = sorted(self._windows - plans.keys())
        if missing:
            raise ValueError(f"program: attention_plans has no plan for window {missing[0]}, only for {list(plans)}")
        return {window: plans[window].launch for window in self._windows}

    def _launches(self, num_tokens: int) -> Iterable[Launch]:
        launches = self._bound.get(num_tokens)
        if launches is None:
            return self._bind(num_tokens)
        self._bound.move_to_end(num_tokens)
        return launches

    def _bind(self, num_tokens: int) -> Iterator[Launch]:
        """Binds a launch when it is asked for, so that the device works while the next ones are bound."""
        frame = _Frame(num_tokens)
        launches = []
        for bind in self._binders:
            launches.append(bind(frame))
            yield launches[-1]
        if len(self._bound) >= _MAX_BOUND:
            self._bound.popitem(last=False)
        self._bound[num_tokens] = launches
