"""The gRPC face of the pipeline: `pagemill.v1.Inference`."""

from __future__ import annotations

import functools
import logging
from collections.abc import AsyncGenerator, Callable
from contextlib import aclosing, asynccontextmanager

import grpc.aio

from pagemill.api_keys import ApiKeys
from pagemill.errors import PagemillError
from pagemill.rpc import abort_with
from pagemill.v1 import inference_pb2, inference_pb2_grpc
from router.generation import GenerationRequest
from router.inference_wire import ResponseWriter, read_chat, read_generate, write_models
from router.pipeline import Pipeline

_log = logging.getLogger(__name__)

SERVICE_NAME = "pagemill.v1.Inference"
# Initial metadata that says which part of an answer came from the prompt cache: "response", "tokens" or "miss".
CACHE_METADATA = "pagemill-prompt-cache"


class InferenceServicer(inference_pb2_grpc.InferenceServicer):
    """Serves `Inference`. Cancelling a call closes the pipeline's iterator, which aborts the request.

    Args:
        pipeline: owned by the caller.
        api_keys: what clients must send as `authorization: Bearer KEY`, and the tenants behind the keys.
    """

    def __init__(self, pipeline: Pipeline, api_keys: ApiKeys) -> None:
        self._pipeline = pipeline
        self._api_keys = api_keys

    async def Generate(self, request: inference_pb2.GenerateRequest, context: grpc.aio.ServicerContext) -> None:
        async with self._edge(context):
            await self._run(functools.partial(read_generate, request), request.final_only, context)

    async def Chat(self, request: inference_pb2.ChatRequest, context: grpc.aio.ServicerContext) -> None:
        async with self._edge(context):
            await self._run(functools.partial(read_chat, request), request.final_only, context)

    async def Tokenize(
        self, request: inference_pb2.TokenizeRequest, context: grpc.aio.ServicerContext
    ) -> inference_pb2.TokenizeResponse:
        async with self._edge(context):
            add_special_tokens = request.add_special_tokens if request.HasField("add_special_tokens") else True
            ids = await self._pipeline.tokenize(
                request.text, model=request.model, add_special_tokens=add_special_tokens
            )
            return inference_pb2.TokenizeResponse(token_ids=ids, max_model_len=self._pipeline.max_model_len)

    async def Detokenize(
        self, request: inference_pb2.DetokenizeRequest, context: grpc.aio.ServicerContext
    ) -> inference_pb2.DetokenizeResponse:
        async with self._edge(context):
            text = await self._pipeline.detokenize(
                list(request.token_ids), model=request.model, skip_special_tokens=request.skip_special_tokens
            )
            return inference_pb2.DetokenizeResponse(text=text)

    async def ListModels(
        self, request: inference_pb2.ListModelsRequest, context: grpc.aio.ServicerContext
    ) -> inference_pb2.ListModelsResponse:
        async with self._edge(context):
            return write_models(self._pipeline.models())

    async def _run(
        self, read: Callable[[], GenerationRequest], final_only: bool, context: grpc.aio.ServicerContext
    ) -> None:
        request = read()
        metadata = _metadata(context)
        request.traceparent = metadata.get("traceparent", "")
        request.tenant = self._tenant(context)
        remaining_s = context.time_remaining()
        request.timeout_s = remaining_s if remaining_s and remaining_s > 0 else None
        prepared = await self._pipeline.prepare(request)
        source = "response" if prepared.cached_output else "tokens" if prepared.tokens_from_cache else "miss"
        await context.send_initial_metadata(((CACHE_METADATA, source),))
        writer = ResponseWriter(prepared)
        if final_only:
            await context.write(writer.whole(await self._pipeline.complete(prepared)))
            return
        async with aclosing(self._pipeline.stream(prepared)) as events:
            async for event in events:
                await context.write(writer.event(event))

    @asynccontextmanager
    async def _edge(self, context: grpc.aio.ServicerContext) -> AsyncGenerator[None]:
        """Checks the key, and translates what is raised inside to a status; anything unexpected shows no details."""
        try:
            self._tenant(context)
            yield
        except PagemillError as error:
            await abort_with(context, error)
        except (grpc.aio.AbortError, grpc.aio.UsageError):
            raise
        except Exception:
            _log.exception("a request failed by a bug")
            await abort_with(context, PagemillError("internal error"))

    def _tenant(self, context: grpc.aio.ServicerContext) -> str:
        return self._api_keys.tenant(_metadata(context).get("authorization", ""))


def _metadata(context: grpc.aio.ServicerContext) -> dict[str, str]:
    return {key: value for key, value in context.invocation_metadata() or () if isinstance(value, str)}
