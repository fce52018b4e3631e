"""Executes step plans: applies deltas to the slots, runs the model, samples, and says what came out."""

from __future__ import annotations

import logging
import time

import numpy as np
import numpy.typing as npt
import torch

from pagemill.config import WorkerSettings
from pagemill.errors import ConfigError, DesyncError
from pagemill.model_source import load_config, resolve_model
from pagemill.step import PromptChunkLogprobs, SlotFailure, StepPlan, StepResult, TokenLogprobs, WorkerCapacity
from worker import kernels
from worker.batch import BatchBuilder, StepBatch
from worker.device import (
    dtype_from_name,
    dtype_name,
    pick_device,
    pick_dtype,
    pick_kv_dtype,
    pick_max_num_seqs,
    pick_max_step_tokens,
)
from worker.kv_cache import KVLayout, allocate_cache, check_context, cpu_blocks, log_pool
from worker.layers.context import LayerContext
from worker.loader import WeightReader, model_fingerprint, open_source
from worker.memory_plan import make_memory_plan
from worker.models import CausalLM, resolve
from worker.sampler import Sampler, prompt_logprobs
from worker.slots import IntArray, SlotTable

logger = logging.getLogger(__name__)

# Rows of logits held at once. More would buy no speed and cost vocabulary size x 4 bytes each.
_MAX_LOGIT_ROWS = 128


class ModelRunner:
    """One model on one device. Not safe for use by several threads at once.

    Args:
        settings: the worker's settings.

    Raises:
        ConfigError: settings that do not fit the model or the machine.
        ModelLoadError: the model cannot be loaded.
    """

    def __init__(self, settings: WorkerSettings) -> None:
        started = time.monotonic()
        self.device = pick_device(settings.device)
        if settings.num_threads is not None:
            kernels.set_num_threads(settings.num_threads)
        source = resolve_model(settings.model)
        config = load_config(source)
        self.model_name = source.name
        self.dtype = pick_dtype(
            settings.dtype, dtype_from_name(config.get("dtype") or config.get("torch_dtype")), self.device
        )
        kv_dtype = pick_kv_dtype(settings.kv_cache_dtype, self.dtype)
        memory_plan = make_memory_plan(self.device, settings)
        logger.info("loading %s from %s as %s", source.name, source.path, dtype_name(self.dtype))
        self._model = resolve(config)(config, LayerContext(self.dtype, self.device.torch_device))
        weight_source = open_source(
            source,
            settings.load_format,
            seed=settings.seed,
            absent_if_random=self._model.optional_weights,
            device=self.device.torch_device,
        )
        self.fingerprint = model_fingerprint(config, weight_source, self.dtype, settings.seed, kv_dtype)
        reader = WeightReader(weight_source, self.dtype, self.device.torch_device)
        with memory_plan.loading(config, self.dtype):
            self._model.load_weights(reader)
        reader.warn_unused()
        max_model_len = self._max_model_len(settings)
        max_step_tokens = pick_max_step_tokens(settings.max_num_batched_tokens, self.device)
        max_num_seqs = pick_max_num_seqs(settings.max_num_seqs, self.device)
        layout = KVLayout(self._model.kv_spec, kv_dtype, settings.block_size)
        num_blocks = cpu_blocks(layout, settings)
        check_context(num_blocks, layout, settings, self._model.max_positions, self.device)
        self.capacity = WorkerCapacity(
            num_blocks=num_blocks,
            block_size=settings.block_size,
            num_slots=max_num_seqs,
            max_model_len=max_model_len,
            vocab_size=self._model.vocab_size,
            max_step_tokens=max_step_tokens,
            kv_bytes_per_token=layout.bytes_per_token,
            shares_prefixes=not self._model.kv_depends_on_prompt_length,
        )
        self._model.allocate(max_step_tokens, max_model_len)
        self._cache = allocate_cache(self._model.kv_spec, kv_dtype, settings.block_size, num_blocks, self.device)
        log_pool(num_blocks, layout, max_model_len)
        self._table = SlotTable(max_num_seqs, max_model_len, settings.block_size, num_blocks)
        self._builder = BatchBuilder(self._table, max_step_tokens)
        self._sampler = Sampler(self._table, self._model.vocab_size)
        self._prompt_logprob_slots = np.full(max_num_seqs, -1, dtype=np.int32)
        self._failed = np.zeros(max_num_seqs, dtype=np.bool_)
        self._gathered = torch.empty((_MAX_LOGIT_ROWS, self._model.hidden_size), dtype=self.dtype)
        self._logits = torch.empty((_MAX_LOGIT_ROWS, self._model.vocab_size), dtype=torch.float32)
        self._epoch: int | None = None
        self._next_step = 0
        self._last_end_ns = 0
        logger.info(
            "ready after %.1f s on %s: weights %.2f GiB, context length %d",
            time.monotonic() - started,
            self.device.name,
            self._model.weight_bytes / (1 << 30),
            max_model_len,
        )

    @property
    def model(self) -> CausalLM:
        """The loaded model."""
        return self._model

    def _max_model_len(self, settings: WorkerSettings) -> int:
        longest = self._model.max_positions
        if settings.max_model_len is None:
            return longest
        if settings.max_model_len > longest:
            raise ConfigError(
                f"max_model_len is {settings.max_model_len}, but the model's context length is {longest}",
                field="max_model_len",
            )
        return settings.max_model_len

    def begin_epoch(self, epoch: int) -> None:
        """Forget all sequences; the next plan is step 0 of `epoch`."""
        self._table.clear()
        self._epoch = epoch
        self._next_step = 0
        self._last_end_ns = 0

    def execute(self, plan: StepPlan) -> StepResult:
        """Run one step.

        A runner without an epoch takes that of the first plan.

        Raises:
            DesyncError: not the expected epoch or step, or a plan that contradicts the slots. The runner's state is
                undefined until `begin_epoch`.
        """
        started_ns = time.monotonic_ns()
        self._expect(plan)
        slots = self._apply(plan)
        result = StepResult(epoch=plan.epoch, step=plan.step)
        # A step of new sequences alone followed idleness, which is no wait of the device.
        if self._last_end_ns and len(plan.new_sequences) < len(slots):
            result.gap_ns = started_ns - self._last_end_ns
        forward_end_ns = started_ns
        if len(slots):
            batch = self._builder.build(plan, slots)
            sampled_rows = np.flatnonzero(np.array(plan.sample, dtype=np.bool_))
            ends = batch.starts + batch.counts
            if (ends[sampled_rows] != self._table.num_known[slots[sampled_rows]]).any():
                raise DesyncError("a row is to be sampled before all its known tokens are computed")
            hidden = self._model.forward(batch, self._cache)
            self._table.num_computed[slots] = ends
            forward_end_ns = time.monotonic_ns()
            if self._prompt_logprob_slots[slots].max() >= 0:
                self._collect_prompt_logprobs(batch, hidden, result)
            if len(sampled_rows):
                self._sample(batch, sampled_rows, hidden, result)
        self._last_end_ns = time.monotonic_ns()
        result.forward_ns = forward_end_ns - started_ns
        result.sample_ns = self._last_end_ns - forward_end_ns
        return result

    def _expect(self, plan: StepPlan) -> None:
        if self._epoch is None:
            self._epoch = plan.epoch
        if plan.epoch != self._epoch or plan.step != self._next_step:
            raise DesyncError(
                f"step {plan.step} of epoch {plan.epoch} came, expected step {self._next_step} of epoch {self._epoch}"
            )
        self._next_step += 1

    def _apply(self, plan: StepPlan) -> IntArray:
        """Apply releases, new sequences, new blocks and copies; returns the slot of each row, int32 [B]."""
        table = self._table
        table.release(plan.released_slots)
        for sequence in plan.new_sequences:
            table.enter(sequence)
            self._sampler.enter(sequence.slot, sequence.sampling)
            self._prompt_logprob_slots[sequence.slot] = min(
                sequence.sampling.num_prompt_logprobs, self._model.vocab_size
            )
            self._failed[sequence.slot] = False
        slots: IntArray = np.array(plan.slots, dtype=np.int32)
        table.check_rows(plan.slots, slots)
        table.append_blocks(slots, plan)
        if plan.copy_sources or plan.copy_destinations:
            self._copy_blocks(plan)
        return slots

    def _copy_blocks(self, plan: StepPlan) -> None:
        sources = np.array(plan.copy_sources, dtype=np.int64)
        destinations = np.array(plan.copy_destinations, dtype=np.int64)
        if len(sources) != len(destinations):
            raise DesyncError(f"{len(sources)} copy sources, {len(destinations)} destinations")
        self._table.check_blocks(sources)
        self._table.check_blocks(destinations)
        kernels.copy_blocks(self._cache.keys, self._cache.values, plan.copy_sources, plan.copy_destinations)

    def _sample(
        self,
        batch: StepBatch,
        rows: npt.NDArray[np.int64],
        hidden: torch.Tensor,
        result: StepResult,
    ) -> None:
        """Logits of the last position of `rows`, and a token for each."""
        last_tokens = batch.query_start.numpy()[1:][rows] - 1
        for first in range(0, len(rows), _MAX_LOGIT_ROWS):
            part = rows[first : first + _MAX_LOGIT_ROWS]
            slots = batch.slots[part]
            logits = self._compute_logits(hidden, last_tokens[first : first + _MAX_LOGIT_ROWS], batch.num_tokens)
            draws = self._sampler.sample(logits, slots)
            failed = draws.failed | self._failed[slots]
            if failed.any():
                draws.token_ids[failed] = 0
                for slot in slots[failed & ~self._failed[slots]].tolist():
                    result.failures.append(SlotFailure(slot, "the model produced NaN or infinite logits"))
                self._failed[slots[failed]] = True
            self._table.append_tokens(slots, draws.token_ids)
            result.sampled_token_ids += draws.token_ids.tolist()
            for row, logprobs in draws.logprobs.items():
                result.logprobs[first + row] = logprobs

    def _compute_logits(self, hidden: torch.Tensor, tokens: IntArray, num_tokens: int) -> torch.Tensor:
        """float32 logits [len(tokens), vocab_size] of chosen tokens of the step; valid until the next call."""
        rows = len(tokens)
        logits = self._logits[:rows]
        if rows != num_tokens:
            gathered = self._gathered[:rows]
            kernels.gather_rows(gathered, hidden, torch.from_numpy(tokens))
            hidden = gathered
        self._model.compute_logits(hidden, logits)
        return logits

    def _collect_prompt_logprobs(self, batch: StepBatch, hidden: torch.Tensor, result: StepResult) -> None:
        """Log-probabilities of prompt tokens whose predecessor was computed in this step."""
        table = self._table
        for row in np.flatnonzero(self._prompt_logprob_slots[batch.slots] >= 0).tolist():
            slot, start = int(batch.slots[row]), int(batch.starts[row])
            stop = min(start + int(batch.counts[row]), int(table.num_prompt[slot]) - 1)
            if stop <= start or self._failed[slot]:
                continue
            num_top = int(self._prompt_logprob_slots[slot])
            first_token = int(batch.query_start[row])
            columns = TokenLogprobs(num_top=num_top)
            for position in range(start, stop, _MAX_LOGIT_ROWS):
                end = min(position + _MAX_LOGIT_ROWS, stop)
                tokens = np.arange(first_token + position - start, first_token + end - start, dtype=np.int32)
                logits = self._compute_logits(hidden, tokens, batch.num_tokens)
                targets = table.token_ids[slot, position + 1 : end + 1].astype(np.int64)
                chunk = prompt_logprobs(logits, targets, num_top)
                if chunk is None:
                    self._failed[slot] = True
                    result.failures.append(SlotFailure(slot, "the model produced NaN or infinite logits"))
                    break
                columns.extend(chunk)
            else:
                result.prompt_logprobs.append(PromptChunkLogprobs(slot, start + 1, columns))
