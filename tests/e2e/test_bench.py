"""`pagemill bench` against real processes: every request is answered, with the asked number of tokens."""

from __future__ import annotations

import csv
import json
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from processes import Server

pytestmark = pytest.mark.e2e

ROOT = Path(__file__).resolve().parents[2]
SMALL = ("--input-len", "24", "--output-len", "6")


def measured(
    folder: Path, *arguments: str, script: tuple[str, ...] = ("-m", "pagemill.cli", "bench")
) -> list[dict[str, Any]]:
    """Rows of a run, as its CSV file has them; those of its JSON file must say the same."""
    files = ("--csv", str(folder / "rows.csv"), "--json", str(folder / "rows.jsonl"))
    command = [sys.executable, *script, *arguments, *files]
    run = subprocess.run(command, capture_output=True, text=True, timeout=240, cwd=ROOT)
    assert run.returncode == 0, run.stderr
    with (folder / "rows.csv").open(newline="") as file:
        rows = list(csv.DictReader(file))
    lines = [json.loads(line) for line in (folder / "rows.jsonl").read_text().splitlines()]
    assert [{name: str(value) for name, value in line.items()} for line in lines] == [
        {name: value for name, value in row.items() if value != ""} for row in rows
    ]
    assert all(row["date"] and row["device"] and arguments[-1] in row["command"] for row in rows)
    return rows


def test_throughput_through_both_apis_of_a_server(server: Server, tmp_path: Path) -> None:
    addresses = ("--base-url", server.http_url, "--address", server.grpc_address)
    rows = measured(tmp_path, "throughput", *addresses, *SMALL, "--num-prompts", "6", "--batch-sizes", "1", "4")
    assert [(row["backend"], row["batch_size"]) for row in rows] == [
        ("http", "1"), ("http", "4"), ("grpc", "1"), ("grpc", "4"),
    ]  # fmt: skip
    for row in rows:
        elapsed_s = float(row["elapsed_s"])
        assert float(row["requests_per_second"]) == pytest.approx(6 / elapsed_s, rel=1e-4)
        assert float(row["output_tokens_per_second"]) == pytest.approx(36 / elapsed_s, rel=1e-4)
        assert float(row["total_tokens_per_second"]) == pytest.approx(180 / elapsed_s, rel=1e-4)
        assert float(row["first_token_ms"]) > 0
        assert row["ms_per_step"]
        assert 0 < float(row["ttft_ms_p50"]) <= float(row["ttft_ms_p99"])
    server.wait_until_idle()


def test_latency_of_a_server(server: Server, tmp_path: Path) -> None:
    (row,) = measured(
        tmp_path, "latency", "--address", server.grpc_address, *SMALL, "--batch-size", "2", "--rounds", "3"
    )
    assert (row["backend"], row["batch_size"], row["num_rounds"]) == ("grpc", "2", "3")
    for name in ("ttft_ms", "tpot_ms", "e2e_ms"):
        assert 0 < float(row[f"{name}_p50"]) <= float(row[f"{name}_p90"]) <= float(row[f"{name}_p99"])
    assert float(row["ttft_ms_max"]) < float(row["e2e_ms_max"])


def test_load_of_growing_conversations_finds_what_was_said_in_the_cache(server: Server, tmp_path: Path) -> None:
    options = ("--workload", "multi-turn", "--turns", "3", "--num-requests", "4", "--request-rate", "20", "40")
    limits = ("--warm-up", "2", "--slo-ttft-ms", "100000", "--slo-tpot-ms", "0.0001")
    rows = measured(tmp_path, "serve", "--base-url", server.http_url, *SMALL, *options, *limits, "--seed", "77")
    assert [row["request_rate"] for row in rows] == ["20.0", "40.0"]
    for row in rows:
        assert (row["num_requests"], row["num_failed"], row["failures"]) == ("12", "0", "")
        assert float(row["cached_share"]) > 0.2
        assert float(row["goodput_share"]) == 0, "no token comes within a tenth of a microsecond"
        assert float(row["itl_ms_p99"]) > 0
        assert 0 < float(row["client_cpu_share"]) < 1


def test_engines_of_one_run_side_by_side(tmp_path: Path) -> None:
    script = ("benchmarks/throughput_benchmark.py",)
    metrics = tmp_path / "metrics.txt"
    engines = (
        "--serve",
        "--metrics-file",
        str(metrics),
        "--backend",
        "offline,http,grpc",
        "--peer",
        "transformers",
        "--device",
        "cpu",
    )
    rows = measured(tmp_path, "--shape", "tiny", *engines, *SMALL, "--num-prompts", "4", script=script)
    backends = [row["backend"] for row in rows]
    kept = re.findall(r"^# (\w+) after (\w+):", metrics.read_text(), re.MULTILINE)
    assert kept == [(name, api) for api in ("http", "grpc") for name in ("router", "scheduler", "worker")]
    assert backends[:3] == ["offline", "http", "grpc"]
    assert [backend.split()[0::2] for backend in backends[3:]] == [
        ["transformers", "static"], ["transformers", "continuous"],
    ]  # fmt: skip
    for row in rows:
        assert (row["model"], row["num_prompts"], row["options"]) == ("tiny", "4", "device=cpu load_format=dummy")
        assert float(row["requests_per_second"]) == pytest.approx(4 / float(row["elapsed_s"]), rel=1e-4)
        assert row["command"].startswith("python benchmarks/throughput_benchmark.py --shape tiny")
