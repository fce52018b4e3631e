"""`pagemill bench`: measurements of kernels, engines and servers."""

from __future__ import annotations

import click

from pagemill.commands.bench_kernels import kernels_command
from pagemill.commands.bench_latency import latency_command
from pagemill.commands.bench_model import make_model_command
from pagemill.commands.bench_serve import serve_command
from pagemill.commands.bench_throughput import throughput_command

_HELP = """Measure kernels, engines and servers.

\b
throughput   many prompts at once: requests and tokens a second, time of a decode step
latency      one batch at a time: time to the first token, time of each further token
serve        a server under load: percentiles, goodput, failures
kernels      each kernel beside others that do the same
make-model   a model directory without weights, for --load-format dummy

docs/benchmarks.md says how each figure is taken."""


def command(name: str) -> click.Command:
    return click.Group(
        name,
        commands=[
            throughput_command(),
            latency_command(),
            serve_command(),
            kernels_command(),
            make_model_command(),
        ],
        help=_HELP,
        context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 120},
    )
