"""`pagemill bench serve`: a server under load."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, get_args

import click

from pagemill.bench import report
from pagemill.bench.arrivals import OpenLoop
from pagemill.bench.load import LoadProcesses, num_requests
from pagemill.bench.load_plan import NUM_REQUESTS, LoadPlan, LoadPoint, WorkloadName
from pagemill.bench.plot import PlottedLoad, check_plot, write_plot
from pagemill.bench.server_metrics import MetricsFile
from pagemill.bench.serving import LoadSamples, load_columns
from pagemill.bench.workloads import FixedLengths, TokenSource, Workload
from pagemill.commands.bench_command import BenchCommand, amount_option, number_option
from pagemill.commands.bench_options import (
    ServedTarget,
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

_HELP = """Put load on a server and say what its clients see: time to the first token (TTFT), time between pieces of a
stream (ITL), mean time per token after the first (TPOT), time to the end (E2E), failures by kind, and goodput: requests
a second that kept to the latencies of --slo-ttft-ms and --slo-tpot-ms.

--request-rate is an open loop: conversations begin at random times, however many are running. --concurrency is a closed
loop: so many at once, the next when one ends. Lists give one row each. Requests are greedy, of random token ids and
exact lengths; an answer of another length fails the run.

\b
Workloads:
  fixed          every prompt and answer as long as the others
  chat           log-normal lengths around the medians --input-len and --output-len
  shared-prefix  prompts that begin with one of --num-prefixes prefixes of --prefix-len tokens
  multi-turn     conversations of --turns turns, each sending all that was said and --input-len new tokens

\b
pagemill bench serve MODEL --serve --request-rate 8,16,24 --num-requests 400 --csv rows.csv
pagemill bench serve --base-url http://127.0.0.1:8000 --concurrency 64 --duration 60 --workload chat
pagemill bench serve --address 127.0.0.1:50051 --workload multi-turn --request-rate 4 --slo-ttft-ms 200 --slo-tpot-ms 25
"""

_BUSY_CLIENT = 0.8
_LATE_MS = 10.0
_CACHED_SHARE = 0.01
_SHOWN = {
    "backend": "backend", "request_rate": "rate", "concurrency": "at once", "num_requests": "requests",
    "num_failed": "failed", "requests_per_second": "requests/s", "output_tokens_per_second": "out tokens/s",
    "ttft_ms_p50": "TTFT ms p50", "ttft_ms_p90": "p90", "ttft_ms_p99": "p99", "itl_ms_p50": "ITL ms p50",
    "itl_ms_p99": "p99 ", "tpot_ms_p50": "TPOT ms p50", "tpot_ms_p90": "p90 ", "tpot_ms_p99": "p99  ",
    "e2e_ms_p50": "E2E ms p50", "e2e_ms_p99": "p99   ", "goodput_requests_per_second": "good/s",
    "cached_share": "cached",
}  # fmt: skip


def serve_command() -> click.Command:
    plot = click.Option(
        ["--plot", "plot_path"],
        type=click.Path(dir_okay=False, path_type=Path),
        metavar="FILE.png",
        help="Draw distributions, and percentiles against the load; needs matplotlib.",
    )
    return BenchCommand(
        "serve",
        sections={
            "What is asked": _workload_options(),
            "When": _schedule_options(),
            "Which server": [*model_options(), backend_option("http, grpc", "what the address is"), *target_options()],
            "Rows": [*_objective_options(), *row_options(), plot],
            "Options of the engine of --serve": engine_options(),
        },
        callback=_serve,
        help=_HELP,
        list_options=("--request-rate", "--concurrency"),
    )


def _workload_options() -> list[click.Parameter]:
    return [
        click.Option(
            ["--workload"],
            type=click.Choice(get_args(WorkloadName)),
            default="fixed",
            help="See above.  [default: fixed]",
        ),
        number_option("--input-len", "Tokens of a prompt.", default=512),
        number_option("--output-len", "Tokens of an answer.", default=256),
        click.Option(
            ["--length-sigma"],
            type=click.FloatRange(0, 3),
            default=0.8,
            metavar="X",
            help="chat: standard deviation of the logarithm of lengths, 0 to 3.  [default: 0.8]",
        ),
        number_option(
            "--prefix-len", "shared-prefix: tokens of --input-len that are shared.  [default: three quarters]"
        ),
        number_option("--num-prefixes", "shared-prefix: how many prefixes there are.", default=8),
        number_option("--turns", "multi-turn: requests of each conversation.", default=4),
        click.Option(
            ["--pause-s"],
            type=click.FloatRange(min=0),
            default=0.0,
            metavar="S",
            help="multi-turn: mean pause of a person before a turn.  [default: 0]",
        ),
        number_option("--seed", "Of prompts, lengths and arrivals.", default=0, least=0),
    ]


def _schedule_options() -> list[click.Parameter]:
    return [
        click.Option(
            ["--request-rate"], metavar="LIST", help="Conversations a second, such as 8,16,24; inf is all at once."
        ),
        amount_option(
            ["--burstiness"],
            "Squared variation of the gaps between arrivals: 1 is Poisson, 4 comes in bursts, 0.25 is even.",
            default=1.0,
        ),
        click.Option(["--concurrency"], metavar="LIST", help="Conversations at once, such as 1,16,64.  [default: 16]"),
        number_option(
            "--num-requests", f"Conversations of each row.  [default: {NUM_REQUESTS}, or what --duration holds]"
        ),
        amount_option(["--duration", "duration_s"], "Begin no conversation after so many seconds.", metavar="S"),
        number_option("--warm-up", "Requests that come before and do not count.", default=16, least=0),
        amount_option(["--timeout-s"], "A request that takes longer has failed.", default=600.0, metavar="S"),
    ]


def _objective_options() -> list[click.Parameter]:
    return [
        amount_option(["--slo-ttft-ms"], "A request with a longer TTFT does not count as good.", metavar="MS"),
        amount_option(["--slo-tpot-ms"], "A request with a longer TPOT does not count as good.", metavar="MS"),
    ]


def _serve(
    csv_path: Path | None,
    json_path: Path | None,
    metrics_path: Path | None,
    plot_path: Path | None,
    label: str,
    **parameters: Any,
) -> None:
    files = report.RowFiles(csv_path, json_path, report.SERVE_COLUMNS)
    if plot_path is not None:
        check_plot(plot_path)
    metrics = MetricsFile(metrics_path)
    target = TargetChoice.take(parameters)
    backends = target.backends(parameters.pop("backend"), "http")
    if "offline" in backends:
        raise ConfigError("--backend offline: bench serve asks a server; of http, grpc", field="backend")
    with chosen_engine(parameters, is_run_here=target.is_started) as engine:
        plan = LoadPlan(**parameters)
        plan.check()
        about = report.context(engine.model, engine.shown(), label)
        rows: list[report.Row] = []
        plotted: list[PlottedLoad] = []
        try:
            with (
                LoadProcesses(target.num_processes) as processes,
                target.targets(engine, backends, plan.most_at_once) as served,
            ):
                runner = _Runner(plan, target.prompt_vocab_size(engine), processes, metrics)
                for each in served:
                    for load in runner.loads(each):
                        row = {**about, **load.row}
                        files.write(row)
                        rows.append(row)
                        plotted.append(load)
        finally:
            print_rows(rows, _SHOWN)
        if plot_path is not None:
            write_plot(plot_path, f"{rows[0]['model']} on {rows[0]['device']}", plan.axis, plotted)
            click.echo(f"drawn: {plot_path}", err=True)


class _Runner:
    """Runs all loads of the plan on one server after the other, each with prompts that none has seen."""

    def __init__(self, plan: LoadPlan, vocab_size: int, processes: LoadProcesses, metrics: MetricsFile) -> None:
        self._plan = plan
        self._vocab_size = vocab_size
        self._processes = processes
        self._metrics = metrics
        self._num_made = 0

    def loads(self, served: ServedTarget) -> Iterator[PlottedLoad]:
        """Raises PagemillError where an answer has a wrong length or no request of a load succeeds."""
        workloads = [self._plan.make_workload(self._tokens(), served.max_model_len) for _ in self._plan.points]
        self._warm_up(served)
        for point, workload in zip(self._plan.points, workloads, strict=True):
            yield self._load(served, point, workload)

    def _tokens(self) -> TokenSource:
        self._num_made += 1
        return TokenSource(self._vocab_size, self._plan.seed * 1_000_003 + self._num_made)

    def _warm_up(self, served: ServedTarget) -> None:
        if self._plan.warm_up:
            workload = FixedLengths(self._tokens(), self._plan.input_len, min(16, self._plan.output_len))
            self._processes.run(served.target, workload, OpenLoop((0.0,) * self._plan.warm_up)).require_all()

    def _load(self, served: ServedTarget, point: LoadPoint, workload: Workload) -> PlottedLoad:
        plan = self._plan
        schedule = plan.schedule(point, plan.seed)
        name = f"{served.target.backend}, {point.name}"
        with _progress_bar(name, num_requests(workload, schedule)) as show:
            result = self._processes.run(served.target, workload, schedule, timeout_s=plan.timeout_s, on_progress=show)
        self._metrics.append(name, served.metrics_urls)
        samples = LoadSamples.of(result.answers)
        row: dict[str, object] = {
            "backend": served.target.backend,
            "device": served.device,
            "model": served.target.model,
            "workload": plan.workload,
            "input_len": plan.input_len,
            "output_len": plan.output_len,
            "request_rate": point.rate,
            "burstiness": plan.burstiness if point.rate is not None else None,
            "concurrency": point.concurrency,
            "slo_ttft_ms": plan.slo_ttft_ms,
            "slo_tpot_ms": plan.slo_tpot_ms,
            "seed": plan.seed,
            **load_columns(result, samples, plan.objective),
        }
        _warn(row)
        result.require_lengths()
        if not samples.first_token_s:
            result.require_all()
        return PlottedLoad(name, point.at, samples, row)


def _warn(row: dict[str, Any]) -> None:
    """Say where the figures may be those of the clients."""
    if row["client_cpu_share"] > _BUSY_CLIENT:
        click.echo(
            f"warning: a process that makes the load was busy for {row['client_cpu_share']:.0%} of the time: "
            "take more --load-processes",
            err=True,
        )
    if row["late_ms_p99"] > _LATE_MS:
        click.echo(f"warning: one request in a hundred was sent {row['late_ms_p99']:.0f} ms late or later", err=True)
    if row["workload"] in ("fixed", "chat") and row["cached_share"] > _CACHED_SHARE:
        click.echo(
            f"warning: {row['cached_share']:.0%} of the prompts were in the server's cache, from an earlier run: "
            "take another --seed",
            err=True,
        )
    if row["num_failed"]:
        click.echo(f"failed: {row['failures']}", err=True)


@contextlib.contextmanager
def _progress_bar(title: str, total: int | None) -> Iterator[Callable[[int], None]]:
    """Ended requests on stderr: a bar on a terminal, else a line at the end."""
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

    console = Console(stderr=True)
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    with Progress(*columns, console=console, disable=not console.is_terminal) as progress:
        task = progress.add_task(title, total=total)
        yield lambda count: progress.update(task, completed=count)
    if not console.is_terminal:
        click.echo(f"{title}: done", err=True)
