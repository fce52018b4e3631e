"""A start that cannot work ends at once with one clear line and a non-zero exit code."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
from pathlib import Path

import psutil
import pytest
from processes import serve, wait_until

pytestmark = pytest.mark.e2e


def failed_start(*args: str, env: dict[str, str] | None = None) -> str:
    """What a start that must fail printed; a traceback is never part of it."""
    command = [sys.executable, "-m", "pagemill.cli", *args]
    run = subprocess.run(command, capture_output=True, text=True, timeout=90, env=os.environ | (env or {}))
    assert run.returncode != 0
    text = run.stdout + run.stderr
    assert "Traceback" not in text, text
    return text


PORTS = ["--http-port", "0", "--grpc-port", "0", "--port", "0"]


def test_unknown_model_path_is_named() -> None:
    assert "no/such/model" in failed_start("serve", "./no/such/model", *PORTS)


def test_missing_tokenizer_files_are_named(tmp_path: Path) -> None:
    config = {"architectures": ["LlamaForCausalLM"], "model_type": "llama", "vocab_size": 8, "hidden_size": 64}
    (tmp_path / "config.json").write_text(json.dumps(config))
    assert "tokenizer.json" in failed_start("serve", str(tmp_path), *PORTS)


def test_an_unsupported_architecture_lists_the_supported_ones(tmp_path: Path) -> None:
    config = {"architectures": ["MadeUpForCausalLM"], "model_type": "madeup"}
    (tmp_path / "config.json").write_text(json.dumps(config))
    text = failed_start("worker", str(tmp_path), "--scheduler", "127.0.0.1:1")
    line = next(line for line in text.splitlines() if "MadeUpForCausalLM" in line)
    assert "LlamaForCausalLM" in line
    assert "Qwen2ForCausalLM" in line


def test_a_port_in_use_is_named() -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = str(taken.getsockname()[1])
        assert port in failed_start("serve", "--http-port", port, "--grpc-port", "0", "--port", "0")
        assert port in failed_start("scheduler", "--port", port)


def test_unknown_yaml_keys_are_refused_by_name(tmp_path: Path) -> None:
    file = tmp_path / "pagemill.yaml"
    file.write_text("scheduler:\n  max_num_sequences: 4\n")
    text = failed_start("serve", "--config-file", str(file))
    assert "max_num_sequences" in text
    assert "max_num_seqs" in text


def test_an_unknown_environment_setting_is_refused_by_name() -> None:
    assert "PAGEMILL_ROUTER_HTPP_PORT" in failed_start("router", env={"PAGEMILL_ROUTER_HTPP_PORT": "1"})


def test_a_value_out_of_range_names_its_option() -> None:
    assert "max-num-seqs" in failed_start("scheduler", "--max-num-seqs", "0").replace("_", "-")


def test_config_prints_values_and_where_they_come_from(tmp_path: Path) -> None:
    file = tmp_path / "pagemill.yaml"
    file.write_text("scheduler:\n  max_num_seqs: 17\n")
    command = [sys.executable, "-m", "pagemill.cli", "config", "scheduler", "--config-file", str(file), "--json"]
    env = os.environ | {"PAGEMILL_SCHEDULER_PORT": "6001"}
    run = subprocess.run(command, capture_output=True, text=True, timeout=60, env=env, check=True)
    assert "17" in run.stdout
    assert "PAGEMILL_SCHEDULER_PORT" in run.stdout
    assert "pagemill.yaml" in run.stdout


def test_a_killed_supervisor_leaves_no_orphan() -> None:
    with pytest.raises(AssertionError, match="exit code"), serve() as server:
        children = psutil.Process(server.process.pid).children(recursive=True)
        assert len(children) >= 3
        os.kill(server.process.pid, signal.SIGKILL)
        gone, alive = psutil.wait_procs(children, timeout=10)
        assert not alive, alive
        assert len(gone) == len(children)


def test_a_killed_worker_is_replaced_and_its_streams_go_on() -> None:
    import asyncio

    from pagemill.client import AsyncClient
    from pagemill.sampling_params import SamplingParams

    with serve("--dtype", "float32") as server:

        async def run() -> None:
            async with AsyncClient(server.grpc_address) as client:
                params = [
                    SamplingParams(temperature=0 if i % 2 else 0.9, seed=i, max_tokens=150, ignore_eos=True)
                    for i in range(6)
                ]
                undisturbed = await asyncio.gather(*(client.generate(f"Tale {i}:", p) for i, p in enumerate(params)))
                streams = [
                    asyncio.create_task(client.generate(f"Tale {i}:", p, cache_salt="again"))
                    for i, p in enumerate(params)
                ]
                before = server.metric("pagemill:generation_tokens_total")
                await asyncio.to_thread(
                    wait_until, lambda: server.metric("pagemill:generation_tokens_total") > before + 100, 30, "tokens"
                )
                os.kill(server.process.ready["pids"]["worker"], signal.SIGKILL)
                disturbed = await asyncio.gather(*streams)
                for whole, cut in zip(undisturbed, disturbed, strict=True):
                    assert cut.outputs[0].token_ids == whole.outputs[0].token_ids
                    assert cut.outputs[0].text == whole.outputs[0].text

        asyncio.run(run())
        server.wait_until_idle()
