"""How `pagemill chat` and `pagemill complete` reach a server: by gRPC or by the OpenAI HTTP API."""

from __future__ import annotations

import contextlib
import http.client
import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol
from urllib.parse import urlsplit

import click

from pagemill.errors import ConfigError, PagemillError, UnavailableError, from_grpc
from pagemill.outputs import RequestOutput
from pagemill.sampling_params import SamplingParams

DEFAULT_ADDRESS = "127.0.0.1:50051"
DEFAULT_TIMEOUT_S = 600.0
_PROBE_TIMEOUT_S = 2.0
_GRPC_CODES = {400: 3, 401: 16, 404: 5, 409: 6, 413: 3, 429: 8, 499: 10, 503: 14, 504: 4}

Message = dict[str, str]


class Endpoint(Protocol):
    """A server that streams text. All methods raise PagemillError; a closed iterator aborts the request."""

    def check(self) -> None:
        """Ask for the served models, to learn whether the server is there and lets us in."""

    def chat(self, messages: Sequence[Message], params: SamplingParams) -> Iterator[str]:
        """Text of the next turn of a conversation, piece by piece."""

    def complete(self, prompt: str, params: SamplingParams) -> Iterator[str]:
        """Text that continues a prompt, piece by piece."""


class GrpcEndpoint:
    """A router's gRPC API at host:port."""

    def __init__(self, address: str, model: str, api_key: str) -> None:
        from pagemill.client import Client

        if "://" in address:
            raise ConfigError(
                f"--address is {address!r}, must be host:port of the gRPC API; --url takes an HTTP address",
                field="address",
            )
        self._address = address
        self._client = Client(address, model=model, api_key=api_key, timeout_s=DEFAULT_TIMEOUT_S)

    def check(self) -> None:
        try:
            self._client.list_models()
        except UnavailableError as err:
            raise self._unreachable(err) from err

    def chat(self, messages: Sequence[Message], params: SamplingParams) -> Iterator[str]:
        return self._texts(self._client.chat_stream(messages, params))

    def complete(self, prompt: str, params: SamplingParams) -> Iterator[str]:
        return self._texts(self._client.generate_stream(prompt, params))

    def _texts(self, deltas: Iterator[RequestOutput]) -> Iterator[str]:
        try:
            for delta in deltas:
                yield "".join(output.text for output in delta.outputs)
        except UnavailableError as err:
            raise self._unreachable(err) from err

    def _unreachable(self, err: UnavailableError) -> UnavailableError:
        if _speaks_http(self._address):
            return UnavailableError(
                f"{self._address} is an HTTP port, not the gRPC API; use --url http://{self._address} for it"
            )
        return UnavailableError(f"the server at {self._address} cannot be reached: {err.message}")


def _speaks_http(address: str) -> bool:
    """Whether an HTTP/1 server answers at host:port."""
    try:
        with contextlib.closing(http.client.HTTPConnection(address, timeout=_PROBE_TIMEOUT_S)) as connection:
            connection.request("GET", "/version")
            connection.getresponse()
    except (OSError, http.client.HTTPException, ValueError):
        return False
    return True


class HttpEndpoint:
    """An OpenAI HTTP API at a base address such as http://127.0.0.1:8000, with or without /v1."""

    def __init__(self, url: str, model: str, api_key: str) -> None:
        parts = urlsplit(url)
        if parts.scheme not in ("http", "https") or not parts.hostname:
            raise ConfigError(f"--url is {url!r}, must be like http://127.0.0.1:8000", field="url")
        self._connection_type = http.client.HTTPSConnection if parts.scheme == "https" else http.client.HTTPConnection
        self._netloc = parts.netloc
        self._prefix = parts.path.rstrip("/").removesuffix("/v1") + "/v1"
        self._headers = {"Content-Type": "application/json"}
        if api_key:
            self._headers["Authorization"] = f"Bearer {api_key}"
        self._model = model

    def check(self) -> None:
        model = self._first_model()
        self._model = self._model or model

    def chat(self, messages: Sequence[Message], params: SamplingParams) -> Iterator[str]:
        for choice in self._stream("/chat/completions", {"messages": list(messages)}, params):
            yield choice.get("delta", {}).get("content") or ""

    def complete(self, prompt: str, params: SamplingParams) -> Iterator[str]:
        for choice in self._stream("/completions", {"prompt": prompt}, params):
            yield choice.get("text") or ""

    def _stream(self, path: str, body: dict[str, Any], params: SamplingParams) -> Iterator[dict[str, Any]]:
        body |= {"model": self._model or self._first_model(), "stream": True}
        body |= {"temperature": params.temperature, "top_p": params.top_p, "max_tokens": params.max_tokens}
        if params.seed is not None:
            body["seed"] = params.seed
        connection = self._connection_type(self._netloc, timeout=DEFAULT_TIMEOUT_S)
        try:
            response = self._request(connection, "POST", path, json.dumps(body))
            for line in response:
                text = line.decode("utf-8").strip()
                if not text.startswith("data:"):
                    continue
                payload = text.removeprefix("data:").strip()
                if payload == "[DONE]":
                    return
                event = json.loads(payload)
                if "error" in event:
                    raise _error_of(int(event["error"].get("status", 500)), event)
                yield from event.get("choices", [])
        except (OSError, http.client.HTTPException, ValueError) as err:
            if isinstance(err, PagemillError):
                raise
            raise UnavailableError(f"the server at {self._netloc} cannot be reached or broke off: {err}") from err
        finally:
            connection.close()

    def _first_model(self) -> str:
        connection = self._connection_type(self._netloc, timeout=DEFAULT_TIMEOUT_S)
        try:
            models = json.loads(self._request(connection, "GET", "/models", None).read())
            return str(models["data"][0]["id"])
        except (OSError, http.client.HTTPException, ValueError, KeyError, IndexError) as err:
            if isinstance(err, PagemillError):
                raise
            raise UnavailableError(f"the server at {self._netloc} cannot be reached: {err}") from err
        finally:
            connection.close()

    def _request(
        self, connection: http.client.HTTPConnection, method: str, path: str, body: str | None
    ) -> http.client.HTTPResponse:
        connection.request(method, self._prefix + path, body=body.encode() if body else None, headers=self._headers)
        response = connection.getresponse()
        if response.status != 200:
            try:
                document = json.loads(response.read(1 << 20))
            except ValueError:
                document = {}
            raise _error_of(response.status, document)
        return response


def _error_of(status: int, document: Any) -> PagemillError:
    error = document.get("error", {}) if isinstance(document, dict) else {}
    message = error.get("message") if isinstance(error, dict) else None
    return from_grpc(_GRPC_CODES.get(status, 13), str(message or f"the server answered with status {status}"))


@dataclass(frozen=True, slots=True)
class AskOptions:
    """What the options of both commands come to."""

    endpoint: Endpoint
    params: SamplingParams


def ask_options(max_tokens: int) -> list[click.Parameter]:
    """Options that both commands have."""
    return [
        click.Option(["--address"], default=DEFAULT_ADDRESS, show_default=True, help="gRPC address of the server."),
        click.Option(["--url"], default=None, help="Address of an OpenAI HTTP API to use instead of gRPC."),
        click.Option(["--model"], default="", help="Served model name; by default the server's only model."),
        click.Option(["--api-key"], default="", envvar="PAGEMILL_API_KEY", help="Key.  [env: PAGEMILL_API_KEY]"),
        click.Option(["--max-tokens"], type=int, default=max_tokens, show_default=True, help="Longest answer."),
        click.Option(["--temperature"], type=float, default=0.7, show_default=True, help="0 is greedy."),
        click.Option(["--top-p"], type=float, default=1.0, show_default=True, help="Nucleus mass in (0, 1]."),
        click.Option(["--seed"], type=int, default=None, help="Makes the answer repeatable."),
    ]


def parse_ask_options(parameters: Mapping[str, Any]) -> AskOptions:
    """Raises InvalidRequestError for parameters out of range, ConfigError for a malformed --url."""
    params = SamplingParams(
        max_tokens=parameters["max_tokens"],
        temperature=parameters["temperature"],
        top_p=parameters["top_p"],
        seed=parameters["seed"],
    )
    params.validate()
    if parameters["url"]:
        return AskOptions(HttpEndpoint(parameters["url"], parameters["model"], parameters["api_key"]), params)
    return AskOptions(GrpcEndpoint(parameters["address"], parameters["model"], parameters["api_key"]), params)
