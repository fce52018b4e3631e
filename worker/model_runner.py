"""Launches step plans: applies deltas to the slots, runs the model, samples; results are asked for later."""

from __future__ import annotations

import logging

import numpy as np
import numpy.typing as npt
import torch

from pagemill.config import WorkerSettings
from pagemill.errors import DesyncError
from pagemill.step import StepPlan, StepResult
from worker import kernels
from worker.batch import StepRows
from worker.forward_pass import Hidden
from worker.models import CausalLM
from worker.pending_step import Draws, PendingChunk, PendingStep, StepMarks, is_out_of_memory
from worker.runner_parts import RunnerParts, build_parts
from worker.sampler import LogprobArrays, StagedDraws, staged_sampling_ints
from worker.slots import IntArray
from worker.step_buffers import ResultRing, aligned
from worker.step_device import Mark, StepDevice

logger = logging.getLogger(__name__)


class ModelRunner:
    """One model on one device. Not safe for use by several threads at once.

    Steps are launched one after the other, and the next before the result of the last is there: `launch` never waits
    for the device. What a later step reads of an earlier one, drawn tokens included, is on the device and ordered by
    its work; the host keeps lengths alone. So a slot or block may be given to another sequence as soon as the results
    of all steps that refer to it were taken.

    Args:
        settings: the worker's settings.
        step_device: where steps run; unless given, what suits the settings' device.

    Raises:
        ConfigError: settings that do not fit the model or the machine.
        ModelLoadError: the model cannot be loaded.
    """

    def __init__(self, settings: WorkerSettings, step_device: StepDevice | None = None) -> None:
        parts = build_parts(settings, step_device)
        self._parts: RunnerParts = parts
        self.model_name = parts.model_name
        self.fingerprint = parts.fingerprint
        self.capacity = parts.capacity
        self.device = parts.device
        self.dtype = parts.dtype
        self.max_steps_in_flight = parts.step_device.max_steps_in_flight
        self._device = parts.step_device
        self._table = parts.table
        self._builder = parts.builder
        self._sampler = parts.sampler
        self._pass = parts.forward_pass
        num_slots = self.capacity.num_slots
        self._results = ResultRing(self._device, num_slots)
        self._prompt_logprob_slots = np.full(num_slots, -1, dtype=np.int32)
        self._failed = np.zeros(num_slots, dtype=np.bool_)
        self._epoch: int | None = None
        self._next_step = 0
        self._last_end: Mark | None = None

    @property
    def model(self) -> CausalLM:
        """The loaded model."""
        return self._parts.model

    @property
    def num_graphs(self) -> int:
        """CUDA graphs of decode steps."""
        return len(self._pass.graphs)

    def begin_epoch(self, epoch: int) -> None:
        """Forget all sequences, and steps in flight with them; the next plan is step 0 of `epoch`.

        Waits for those steps: host buffers are used in turn by as many steps as may be in flight.
        """
        if self._last_end is not None:
            self._last_end.wait()
        self._table.clear()
        self._epoch = epoch
        self._next_step = 0
        self._last_end = None

    def execute(self, plan: StepPlan) -> StepResult:
        """Run one step and wait for it. Raises as `launch`."""
        return self.launch(plan).result()

    def launch(self, plan: StepPlan) -> PendingStep:
        """Start one step. At most two steps may be launched whose results are still to be taken.

        A runner without an epoch takes that of the first plan. Where memory runs out, the rows of the step fail.

        Raises:
            DesyncError: not the expected epoch or step, or a plan that contradicts the slots. The runner's state is
                undefined until `begin_epoch`.
        """
        self._device.activate()
        self._expect(plan)
        slots = self._apply(plan)
        result = StepResult(epoch=plan.epoch, step=plan.step)
        if not len(slots):
            return PendingStep(result, slots, self._failed, None)
        rows = self._builder.rows(plan, slots)
        sampled = np.flatnonzero(np.array(plan.sample, dtype=np.bool_))
        if (rows.ends[sampled] != self._table.num_known[slots[sampled]]).any():
            raise DesyncError("a row is to be sampled before all its known tokens are computed")
        result.is_decode = rows.max_count == 1 and len(sampled) == len(slots)
        # A step of new sequences alone followed idleness, which is no wait of the device.
        continues = len(plan.new_sequences) < len(slots)
        step = PendingStep(
            result, slots, self._failed, StepMarks(self._last_end if continues else None, self._device.mark())
        )
        graph_rows = self._pass.padded_rows(rows) if result.is_decode else None
        staged, last_tokens = self._stage(rows, sampled, graph_rows)
        if staged is not None:
            step.draws = Draws(slots[sampled], self._results.take(), staged.num_logprobs)
        try:
            self._compute(step, plan, rows, graph_rows, staged, last_tokens)
        except Exception as error:
            if not is_out_of_memory(error):
                raise
            logger.error("step %d ran out of memory: %s", plan.step, error)
            step.ran_out_of_memory = True
        assert step.marks is not None
        self._last_end = step.marks.end = self._device.mark()
        return step

    def _expect(self, plan: StepPlan) -> None:
        if self._epoch is None:
            self._epoch = plan.epoch
        if plan.epoch != self._epoch or plan.step != self._next_step:
            raise DesyncError(
                f"step {plan.step} of epoch {plan.epoch} came, expected step {self._next_step} of epoch {self._epoch}"
            )
        self._next_step += 1

    def _apply(self, plan: StepPlan) -> IntArray:
        """Apply releases, new sequences and new blocks to the host's state; returns the slot of each row."""
        table = self._table
        table.release(plan.released_slots)
        for sequence in plan.new_sequences:
            table.enter(sequence)
            self._sampler.enter(sequence.slot, sequence.sampling)
            self._prompt_logprob_slots[sequence.slot] = min(
                sequence.sampling.num_prompt_logprobs, self.capacity.vocab_size
            )
            self._failed[sequence.slot] = False
        slots: IntArray = np.array(plan.slots, dtype=np.int32)
        table.check_rows(slots)
        table.append_blocks(slots, plan)
        if len(plan.copy_sources) != len(plan.copy_destinations):
            raise DesyncError(f"{len(plan.copy_sources)} copy sources, {len(plan.copy_destinations)} destinations")
        table.check_blocks(np.array(plan.copy_sources, dtype=np.int64))
        table.check_blocks(np.array(plan.copy_destinations, dtype=np.int64))
        return slots

    def _stage(
        self, rows: StepRows, sampled: npt.NDArray[np.int64], graph_rows: int | None
    ) -> tuple[StagedDraws | None, torch.Tensor | None]:
        """Send everything that the step reads to the device, and count its tokens as computed and drawn.

        Returns the parameters of the draws, and the tokens whose logits are drawn from: None is all of them.
        """
        staging, store, slots = self._builder.staging, self._table.store, rows.slots
        store.stage_overflow(staging, staged_sampling_ints(len(sampled)) + aligned(len(sampled)))
        staging.begin()
        self._builder.stage(rows, graph_rows or len(slots))
        staged = last_tokens = None
        if len(sampled):
            staged = self._sampler.stage(slots[sampled], staging)
            if len(sampled) != rows.num_tokens:
                last_tokens = staging.column((np.cumsum(rows.counts, dtype=np.int32) - 1)[sampled])
        store.stage(staging)
        staging.upload()
        store.apply()
        self._table.num_computed[slots] = rows.ends
        self._table.note_sampled(slots[sampled])
        return staged, last_tokens

    def _compute(
        self,
        step: PendingStep,
        plan: StepPlan,
        rows: StepRows,
        graph_rows: int | None,
        staged: StagedDraws | None,
        last_tokens: torch.Tensor | None,
    ) -> None:
        """Launch copies, forward pass, log-probabilities and draws."""
        cache = self._parts.cache
        if plan.copy_sources:
            kernels.copy_blocks(cache.keys, cache.values, plan.copy_sources, plan.copy_destinations)
        hidden = self._pass.run(rows, graph_rows)
        step.note_forward(hidden.is_replay, self._device.mark())
        if self._prompt_logprob_slots[rows.slots].max() >= 0:
            step.chunks = self._prompt_logprobs(rows, hidden.states)
        if staged is not None and step.draws is not None:
            self._draw(step.draws, staged, hidden, last_tokens)

    def _draw(self, draws: Draws, staged: StagedDraws, hidden: Hidden, last_tokens: torch.Tensor | None) -> None:
        """A token for each sampled row, from the logits of its last position."""
        most_logprobs = int(staged.num_logprobs.max())
        logprobs = None
        if most_logprobs >= 0:
            logprobs = LogprobArrays.allocate(staged.num_rows, most_logprobs, self._device.torch_device)
        if hidden.logits is not None:
            self._sampler.draw(staged, 0, hidden.logits, draws.results, logprobs)
        else:
            at_once = self._pass.max_logit_rows
            for first in range(0, staged.num_rows, at_once):
                stop = min(first + at_once, staged.num_rows)
                if last_tokens is None:
                    logits = self._pass.logits_of(hidden.states[first:stop])
                else:
                    logits = self._pass.logits_of(hidden.states, last_tokens[first:stop])
                self._sampler.draw(staged, first, logits, draws.results, logprobs)
        self._results.download(draws.results)
        if logprobs is not None:
            draws.logprobs = logprobs.download(self._device)

    def _prompt_logprobs(self, rows: StepRows, states: torch.Tensor) -> list[PendingChunk]:
        """Log-probabilities of prompt tokens whose predecessor is computed in this step."""
        chunks = []
        first_tokens = np.cumsum(rows.counts) - rows.counts
        for row in np.flatnonzero(self._prompt_logprob_slots[rows.slots] >= 0).tolist():
            slot, start = int(rows.slots[row]), int(rows.starts[row])
            stop = min(int(rows.ends[row]), int(self._table.num_prompt[slot]) - 1)
            if stop <= start:
                continue
            chunk = PendingChunk(slot, start + 1)
            at_once = self._pass.max_logit_rows
            for position in range(start, stop, at_once):
                end = min(position + at_once, stop)
                token = int(first_tokens[row]) + position - start
                logits = self._pass.logits_of(states[token : token + end - position])
                targets = self._table.store.history[slot, position + 1 : end + 1].long()
                status, arrays = self._sampler.prompt_logprobs(logits, targets, int(self._prompt_logprob_slots[slot]))
                chunk.parts.append((self._device.download(status), arrays.download(self._device)))
            chunks.append(chunk)
        return chunks
