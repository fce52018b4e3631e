"""Options that the measuring commands share: the model, its engine, the server to ask, and where rows go."""

from __future__ import annotations

import contextlib
import os
import shlex
import sys
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

import click

from pagemill.bench import report
from pagemill.bench.machine import device_name
from pagemill.bench.model_files import SHAPES, write_model, write_tokenizer
from pagemill.bench.targets import GrpcTarget, HttpTarget, Target
from pagemill.commands.bench_command import number_option
from pagemill.commands.serve import load_all, serve_specs
from pagemill.commands.settings_options import build_options, model_argument, with_model_argument
from pagemill.config import WorkerSettings
from pagemill.config_loader import LoadedSettings, option_name
from pagemill.engine_args import EngineArgs
from pagemill.errors import ConfigError
from pagemill.model_source import ModelSource, load_config, resolve_model

FILE = click.Path(dir_okay=False, path_type=Path)
BACKENDS = ("offline", "http", "grpc")

# Of the engine's arguments, those that the workload decides.
_NOT_OFFERED = frozenset({"seed", "max_queued_requests", "chat_template", "tensor_parallel_size"})
_VOCAB_SIZE_UNKNOWN = 32000
_QUEUE_BOUND = 1024
# Wide enough that a line of a table stays one line in a file.
_PIPE_WIDTH = 200
_TOKENIZER_FILES = ("tokenizer.json", "tokenizer.model")


def engine_specs() -> list[Any]:
    """Settings that the offline engine and a server share under one name."""
    names = set(EngineArgs.__slots__) - _NOT_OFFERED
    return [spec for spec in serve_specs() if spec.setting in names]


def engine_options() -> list[click.Parameter]:
    """All options of the engine, as `pagemill serve` has them."""
    return build_options(engine_specs())


def model_options() -> list[click.Parameter]:
    """MODEL, and the shape that stands for it."""
    return [
        model_argument(),
        click.Option(
            ["--shape"],
            type=click.Choice(SHAPES),
            metavar="NAME",
            help=f"Random weights of this shape instead of a model; no files are needed.  [{', '.join(SHAPES)}]",
        ),
    ]


def backend_option(offered: str, default: str) -> click.Parameter:
    return click.Option(["--backend"], metavar="LIST", help=f"Of {offered}.  [default: {default}]")


def target_options() -> list[click.Parameter]:
    """Which server is asked."""
    return [
        click.Option(
            ["--serve", "is_started"], is_flag=True, help="Start a server of three processes, and stop it after."
        ),
        click.Option(["--base-url"], metavar="URL", help="HTTP address of a server that runs."),
        click.Option(["--address"], metavar="HOST:PORT", help="gRPC address of a router that runs."),
        click.Option(["--served-model"], default="", metavar="NAME", help="Its model.  [default: its first one]"),
        click.Option(["--api-key"], default="", envvar="PAGEMILL_API_KEY", help="Key.  [env: PAGEMILL_API_KEY]"),
        click.Option(
            ["--serve-args"],
            default="",
            metavar="TEXT",
            help="More options of `pagemill serve` for --serve, in quotes.",
        ),
        number_option(
            "--vocab-size",
            f"Ids of random prompts are below this.  [default: the model's, {_VOCAB_SIZE_UNKNOWN} where unknown]",
            least=300,
        ),
        number_option(
            "--load-processes", "Processes that make the load.  [default: a quarter of the cores, at most 4]"
        ),
    ]


def row_options() -> list[click.Parameter]:
    """Where rows go."""
    return [
        click.Option(["--csv", "csv_path"], type=FILE, metavar="FILE", help="Append the rows to this file."),
        click.Option(
            ["--json", "--jsonl", "json_path"], type=FILE, metavar="FILE", help="The same, one JSON object a line."
        ),
        click.Option(
            ["--metrics-file", "metrics_path"],
            type=FILE,
            metavar="FILE",
            help="Append what the server's processes count, after each row.",
        ),
        click.Option(["--label"], default="", metavar="TEXT", help="A word that the rows carry."),
    ]


@dataclass(frozen=True, slots=True)
class EngineChoice:
    """Model and settings that are measured.

    Attributes:
        options: what was written on the command line, by name of the setting, with what the benchmark adds to it.
        config_file: as it was given.
        source: files of the model; None where a server elsewhere has it.
        model: what the rows call it; empty where the server has a name for it.
    """

    options: Mapping[str, Any]
    config_file: str | None
    source: ModelSource | None
    model: str

    def loaded(self) -> dict[str, LoadedSettings]:
        return load_all(self.config_file, dict(self.options), os.environ)

    def worker(self) -> WorkerSettings:
        return cast(WorkerSettings, self.loaded()["worker"].settings)

    def args(self) -> EngineArgs:
        """For the offline engine."""
        loaded = self.loaded()
        values: dict[str, Any] = {}
        for spec in engine_specs():
            for service in ("worker", "scheduler", "router"):
                if spec.setting in type(loaded[service].settings).model_fields and spec.setting not in values:
                    values[spec.setting] = getattr(loaded[service].settings, spec.setting)
        return EngineArgs(**values)

    def serve_arguments(self) -> list[str]:
        """For `pagemill serve`."""
        arguments = ["--config-file", self.config_file] if self.config_file is not None else []
        for name, value in self.options.items():
            flag = option_name(name)
            if isinstance(value, bool):
                arguments.append(flag if value else f"--no-{flag[2:]}")
            else:
                arguments += [flag, str(value)]
        return arguments

    def shown(self) -> str:
        """Settings that differ from the defaults, for the rows."""
        hidden = {"model", "tokenizer"}
        return " ".join(f"{name}={value}" for name, value in sorted(self.options.items()) if name not in hidden)

    @property
    def vocab_size(self) -> int | None:
        """None where the model's files are not known."""
        return None if self.source is None else int(load_config(self.source)["vocab_size"])


@contextlib.contextmanager
def chosen_engine(parameters: dict[str, Any], *, is_run_here: bool) -> Iterator[EngineChoice]:
    """Take the engine's options out of `parameters`; what has to be written for the model lives as long as the block.

    A model without a tokenizer gets one of its size, since prompts are token ids here.

    Args:
        is_run_here: where it is not, no model is needed, and none is looked for unless one is named.
    """
    config_file = parameters.pop("config_file")
    shape = parameters.pop("shape")
    names = {spec.parameter for spec in engine_specs()}
    own = {name: parameters.pop(name) for name in list(parameters) if name in names}
    options = with_model_argument(own | {"model_argument": parameters.pop("model_argument")})
    with tempfile.TemporaryDirectory(prefix="pagemill-bench-") as folder:
        if shape is not None:
            if "model" in options:
                raise ConfigError(
                    f"--shape {shape} and the model {options['model']!r}: give one of them", field="shape"
                )
            directory = Path(folder) / shape
            write_model(directory, shape)
            options = {"load_format": "dummy"} | options | {"model": str(directory)}
        elif not is_run_here and "model" not in options:
            yield EngineChoice(options, config_file, None, "")
            return
        source = resolve_model(str(options.get("model", "")), files="tokenizer")
        if "tokenizer" not in options and _lacks_tokenizer(source):
            file = Path(folder) / "tokenizer.json"
            write_tokenizer(file, int(load_config(source)["vocab_size"]))
            options["tokenizer"] = str(file)
        yield EngineChoice(options, config_file, source, shape or source.name)


def _lacks_tokenizer(source: ModelSource) -> bool:
    return source.kind == "hf" and not any((source.path / name).is_file() for name in _TOKENIZER_FILES)


@dataclass(frozen=True, slots=True)
class TargetChoice:
    """Which servers are asked, and how."""

    is_started: bool
    base_url: str | None
    address: str | None
    served_model: str
    api_key: str
    serve_args: str
    vocab_size: int | None
    load_processes: int | None

    @staticmethod
    def take(parameters: dict[str, Any]) -> TargetChoice:
        """Take the options of `target_options` out of `parameters`."""
        choice = TargetChoice(**{name: parameters.pop(name) for name in TargetChoice.__slots__})
        if choice.is_started and (choice.base_url or choice.address):
            raise ConfigError(
                "--serve starts a server, --base-url and --address name one: give one of them", field="serve"
            )
        if choice.serve_args and not choice.is_started:
            raise ConfigError("--serve-args goes to the server that --serve starts", field="serve_args")
        try:
            shlex.split(choice.serve_args)
        except ValueError as error:
            raise ConfigError(f"--serve-args is {choice.serve_args!r}: {error}", field="serve_args") from error
        return choice

    def backends(self, asked: str | None, default: str) -> list[str]:
        """Backends in the order asked for; what the address implies where none is asked for.

        Raises:
            ConfigError: an unknown one, or one without an address.
        """
        implied = [name for name, value in (("http", self.base_url), ("grpc", self.address)) if value]
        names = asked.split(",") if asked else implied or (["http"] if self.is_started else [default])
        for name in names:
            if name not in BACKENDS:
                raise ConfigError(f"--backend {name}: must be of {', '.join(BACKENDS)}", field="backend")
            if name != "offline" and not self.is_started and name not in implied:
                option = {"http": "--base-url URL", "grpc": "--address HOST:PORT"}[name]
                raise ConfigError(f"--backend {name} needs {option}, or --serve to start a server", field="backend")
        return names

    def prompt_vocab_size(self, engine: EngineChoice) -> int:
        """Ids of prompts are below this."""
        return self.vocab_size or engine.vocab_size or _VOCAB_SIZE_UNKNOWN

    @contextlib.contextmanager
    def targets(
        self, engine: EngineChoice, backends: Sequence[str], most_requests: int
    ) -> Iterator[list[ServedTarget]]:
        """Targets of the backends that go through a server, which is started where --serve asks for it."""
        served = [name for name in backends if name != "offline"]
        if not served:
            yield []
        elif self.is_started:
            from pagemill.bench.server_process import started_server

            arguments = [*engine.serve_arguments(), *_queue_options(most_requests), *shlex.split(self.serve_args)]
            click.echo(f"starting: pagemill serve {shlex.join(report.without_keys(arguments))}", err=True)
            with started_server(arguments) as server:
                click.echo(f"ready after {server.start_s:.1f} s", err=True)
                device = device_name(engine.worker().device)
                where = (server.base_url, server.address, device, server.metrics_urls)
                yield [self._target(name, *where) for name in served]
        else:
            urls = {"router": f"{self.base_url.rstrip('/').removesuffix('/v1')}/metrics"} if self.base_url else {}
            yield [self._target(name, self.base_url or "", self.address or "", "", urls) for name in served]

    def _target(
        self, backend: str, base_url: str, address: str, device: str, metrics_urls: Mapping[str, str]
    ) -> ServedTarget:
        from dataclasses import replace

        from pagemill.bench.targets import served_model

        target: Target = (
            HttpTarget(base_url, self.served_model, self.api_key)
            if backend == "http"
            else GrpcTarget(address, self.served_model, self.api_key)
        )
        model = served_model(target)
        where = device or f"server at {base_url or address}"
        return ServedTarget(replace(target, model=model.name), where, model.max_model_len, metrics_urls)

    @property
    def num_processes(self) -> int:
        from pagemill.bench.load import default_num_processes

        return self.load_processes or default_num_processes()


@dataclass(frozen=True, slots=True)
class ServedTarget:
    """A server that answers.

    Attributes:
        device: what the rows call the machine.
        max_model_len: 0 where the server does not say.
        metrics_urls: by name of the process.
    """

    target: Target
    device: str
    max_model_len: int
    metrics_urls: Mapping[str, str]


def _queue_options(most_requests: int) -> list[str]:
    """So that a server that is started here refuses nothing of a workload that is sent at once."""
    if most_requests <= _QUEUE_BOUND:
        return []
    return ["--max-queued-requests", str(most_requests), "--max-inflight-requests", str(max(4096, most_requests))]


def parse_numbers(text: str, field: str) -> list[int]:
    """A list of positive integers, separated by commas or spaces.

    Raises:
        ConfigError: something else is in it.
    """
    words = text.replace(",", " ").split()
    numbers = [int(word) for word in words if word.isdecimal() and int(word) > 0]
    if not words or len(numbers) != len(words):
        raise ConfigError(f"{option_name(field)} is {text!r}, must be positive numbers such as 1,16,64", field=field)
    return numbers


def print_rows(rows: Sequence[report.Row], columns: Mapping[str, str]) -> None:
    """A table on stdout for each device."""
    from rich.console import Console

    console = Console(width=None if sys.stdout.isatty() else _PIPE_WIDTH)
    for device in dict.fromkeys(str(row["device"]) for row in rows):
        of_device = [row for row in rows if row["device"] == device]
        console.print(f"{of_device[0]['model']} on {device}", markup=False, highlight=False)
        console.print(report.table(of_device, columns))
