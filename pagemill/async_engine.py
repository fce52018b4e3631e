"""The offline engine for asyncio: many requests at once, batched on one background thread.

engine = AsyncLLMEngine.from_engine_args(EngineArgs())
async for output in engine.generate("Paris is", SamplingParams(max_tokens=16), request_id="1"):
    print(output.outputs[0].text)
engine.shutdown()
"""

from __future__ import annotations

import asyncio
import contextlib
import copy
import logging
import queue
import threading
import uuid
from collections.abc import AsyncGenerator, Callable
from dataclasses import dataclass, field
from typing import Any, Self

from pagemill.engine_args import EngineArgs
from pagemill.errors import (
    DuplicateRequestError,
    InvalidRequestError,
    PagemillError,
    UnavailableError,
)
from pagemill.local_engine import EngineEvent, LocalEngine, free_device_memory
from pagemill.outputs import RequestOutput
from pagemill.sampling_params import SamplingParams

logger = logging.getLogger(__name__)

_STOP_DEADLINE_S = 30.0


@dataclass(slots=True)
class _Stream:
    """One request as the event loop sees it. Deltas are merged, so that a slow reader costs no memory."""

    loop: asyncio.AbstractEventLoop
    whole: RequestOutput
    handle: int = -1
    has_news: asyncio.Event = field(default_factory=asyncio.Event)
    error: PagemillError | None = None

    def take(self, event: EngineEvent) -> None:
        """On the event loop: what a step brought."""
        self.error = event.error
        if event.output is not None:
            self.whole.prompt = event.output.prompt
            self.whole.extend(event.output)
        self.has_news.set()


class AsyncLLMEngine:
    """One model in this process, for many coroutines. `shutdown` ends its thread and frees the model.

    Args:
        args: model and limits.

    Raises:
        ConfigError: an argument is wrong; the message names it.
        ModelLoadError: the model cannot be found or loaded.
    """

    def __init__(self, args: EngineArgs | None = None) -> None:
        self._engine: LocalEngine | None = LocalEngine(args or EngineArgs())
        # Calls for the engine's thread. Bounded by the engine's own queue: each holds one request.
        self._calls: queue.SimpleQueue[Callable[[LocalEngine], None]] = queue.SimpleQueue()
        self._streams: dict[str, _Stream] = {}
        self._by_handle: dict[int, _Stream] = {}  # of the engine's thread
        self._stopping = False
        self._thread = threading.Thread(target=self._serve, name="pagemill-engine", daemon=True)
        self._thread.start()

    @classmethod
    def from_engine_args(cls, args: EngineArgs) -> Self:
        """The same as the constructor."""
        return cls(args)

    def is_running(self) -> bool:
        """False after `shutdown` and after a failure that ended the engine."""
        return self._thread.is_alive() and not self._stopping

    def get_tokenizer(self) -> Any:
        """The model's tokenizer, with `encode` and `decode`."""
        return self._alive().tokenizer

    async def add_request(
        self,
        request_id: str,
        prompt: str | None = None,
        sampling_params: SamplingParams | None = None,
        *,
        prompt_token_ids: list[int] | None = None,
        messages: list[dict[str, Any]] | None = None,
        priority: int = 0,
    ) -> None:
        """Take in a request; its output comes from `get_output_generator`.

        Args:
            request_id: unique among the requests whose output was not read to its end.
            prompt, prompt_token_ids, messages: exactly one of them.
            sampling_params: None is `SamplingParams()`.
            priority: smaller runs sooner.

        Raises:
            DuplicateRequestError: the id is in use.
            InvalidRequestError, ContextLengthError: it can never run; the message names the field.
            OverloadedError: the queue is full.
            UnavailableError: the engine has ended.
        """
        engine = self._alive()
        if request_id in self._streams:
            raise DuplicateRequestError(f"request {request_id!r} is running already", field="request_id")
        given = [value for value in (prompt, prompt_token_ids, messages) if value is not None]
        if len(given) != 1:
            raise InvalidRequestError("exactly one of prompt, prompt_token_ids and messages is needed", field="prompt")
        if prompt_token_ids is not None:
            made = engine.token_prompt(prompt_token_ids)
        else:
            made = engine.completion_prompt(prompt) if prompt is not None else engine.chat_prompt(messages or [])
        stream = _Stream(asyncio.get_running_loop(), RequestOutput(request_id))
        self._streams[request_id] = stream
        params = sampling_params or SamplingParams()

        def add(engine: LocalEngine) -> None:
            stream.handle = engine.add(made, params, request_id=request_id, priority=priority)
            self._by_handle[stream.handle] = stream

        try:
            await self._call(add)
        except BaseException:
            self._streams.pop(request_id, None)
            # Where the caller was cancelled, the engine may take the request in all the same.
            self._calls.put(lambda engine: self._abort(engine, stream))
            raise

    async def get_output_generator(self, request_id: str) -> AsyncGenerator[RequestOutput, None]:
        """Outputs that grow: each holds everything so far, the last one has `finished` true.

        Leaving the generator early aborts the request.

        Raises (from the iterator):
            InvalidRequestError: no such request, or its output was read to its end.
            PagemillError: the request failed.
        """
        stream = self._streams.get(request_id)
        if stream is None:
            raise InvalidRequestError(f"there is no request {request_id!r}", field="request_id")
        try:
            while True:
                await stream.has_news.wait()
                stream.has_news.clear()
                if stream.error is not None:
                    raise stream.error
                output = copy.deepcopy(stream.whole)
                yield output
                # Not `whole`: it may have finished while the reader held this one, and the last is still to come.
                if output.finished:
                    return
        finally:
            self._streams.pop(request_id, None)
            if not stream.whole.finished and stream.error is None:
                self._calls.put(lambda engine: self._abort(engine, stream))

    async def generate(
        self,
        prompt: str | None = None,
        sampling_params: SamplingParams | None = None,
        request_id: str = "",
        *,
        prompt_token_ids: list[int] | None = None,
        messages: list[dict[str, Any]] | None = None,
        priority: int = 0,
    ) -> AsyncGenerator[RequestOutput, None]:
        """`add_request` and `get_output_generator` in one; an empty request_id draws one."""
        request_id = request_id or f"req-{uuid.uuid4().hex}"
        await self.add_request(
            request_id,
            prompt,
            sampling_params,
            prompt_token_ids=prompt_token_ids,
            messages=messages,
            priority=priority,
        )
        async with contextlib.aclosing(self.get_output_generator(request_id)) as outputs:
            async for output in outputs:
                yield output

    async def abort(self, request_id: str) -> bool:
        """End a request: its generator ends with finish_reason "abort". False where there is no such one."""
        stream = self._streams.get(request_id)
        if stream is None or stream.whole.finished:
            return False
        await self._call(lambda engine: self._abort(engine, stream))
        return True

    def shutdown(self) -> None:
        """End the thread and free the model; requests that run get UnavailableError. A second call does nothing."""
        self._stopping = True
        self._calls.put(lambda engine: None)
        self._thread.join(_STOP_DEADLINE_S)
        self._engine = None
        free_device_memory()

    def _alive(self) -> LocalEngine:
        if self._engine is None or not self.is_running():
            raise UnavailableError("the engine has ended")
        return self._engine

    async def _call(self, function: Callable[[LocalEngine], None]) -> None:
        """Run `function` on the engine's thread, between two steps."""
        loop = asyncio.get_running_loop()
        done: asyncio.Future[None] = loop.create_future()

        def finish(error: BaseException | None) -> None:
            if done.done():
                return
            if error is None:
                done.set_result(None)
            else:
                done.set_exception(error)

        def run(engine: LocalEngine) -> None:
            error: BaseException | None = None
            try:
                function(engine)
            except Exception as err:
                error = err
            loop.call_soon_threadsafe(finish, error)

        self._calls.put(run)
        while not done.done():
            await asyncio.wait({done}, timeout=1.0)
            if not done.done():
                self._alive()
        done.result()

    # The engine's thread.

    def _serve(self) -> None:
        engine = self._engine
        assert engine is not None
        failure: PagemillError = UnavailableError("the engine has ended")
        try:
            engine.enter_thread()
            while not self._stopping:
                self._run_calls(engine)
                if engine.has_work and not self._stopping:
                    self._deliver(engine.step())
        except Exception as err:
            logger.exception("the engine failed")
            failure = err if isinstance(err, PagemillError) else PagemillError("the engine failed; see the log")
        finally:
            self._stopping = True
            for handle in list(self._by_handle):
                self._deliver([EngineEvent(handle, error=failure)])
            engine.forget_all()

    def _run_calls(self, engine: LocalEngine) -> None:
        """All calls that wait; where there is nothing to do, wait for one."""
        if not engine.has_work:
            self._calls.get()(engine)
        with contextlib.suppress(queue.Empty):
            while True:
                self._calls.get_nowait()(engine)

    def _abort(self, engine: LocalEngine, stream: _Stream) -> None:
        engine.abort(stream.handle)

    def _deliver(self, events: list[EngineEvent]) -> None:
        for event in events:
            stream = self._by_handle.get(event.handle)
            if stream is None:
                continue
            if event.error is not None or (event.output is not None and event.output.finished):
                del self._by_handle[event.handle]
            with contextlib.suppress(RuntimeError):  # its event loop was closed: nobody reads any more
                stream.loop.call_soon_threadsafe(stream.take, event)
