"""Requests, and ways to run them on a router in this process."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from typing import Any

from pagemill.sampling_params import SamplingParams
from router.app import RouterParts
from router.generation import CompleteOutput, GenerationRequest, StreamEvent


async def eventually(condition: Callable[[], bool], timeout_s: float = 20.0) -> None:
    """Poll until a condition holds."""
    deadline = time.monotonic() + timeout_s
    while not condition():
        assert time.monotonic() < deadline, "the condition did not come true"
        await asyncio.sleep(0.005)


def prompt(text: str = "Once upon a time", **sampling: Any) -> GenerationRequest:
    return GenerationRequest(SamplingParams(**({"max_tokens": 500} | sampling)), prompt_text=text)


def chat(text: str = "Hello", **sampling: Any) -> GenerationRequest:
    messages = [{"role": "user", "content": text}]
    return GenerationRequest(SamplingParams(**({"max_tokens": 500} | sampling)), messages=messages)


async def collect(parts: RouterParts, request: GenerationRequest) -> list[StreamEvent]:
    return [event async for event in parts.pipeline.generate(request)]


def text_of(events: list[StreamEvent], index: int = 0) -> str:
    return "".join(d.text for e in events for d in e.deltas if d.index == index)


async def complete(parts: RouterParts, request: GenerationRequest) -> CompleteOutput:
    return await parts.pipeline.complete(await parts.pipeline.prepare(request))
