"""Which server load goes to, in a form that travels to the processes that make it."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass
from typing import Protocol

from pagemill.bench.records import Answer
from pagemill.errors import UnavailableError


class LoadClient(Protocol):
    """What asks one server."""

    async def ask(self, prompt: list[int], num_output_tokens: int) -> Answer:
        """One answer to its end; failures are in the answer."""
        ...

    async def prepare(self, num_connections: int) -> None:
        """Open connections, so that no request waits for one. Raises UnavailableError where nothing answers."""
        ...

    async def close(self) -> None: ...


@dataclass(frozen=True, slots=True)
class HttpTarget:
    """An OpenAI HTTP API."""

    base_url: str
    model: str = ""
    api_key: str = ""

    @property
    def backend(self) -> str:
        return "http"

    def client(self, *, keep_token_ids: bool) -> LoadClient:
        """To be called inside the event loop that uses it."""
        from pagemill.bench.http_client import HttpClient

        return HttpClient(self.base_url, self.model, self.api_key, keep_token_ids=keep_token_ids)


@dataclass(frozen=True, slots=True)
class GrpcTarget:
    """A Pagemill router's gRPC API."""

    address: str
    model: str = ""
    api_key: str = ""

    @property
    def backend(self) -> str:
        return "grpc"

    def client(self, *, keep_token_ids: bool) -> LoadClient:
        """To be called inside the event loop that uses it."""
        from pagemill.bench.grpc_client import GrpcClient

        return GrpcClient(self.address, self.model, self.api_key, keep_token_ids=keep_token_ids)


Target = HttpTarget | GrpcTarget


@dataclass(frozen=True, slots=True)
class ServedModel:
    """A model that a server has; `max_model_len` is 0 where the server does not say."""

    name: str
    max_model_len: int


def served_model(target: Target) -> ServedModel:
    """The target's model, or the server's first one where the target names none.

    Raises:
        UnavailableError: the server cannot be reached or has no such model.
    """
    models = _http_models(target) if isinstance(target, HttpTarget) else _grpc_models(target)
    named = [model for model in models if target.model in ("", model.name)]
    if not named:
        raise UnavailableError(f"the server has no model {target.model!r}; it has {[model.name for model in models]}")
    return named[0]


def _http_models(target: HttpTarget) -> list[ServedModel]:
    from pagemill.bench.http_client import HttpClient

    async def ask() -> list[ServedModel]:
        client = HttpClient(target.base_url, target.model, target.api_key)
        try:
            document = await client.get("/models")
        finally:
            await client.close()
        return [ServedModel(str(entry["id"]), int(entry.get("max_model_len") or 0)) for entry in document["data"]]

    return asyncio.run(ask())


def _grpc_models(target: GrpcTarget) -> list[ServedModel]:
    from pagemill.client import Client

    with Client(target.address, api_key=target.api_key, timeout_s=20.0) as client:
        return [ServedModel(model.id, model.max_model_len) for model in client.list_models()]
