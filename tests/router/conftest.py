"""The demo model's tokenizer, and routers in this process against scripted schedulers."""

from __future__ import annotations

from collections.abc import AsyncIterator, Awaitable, Callable
from typing import Any

import pytest
from router_helpers import eventually
from session_scheduler import FakeScheduler, Script

from pagemill.config import RouterSettings
from pagemill.model_source import resolve_model
from pagemill.redis_server import RedisServer
from router.app import ModelFiles, RouterParts, build_parts, load_model_files
from router.tokenizer import Tokenizer, load_tokenizer

StartRouter = Callable[..., Awaitable[RouterParts]]


@pytest.fixture(scope="session")
def tokenizer() -> Tokenizer:
    return load_tokenizer(resolve_model(""))


@pytest.fixture(scope="session")
def model_files() -> ModelFiles:
    return load_model_files(RouterSettings())


@pytest.fixture
def says(tokenizer: Tokenizer) -> Callable[[str], Script]:
    """A script whose every sequence says a text and then ends."""

    def script_of(text: str) -> Script:
        ids = [*tokenizer.encode(text), tokenizer.eos_token_ids[0]]
        return lambda submit, index: ids

    return script_of


@pytest.fixture
async def start_scheduler() -> AsyncIterator[Callable[..., Awaitable[FakeScheduler]]]:
    started: list[FakeScheduler] = []

    async def start(script: Script, **hello_changes: Any) -> FakeScheduler:
        scheduler = FakeScheduler(script, **hello_changes)
        await scheduler.start()
        started.append(scheduler)
        return scheduler

    yield start
    for scheduler in started:
        await scheduler.stop()


@pytest.fixture
async def start_router(model_files: ModelFiles) -> AsyncIterator[StartRouter]:
    """Build and start a router; returns once a scheduler is ready, where it has any."""
    started: list[RouterParts] = []

    async def start(*schedulers: FakeScheduler, files: ModelFiles = model_files, **settings: Any) -> RouterParts:
        addresses = [s.address for s in schedulers]
        parts = build_parts(RouterSettings(scheduler=addresses, **settings), files)
        parts.start()
        started.append(parts)
        await eventually(lambda: all(link.connected for link in parts.schedulers.links))
        return parts

    yield start
    for parts in started:
        await parts.close()


@pytest.fixture(scope="module")
def redis_server() -> Any:
    with RedisServer() as server:
        yield server
