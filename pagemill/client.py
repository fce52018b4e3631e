"""Typed gRPC client of a Pagemill router, for threads (`Client`) and for asyncio (`AsyncClient`).

    with Client("127.0.0.1:50051") as client:
        print(client.generate("Paris is", SamplingParams(max_tokens=8)).outputs[0].text)
        for delta in client.chat_stream([{"role": "user", "content": "Hello!"}]):
            print(delta.outputs[0].text, end="", flush=True)

`generate` and `chat` return the whole `RequestOutput`; `generate_stream` and `chat_stream` hand out deltas, each a
`RequestOutput` that holds only what is new, the last one with `finished` true. Leaving a stream early (`break`,
`close()`, `aclose()`, cancellation) cancels the call, which aborts the request on the server. All errors are those of
`pagemill.errors`. Both clients may be used by many threads or tasks at once.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Iterator, Sequence
from dataclasses import dataclass
from types import TracebackType
from typing import Any, Self

import grpc

from pagemill.client_wire import ChatTurn, RequestBuilder, ResponseReader
from pagemill.errors import InvalidRequestError, UnavailableError
from pagemill.outputs import RequestOutput
from pagemill.rpc import aio_channel, error_from_rpc, sync_channel
from pagemill.sampling_params import SamplingParams
from pagemill.v1 import inference_pb2, inference_pb2_grpc

__all__ = ["AsyncClient", "ChatTurn", "Client", "ModelInfo"]

DEFAULT_ADDRESS = "127.0.0.1:50051"
DEFAULT_TIMEOUT_S = 600.0


@dataclass(frozen=True, slots=True)
class ModelInfo:
    """One served model.

    Attributes:
        id: served name.
        max_model_len: context length in tokens.
        created_unix_s: when the router learnt of it.
    """

    id: str
    max_model_len: int
    created_unix_s: int


class Client:
    """Blocking client; one channel, safe to share between threads.

    Args:
        address: host:port of the router's gRPC API.
        model: served model name; empty takes the router's only model.
        api_key: sent as a bearer token where not empty.
        timeout_s: deadline of each call, streams included.
    """

    def __init__(
        self,
        address: str = DEFAULT_ADDRESS,
        *,
        model: str = "",
        api_key: str = "",
        timeout_s: float = DEFAULT_TIMEOUT_S,
    ) -> None:
        self._channel = sync_channel(address)
        self._stub = inference_pb2_grpc.InferenceStub(self._channel)  # type: ignore[no-untyped-call]
        self._requests = RequestBuilder(model)
        self._call_options = _call_options(api_key, timeout_s)
        self._closed = False

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def close(self) -> None:
        """Ends all calls in progress and closes the channel; later calls get UnavailableError."""
        self._closed = True
        self._channel.close()

    def generate(
        self,
        prompt: str | Sequence[int],
        sampling_params: SamplingParams | None = None,
        *,
        request_id: str = "",
        priority: int = 0,
        cache_salt: str = "",
    ) -> RequestOutput:
        """Continues `prompt` (text or token ids) and returns the whole output.

        Raises:
            InvalidRequestError: an argument can never be sent, such as text that is no Unicode; it is named.
            PagemillError: what the router answered, such as InvalidRequestError, OverloadedError, UnavailableError.
        """
        request = self._requests.generate(prompt, sampling_params, request_id, priority, cache_salt, final_only=True)
        return _gather(self._stream(self._stub.Generate, request))

    def generate_stream(
        self,
        prompt: str | Sequence[int],
        sampling_params: SamplingParams | None = None,
        *,
        request_id: str = "",
        priority: int = 0,
        cache_salt: str = "",
    ) -> Iterator[RequestOutput]:
        """Like `generate`, as deltas."""
        request = self._requests.generate(prompt, sampling_params, request_id, priority, cache_salt, final_only=False)
        return self._stream(self._stub.Generate, request)

    def chat(
        self,
        messages: Sequence[ChatTurn],
        sampling_params: SamplingParams | None = None,
        *,
        request_id: str = "",
        priority: int = 0,
        cache_salt: str = "",
    ) -> RequestOutput:
        """Continues a conversation and returns the whole answer; raises as `generate`."""
        request = self._requests.chat(messages, sampling_params, request_id, priority, cache_salt, final_only=True)
        return _gather(self._stream(self._stub.Chat, request))

    def chat_stream(
        self,
        messages: Sequence[ChatTurn],
        sampling_params: SamplingParams | None = None,
        *,
        request_id: str = "",
        priority: int = 0,
        cache_salt: str = "",
    ) -> Iterator[RequestOutput]:
        """Like `chat`, as deltas."""
        request = self._requests.chat(messages, sampling_params, request_id, priority, cache_salt, final_only=False)
        return self._stream(self._stub.Chat, request)

    def tokenize(self, text: str, *, add_special_tokens: bool = True) -> list[int]:
        """Token ids of `text`."""
        request = self._requests.tokenize(text, add_special_tokens)
        return list(self._unary(self._stub.Tokenize, request).token_ids)

    def detokenize(self, token_ids: Sequence[int], *, skip_special_tokens: bool = False) -> str:
        """Text of `token_ids`."""
        request = self._requests.detokenize(token_ids, skip_special_tokens)
        text: str = self._unary(self._stub.Detokenize, request).text
        return text

    def list_models(self) -> list[ModelInfo]:
        """Models that the router serves."""
        return _models(self._unary(self._stub.ListModels, inference_pb2.ListModelsRequest()))

    def _call(self, method: Any, request: Any) -> Any:
        if self._closed:
            raise UnavailableError("this client is closed")
        try:
            return method(request, **self._call_options)
        except ValueError as error:  # grpc's word for a channel that another thread has just closed
            raise UnavailableError("this client is closed") from error

    def _unary(self, method: Any, request: Any) -> Any:
        try:
            return self._call(method, request)
        except grpc.RpcError as error:
            raise error_from_rpc(error) from error

    def _stream(self, method: Any, request: Any) -> Iterator[RequestOutput]:
        call = self._call(method, request)
        reader = ResponseReader(request)
        try:
            for response in call:
                yield reader.read(response)
        except grpc.RpcError as error:
            raise error_from_rpc(error) from error
        finally:
            call.cancel()


class AsyncClient:
    """The same for asyncio; belongs to the event loop that it was made in. Arguments as for `Client`."""

    def __init__(
        self,
        address: str = DEFAULT_ADDRESS,
        *,
        model: str = "",
        api_key: str = "",
        timeout_s: float = DEFAULT_TIMEOUT_S,
    ) -> None:
        self._channel = aio_channel(address)
        self._stub = inference_pb2_grpc.InferenceStub(self._channel)  # type: ignore[no-untyped-call]
        self._requests = RequestBuilder(model)
        self._call_options = _call_options(api_key, timeout_s)
        self._closed = False

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.close()

    async def close(self) -> None:
        """Ends all calls in progress and closes the channel; later calls get UnavailableError."""
        self._closed = True
        await self._channel.close()

    async def generate(
        self,
        prompt: str | Sequence[int],
        sampling_params: SamplingParams | None = None,
        *,
        request_id: str = "",
        priority: int = 0,
        cache_salt: str = "",
    ) -> RequestOutput:
        """Continues `prompt` (text or token ids) and returns the whole output; cancelling the task aborts the request.

        Raises:
            InvalidRequestError: an argument can never be sent, such as text that is no Unicode; it is named.
            PagemillError: what the router answered, such as InvalidRequestError, OverloadedError, UnavailableError.
        """
        request = self._requests.generate(prompt, sampling_params, request_id, priority, cache_salt, final_only=True)
        return await _gather_async(self._stream(self._stub.Generate, request))

    def generate_stream(
        self,
        prompt: str | Sequence[int],
        sampling_params: SamplingParams | None = None,
        *,
        request_id: str = "",
        priority: int = 0,
        cache_salt: str = "",
    ) -> AsyncIterator[RequestOutput]:
        """Like `generate`, as deltas. Close it with `contextlib.aclosing` where you may leave early."""
        request = self._requests.generate(prompt, sampling_params, request_id, priority, cache_salt, final_only=False)
        return self._stream(self._stub.Generate, request)

    async def chat(
        self,
        messages: Sequence[ChatTurn],
        sampling_params: SamplingParams | None = None,
        *,
        request_id: str = "",
        priority: int = 0,
        cache_salt: str = "",
    ) -> RequestOutput:
        """Continues a conversation and returns the whole answer; raises as `generate`."""
        request = self._requests.chat(messages, sampling_params, request_id, priority, cache_salt, final_only=True)
        return await _gather_async(self._stream(self._stub.Chat, request))

    def chat_stream(
        self,
        messages: Sequence[ChatTurn],
        sampling_params: SamplingParams | None = None,
        *,
        request_id: str = "",
        priority: int = 0,
        cache_salt: str = "",
    ) -> AsyncIterator[RequestOutput]:
        """Like `chat`, as deltas."""
        request = self._requests.chat(messages, sampling_params, request_id, priority, cache_salt, final_only=False)
        return self._stream(self._stub.Chat, request)

    async def tokenize(self, text: str, *, add_special_tokens: bool = True) -> list[int]:
        """Token ids of `text`."""
        request = self._requests.tokenize(text, add_special_tokens)
        return list((await self._unary(self._stub.Tokenize, request)).token_ids)

    async def detokenize(self, token_ids: Sequence[int], *, skip_special_tokens: bool = False) -> str:
        """Text of `token_ids`."""
        request = self._requests.detokenize(token_ids, skip_special_tokens)
        text: str = (await self._unary(self._stub.Detokenize, request)).text
        return text

    async def list_models(self) -> list[ModelInfo]:
        """Models that the router serves."""
        return _models(await self._unary(self._stub.ListModels, inference_pb2.ListModelsRequest()))

    def _call(self, method: Any, request: Any) -> Any:
        if self._closed:
            raise UnavailableError("this client is closed")
        return method(request, **self._call_options)

    async def _unary(self, method: Any, request: Any) -> Any:
        try:
            return await self._call(method, request)
        except grpc.RpcError as error:
            raise error_from_rpc(error) from error

    async def _stream(self, method: Any, request: Any) -> AsyncIterator[RequestOutput]:
        call = self._call(method, request)
        reader = ResponseReader(request)
        try:
            async for response in call:
                yield reader.read(response)
        except grpc.RpcError as error:
            raise error_from_rpc(error) from error
        finally:
            call.cancel()


def _call_options(api_key: str, timeout_s: float) -> dict[str, Any]:
    if not isinstance(api_key, str) or not (api_key.isascii() and api_key.isprintable()):
        raise InvalidRequestError("api_key must be printable ASCII", field="api_key")
    metadata = (("authorization", f"Bearer {api_key}"),) if api_key else None
    return {"timeout": timeout_s, "metadata": metadata}


def _models(response: inference_pb2.ListModelsResponse) -> list[ModelInfo]:
    return [ModelInfo(model.id, model.max_model_len, model.created_unix_s) for model in response.models]


def _gather(deltas: Iterator[RequestOutput]) -> RequestOutput:
    whole: RequestOutput | None = None
    for delta in deltas:
        if whole is None:
            whole = delta
        else:
            whole.extend(delta)
    return _whole(whole)


async def _gather_async(deltas: AsyncIterator[RequestOutput]) -> RequestOutput:
    whole: RequestOutput | None = None
    async for delta in deltas:
        if whole is None:
            whole = delta
        else:
            whole.extend(delta)
    return _whole(whole)


def _whole(output: RequestOutput | None) -> RequestOutput:
    if output is None or not output.finished:
        raise UnavailableError("the router ended the stream before the request was finished")
    return output
