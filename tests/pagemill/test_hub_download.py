"""A hub id is downloaded once and found again without the hub, from a real server that speaks the hub's protocol."""

from __future__ import annotations

import hashlib
import json
import os
import subprocess
import sys
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest

COMMIT = "0123456789abcdef0123456789abcdef01234567"
FILES = {
    "config.json": json.dumps({"architectures": ["LlamaForCausalLM"], "model_type": "llama"}).encode(),
    "tokenizer.json": b"{}",
    "model.safetensors": b"weights",
    "pytorch_model.bin": b"the same weights again",
}


class Hub(BaseHTTPRequestHandler):
    """What the hub answers about one repository, org/tiny."""

    def do_HEAD(self) -> None:
        self._answer(with_body=False)

    def do_GET(self) -> None:
        self._answer(with_body=True)

    def log_message(self, format: str, *args: object) -> None:
        return

    def _answer(self, with_body: bool) -> None:
        path = self.path.split("?")[0]
        headers = {"Content-Type": "application/json"}
        if path.startswith("/api/models/org/tiny/tree/"):
            entries = [
                {"type": "file", "path": name, "size": len(content), "oid": hashlib.sha1(content).hexdigest()}
                for name, content in FILES.items()
            ]
            body = json.dumps(entries).encode()
        elif path.startswith("/api/models/org/tiny"):
            siblings = [{"rfilename": name} for name in FILES]
            body = json.dumps({"id": "org/tiny", "sha": COMMIT, "siblings": siblings}).encode()
        elif path.startswith("/org/tiny/resolve/") and path.rsplit("/", 1)[1] in FILES:
            body = FILES[path.rsplit("/", 1)[1]]
            headers["ETag"] = f'"{hashlib.sha1(body).hexdigest()}"'
            headers["X-Repo-Commit"] = COMMIT
        else:
            self.send_error(404)
            return
        self.send_response(200)
        for name, value in headers.items():
            self.send_header(name, value)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        if with_body:
            self.wfile.write(body)


@pytest.fixture()
def hub_url() -> Iterator[str]:
    server = ThreadingHTTPServer(("127.0.0.1", 0), Hub)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    yield f"http://127.0.0.1:{server.server_port}"
    server.shutdown()


def resolve(folder: Path, environment: dict[str, str]) -> Path:
    """Where a fresh process finds org/tiny: the hub client reads its environment when it is imported."""
    code = (
        "from pagemill.model_source import resolve_model\n"
        f"print(resolve_model('org/tiny', download_dir={str(folder)!r}).path)"
    )
    run = subprocess.run(
        [sys.executable, "-c", code], env=os.environ | environment, capture_output=True, text=True, timeout=60
    )
    assert run.returncode == 0, run.stderr
    return Path(run.stdout.strip().splitlines()[-1])


def test_a_hub_id_is_fetched_into_the_download_folder_and_then_needs_no_hub(hub_url: str, tmp_path: Path) -> None:
    online = {"HF_ENDPOINT": hub_url, "HF_HUB_OFFLINE": "0", "HF_HUB_DISABLE_XET": "1"}
    path = resolve(tmp_path, online)
    assert path.is_relative_to(tmp_path)
    # One copy of the weights: safetensors where there are any.
    assert {file.name for file in path.iterdir()} == {"config.json", "tokenizer.json", "model.safetensors"}
    assert (path / "model.safetensors").read_bytes() == FILES["model.safetensors"]
    assert resolve(tmp_path, {"HF_ENDPOINT": hub_url, "HF_HUB_OFFLINE": "1"}) == path
