"""Pagemill: a server for large language models.

Names below are imported when first used, so that `import pagemill` costs nothing and needs no torch.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

__version__ = "0.1.0"

if TYPE_CHECKING:
    from pagemill.async_engine import AsyncLLMEngine
    from pagemill.client import AsyncClient, Client
    from pagemill.llm import LLM
    from pagemill.outputs import CompletionOutput, RequestOutput
    from pagemill.sampling_params import SamplingParams

_MODULES = {
    "LLM": "pagemill.llm",
    "AsyncLLMEngine": "pagemill.async_engine",
    "SamplingParams": "pagemill.sampling_params",
    "RequestOutput": "pagemill.outputs",
    "CompletionOutput": "pagemill.outputs",
    "Client": "pagemill.client",
    "AsyncClient": "pagemill.client",
}

__all__ = [
    "LLM",
    "AsyncClient",
    "AsyncLLMEngine",
    "Client",
    "CompletionOutput",
    "RequestOutput",
    "SamplingParams",
    "__version__",
]


def __getattr__(name: str) -> Any:
    if name not in _MODULES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(_MODULES[name]), name)
