"""`pagemill config [SERVICE]`: the settings in force and where each came from."""

from __future__ import annotations

import json

import click

from pagemill.commands import serve, settings_options
from pagemill.config_loader import SERVICES, LoadedSettings

_HELP = """Print the settings in force and where each came from.

SERVICE is router, scheduler or worker, or serve for all four at once, as does no SERVICE. Further options are those of
the command of that name, so that `pagemill config serve --http-port 9000` shows what `pagemill serve --http-port 9000`
would run with, and refuses what that would refuse. Later ones win: defaults, the YAML file, the environment, the
command line. Secrets are masked."""


def command(name: str) -> click.Command:
    return click.Command(
        name,
        callback=_print_settings,
        params=[
            click.Argument(["service"], required=False, metavar="[SERVICE]"),
            click.Argument(["options"], nargs=-1, type=click.UNPROCESSED, metavar="[OPTIONS OF SERVICE]..."),
            click.Option(["--json", "as_json"], is_flag=True, help="One JSON object instead of a table."),
            click.Option(["--config-file"], metavar="FILE", help="YAML file.  [env: PAGEMILL_CONFIG_FILE]"),
        ],
        help=_HELP,
        context_settings={
            "help_option_names": ["-h", "--help"],
            "max_content_width": 120,
            "ignore_unknown_options": True,
        },
    )


def _print_settings(service: str | None, options: tuple[str, ...], as_json: bool, config_file: str | None) -> None:
    # An option may stand before the service; then click has taken it for the service.
    arguments = [item for item in (service, *options) if item is not None]
    names = [item for item in arguments[:1] if item in SERVICES]
    if arguments and not names:
        known = ", ".join(SERVICES)
        raise click.UsageError(f"{arguments[0]!r} is no service; services are {known}, and options come after one.")
    loaded: list[LoadedSettings] = []

    def keep(*settings: LoadedSettings) -> int:
        loaded.extend(settings)
        return 0

    name = names[0] if names else "serve"
    if name == "serve":
        parser = serve.serve_command(name, "", lambda settings: keep(*settings.values()))
    else:
        parser = settings_options.service_command(name, "", keep)
    file_arguments = ["--config-file", config_file] if config_file is not None else []
    parser.main([*file_arguments, *arguments[1:]], prog_name=f"pagemill config {name}", standalone_mode=False)
    if as_json:
        click.echo(json.dumps({item.service: _as_json(item) for item in loaded}, indent=2))
        return
    for item in loaded:
        _print_table(item)


def _as_json(loaded: LoadedSettings) -> dict[str, dict[str, object]]:
    return {name: {"value": value, "origin": origin} for name, value, origin in loaded.rows()}


def _print_table(loaded: LoadedSettings) -> None:
    from rich.console import Console
    from rich.table import Table

    table = Table(title=loaded.service, title_justify="left", title_style="bold", box=None, pad_edge=False)
    table.add_column("setting", overflow="fold")
    table.add_column("value", overflow="fold")
    table.add_column("origin", overflow="fold")
    for name, value, origin in loaded.rows():
        shown = "" if value is None else ",".join(value) if isinstance(value, list) else str(value)
        table.add_row(name, shown, origin, style="" if origin != "default" else "dim")
    console = Console()
    console.print(table)
    console.print()
