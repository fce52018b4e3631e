"""`pagemill top`: a live view of what a deployment does."""

from __future__ import annotations

import contextlib
import json
import math
import sys
import time
from typing import TYPE_CHECKING

import click

from pagemill.errors import ConfigError

if TYPE_CHECKING:
    from rich.console import Console

    from pagemill.top.deployment import Deployment

DEFAULT_ADDRESS = "http://127.0.0.1:8000"
_PLAIN_WIDTH = 140

_HELP = """Show live what a deployment does: routers, schedulers and workers, a table each.

An ADDRESS is where a process serves its metrics: a router's HTTP port, or the port that --metrics-port gave to a
router, a scheduler or a worker; host:port or a URL. Which of the three it is, is seen from what it tells. A router also
tells the load of each scheduler that it knows, without steps and prefix cache; those need the scheduler's own port.

\b
  pagemill serve --metrics-port 9100       router, scheduler and worker at 9100, 9101, 9102
  pagemill top 127.0.0.1:8000 127.0.0.1:9101 127.0.0.1:9102
  pagemill top --json | jq '.routers[0].requests_by_code'

Rates, shares and latencies are of the last interval, "-" where nothing happened in it. TTFT is the time to the first
token, "token" that between two tokens; both are estimates from histogram buckets. "cached" are the shares of questions
to the prompt cache for an answer and for the tokens of a prompt that it could answer. Errors are requests that ended
neither well nor by their client. An address that does not answer is "away", says why, and comes back by itself.

Ctrl-C ends it. Exit codes: 0; 1 where with --once or --json no address answered; 2 for a wrong command line. Where
stdout is no terminal, frames are plain text, one after the other."""


def command(name: str) -> click.Command:
    return click.Command(
        name,
        callback=_top,
        params=[
            click.Argument(["addresses"], nargs=-1, metavar="[ADDRESS]..."),
            click.Option(
                ["--interval"],
                type=click.FloatRange(min=0.1, max=3600),
                default=2.0,
                show_default=True,
                help="Seconds from one look to the next.",
            ),
            click.Option(
                ["--timeout"],
                type=click.FloatRange(min=0.1, max=600),
                default=2.0,
                show_default=True,
                help="Seconds for the answer of a process.",
            ),
            click.Option(["--once"], is_flag=True, help="Print one frame, after one interval, and end."),
            click.Option(["--json", "as_json"], is_flag=True, help="Print one frame as JSON, after one interval."),
            click.Option(["--api-key"], default="", envvar="PAGEMILL_API_KEY", help="Key.  [env: PAGEMILL_API_KEY]"),
        ],
        help=f"{_HELP}\n\nDefault ADDRESS: {DEFAULT_ADDRESS}",
        context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 120},
    )


def _top(addresses: tuple[str, ...], interval: float, timeout: float, once: bool, as_json: bool, api_key: str) -> None:
    from pagemill.top.deployment import Deployment
    from pagemill.top.scrape import parse_address

    if not (math.isfinite(interval) and math.isfinite(timeout)):
        raise ConfigError("--interval and --timeout must be numbers of seconds", field="interval")
    if not (api_key.isascii() and api_key.isprintable()):
        raise ConfigError("--api-key must be of printable ASCII characters", field="api_key")
    parsed = [parse_address(address) for address in addresses or (DEFAULT_ADDRESS,)]
    deployment = Deployment(parsed, api_key, timeout)
    with contextlib.suppress(KeyboardInterrupt):
        if once or as_json:
            _show_one(deployment, interval, as_json)
        else:
            _show_live(deployment, interval)


def _show_one(deployment: Deployment, interval_s: float, as_json: bool) -> None:
    deployment.look()
    time.sleep(interval_s)
    frame = deployment.look()
    if as_json:
        click.echo(json.dumps(frame.to_json(), indent=2))
    else:
        from pagemill.top.view import render

        _console().print(render(frame))
    if frame.is_empty:
        raise click.exceptions.Exit(1)


def _show_live(deployment: Deployment, interval_s: float) -> None:
    from rich.live import Live

    from pagemill.top.view import render

    console = _console()
    if not console.is_terminal:
        while True:
            started_s = time.monotonic()
            console.print(render(deployment.look()), end="\n\n")
            sys.stdout.flush()
            _sleep_until(started_s + interval_s)
    with Live(console=console, screen=True, auto_refresh=False) as live:
        while True:
            started_s = time.monotonic()
            live.update(render(deployment.look()), refresh=True)
            _sleep_until(started_s + interval_s)


def _console() -> Console:
    from rich.console import Console

    is_terminal = sys.stdout.isatty()
    return Console(highlight=False, width=None if is_terminal else _PLAIN_WIDTH)


def _sleep_until(time_s: float) -> None:
    time.sleep(max(0.0, time_s - time.monotonic()))
