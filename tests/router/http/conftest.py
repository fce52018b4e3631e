"""One router for all tests of the HTTP API that need no settings of their own."""

from __future__ import annotations

from collections.abc import Iterator

import openai
import pytest
from http_server import HttpServer, serve_http


@pytest.fixture(scope="session")
def server() -> Iterator[HttpServer]:
    with serve_http() as running:
        yield running


@pytest.fixture(scope="session")
def client(server: HttpServer) -> openai.OpenAI:
    return openai.OpenAI(base_url=server.url + "/v1", api_key="EMPTY", max_retries=0, timeout=30)
