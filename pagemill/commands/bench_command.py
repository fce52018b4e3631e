"""How the measuring commands read their options and show them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import click


class BenchCommand(click.Command):
    """A command whose options come in sections.

    An option that is a list may be written with spaces between its numbers: `--batch-sizes 1 2 4`.

    Args:
        sections: options by the title under which the help lists them.
        list_options: names of the options that are lists.
    """

    def __init__(
        self,
        name: str,
        *,
        sections: Mapping[str, Sequence[click.Parameter]],
        list_options: Sequence[str] = (),
        **kwargs: Any,
    ) -> None:
        super().__init__(name, params=[option for options in sections.values() for option in options], **kwargs)
        self.context_settings = {"help_option_names": ["-h", "--help"], "max_content_width": 120}
        self._sections = sections
        self._list_options = frozenset(list_options)

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        return super().parse_args(ctx, join_lists(args, self._list_options))

    def format_options(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        for title, options in self._sections.items():
            with formatter.section(title):
                records = [option.get_help_record(ctx) for option in options if isinstance(option, click.Option)]
                formatter.write_dl([record for record in records if record is not None])


def join_lists(args: Sequence[str], list_options: frozenset[str]) -> list[str]:
    """Words behind an option of `list_options` that are numbers or "all", joined by commas."""
    joined: list[str] = []
    at = 0
    while at < len(args):
        word = args[at]
        joined.append(word)
        at += 1
        if word in list_options:
            values = []
            while at < len(args) and all(map(_is_list_item, args[at].rstrip(",").split(","))):
                values.append(args[at].rstrip(","))
                at += 1
            joined += [",".join(values)] if values else []
    return joined


def _is_list_item(word: str) -> bool:
    return word == "all" or word.replace(".", "", 1).isdecimal()


def number_option(name: str, help_text: str, *, default: int | None = None, least: int = 1) -> click.Option:
    """An integer of at least `least`."""
    shown = f"{help_text}  [default: {default}]" if default is not None else help_text
    return click.Option([name], type=click.IntRange(min=least), default=default, metavar="N", help=shown)


def amount_option(
    names: Sequence[str], help_text: str, *, default: float | None = None, metavar: str = "X"
) -> click.Option:
    """A number over zero."""
    shown = f"{help_text}  [default: {default:g}]" if default is not None else help_text
    kind = click.FloatRange(min=0, min_open=True)
    return click.Option(names, type=kind, default=default, metavar=metavar, help=shown)
