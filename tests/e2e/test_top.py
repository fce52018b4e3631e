"""`pagemill top` sees in a real deployment what its clients did."""

from __future__ import annotations

import json
import subprocess
import sys

import httpx
import pytest
from processes import serve

pytestmark = pytest.mark.e2e


def top(*arguments: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "pagemill.cli", "top", "--interval", "0.2", *arguments]
    return subprocess.run(command, capture_output=True, text=True, timeout=60)


def test_top_gives_the_counts_that_the_client_counted() -> None:
    with serve("--no-cache-responses") as server:
        usages = []
        for index in range(3):
            body = {"prompt": f"Count from {index}:", "max_tokens": 6 + index, "temperature": 0, "ignore_eos": True}
            answer = httpx.post(server.http_url + "/v1/completions", json=body, timeout=60)
            assert answer.status_code == 200, answer.text
            usages.append(answer.json()["usage"])
        server.wait_until_idle()
        ports = server.process.ready["metrics_ports"]
        addresses = [server.http_url, f"127.0.0.1:{ports['scheduler']}", f"127.0.0.1:{ports['worker']}"]
        done = top("--once", "--json", *addresses)
        plain = top("--once", server.http_url)

    assert done.returncode == 0, done.stderr
    frame = json.loads(done.stdout)
    assert frame["away"] == []
    (router,), (scheduler,), (worker,) = frame["routers"], frame["schedulers"], frame["workers"]
    assert router["requests_by_code"] == {"OK": 3}
    assert (router["requests_total"], router["first_tokens_total"], router["requests_running"]) == (3, 3, 0)
    assert router["prompt_tokens_total"] == sum(usage["prompt_tokens"] for usage in usages)
    assert router["output_tokens_total"] == sum(usage["completion_tokens"] for usage in usages) == 6 + 7 + 8
    assert (scheduler["running"], scheduler["waiting"], scheduler["workers"]) == (0, 0, 1)
    assert scheduler["steps_total"] > 0
    assert worker["steps_total"] >= 6 + 7 + 8
    assert worker["kv_blocks_total"] == scheduler["kv_blocks_total"] > 0
    assert plain.returncode == 0, plain.stderr
    assert server.http_url.removeprefix("http://") in plain.stdout
