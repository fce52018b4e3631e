from __future__ import annotations

import subprocess
import sys

PROGRAM = """
import asyncio, sys
from pagemill.config import RouterSettings
from router.app import build_parts, load_model_files
files = load_model_files(RouterSettings())
ids = files.tokenizer.encode(files.renderer.render([{"role": "user", "content": "hi"}]), add_special_tokens=False)
assert ids
async def build():
    build_parts(RouterSettings(redis_url="unix:///x"), files)
asyncio.run(build())
unwanted = {"torch", "transformers", "scheduler", "worker"} & set(sys.modules)
print(sorted(unwanted))
"""


def test_a_router_with_a_loaded_model_imports_neither_torch_nor_transformers_nor_other_services() -> None:
    result = subprocess.run([sys.executable, "-c", PROGRAM], capture_output=True, text=True, timeout=120, check=False)
    assert result.stdout.strip() == "[]", result.stdout + result.stderr
