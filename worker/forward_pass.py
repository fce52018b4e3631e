"""One forward pass of a step: by launches, or by the replay of a CUDA graph; and the logits that it leaves."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import numpy as np
import torch

from worker import kernels
from worker.batch import BatchBuilder, StepBatch, StepRows
from worker.cuda_graph import DecodeGraphs, graph_sizes
from worker.kernels import AttentionPlan
from worker.kv_cache import KVCache
from worker.models import CausalLM
from worker.step_device import RING_DEPTH, StepDevice


@dataclass(slots=True)
class Hidden:
    """What a pass leaves.

    Attributes:
        states: [T, hidden_size], of all tokens.
        logits: float32 [T, vocab_size] where they are computed already.
        is_replay: by a CUDA graph.
    """

    states: torch.Tensor
    logits: torch.Tensor | None = None
    is_replay: bool = False


class ForwardPass:
    """The model on its cache.

    Args:
        model: loaded and with its work buffers.
        builder: makes the batches.
        device: of the model.
        dtype: of hidden states.
        max_logit_rows: rows of logits held at once.
    """

    def __init__(
        self,
        model: CausalLM,
        builder: BatchBuilder,
        device: StepDevice,
        dtype: torch.dtype,
        max_logit_rows: int,
    ) -> None:
        place = device.torch_device
        self._model = model
        self._builder = builder
        self._gathered = torch.empty((max_logit_rows, model.hidden_size), dtype=dtype, device=place)
        self._logits = torch.empty((max_logit_rows, model.vocab_size), dtype=torch.float32, device=place)
        self._plans: dict[int, AttentionPlan] = {}
        self._cache: KVCache | None = None
        self._recording_stream: torch.cuda.Stream | None = None
        self.graphs = DecodeGraphs()
        self.max_logit_rows = max_logit_rows

    def reserve_plans(self, max_tokens: int, max_seqs: int, max_model_len: int, kv_dtype: torch.dtype) -> None:
        """Make the attention plans of a CUDA device, large enough for any step."""
        for window, geometry in self._model.attention_geometries(kv_dtype).items():
            plan = AttentionPlan(geometry, num_host_buffers=RING_DEPTH)
            plan.reserve(max_tokens, max_seqs, max_model_len)
            self._plans[window] = plan

    def bind(self, cache: KVCache) -> None:
        """Run on this cache from now on. Recorded graphs are those of another one, and dropped."""
        self._cache = cache
        self.graphs = DecodeGraphs()

    def record_graphs(self, sizes: list[int]) -> DecodeGraphs:
        """Record decode steps of these numbers of rows on the bound cache; `graphs` replays them once assigned."""
        # Binds the model to the cache here and not on the recording stream: what it allocates for that is then the
        # memory that it had before, on another cache.
        self._plan_decode(sizes[0])
        self._run_decode(sizes[0])
        graphs = DecodeGraphs()
        if self._recording_stream is None:
            self._recording_stream = torch.cuda.Stream()
        graphs.record(sizes, self._plans, self._plan_decode, self._run_decode, self._recording_stream)
        return graphs

    def graph_sizes(self, max_seqs: int) -> list[int]:
        """Numbers of rows worth a graph."""
        return graph_sizes(min(max_seqs, self.max_logit_rows))

    def padded_rows(self, rows: StepRows) -> int | None:
        """Rows of the graph for a decode step; None where there is none."""
        return self.graphs.padded_rows(len(rows.slots))

    def _decode_rows(self, count: int) -> StepRows:
        """Rows for a recording: one token each, at position 0 of slot 0."""
        zeros, ones = np.zeros(count, dtype=np.int32), np.ones(count, dtype=np.int32)
        return StepRows(zeros, zeros, ones, ones, count, 1)

    def _plan_decode(self, count: int) -> None:
        builder = self._builder
        builder.staging.begin()
        builder.stage(self._decode_rows(count), count)
        builder.staging.upload()
        self._update_plans(count, "v2")

    def _run_decode(self, count: int) -> None:
        batch = self._builder.batch(self._decode_rows(count), count, count, self._plans)
        hidden = self._forward(batch)
        self._model.compute_logits(hidden, self._logits[:count])

    def _update_plans(self, padded_rows: int, version: Literal["auto", "v1", "v2"]) -> None:
        if self._plans:
            query_start, context_lens = self._builder.host_rows(padded_rows)
            for plan in self._plans.values():
                plan.update(query_start, context_lens, version=version)

    def _forward(self, batch: StepBatch) -> torch.Tensor:
        assert self._cache is not None
        self._builder.prepare(batch)
        return self._model.forward(batch, self._cache)

    def run(self, rows: StepRows, graph_rows: int | None) -> Hidden:
        """Launch the pass over rows that were staged and uploaded.

        Args:
            graph_rows: padded to the rows of this graph, which is replayed.
        """
        padded_rows = graph_rows or len(rows.slots)
        self._update_plans(padded_rows, "v2" if graph_rows else "auto")
        if graph_rows and self.graphs.replay(graph_rows, self._plans):
            # What was recorded wrote to the same buffers.
            return Hidden(self._gathered[:0], self._logits[: rows.num_tokens], is_replay=True)
        return Hidden(self._forward(self._builder.batch(rows, padded_rows, rows.num_tokens, self._plans)))

    def logits_of(self, states: torch.Tensor, tokens: torch.Tensor | None = None) -> torch.Tensor:
        """float32 logits [R, vocab_size], R at most `max_logit_rows`; valid until the next call.

        Args:
            states: hidden states.
            tokens: int32 [R], rows of `states`; None is all of them.
        """
        if tokens is not None:
            gathered = self._gathered[: len(tokens)]
            kernels.gather_rows(gathered, states, tokens)
            states = gathered
        logits = self._logits[: len(states)]
        self._model.compute_logits(states, logits)
        return logits
