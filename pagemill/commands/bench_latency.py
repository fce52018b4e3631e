"""`pagemill bench latency`: one batch at a time."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import click

from pagemill.bench import report
from pagemill.bench.latency import LatencyPlan, LatencySamples
from pagemill.bench.server_metrics import MetricsFile
from pagemill.commands.bench_command import BenchCommand, number_option
from pagemill.commands.bench_options import (
    EngineChoice,
    TargetChoice,
    backend_option,
    chosen_engine,
    engine_options,
    model_options,
    print_rows,
    row_options,
    target_options,
)

_HELP = """Time one batch at a time: to the first token (TTFT), for each token after it (TPOT), to the end (E2E).

Offline is `pagemill.LLM`, which returns whole answers: its first token is timed by batches that ask for one token.
Through a server, the times at which pieces of the streams arrive count. Prompts are random and none comes twice.

\b
pagemill bench latency --shape llama-3-8b --input-len 128 --output-len 128
pagemill bench latency MODEL --serve --backend offline,http,grpc --csv rows.csv
pagemill bench latency --address 127.0.0.1:50051 --batch-size 16
"""

_SHOWN = {
    "backend": "backend", "input_len": "in", "output_len": "out", "batch_size": "at once", "ttft_ms_p50": "TTFT ms p50",
    "ttft_ms_p90": "p90", "ttft_ms_p99": "p99", "tpot_ms_p50": "TPOT ms p50", "tpot_ms_p90": "p90 ",
    "tpot_ms_p99": "p99 ", "e2e_ms_p50": "E2E ms p50", "e2e_ms_p99": "p99  ",
}  # fmt: skip


def latency_command() -> click.Command:
    workload: list[click.Parameter] = [
        *model_options(),
        number_option("--input-len", "Tokens of a prompt.", default=128),
        number_option("--output-len", "Tokens of an answer.", default=128),
        number_option("--batch-size", "Requests at once.", default=1),
        number_option("--rounds", "Batches that are timed.", default=20),
        number_option("--seed", "Of the prompts.", default=0, least=0),
    ]
    backend = backend_option("offline, http, grpc", "offline, or what the address is")
    return BenchCommand(
        "latency",
        sections={
            "What is measured": workload,
            "What measures": [backend, *target_options()],
            "Rows": row_options(),
            "Options of the engine, as of `pagemill serve`": engine_options(),
        },
        callback=_latency,
        help=_HELP,
    )


def _latency(
    csv_path: Path | None, json_path: Path | None, metrics_path: Path | None, label: str, **parameters: Any
) -> None:
    files = report.RowFiles(csv_path, json_path, report.LATENCY_COLUMNS)
    metrics = MetricsFile(metrics_path)
    target = TargetChoice.take(parameters)
    names = ("input_len", "output_len", "batch_size", "rounds")
    plan = LatencyPlan(*(parameters.pop(name) for name in names))
    backends = target.backends(parameters.pop("backend"), "offline")
    seed = parameters.pop("seed")
    is_run_here = target.is_started or "offline" in backends
    with chosen_engine(parameters, is_run_here=is_run_here) as engine:
        about = report.context(engine.model, engine.shown(), label)
        rows: list[report.Row] = []
        try:
            for samples in _samples(plan, backends, engine, target, seed, metrics):
                row = {**about, **samples.columns(plan)}
                files.write(row)
                rows.append(row)
        finally:
            print_rows(rows, _SHOWN)


def _samples(
    plan: LatencyPlan, backends: list[str], engine: EngineChoice, target: TargetChoice, seed: int, metrics: MetricsFile
) -> Iterator[LatencySamples]:
    from pagemill.bench.engines import FreshWorkloads
    from pagemill.bench.isolated import isolated
    from pagemill.bench.latency import offline_latency, served_latency

    workloads = FreshWorkloads(target.prompt_vocab_size(engine), seed)
    if "offline" in backends:
        click.echo("measuring offline", err=True)
        yield from isolated(offline_latency, engine.args(), plan, workloads)
    with target.targets(engine, backends, plan.batch_size) as served:
        for each in served:
            click.echo(f"measuring {each.target.backend}", err=True)
            yield served_latency(each.target, each.device, plan, workloads)
            metrics.append(f"latency, {each.target.backend}", each.metrics_urls)
