"""The examples run as they are against a router."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
from http_server import HttpServer

EXAMPLES = Path(__file__).parents[3] / "examples"


@pytest.mark.parametrize(
    ("script", "expected"),
    [
        ("openai_client.py", ["model: ", "completion: 'The capital of France is", "usage: "]),
        ("grpc_client.py", ["completion: 'The capital of France is", "Water boils at", "usage: 3 in, 16 out"]),
    ],
)
def test_example_runs(server: HttpServer, script: str, expected: list[str]) -> None:
    environment = os.environ | {
        "PAGEMILL_BASE_URL": server.url + "/v1",
        "PAGEMILL_GRPC": f"127.0.0.1:{server.grpc_port}",
        "PYTHONPATH": str(EXAMPLES.parent),
        "NO_PROXY": "127.0.0.1",
    }
    run = subprocess.run(
        [sys.executable, str(EXAMPLES / script)], env=environment, capture_output=True, text=True, timeout=60
    )
    assert run.returncode == 0, run.stderr
    for text in expected:
        assert text in run.stdout
