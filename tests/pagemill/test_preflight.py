"""What `pagemill serve` refuses before it starts a process: one line, the exit code of its kind, and quickly."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from pagemill.commands import preflight
from pagemill.config import RouterSettings, WorkerSettings
from pagemill.demo_model import demo_model_path
from pagemill.errors import ConfigError, ModelLoadError
from pagemill.model_source import ModelSource, resolve_model

CONFIG = {
    "architectures": ["LlamaForCausalLM"],
    "vocab_size": 320,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_attention_heads": 1,
    "num_hidden_layers": 2,
    "max_position_embeddings": 128,
}


def model(path: Path, *files: str, **config: Any) -> ModelSource:
    (path / "config.json").write_text(json.dumps(CONFIG | config))
    for file in files:
        (path / file).write_text("{}")
    return resolve_model(str(path))


def check(source: ModelSource, tokenizer: str = "", **worker: Any) -> None:
    settings = WorkerSettings(model=str(source.path), **worker)
    preflight.check_worker(settings)
    preflight.check_model(source, source, RouterSettings(tokenizer=tokenizer), settings)


def test_what_can_run_passes(tmp_path: Path) -> None:
    check(resolve_model(""), max_model_len=8192)
    check(model(tmp_path, "tokenizer.json", "model.safetensors"), max_model_len=128)
    check(model(tmp_path, rope_scaling={"rope_type": "linear", "factor": 4.0}), max_model_len=512)


@pytest.mark.parametrize(
    ("files", "config", "worker", "error", "words"),
    [
        ((), {"architectures": ["MadeUp"]}, {}, ModelLoadError, "architecture MadeUp is not supported"),
        ((), {}, {}, ModelLoadError, "neither tokenizer.json nor tokenizer.model"),
        (("tokenizer.json",), {}, {}, ModelLoadError, "no weight files for load_format auto"),
        (("tokenizer.json",), {}, {"max_model_len": 129}, ConfigError, "max_model_len is 129.*length is 128"),
        (("tokenizer.json", "a.safetensors"), {}, {"device": "cuda"}, ConfigError, "device cuda"),
        (("tokenizer.json", "a.safetensors"), {}, {"kv_cache_gib": 1e6}, ConfigError, "memory that is available is"),
        (("tokenizer.json", "a.safetensors"), {}, {"num_blocks": 1 << 30}, ConfigError, "num_blocks is"),
    ],
)
def test_what_cannot_run_is_named(
    tmp_path: Path,
    files: tuple[str, ...],
    config: dict[str, Any],
    worker: dict[str, Any],
    error: type[Exception],
    words: str,
) -> None:
    with pytest.raises(error, match=words):
        check(model(tmp_path, *files, **config), **worker)


def test_random_weights_need_no_files(tmp_path: Path) -> None:
    check(model(tmp_path, "tokenizer.json"), load_format="dummy")


def test_a_tokenizer_that_is_not_there_is_named(tmp_path: Path) -> None:
    with pytest.raises(ModelLoadError, match="nowhere"):
        check(resolve_model(""), tokenizer=str(tmp_path / "nowhere"))


def test_the_families_are_those_that_the_worker_has() -> None:
    from worker.models import registry

    assert set(preflight.BUILT_IN_ARCHITECTURES) <= set(registry.supported_architectures())
    assert registry.ENTRY_POINT_GROUP == preflight.ENTRY_POINT_GROUP
    for name in preflight.BUILT_IN_ARCHITECTURES:
        assert registry.resolve({"architectures": [name]})


def serve(*arguments: str, **variables: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-X", "importtime", "-m", "pagemill.cli", "serve", *arguments]
    ports = ("--http-port", "0", "--grpc-port", "0")
    return subprocess.run([*command, *ports], capture_output=True, text=True, timeout=90, env=os.environ | variables)


@pytest.mark.parametrize(
    ("arguments", "variables", "code", "words"),
    [
        ((), {"PAGEMILL_CPU_ISA": "foo"}, 2, "PAGEMILL_CPU_ISA: should be one of portable, avx2"),
        ((), {"PAGEMILL_SPIN_US": "-1"}, 2, "PAGEMILL_SPIN_US"),
        (("--num-threads", "5000"), {}, 2, "--num-threads"),
        (("--device", "cuda"), {}, 2, "device cuda"),
        (("--kv-cache-gib", "100000"), {}, 2, "kv_cache_gib is 100000"),
        (("--http-host", "198.51.100.7"), {}, 2, "--http-host 198.51.100.7"),
        (("--max-model-len", "100000"), {}, 2, "context length is 8192"),
        (("--api-key", "a="), {}, 2, "--api-key"),
        (("BROKEN",), {}, 1, "not a readable GGUF file"),
    ],
)
def test_a_start_that_cannot_work_is_one_line_without_torch(
    tmp_path: Path, arguments: tuple[str, ...], variables: dict[str, str], code: int, words: str
) -> None:
    broken = tmp_path / "broken.gguf"
    broken.write_bytes(b"G")
    run = serve(*(str(broken) if item == "BROKEN" else item for item in arguments), **variables)
    lines = [line for line in run.stderr.splitlines() if not line.startswith("import time:")]
    assert run.returncode == code, run.stderr[-2000:]
    assert len(lines) == 1, lines
    assert lines[0].startswith("pagemill: error: ")
    assert words in lines[0]
    assert "| torch" not in run.stderr
    assert run.stdout == ""


def test_what_a_process_refuses_is_the_last_line_with_its_exit_code(tmp_path: Path) -> None:
    truncated = tmp_path / "cut.gguf"
    with demo_model_path().open("rb") as file:
        truncated.write_bytes(file.read(4 << 20))
    run = serve(str(truncated), "--redis", "off")
    lines = [line for line in run.stderr.splitlines() if not line.startswith("import time:")]
    assert run.returncode == 1
    assert lines[-1].startswith("pagemill: error: worker: ")
    assert "cut.gguf" in lines[-1]
    assert "Traceback" not in run.stderr
    assert not any("stopping" in line or "draining" in line for line in lines)
