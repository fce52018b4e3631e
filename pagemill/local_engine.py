"""Scheduler core, model runner and text handling in one process, without gRPC: what the offline engines drive.

One thread owns a `LocalEngine`: add requests, call `step` while there is work, take the events that it returns.
"""

from __future__ import annotations

import gc
import logging
import os
import secrets
import sys
import time
from collections import deque
from collections.abc import Iterable
from dataclasses import dataclass, replace
from numbers import Integral
from typing import TYPE_CHECKING, Any, Literal

from pagemill.engine_args import EngineArgs
from pagemill.errors import InvalidRequestError, PagemillError
from pagemill.kernel_variables import check_kernel_variables
from pagemill.model_source import resolve_model
from pagemill.outputs import CompletionOutput, FinishReasonName, PositionLogprobs, RequestMetrics, RequestOutput
from pagemill.outputs import position_logprobs as columns_to_positions
from pagemill.sampling_params import SamplingParams, sequence_seed
from pagemill.step import TokenLogprobs

if TYPE_CHECKING:
    from router.generation import TextDelta
    from router.text_stream import RequestText
    from router.tokenizer import Tokenizer
    from router.wire import RequestUpdate
    from scheduler.sequence import FinishedSequence, OwnerOutput
    from worker.pending_step import PendingStep

logger = logging.getLogger(__name__)

_NS_PER_S = 1e9
_REASONS: dict[int, FinishReasonName] = {1: "stop", 2: "length", 3: "abort", 4: "error"}


@dataclass(slots=True)
class Prompt:
    """What a request starts from: token ids, and what they were made of."""

    token_ids: list[int]
    text: str | None = None  # as it was given; None for token ids and conversations
    kind: Literal["completion", "chat"] = "completion"


@dataclass(slots=True)
class EngineEvent:
    """What one step brought for one request: new output, or the error that ended it."""

    handle: int
    output: RequestOutput | None = None
    error: PagemillError | None = None


@dataclass(slots=True)
class _Running:
    request_id: str
    prompt: Prompt
    text: RequestText
    is_first: bool = True


class LocalEngine:
    """One model in this process.

    Args:
        args: model and limits.
        steps_in_flight: most steps launched before the oldest one's result is taken; None is what suits the device.

    Raises:
        ConfigError: an argument is wrong; the message names it.
        ModelLoadError: the model cannot be found or loaded.
    """

    def __init__(self, args: EngineArgs, *, steps_in_flight: int | None = None) -> None:
        check_kernel_variables(os.environ)
        # Imported here: these pull in torch and the tokenizer library.
        from router.chat import ChatRenderer, configured_templates
        from router.tokenizer import load_tokenizer
        from scheduler.admission import SchedulerLimits, longest_sequence
        from worker.model_runner import ModelRunner

        source = resolve_model(args.model, download_dir=args.download_dir)
        settings = args.worker_settings(str(source.path))
        self.model_name = source.name
        self.tokenizer: Tokenizer = load_tokenizer(source, args.tokenizer)
        templates = configured_templates(args.chat_template, self.tokenizer.chat_templates)
        self._renderer = ChatRenderer(templates, self.tokenizer.special_tokens)
        self._runner = ModelRunner(settings)
        self._steps_in_flight = steps_in_flight or self._runner.max_steps_in_flight
        self._in_flight: deque[PendingStep] = deque()
        self.capacity = self._runner.capacity
        self._limits = SchedulerLimits(
            max_num_batched_tokens=args.max_num_batched_tokens or self.capacity.max_step_tokens,
            max_num_seqs=args.max_num_seqs or self.capacity.num_slots,
            max_queued_requests=args.max_queued_requests,
            max_queued_tokens=max(1 << 22, args.max_queued_requests),
            enable_prefix_caching=args.enable_prefix_caching,
        )
        self.longest_sequence = longest_sequence(self.capacity)
        self._seed = args.seed
        self._running: dict[int, _Running] = {}
        self._next_handle = 0
        self._epoch = 0
        self._start_epoch()

    def enter_thread(self) -> None:
        """Let the calling thread run steps, where it is another one than made the engine."""
        from worker.device import use_device

        use_device(self._runner.device)

    def _start_epoch(self) -> None:
        """A core without requests, and a runner without sequences."""
        from scheduler.scheduler import Scheduler

        self._epoch += 1
        self._running.clear()
        self._in_flight.clear()
        self._runner.begin_epoch(self._epoch)
        self.scheduler = Scheduler(self.capacity, self._limits, epoch=self._epoch)

    @property
    def has_work(self) -> bool:
        """Requests have not ended, something is to be reported, or a step's result is to be taken."""
        return bool(self._running or self._in_flight) or self.scheduler.has_outputs

    def completion_prompt(self, prompt: str) -> Prompt:
        """A text to continue, with the tokenizer's default special tokens."""
        if not isinstance(prompt, str):
            raise InvalidRequestError(f"a prompt is {type(prompt).__name__}, must be a string", field="prompt")
        return self._made(Prompt(self.tokenizer.encode(prompt), prompt))

    def token_prompt(self, token_ids: Iterable[int]) -> Prompt:
        """Token ids to continue. Raises InvalidRequestError for what are none."""
        if isinstance(token_ids, str | bytes) or not isinstance(token_ids, Iterable):
            raise InvalidRequestError(f"a prompt is {type(token_ids).__name__}, must be a list of ids", field="prompt")
        ids = list(token_ids)
        for at, token_id in enumerate(ids):
            if isinstance(token_id, bool) or not isinstance(token_id, Integral):
                raise InvalidRequestError(f"prompt token {at} is {token_id!r:.80}, must be a token id", field="prompt")
        return self._made(Prompt([int(token_id) for token_id in ids]))

    def chat_prompt(self, messages: list[dict[str, Any]]) -> Prompt:
        """A conversation to continue, by the model's chat template."""
        text = self._renderer.render(messages)
        # The template writes the special tokens itself.
        return self._made(Prompt(self.tokenizer.encode(text, add_special_tokens=False), None, "chat"))

    def _made(self, prompt: Prompt) -> Prompt:
        if not prompt.token_ids:
            raise InvalidRequestError("the prompt is empty", field="prompt")
        return prompt

    def add(self, prompt: Prompt, params: SamplingParams, *, request_id: str = "", priority: int = 0) -> int:
        """Take in a request; the number that its events carry.

        A max_tokens over the room that the context has left ends with finish_reason "length".

        Raises:
            InvalidRequestError, ContextLengthError: it can never run; the message names the field.
            OverloadedError: the queue is full.
        """
        from router.text_stream import RequestText, TextRules
        from scheduler.sequence import NewRequest

        params.validate(self.capacity.vocab_size)
        handle = self._next_handle
        if params.seed is None:
            params = replace(params, seed=self._seed_of(handle))
        eos_token_ids = self.tokenizer.eos_token_ids
        self.scheduler.add_request(
            NewRequest(handle, prompt.token_ids, params, eos_token_ids, request_id=request_id, priority=priority)
        )
        self._next_handle += 1
        rules = TextRules.of(self.tokenizer.table, params, eos_token_ids, continues_text=prompt.kind == "completion")
        self._running[handle] = _Running(request_id or str(handle), prompt, RequestText(rules))
        return handle

    def _seed_of(self, handle: int) -> int:
        return secrets.randbits(63) if self._seed is None else sequence_seed(self._seed, handle)

    def abort(self, handle: int) -> bool:
        """End a request; its last event comes with the next step. False where it has ended."""
        return self.scheduler.abort(handle)

    def forget_all(self) -> None:
        """Drop all requests without reporting them, also in the middle of a step that failed."""
        if self._running or self.scheduler.num_in_flight:
            self._start_epoch()

    def step(self) -> list[EngineEvent]:
        """Keep the device busy and take one step's result; what it brought, per request.

        Raises:
            PagemillError: a step failed as a whole. All requests are lost; call `forget_all`.
        """
        self._launch()
        if self._in_flight:
            outputs = self.scheduler.update(self._in_flight.popleft().result())
            if self._in_flight:
                # The device goes on while text is made of what came back.
                self._launch()
        else:
            outputs = self.scheduler.take_outputs()
            if not outputs and self._running:
                raise PagemillError("the scheduler has requests but plans no step")
        return [event for output in outputs.values() for event in self._events(output)]

    def _launch(self) -> None:
        """Launch steps as long as more may be in flight and there is something to run."""
        while len(self._in_flight) < self._steps_in_flight and (plan := self.scheduler.schedule()) is not None:
            self._in_flight.append(self._runner.launch(plan))

    def _events(self, output: OwnerOutput) -> list[EngineEvent]:
        updates = _updates(output)
        for handle, prompt_logprobs in output.prompt_logprobs:
            updates.setdefault(handle, _new_update()).prompt_logprobs = prompt_logprobs
        last = {item.handle: item for item in output.finished if item.request_finished}
        events: list[EngineEvent] = []
        for failure in output.failures:
            if self._running.pop(failure.handle, None) is not None:
                events.append(EngineEvent(failure.handle, error=failure.error))
        for handle, update in updates.items():
            running = self._running.get(handle)
            if running is None:
                continue
            deltas = running.text.feed(update)
            for delta in deltas:
                if isinstance(delta.stop_reason, str):
                    self.scheduler.abort(handle, delta.index)
            finished = last.get(handle)
            if deltas or finished is not None:
                events.append(EngineEvent(handle, self._output(running, update, deltas, finished)))
            if finished is not None:
                del self._running[handle]
        return events

    def _output(
        self, running: _Running, update: RequestUpdate, deltas: list[TextDelta], finished: FinishedSequence | None
    ) -> RequestOutput:
        output = RequestOutput(running.request_id, running.prompt.text)
        output.outputs = [self._completion(delta) for delta in deltas]
        if running.is_first:
            output.prompt_token_ids = running.prompt.token_ids
            running.is_first = False
        if update.prompt_logprobs is not None:
            positions = self._positions(running.prompt.token_ids[1:], update.prompt_logprobs)
            output.prompt_logprobs = [None, *positions]
        if finished is not None and finished.usage is not None and finished.timings is not None:
            timings = finished.timings
            output.finished = True
            output.num_cached_tokens = finished.usage.cached_tokens
            output.metrics = RequestMetrics(
                timings.arrival_unix_ns / _NS_PER_S,
                timings.scheduled_unix_ns / _NS_PER_S or None,
                timings.first_token_unix_ns / _NS_PER_S or None,
                (timings.finished_unix_ns or time.time_ns()) / _NS_PER_S,
            )
        return output

    def _completion(self, delta: TextDelta) -> CompletionOutput:
        output = CompletionOutput(delta.index, delta.text, delta.token_ids)
        output.finish_reason, output.stop_reason = delta.finish_reason, delta.stop_reason
        if delta.logprobs is not None:
            output.logprobs = self._positions(delta.token_ids, delta.logprobs)
            output.cumulative_logprob = sum(delta.logprobs.chosen)
        return output

    def _positions(self, token_ids: list[int], columns: TokenLogprobs) -> list[PositionLogprobs]:
        positions = columns_to_positions(
            token_ids, columns.chosen, columns.ranks, columns.num_top, columns.top_ids, columns.top_logprobs
        )
        for position in positions:
            for token_id, logprob in position.items():
                logprob.decoded_token = self.tokenizer.token_bytes(token_id).decode("utf-8", "replace")
        return positions


def _new_update() -> RequestUpdate:
    from router.wire import RequestUpdate

    return RequestUpdate()


def _updates(output: OwnerOutput) -> dict[int, RequestUpdate]:
    """Columns of a step to one update per request."""
    from router.wire import SequenceEnd

    updates: dict[int, RequestUpdate] = {}
    for position, handle in enumerate(output.handles):
        update = updates.setdefault(handle, _new_update())
        update.add_run(output.indexes[position], [output.token_ids[position]], output.logprobs.get(position))
    for finished in output.finished:
        end = SequenceEnd(_REASONS[finished.reason], finished.stop_token_id)
        updates.setdefault(finished.handle, _new_update()).ends[finished.index] = end
    return updates


def free_device_memory() -> None:
    """Give a GPU's memory back, after the last reference to an engine is gone: torch keeps what it once had."""
    gc.collect()
    torch = sys.modules.get("torch")
    if torch is not None and torch.cuda.is_initialized():
        torch.cuda.empty_cache()
