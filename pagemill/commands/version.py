"""`pagemill version`."""

from __future__ import annotations

import click

from pagemill import __version__


def command(name: str) -> click.Command:
    return click.Command(name, callback=lambda: click.echo(__version__), help="Print the version.")
