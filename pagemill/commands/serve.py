"""`pagemill serve [MODEL]`."""

from __future__ import annotations

import asyncio
import os
from collections.abc import Callable, Mapping
from typing import Any, cast

import click

from pagemill.commands.settings_options import (
    GroupedCommand,
    OptionSpec,
    build_options,
    model_argument,
    service_specs,
    with_model_argument,
)
from pagemill.config import WorkerSettings
from pagemill.config_loader import SERVICES, SHARED_NAMES, LoadedSettings, load_settings

_HELP = """Serve MODEL on this machine.

MODEL is a local Hugging Face directory, a .gguf file or a hub id; without it the demo model SmolLM2-135M-Instruct is
served. Starts a private redis-server where one is found, a scheduler, workers and a router as separate processes, and
starts a process again that dies. All options of the three services are taken.

When the first answer can be had, it prints how to ask, and one line that begins with `pagemill-ready` on stdout. The
first SIGTERM or Ctrl-C drains and exits 0, the second ends everything at once. No process outlives it."""

# Settings of a service that the supervisor decides.
_DECIDED_HERE = frozenset({"scheduler"})
# Options whose name says too little beside those of the other services have a second, clearer one.
_ALIASES = {("scheduler", "host"): "--scheduler-host", ("scheduler", "port"): "--scheduler-port"}


def serve_specs() -> list[OptionSpec]:
    """Options of the supervisor and of all three services; a shared name comes once and is applied to all."""
    specs = service_specs("serve")
    seen = {spec.setting for spec in specs}
    for service in ("router", "scheduler", "worker"):
        for spec in service_specs(service):
            if spec.setting in seen or spec.setting in _DECIDED_HERE:
                continue
            owner = "common" if spec.setting in SHARED_NAMES else service
            alias = _ALIASES.get((service, spec.setting), "")
            specs.append(OptionSpec(spec.setting, owner, spec.setting, spec.field, alias))
            if owner == "common":
                seen.add(spec.setting)
    return specs


def load_all(
    config_file: str | None, parameters: dict[str, Any], environment: Mapping[str, str]
) -> dict[str, LoadedSettings]:
    """Settings of all four services from one command line."""
    loaded: dict[str, LoadedSettings] = {}
    specs = serve_specs()
    for service in SERVICES:
        own = [spec for spec in specs if spec.service in ("common", service) and spec.parameter in parameters]
        loaded[service] = load_settings(
            service,
            config_file=config_file,
            environment=environment,
            options={spec.setting: parameters[spec.parameter] for spec in own},
        )
    return loaded


def command(name: str) -> click.Command:
    return serve_command(name, _HELP, _run)


def serve_command(name: str, help_text: str, run: Callable[[dict[str, LoadedSettings]], int]) -> click.Command:
    """A command with all options of `pagemill serve` that calls `run` with the settings of all four services."""
    specs = serve_specs()

    def callback(config_file: str | None, **parameters: Any) -> None:
        loaded = load_all(config_file, with_model_argument(parameters), os.environ)
        raise click.exceptions.Exit(run(loaded))

    return GroupedCommand(
        name,
        specs=specs,
        callback=callback,
        params=[model_argument(), *build_options(specs)],
        help=help_text,
        context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 120},
    )


def _run(loaded: dict[str, LoadedSettings]) -> int:
    from pagemill.commands.preflight import check_model, check_worker
    from pagemill.model_source import resolve_model
    from pagemill.progress import make_progress
    from pagemill.serve_plan import check_listening, make_plan
    from pagemill.supervisor import Supervisor
    from pagemill.telemetry import setup_logging

    setup_logging("serve", loaded["serve"].settings)
    # Looked at here as well, so that what cannot work is one line at once rather than one of each process later.
    check_worker(cast(WorkerSettings, loaded["worker"].settings))
    sources = {
        name: resolve_model(loaded[name].settings.model_dump()["model"], files="tokenizer")
        for name in ("worker", "router")
    }
    plan = make_plan(loaded, sources["router"].name)
    check_listening(plan)
    check_model(sources["router"], sources["worker"], plan.router, plan.workers[0])
    return asyncio.run(Supervisor(plan, make_progress()).run())
