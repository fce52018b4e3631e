"""`pagemill bench throughput`: many prompts at once."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import click

from pagemill.bench import report
from pagemill.bench.engines import FreshWorkloads
from pagemill.bench.server_metrics import MetricsFile
from pagemill.bench.throughput import Case, Measurement
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
from pagemill.errors import ConfigError

_HELP = """Time many prompts of random token ids, with answers of an exact length, greedy.

Without --batch-sizes all prompts are given at once. With it there is one row per size, with at most that many requests
at a time: --num-prompts of them in all, or one batch where that is not given. Such rows also say what a decode step
takes: (time of a batch with N tokens out - time with one token out) / (N - 1).

Offline is `pagemill.LLM`, scheduler and model in one process without gRPC; http and grpc go through a server. Engines
run one after the other in processes of their own, with prompts that none has seen, so that no cache answers.

\b
pagemill bench throughput --shape llama-3-8b                                   1,000 prompts of 512, 256 out
pagemill bench throughput MODEL --batch-sizes 1,16,64,all --csv rows.csv       steps, and 1,000 prompts
pagemill bench throughput --shape llama-3-8b --serve --backend offline,http,grpc
pagemill bench throughput --shape llama-3-8b --case 128/128@1 --case 512/129@64 --peer transformers
pagemill bench throughput --base-url http://127.0.0.1:8000 --num-prompts 200
"""

_NUM_PROMPTS = 1000
_CASE = re.compile(r"(\d+)/(\d+)@(\d+|all)(?:x(\d+))?")
_SHOWN = {
    "backend": "backend", "input_len": "in", "output_len": "out", "num_prompts": "prompts", "batch_size": "at once",
    "elapsed_s": "s", "requests_per_second": "requests/s", "output_tokens_per_second": "out tokens/s",
    "total_tokens_per_second": "all tokens/s", "ms_per_step": "ms a step", "first_token_ms": "ms to first token",
    "ttft_ms_p50": "TTFT p50", "ttft_ms_p99": "p99",
}  # fmt: skip


def throughput_command() -> click.Command:
    workload: list[click.Parameter] = [
        *model_options(),
        number_option("--input-len", "Tokens of a prompt.", default=512),
        number_option("--output-len", "Tokens of an answer.", default=256),
        number_option(
            "--num-prompts", f"Prompts in all.  [default: {_NUM_PROMPTS}; a batch where --batch-sizes has a number]"
        ),
        click.Option(["--batch-sizes"], metavar="LIST", help="Requests at once, such as 1,16,64; all is every prompt."),
        click.Option(
            ["--case", "cases"],
            multiple=True,
            metavar="IN/OUT@SIZE[xN]",
            help="One more row, of lengths of its own: 128/128@1, 512/256@all, 512/256@16x64 (64 prompts). Repeatable.",
        ),
        number_option("--repeats", "Runs of each; the median counts.", default=1),
        number_option("--seed", "Of the prompts.", default=0, least=0),
    ]
    peer: list[click.Parameter] = [
        click.Option(
            ["--peer"],
            type=click.Choice(["transformers"]),
            metavar="transformers",
            help="Measure it beside Pagemill, in the same run: static batches and its continuous batching.",
        ),
        number_option("--peer-prompts", "Most prompts for the peer, which is slower.", default=64),
        number_option("--peer-batch-size", "Most prompts of its static batches.", default=16),
    ]
    backend = backend_option("offline, http, grpc", "offline, or what the address is")
    return BenchCommand(
        "throughput",
        sections={
            "What is measured": workload,
            "What measures": [backend, *target_options()],
            "Peers": peer,
            "Rows": row_options(),
            "Options of the engine, as of `pagemill serve`": engine_options(),
        },
        callback=_throughput,
        help=_HELP,
        list_options=("--batch-sizes",),
    )


def _throughput(
    csv_path: Path | None, json_path: Path | None, metrics_path: Path | None, label: str, **parameters: Any
) -> None:
    files = report.RowFiles(csv_path, json_path, report.THROUGHPUT_COLUMNS)
    metrics = MetricsFile(metrics_path)
    target = TargetChoice.take(parameters)
    backends = target.backends(parameters.pop("backend"), "offline")
    is_run_here = target.is_started or "offline" in backends or parameters["peer"] is not None
    with chosen_engine(parameters, is_run_here=is_run_here) as engine:
        plan = _make_plan(parameters, backends)
        about = report.context(engine.model, engine.shown(), label)
        rows: list[report.Row] = []
        try:
            for measurement in _measurements(plan, engine, target, metrics):
                row = {**about, **measurement.columns()}
                files.write(row)
                rows.append(row)
                click.echo(_line(measurement), err=True)
        finally:
            print_rows(rows, _SHOWN)


@dataclass(frozen=True, slots=True)
class _Plan:
    cases: Sequence[Case]
    backends: Sequence[str]
    repeats: int
    seed: int
    peer: str | None
    peer_prompts: int
    peer_batch_size: int


def _make_plan(parameters: dict[str, Any], backends: Sequence[str]) -> _Plan:
    cases = make_cases(
        parameters.pop("input_len"),
        parameters.pop("output_len"),
        parameters.pop("num_prompts"),
        parameters.pop("batch_sizes"),
        parameters.pop("cases"),
    )
    return _Plan(cases, backends, **parameters)


def make_cases(
    input_len: int, output_len: int, num_prompts: int | None, batch_sizes: str | None, more: Sequence[str]
) -> list[Case]:
    """Rows that the options ask for.

    Raises:
        ConfigError: a list or a case that cannot be read.
    """
    texts = list(more)
    if batch_sizes is not None:
        suffix = f"x{num_prompts}" if num_prompts is not None else ""
        sizes = batch_sizes.replace(",", " ").split()
        if not sizes:
            raise ConfigError("--batch-sizes is empty, must be numbers such as 1,16,64", field="batch_sizes")
        texts = [f"{input_len}/{output_len}@{size}{suffix}" for size in sizes] + texts
    elif not texts:
        texts = [f"{input_len}/{output_len}@all"]
    return [_case(text, num_prompts or _NUM_PROMPTS) for text in texts]


def _case(text: str, all_prompts: int) -> Case:
    match = _CASE.fullmatch(text)
    if match is None or "0" in (match[1], match[2], match[3], match[4]):
        raise ConfigError(
            f"{text!r} is no IN/OUT@SIZE such as 512/256@16, 512/256@all or 512/256@16x64", field="batch_sizes"
        )
    if match[3] == "all":
        count = int(match[4] or all_prompts)
        return Case(int(match[1]), int(match[2]), count, count, with_steps=False)
    count, size = int(match[4] or match[3]), int(match[3])
    return Case(int(match[1]), int(match[2]), count, min(size, count), with_steps=int(match[2]) > 1)


def _measurements(
    plan: _Plan, engine: EngineChoice, target: TargetChoice, metrics: MetricsFile
) -> Iterator[Measurement]:
    from pagemill.bench.engines import ServedEngine
    from pagemill.bench.isolated import isolated
    from pagemill.bench.load import LoadProcesses
    from pagemill.bench.throughput import measure, offline

    # Processes get copies and begin with the same prompts; both APIs of a server, which has one cache, share this one.
    workloads = FreshWorkloads(target.prompt_vocab_size(engine), plan.seed)
    if "offline" in plan.backends:
        click.echo("measuring offline", err=True)
        yield from isolated(offline, engine.args(), plan.cases, workloads, plan.repeats)
    with (
        LoadProcesses(target.num_processes) as processes,
        target.targets(engine, plan.backends, max(case.at_once for case in plan.cases)) as served,
    ):
        for each in served:
            click.echo(f"measuring {each.target.backend}", err=True)
            asked = ServedEngine(each.target, each.device, processes)
            for measurement in measure(asked, plan.cases, workloads, plan.repeats):
                yield measurement
                metrics.append(_title(measurement), each.metrics_urls)
    if plan.peer is not None:
        yield from _peer_measurements(plan, engine, workloads)


def _peer_measurements(plan: _Plan, engine: EngineChoice, workloads: FreshWorkloads) -> Iterator[Measurement]:
    from pagemill.bench.isolated import isolated
    from pagemill.bench.transformers_peer import PeerModel, transformers_rows

    assert engine.source is not None
    worker = engine.worker()
    model = PeerModel(engine.source, worker.load_format == "dummy", worker.dtype, worker.device)
    click.echo("measuring transformers", err=True)
    static_cases = peer_cases(plan.cases, plan.peer_prompts, plan.peer_batch_size)
    continuous_cases = peer_cases(plan.cases, plan.peer_prompts, plan.peer_prompts)
    yield from isolated(transformers_rows, model, static_cases, continuous_cases, workloads, plan.repeats)


def peer_cases(cases: Sequence[Case], most_prompts: int, most_at_once: int) -> list[Case]:
    """The same lengths with fewer prompts; where the size is cut, no step is timed: it would be one of another size."""
    return [
        Case(
            case.input_len,
            case.output_len,
            min(case.num_prompts, most_prompts),
            min(case.at_once, most_at_once, most_prompts),
            with_steps=case.with_steps and case.at_once <= min(most_at_once, most_prompts),
        )
        for case in cases
    ]


def _title(measurement: Measurement) -> str:
    case = measurement.case
    lengths = f"{case.num_prompts} prompts of {case.input_len}, {case.output_len} out"
    return f"{measurement.backend}: {lengths}, {case.at_once} at once"


def _line(measurement: Measurement) -> str:
    row = measurement.columns()
    step = f", {row['ms_per_step']:.3g} ms a step" if "ms_per_step" in row else ""
    return f"{_title(measurement)}: {row['requests_per_second']:.4g} requests/s{step}"
