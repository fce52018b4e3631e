from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path

import openai
import pytest

sys.path.insert(0, str(Path(__file__).parent))

from processes import Server, serve


@pytest.fixture(scope="session")
def server() -> Iterator[Server]:
    """One server with the real weights for every test that needs no options of its own."""
    with serve() as running:
        yield running


@pytest.fixture()
def client(server: Server) -> openai.OpenAI:
    return openai.OpenAI(base_url=server.http_url + "/v1", api_key="EMPTY", max_retries=0, timeout=120)


@pytest.fixture()
def model(client: openai.OpenAI) -> str:
    return client.models.list().data[0].id
