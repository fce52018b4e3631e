"""`pagemill complete PROMPT`."""

from __future__ import annotations

import sys
from typing import Any

import click

from pagemill.commands.endpoint import ask_options, parse_ask_options

_HELP = """Continue PROMPT with a served model and print the text as it comes.

PROMPT is taken as it is, without a chat template; `-` reads it from stdin. Needs a running server, such as
`pagemill serve`."""


def command(name: str) -> click.Command:
    return click.Command(
        name,
        callback=_complete,
        params=[
            click.Argument(["prompt"], metavar="PROMPT"),
            click.Option(["--echo"], is_flag=True, help="Print the prompt first."),
            *ask_options(max_tokens=128),
        ],
        help=_HELP,
        context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 120},
    )


def _complete(prompt: str, echo: bool, **parameters: Any) -> None:
    options = parse_ask_options(parameters)
    text = sys.stdin.read() if prompt == "-" else prompt
    if echo:
        click.echo(text, nl=False)
    for piece in options.endpoint.complete(text, options.params):
        click.echo(piece, nl=False)
    click.echo()
