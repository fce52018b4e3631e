"""A client of a router's gRPC API for load: messages are counted and their time noted, nothing else is made of them."""

from __future__ import annotations

import asyncio
import time

import grpc
import grpc.aio

from pagemill.bench.records import Answer
from pagemill.client_wire import RequestBuilder
from pagemill.errors import UnavailableError
from pagemill.rpc import aio_channel
from pagemill.sampling_params import SamplingParams
from pagemill.v1 import inference_pb2_grpc

_CONNECT_TIMEOUT_S = 20.0


class GrpcClient:
    """Streams answers of one router. Belongs to one event loop.

    Args:
        address: host:port.
        model: served name; empty takes the router's only model.
        api_key: sent as a bearer token where not empty.
        keep_token_ids: keep the ids of the answer.
    """

    def __init__(self, address: str, model: str, api_key: str = "", *, keep_token_ids: bool = False) -> None:
        self._address = address
        self._channel = aio_channel(address)
        self._stub = inference_pb2_grpc.InferenceStub(self._channel)  # type: ignore[no-untyped-call]
        self._requests = RequestBuilder(model)
        self._metadata = (("authorization", f"Bearer {api_key}"),) if api_key else None
        self._keep_token_ids = keep_token_ids

    async def ask(self, prompt: list[int], num_output_tokens: int) -> Answer:
        """One answer to its end; failures are in the answer."""
        params = SamplingParams(temperature=0.0, max_tokens=num_output_tokens, ignore_eos=True)
        request = self._requests.generate(prompt, params, "", 0, "", final_only=False)
        answer = Answer(len(prompt), num_output_tokens, time.perf_counter())
        call = self._stub.Generate(request, metadata=self._metadata)
        try:
            async for response in call:
                now_s = time.perf_counter()
                before = answer.num_output_tokens
                for delta in response.deltas:
                    answer.num_output_tokens += len(delta.token_ids)
                    if self._keep_token_ids:
                        answer.token_ids += delta.token_ids
                if answer.num_output_tokens > before:
                    answer.arrivals_s.append(now_s)
                if response.HasField("usage"):
                    answer.num_cached_tokens = response.usage.cached_tokens
        except grpc.aio.AioRpcError as err:
            answer.fail(f"grpc_{err.code().name.lower()}", err.details() or err.code().name)
        finally:
            call.cancel()
        answer.end_s = time.perf_counter()
        answer.check_length()
        return answer

    async def prepare(self, num_connections: int) -> None:
        """Connect: one connection carries all requests."""
        try:
            await asyncio.wait_for(self._channel.channel_ready(), _CONNECT_TIMEOUT_S)
        except TimeoutError:
            raise UnavailableError(f"no gRPC server answers at {self._address}") from None

    async def close(self) -> None:
        await self._channel.close()
