"""Command-line options made from the settings models: one option per setting, nothing listed twice."""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any, Literal, get_args, get_origin

import click
from pydantic.fields import FieldInfo
from pydantic_core import PydanticUndefined

from pagemill.config import CommonSettings
from pagemill.config_loader import (
    SERVICES,
    LoadedSettings,
    environment_name,
    is_list,
    load_settings,
    option_name,
    plain_type,
)

# A word that may be capitalised; `redis://` and names with dots are written as they are.
_PLAIN_WORD = re.compile(r"[a-z]+(?=[\s,;]|$)")
_CONFIG_FILE_PARAMETER = "config_file"
_MODEL_PARAMETER = "model_argument"


@dataclass(frozen=True, slots=True)
class OptionSpec:
    """One option.

    Attributes:
        parameter: name of the value in the parsed command line.
        service: whose setting it is; "common" where several services take it.
        setting: name of the setting.
        alias: a second way to write the option, empty where there is none.
    """

    parameter: str
    service: str
    setting: str
    field: FieldInfo
    alias: str = ""


class GroupedCommand(click.Command):
    """A command whose help lists the options by service."""

    def __init__(self, *args: Any, specs: Iterable[OptionSpec], **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._section_of = {spec.parameter: spec.service for spec in specs}

    def format_options(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        sections: dict[str, list[tuple[str, str]]] = {}
        for parameter in self.get_params(ctx):
            record = parameter.get_help_record(ctx)
            if record is not None and isinstance(parameter, click.Option):
                sections.setdefault(self._section_of.get(parameter.name or "", ""), []).append(record)
        titles = {"": "Options", "common": "Options of all processes"}
        for section in ("", *SERVICES, "common"):
            if section in sections:
                with formatter.section(titles.get(section, f"Options of the {section}")):
                    formatter.write_dl(sections[section])


def service_specs(service: str) -> list[OptionSpec]:
    """All options of one service."""
    fields = SERVICES[service].model_fields
    return [
        OptionSpec(name, "common" if name in CommonSettings.model_fields else service, name, field)
        for name, field in fields.items()
    ]


def build_options(specs: Iterable[OptionSpec]) -> list[click.Parameter]:
    """The click options of `specs`, and --config-file. Values stay text: the settings model judges them."""
    options: list[click.Parameter] = [
        click.Option(
            ["--config-file", _CONFIG_FILE_PARAMETER],
            metavar="FILE",
            help="YAML file with sections common, router, scheduler, worker, serve.  [env: PAGEMILL_CONFIG_FILE]",
        )
    ]
    options += [_option(spec) for spec in specs]
    return options


def _option(spec: OptionSpec) -> click.Option:
    flag = option_name(spec.parameter)
    help_text = _help(spec)
    if plain_type(spec.field) is bool:
        return click.Option([f"{flag}/--no-{flag[2:]}", spec.parameter], default=None, help=help_text)
    return click.Option(
        [flag, *([spec.alias] if spec.alias else []), spec.parameter],
        type=str,
        multiple=is_list(spec.field),
        default=None,
        metavar=_metavar(spec.field),
        help=help_text,
    )


def _metavar(field: FieldInfo) -> str:
    kind = plain_type(field)
    if get_origin(kind) is Literal:
        return "[" + "|".join(map(str, get_args(kind))) + "]"
    return {int: "INT", float: "FLOAT", str: "TEXT"}.get(kind, "TEXT")


def _help(spec: OptionSpec) -> str:
    default = spec.field.default
    if default is PydanticUndefined and spec.field.default_factory is not None:
        default = ",".join(spec.field.default_factory())  # type: ignore[call-arg]
    variable = f"PAGEMILL_{spec.setting}".upper()
    if spec.service != "common":
        variable = environment_name(spec.service, spec.setting)
    shown = (
        "" if default in (None, "") else f"default: {str(default).lower() if isinstance(default, bool) else default}; "
    )
    description = spec.field.description or ""
    if _PLAIN_WORD.match(description):
        description = description[:1].upper() + description[1:]
    return f"{description}.  [{shown}env: {variable}]"


def given(parameters: Mapping[str, Any]) -> dict[str, Any]:
    """What was written on the command line, without what was left out."""
    return {name: value for name, value in parameters.items() if value is not None and value != ()}


def model_argument() -> click.Argument:
    """MODEL, the short way to write --model."""
    return click.Argument([_MODEL_PARAMETER], required=False, metavar="[MODEL]")


def with_model_argument(parameters: dict[str, Any]) -> dict[str, Any]:
    """What was written on the command line, with MODEL under the name of its setting."""
    model = parameters.pop(_MODEL_PARAMETER, None)
    options = given(parameters)
    if model is not None:
        if options.get("model", model) != model:
            raise click.UsageError(f"two models: {model!r} and --model {options['model']!r}")
        options["model"] = model
    return options


def load(service: str, config_file: str | None, options: Mapping[str, Any]) -> LoadedSettings:
    """Settings of one service from this process's environment."""
    return load_settings(service, config_file=config_file, environment=os.environ, options=options)


def service_command(service: str, help_text: str, run: Callable[[LoadedSettings], int]) -> click.Command:
    """A command with all options of `service` that calls `run` with its settings and exits with what it returns."""
    specs = service_specs(service)

    def callback(**parameters: Any) -> None:
        config_file = parameters.pop(_CONFIG_FILE_PARAMETER)
        raise click.exceptions.Exit(run(load(service, config_file, with_model_argument(parameters))))

    arguments = [model_argument()] if any(spec.setting == "model" for spec in specs) else []
    return GroupedCommand(
        service,
        specs=specs,
        callback=callback,
        params=[*arguments, *build_options(specs)],
        help=help_text,
        context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 120},
    )
