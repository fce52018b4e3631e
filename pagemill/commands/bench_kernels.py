"""`pagemill bench kernels`: the kernels of this machine, beside others that do the same."""

from __future__ import annotations

import shlex
import sys
from pathlib import Path

import click

from pagemill.commands.bench_options import FILE
from pagemill.errors import ConfigError

# Wide enough that a line of the table stays one line in a file.
_PIPE_WIDTH = 200

_HELP = """Time the kernels, beside torch and FlashInfer where these do the same.

Each line says how long a kernel takes, the bytes or operations a second that it reaches, and its floor: the bytes that
it must move at the bandwidth, or the operations at the rate of products, that are measured in the same run on the same
device. What is read has left the caches; times are medians.

\b
pagemill bench kernels --quick                        one shape of each kernel, on the CPU
pagemill bench kernels --device cuda --csv rows.csv   all of them on the GPU, appended to a file
"""


def kernels_command() -> click.Command:
    options: list[click.Parameter] = [
        click.Option(
            ["--device"], type=click.Choice(["cpu", "cuda"]), help="Where they run.  [default: cuda where there is one]"
        ),
        click.Option(["--kernel", "kernels"], multiple=True, metavar="NAME", help="This kernel alone; repeatable."),
        click.Option(["--quick"], is_flag=True, help="Few shapes, shorter timings."),
        click.Option(["--csv", "csv_path"], type=FILE, metavar="FILE", help="Append the rows to this file."),
        click.Option(["--jsonl", "jsonl_path"], type=FILE, metavar="FILE", help="The same, one JSON object a line."),
        click.Option(["--dry-run"], is_flag=True, help="Tiny shapes, each run once: shows that all of them run."),
    ]
    return click.Command("kernels", params=options, callback=_bench_kernels, help=_HELP)


def _bench_kernels(
    device: str | None,
    kernels: tuple[str, ...],
    quick: bool,
    csv_path: Path | None,
    jsonl_path: Path | None,
    dry_run: bool,
) -> None:
    for path in (csv_path, jsonl_path):
        if path is not None and not path.parent.is_dir():
            raise ConfigError(f"{path}: there is no folder {path.parent}", field="csv" if path is csv_path else "jsonl")
    import torch
    from rich.console import Console

    from worker.bench import report, runner, suite

    site = suite.make_site(device or ("cuda" if torch.cuda.is_available() else "cpu"), is_dry=dry_run)
    cases = suite.choose_cases(site, kernels, is_quick=quick)
    progress = Console(stderr=True)
    about = report.context(site, shlex.join(["pagemill", *sys.argv[1:]]))
    rows = []
    with torch.inference_mode(), progress.status("measuring the device") as status:
        for row in runner.run(site, cases, runner.make_timer(site, is_quick=quick)):
            rows.append(row)
            status.update(f"{row.kernel} {row.shape}: {row.implementation}")
            # At once, so that a run that is stopped leaves what it has measured.
            if csv_path is not None:
                report.append_csv(csv_path, [row], about)
            if jsonl_path is not None:
                report.append_jsonl(jsonl_path, [row], about)
    width = None if sys.stdout.isatty() else _PIPE_WIDTH
    console = Console(width=width)
    console.print(f"{about['device']}, torch {about['torch']}, {about['date']}")
    console.print(report.table(rows))
    for line in report.summary(rows):
        console.print(line)
    for line in report.failures(rows):
        console.print(f"failed: {line}", markup=False, highlight=False)
    if any(row.error and row.implementation == runner.OURS for row in rows):
        raise click.exceptions.Exit(1)
