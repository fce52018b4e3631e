"""The offline engine: a model in this process, for scripts and notebooks.

from pagemill import LLM, SamplingParams

llm = LLM()
for output in llm.generate(["Paris is", "The sky is"], SamplingParams(temperature=0, max_tokens=16)):
    print(output.outputs[0].text)
"""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Iterable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from numbers import Integral
from types import TracebackType
from typing import TYPE_CHECKING, Any, Protocol, Self

from pagemill.engine_args import EngineArgs
from pagemill.errors import ConfigError, InvalidRequestError, UnavailableError
from pagemill.garbage_collector import collecting_rarely
from pagemill.local_engine import LocalEngine, Prompt, free_device_memory
from pagemill.outputs import RequestOutput
from pagemill.sampling_params import SamplingParams

if TYPE_CHECKING:
    from router.tokenizer import Tokenizer

TokenPrompts = Sequence[int] | Sequence[Sequence[int]]
Prompts = str | Sequence[str] | TokenPrompts
Params = SamplingParams | Sequence[SamplingParams] | None
Messages = list[dict[str, Any]]


class LLM:
    """One model, many prompts. Calls from several threads run one after the other.

    Args:
        model: directory, .gguf file or hub id; empty is the demo model.
        **arguments: any other attribute of `EngineArgs`.

    Raises:
        ConfigError: an argument is unknown or out of range; the message names it.
        ModelLoadError: the model cannot be found or loaded.
    """

    def __init__(self, model: str = "", **arguments: Any) -> None:
        unknown = arguments.keys() - set(EngineArgs.__slots__)
        if unknown:
            name = min(unknown)
            raise ConfigError(f"LLM has no argument {name!r}", field=name)
        self._engine: LocalEngine | None = LocalEngine(EngineArgs(model=model, **arguments).without_queue_bound())
        self._lock = threading.Lock()

    def generate(
        self,
        prompts: Prompts | None = None,
        sampling_params: Params = None,
        *,
        prompt_token_ids: TokenPrompts | None = None,
        use_tqdm: bool = True,
    ) -> list[RequestOutput]:
        """Continue prompts; outputs come in the order of the prompts.

        Args:
            prompts: one prompt or a list of them; a prompt is a text or a list of token ids. Either these or
                `prompt_token_ids`.
            sampling_params: for all prompts, or one per prompt; None is `SamplingParams()`.
            prompt_token_ids: a list of token ids or a list of such lists.
            use_tqdm: show a progress bar on stderr.

        Raises:
            InvalidRequestError, ContextLengthError: one of the prompts can never run; then none is.
            NumericalError: the model produced NaN or infinite logits.
        """
        with self._lock:
            engine = self._alive()
            engine.enter_thread()
            requests = _as_prompts(engine, prompts, prompt_token_ids)
            params = _as_params(sampling_params, len(requests), SamplingParams())
            return _run(engine, requests, params, _progress_bar(use_tqdm, len(requests)))

    def chat(
        self, messages: Messages | list[Messages], sampling_params: Params = None, *, use_tqdm: bool = True
    ) -> list[RequestOutput]:
        """Continue one conversation or several by the model's chat template. Raises as `generate`.

        Args:
            messages: turns with role and content, or a list of such conversations.
            sampling_params: for all, or one per conversation; None samples until the model ends its turn.
            use_tqdm: show a progress bar on stderr.
        """
        with self._lock:
            engine = self._alive()
            engine.enter_thread()
            if not isinstance(messages, Sequence) or isinstance(messages, str):
                raise InvalidRequestError("messages must be a list of messages or of conversations", field="messages")
            conversations: list[Any] = [messages] if messages and isinstance(messages[0], dict) else list(messages)
            requests = [engine.chat_prompt(conversation) for conversation in conversations]
            default = SamplingParams(max_tokens=engine.longest_sequence)
            params = _as_params(sampling_params, len(requests), default)
            return _run(engine, requests, params, _progress_bar(use_tqdm, len(requests)))

    async def generate_async(self, prompt: str, sampling_params: SamplingParams | None = None) -> RequestOutput:
        """One prompt without blocking the event loop. For many at once, `AsyncLLMEngine` batches them."""
        outputs = await asyncio.to_thread(self.generate, prompt, sampling_params, use_tqdm=False)
        return outputs[0]

    def get_tokenizer(self) -> Tokenizer:
        """The model's tokenizer, with `encode` and `decode`."""
        return self._alive().tokenizer

    def dispose(self) -> None:
        """Give weights and KV cache back; the object is of no use afterwards. A second call does nothing."""
        with self._lock:
            self._engine = None
        free_device_memory()

    def _alive(self) -> LocalEngine:
        if self._engine is None:
            raise UnavailableError("this LLM was disposed of")
        return self._engine

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.dispose()


def _as_prompts(engine: LocalEngine, prompts: Prompts | None, token_ids: TokenPrompts | None) -> list[Prompt]:
    if (prompts is None) == (token_ids is None):
        raise InvalidRequestError("exactly one of prompts and prompt_token_ids is needed", field="prompts")
    if token_ids is not None:
        return [engine.token_prompt(ids) for ids in _as_list(token_ids, "prompt_token_ids")]
    return [
        engine.completion_prompt(prompt) if isinstance(prompt, str) else engine.token_prompt(prompt)
        for prompt in _as_list(prompts, "prompts")
    ]


def _as_list(prompts: Any, field: str) -> list[Any]:
    """One prompt, text or ids, as a list of one."""
    if isinstance(prompts, str):
        return [prompts]
    if isinstance(prompts, bytes | Mapping) or not isinstance(prompts, Iterable):
        raise InvalidRequestError(
            f"{field} is {type(prompts).__name__}, must be a text, a list of token ids, or a list of such", field=field
        )
    made = list(prompts)
    return [made] if made and isinstance(made[0], Integral) else made


def _as_params(params: Params, count: int, default: SamplingParams) -> list[SamplingParams]:
    if params is None:
        return [default] * count
    if isinstance(params, SamplingParams):
        return [params] * count
    if not isinstance(params, Sequence) or any(not isinstance(each, SamplingParams) for each in params):
        raise InvalidRequestError(
            f"sampling_params is {type(params).__name__}, must be SamplingParams or a list of SamplingParams",
            field="sampling_params",
        )
    if len(params) != count:
        raise InvalidRequestError(f"{len(params)} sampling_params for {count} prompts", field="sampling_params")
    return list(params)


def _run(
    engine: LocalEngine,
    prompts: list[Prompt],
    params: list[SamplingParams],
    progress: AbstractContextManager[_Progress],
) -> list[RequestOutput]:
    """Run all requests to their end; leaves the engine empty, whatever happens."""
    try:
        handles = [engine.add(prompt, each) for prompt, each in zip(prompts, params, strict=True)]
        outputs = {handle: RequestOutput("") for handle in handles}
        with progress as bar, collecting_rarely():
            while engine.has_work:
                for event in engine.step():
                    if event.error is not None:
                        raise event.error
                    assert event.output is not None
                    whole = outputs[event.handle]
                    whole.request_id, whole.prompt = event.output.request_id, event.output.prompt
                    whole.extend(event.output)
                    if event.output.finished:
                        bar.advance()
        return [outputs[handle] for handle in handles]
    finally:
        engine.forget_all()


class _Progress(Protocol):
    def advance(self) -> None: ...


class _NoBar:
    def advance(self) -> None:
        pass


class _Bar:
    """A bar on stderr that counts finished prompts."""

    def __init__(self, total: int) -> None:
        from rich.console import Console
        from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

        columns = (TextColumn("prompts"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
        self._progress = Progress(*columns, console=Console(stderr=True))
        self._task = self._progress.add_task("prompts", total=total)

    def advance(self) -> None:
        self._progress.advance(self._task)

    def __enter__(self) -> _Bar:
        self._progress.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self._progress.stop()


def _progress_bar(wanted: bool, total: int) -> AbstractContextManager[_Progress]:
    return _Bar(total) if wanted and total else nullcontext(_NoBar())
