"""`pagemill bench make-model`: a model directory without weights."""

from __future__ import annotations

from pathlib import Path

import click

from pagemill.bench.model_files import SHAPES, write_model
from pagemill.errors import ConfigError

_HELP = """Write config.json and tokenizer.json of a shape into a directory, for `--load-format dummy`.

The tokenizer is a byte-level one of the model's vocabulary size; it knows runs of letters and no language.

\b
pagemill bench make-model --shape llama-3-8b --out ./llama-3-8b
pagemill serve ./llama-3-8b --load-format dummy
"""


def make_model_command() -> click.Command:
    options: list[click.Parameter] = [
        click.Option(["--shape"], type=click.Choice(SHAPES), required=True, help="Which shape."),
        click.Option(
            ["--out", "directory"],
            type=click.Path(file_okay=False, path_type=Path),
            required=True,
            metavar="DIR",
            help="Directory, made where it is missing.",
        ),
        click.Option(["--layers"], type=click.IntRange(min=1), help="Fewer or more layers than the shape has."),
    ]
    return click.Command(
        "make-model",
        params=options,
        callback=_make_model,
        help=_HELP,
        context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 120},
    )


def _make_model(shape: str, directory: Path, layers: int | None) -> None:
    if (directory / "config.json").exists():
        raise ConfigError(f"{directory} holds a config.json already; name another directory", field="out")
    write_model(directory, shape, num_layers=layers)
    click.echo(str(directory))
