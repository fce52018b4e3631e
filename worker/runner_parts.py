"""Everything that a model runner is put together from: model, memory, buffers, graphs."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import torch

from pagemill.config import WorkerSettings
from pagemill.errors import ConfigError
from pagemill.model_source import load_config, resolve_model
from pagemill.step import SlotSampling, WorkerCapacity
from worker import kernels
from worker.batch import BatchBuilder, StepRows
from worker.device import (
    Device,
    dtype_from_name,
    dtype_name,
    pick_device,
    pick_dtype,
    pick_kv_dtype,
    pick_max_num_seqs,
    pick_max_step_tokens,
)
from worker.forward_pass import ForwardPass
from worker.kv_cache import MIN_BLOCKS, KVCache, KVLayout, allocate_cache, log_pool
from worker.layers.context import LayerContext
from worker.loader import WeightReader, model_fingerprint, open_source
from worker.memory_plan import MemoryPlan, make_memory_plan
from worker.models import CausalLM, resolve
from worker.sampler import LogprobArrays, Sampler, staged_sampling_ints
from worker.slots import DeviceStore, HostStore, SlotTable, staged_change_ints
from worker.step_buffers import ResultRing, aligned
from worker.step_device import HostDevice, StepDevice, step_device

logger = logging.getLogger(__name__)

# Rows of logits held at once. On a CPU more would buy no speed and cost vocabulary size x 4 bytes each; on a GPU they
# are all rows of a decode step, which is recorded as one graph.
_CPU_LOGIT_ROWS = 128
_CUDA_LOGIT_ROWS = 1024
# Rows with penalties, filters and this many alternatives are the costliest draw that start-up plans for.
_PROFILED_LOGPROBS = 20
_PROFILED_SAMPLING = SlotSampling(
    top_k=50, top_p=0.9, min_p=0.01, presence_penalty=0.5, repetition_penalty=1.1, num_logprobs=_PROFILED_LOGPROBS
)


@dataclass(slots=True)
class RunnerParts:
    """What `build_parts` makes."""

    model_name: str
    fingerprint: str
    device: Device
    dtype: torch.dtype
    capacity: WorkerCapacity
    step_device: StepDevice
    model: CausalLM
    table: SlotTable
    builder: BatchBuilder
    sampler: Sampler
    forward_pass: ForwardPass
    cache: KVCache


@dataclass(slots=True)
class _Loaded:
    """A model with its weights, and what decided them."""

    name: str
    model: CausalLM
    fingerprint: str
    dtype: torch.dtype
    kv_dtype: torch.dtype


@dataclass(slots=True)
class _Sizes:
    max_model_len: int
    max_step_tokens: int
    max_num_seqs: int


def build_parts(settings: WorkerSettings, where: StepDevice | None) -> RunnerParts:
    """Load the model, find out how much KV cache fits, allocate everything, record graphs.

    Args:
        where: steps run; None is what suits the settings' device.

    Raises:
        ConfigError, ModelLoadError: as for `ModelRunner`.
    """
    started = time.monotonic()
    device = pick_device(settings.device)
    where = where or step_device(device.torch_device)
    if settings.num_threads is not None:
        kernels.set_num_threads(settings.num_threads)
    memory_plan = make_memory_plan(device, settings)
    loaded = _load(settings, device, where, memory_plan)
    model, dtype = loaded.model, loaded.dtype
    loaded_at = time.monotonic()
    sizes = _Sizes(
        _max_model_len(model, settings),
        pick_max_step_tokens(settings.max_num_batched_tokens, device),
        pick_max_num_seqs(settings.max_num_seqs, device),
    )
    layout = KVLayout(model.kv_spec, loaded.kv_dtype, settings.block_size)
    with memory_plan.stepping():
        model.allocate(sizes.max_step_tokens, sizes.max_model_len)
        table, builder, sampler, forward_pass = _step_parts(model, where, dtype, sizes, settings.block_size)
        if device.kind == "cuda":
            forward_pass.reserve_plans(sizes.max_step_tokens, sizes.max_num_seqs, sizes.max_model_len, layout.dtype)

    def make_cache(num_blocks: int) -> KVCache:
        return allocate_cache(model.kv_spec, layout.dtype, settings.block_size, num_blocks, device)

    records = device.kind == "cuda" and not settings.enforce_eager
    graph_sizes = forward_pass.graph_sizes(sizes.max_num_seqs) if records else []
    rehearsal = Rehearsal(builder, sampler, forward_pass, where, make_cache, sizes.max_step_tokens, graph_sizes)
    table.num_pool_blocks = memory_plan.num_blocks(layout, model.max_positions, rehearsal)
    rehearsal.end()
    cache = make_cache(table.num_pool_blocks)
    log_pool(table.num_pool_blocks, layout, sizes.max_model_len)
    forward_pass.bind(cache)
    if graph_sizes:
        forward_pass.graphs = forward_pass.record_graphs(graph_sizes)
        forward_pass.graphs.log()
    logger.info(
        "ready after %.1f s on %s, %.1f s of them for weights: weights %.2f GiB, context length %d",
        time.monotonic() - started,
        device.name,
        loaded_at - started,
        model.weight_bytes / (1 << 30),
        sizes.max_model_len,
    )
    return RunnerParts(
        model_name=loaded.name,
        fingerprint=loaded.fingerprint,
        device=device,
        dtype=dtype,
        capacity=_capacity(model, layout, table.num_pool_blocks, sizes),
        step_device=where,
        model=model,
        table=table,
        builder=builder,
        sampler=sampler,
        forward_pass=forward_pass,
        cache=cache,
    )


def _load(settings: WorkerSettings, device: Device, where: StepDevice, memory_plan: MemoryPlan) -> _Loaded:
    """The model that the settings name, with its weights on the device."""
    source = resolve_model(settings.model)
    config = load_config(source)
    dtype = pick_dtype(settings.dtype, dtype_from_name(config.get("dtype") or config.get("torch_dtype")), device)
    kv_dtype = pick_kv_dtype(settings.kv_cache_dtype, dtype)
    logger.info("loading %s from %s as %s", source.name, source.path, dtype_name(dtype))
    model = resolve(config)(config, LayerContext(dtype, where.torch_device, execution=where.execution))
    weights = open_source(
        source,
        settings.load_format,
        seed=settings.seed,
        absent_if_random=model.optional_weights,
        device=where.torch_device,
    )
    reader = WeightReader(weights, dtype, where.torch_device)
    with memory_plan.loading(config, dtype):
        model.load_weights(reader)
    reader.warn_unused()
    fingerprint = model_fingerprint(config, weights, dtype, settings.seed, kv_dtype)
    return _Loaded(source.name, model, fingerprint, dtype, kv_dtype)


def _capacity(model: CausalLM, layout: KVLayout, num_blocks: int, sizes: _Sizes) -> WorkerCapacity:
    return WorkerCapacity(
        num_blocks=num_blocks,
        block_size=layout.block_size,
        num_slots=sizes.max_num_seqs,
        max_model_len=sizes.max_model_len,
        vocab_size=model.vocab_size,
        max_step_tokens=sizes.max_step_tokens,
        kv_bytes_per_token=layout.bytes_per_token,
        shares_prefixes=not model.kv_depends_on_prompt_length,
    )


def _max_model_len(model: CausalLM, settings: WorkerSettings) -> int:
    longest = model.max_positions
    if settings.max_model_len is None:
        return longest
    if settings.max_model_len > longest:
        raise ConfigError(
            f"max_model_len is {settings.max_model_len}, but the model's context length is {longest}",
            field="max_model_len",
        )
    return settings.max_model_len


def _step_parts(
    model: CausalLM, where: StepDevice, dtype: torch.dtype, sizes: _Sizes, block_size: int
) -> tuple[SlotTable, BatchBuilder, Sampler, ForwardPass]:
    """Slots, batches, sampler and forward pass, on a pool whose size is not known yet."""
    num_slots, max_model_len = sizes.max_num_seqs, sizes.max_model_len
    max_blocks = -(-max_model_len // block_size)
    if isinstance(where, HostDevice):
        store: HostStore | DeviceStore = HostStore(num_slots, max_model_len, max_blocks)
        logit_rows = _CPU_LOGIT_ROWS
    else:
        store = DeviceStore(where, num_slots, max_model_len, max_blocks)
        logit_rows = min(num_slots, _CUDA_LOGIT_ROWS)
    table = SlotTable(num_slots, max_model_len, block_size, 0, store)
    # Room for the columns of all rows, and for the histories and blocks of what enters in one step as a rule.
    entering = max(max_model_len + max_blocks, 2 * sizes.max_step_tokens + 2 * num_slots)
    num_ints = staged_sampling_ints(num_slots) + aligned(num_slots) + staged_change_ints(entering)
    builder = BatchBuilder(table, sizes.max_step_tokens, where, num_ints=num_ints)
    sampler = Sampler(table, model.vocab_size, logit_rows, where)
    return table, builder, sampler, ForwardPass(model, builder, where, dtype, logit_rows)


class Rehearsal:
    """The largest step and graph, on a cache of a few blocks, before there is a KV cache: a `StepProbe`."""

    def __init__(
        self,
        builder: BatchBuilder,
        sampler: Sampler,
        forward_pass: ForwardPass,
        device: StepDevice,
        make_cache: Callable[[int], KVCache],
        max_step_tokens: int,
        graph_sizes: list[int],
    ) -> None:
        self._builder = builder
        self._sampler = sampler
        self._pass = forward_pass
        self._device = device
        self._make_cache = make_cache
        self._max_step_tokens = max_step_tokens
        self._graph_sizes = graph_sizes
        self._cache: KVCache | None = None
        self.num_graphs = len(graph_sizes)

    def _bind(self) -> None:
        if self._cache is None:
            self._cache = self._make_cache(MIN_BLOCKS)
            self._pass.bind(self._cache)

    def end(self) -> None:
        """Let go of the cache. The pass is to be bound to another one."""
        self._cache = None

    def capture_graphs(self, count: int) -> object:
        """Record the `count` largest graphs; they live as long as what is returned."""
        self._bind()
        return self._pass.record_graphs(self._graph_sizes[-count:])

    def run_largest_step(self) -> None:
        """As many tokens and rows as a step may have, with penalties, filters and log-probabilities. Waits."""
        self._bind()
        rows = self._rows()
        at_once = min(len(rows.slots), self._pass.max_logit_rows)
        slots = rows.slots[:at_once]
        for slot in slots.tolist():
            self._sampler.enter(slot, _PROFILED_SAMPLING)
        staging = self._builder.staging
        staging.begin()
        self._builder.stage(rows, len(rows.slots))
        staged = self._sampler.stage(slots, staging)
        last_tokens = staging.column((np.cumsum(rows.counts, dtype=np.int32) - 1)[:at_once])
        staging.upload()
        hidden = self._pass.run(rows, None)
        logprobs = LogprobArrays.allocate(at_once, _PROFILED_LOGPROBS, self._device.torch_device)
        logits = self._pass.logits_of(hidden.states, last_tokens)
        self._sampler.draw(staged, 0, logits, ResultRing(self._device, at_once).take(), logprobs)
        self._device.mark().wait()

    def _rows(self) -> StepRows:
        """All slots, whose block tables name block 0, with equal shares of the tokens of a step."""
        table = self._builder.table
        num_rows = min(table.num_slots, self._max_step_tokens)
        counts = np.full(num_rows, self._max_step_tokens // num_rows, dtype=np.int32)
        counts[: self._max_step_tokens % num_rows] += 1
        counts = np.minimum(counts, table.max_model_len).astype(np.int32)
        starts = np.zeros(num_rows, dtype=np.int32)
        slots = np.arange(num_rows, dtype=np.int32)
        return StepRows(slots, starts, counts, counts, int(counts.sum()), int(counts.max()))
