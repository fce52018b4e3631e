"""Settings in force and where each came from: defaults < YAML file < environment < command line.

Names are refused where they are unknown, with the closest known one as a hint, in every section of the file and in the
whole `PAGEMILL_` environment, so that a typing error is never silently a default.
"""

from __future__ import annotations

import difflib
import json
import re
import types
from collections.abc import Hashable, Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Union, get_args, get_origin
from urllib.parse import urlsplit, urlunsplit

import yaml
from pydantic import ValidationError
from pydantic.fields import FieldInfo

from pagemill.config import CommonSettings, RouterSettings, SchedulerSettings, ServeSettings, WorkerSettings
from pagemill.errors import ConfigError
from pagemill.kernel_variables import CPU_ISAS, check_kernel_variables

SERVICES: dict[str, type[CommonSettings]] = {
    "router": RouterSettings,
    "scheduler": SchedulerSettings,
    "worker": WorkerSettings,
    "serve": ServeSettings,
}
CONFIG_FILE_ENV = "PAGEMILL_CONFIG_FILE"
DEFAULT_ORIGIN = "default"

# Variables that Pagemill reads and that are no settings.
OTHER_VARIABLES: dict[str, str] = {
    CONFIG_FILE_ENV: "YAML file, as --config-file",
    "PAGEMILL_API_KEY": "key that `pagemill chat`, `pagemill complete` and `pagemill bench` send",
    "PAGEMILL_DEMO_MODEL": "path of the demo model's .gguf file",
    "PAGEMILL_CPU_ISA": f"best instruction set to use, if the machine has it: {', '.join(CPU_ISAS)}; unset: all",
    "PAGEMILL_CUDA_LIBRARY": "file of the CUDA kernels; unset: the one beside the CPU kernels",
    "PAGEMILL_SPIN_US": "microseconds for which idle kernel threads spin before they sleep",
    "PAGEMILL_TRACE_KERNELS": "1 logs each kernel launch",
    "PAGEMILL_PARENT_PID": "set by `pagemill serve` for its processes",
}
_OTHER_PREFIXES = ("PAGEMILL_TEST_", "PAGEMILL_BENCH_")

# Kubernetes puts variables of this form into every pod for a Service whose name begins with pagemill-.
_SERVICE_LINK = re.compile(r"PAGEMILL_\w*?(_SERVICE_(HOST|PORT(_\w+)?)|_PORT_\d+_(TCP|UDP|SCTP)(_\w+)?)")
_SERVICE_LINK_VALUE = re.compile(r"(tcp|udp|sctp)://")

_SECRETS = frozenset({"api_key"})


def _shared_names() -> frozenset[str]:
    """Names that several services have with one meaning: allowed in `common` and as PAGEMILL_<NAME>."""
    counts: dict[str, int] = {}
    for model in (RouterSettings, SchedulerSettings, WorkerSettings):
        for name in model.model_fields:
            counts[name] = counts.get(name, 0) + 1
    return frozenset(name for name, count in counts.items() if count > 1)


SHARED_NAMES = _shared_names()


@dataclass(frozen=True, slots=True)
class LoadedSettings:
    """Valid settings of one service and the origin of each value."""

    service: str
    settings: CommonSettings
    origins: dict[str, str]

    def is_default(self, name: str) -> bool:
        return self.origins[name] == DEFAULT_ORIGIN

    def rows(self) -> list[tuple[str, Any, str]]:
        """(name, value with secrets masked, origin) per setting, in the order of the model."""
        return [(name, masked(name, getattr(self.settings, name)), self.origins[name]) for name in self.origins]


def masked(name: str, value: Any) -> Any:
    """The value as it may be printed: no keys, no passwords in addresses."""
    if name in _SECRETS and value:
        return "********"
    if isinstance(value, str) and "://" in value and "@" in value:
        parts = urlsplit(value)
        return urlunsplit(parts._replace(netloc="********@" + parts.netloc.rpartition("@")[2]))
    return value


@dataclass(frozen=True, slots=True)
class _Value:
    raw: Any
    origin: str


def load_settings(
    service: str,
    *,
    config_file: str | None,
    environment: Mapping[str, str],
    options: Mapping[str, Any],
) -> LoadedSettings:
    """Settings of one service.

    Args:
        service: a key of SERVICES.
        config_file: YAML file; None takes $PAGEMILL_CONFIG_FILE, empty or unset is no file.
        environment: usually os.environ.
        options: values of the command line by setting name; names that the service lacks are ignored.

    Raises:
        ConfigError: an unknown name, a value of the wrong kind or out of range, an unreadable file; one line.
    """
    model = SERVICES[service]
    path = config_file if config_file is not None else environment.get(CONFIG_FILE_ENV, "")
    values = _from_file(Path(path), service) if path else {}
    values |= _from_environment(environment, service)
    if service in ("worker", "serve"):
        check_kernel_variables(environment)
    values |= {
        name: _Value(raw, f"command line {option_name(name)}")
        for name, raw in options.items()
        if name in model.model_fields
    }
    coerced = {name: _coerce(model.model_fields[name], value.raw) for name, value in values.items()}
    try:
        settings = model.model_validate(coerced)
    except ValidationError as err:
        raise _config_error(err, values, service) from None
    origins = {name: values[name].origin if name in values else DEFAULT_ORIGIN for name in model.model_fields}
    return LoadedSettings(service, settings, origins)


def option_name(name: str) -> str:
    """`max_num_seqs` as `--max-num-seqs`."""
    return "--" + name.replace("_", "-")


def environment_name(service: str, name: str) -> str:
    """The service's own variable of a setting."""
    return f"PAGEMILL_{service}_{name}".upper()


def is_setting_variable(name: str) -> bool:
    """Whether an environment variable sets something here: those a supervisor keeps from its processes."""
    return name.startswith("PAGEMILL_") and (name == CONFIG_FILE_ENV or not _is_exempt(name, ""))


def _is_exempt(name: str, value: str) -> bool:
    return (
        name in OTHER_VARIABLES
        or name.startswith(_OTHER_PREFIXES)
        or _SERVICE_LINK.fullmatch(name) is not None
        or (name.endswith("_PORT") and _SERVICE_LINK_VALUE.match(value) is not None)
    )


class _YamlLoader(yaml.SafeLoader):
    """Safe YAML in which only true and false are booleans (`redis: off` is a word) and no key comes twice."""

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Any, Any]:
        seen: set[Any] = set()
        for key_node, _ in node.value:
            key = self.construct_object(key_node, deep=deep)
            if not isinstance(key, Hashable):
                raise yaml.constructor.ConstructorError(None, None, "a key must be a word", key_node.start_mark)
            if key in seen:
                raise yaml.constructor.ConstructorError(None, None, f"key {key!r} comes twice", key_node.start_mark)
            seen.add(key)
        return super().construct_mapping(node, deep=deep)


_YamlLoader.yaml_implicit_resolvers = {
    first: [(tag, pattern) for tag, pattern in resolvers if tag != "tag:yaml.org,2002:bool"]
    for first, resolvers in yaml.SafeLoader.yaml_implicit_resolvers.items()
}
_YamlLoader.add_implicit_resolver(
    "tag:yaml.org,2002:bool", re.compile(r"(true|True|TRUE|false|False|FALSE)$"), list("tTfF")
)


def _from_file(path: Path, service: str) -> dict[str, _Value]:
    try:
        document = yaml.load(path.read_text(encoding="utf-8"), Loader=_YamlLoader)  # a subclass of SafeLoader
    except OSError as err:
        raise ConfigError(f"config file {str(path)!r} cannot be read: {err.strerror}") from None
    except (yaml.YAMLError, ValueError, TypeError, RecursionError) as err:
        raise ConfigError(f"config file {str(path)!r}{_yaml_problem(err)}") from None
    if document is None:
        return {}
    if not isinstance(document, dict):
        raise ConfigError(f"config file {str(path)!r} must hold sections, each a map of settings")
    values: dict[str, _Value] = {}
    for section in dict.fromkeys(("common", service, *document)):  # the service's own values come over common ones
        if section not in document:
            continue
        known = SHARED_NAMES if section == "common" else _names_of(section, path)
        entries = document[section] if document[section] is not None else {}
        if not isinstance(entries, dict):
            raise ConfigError(f"{path}: section {section!r} must be a map of settings", field=str(section))
        for name in entries:
            if name not in known:
                hint = _hint(str(name), known, _places(str(name)))
                raise ConfigError(f"{path}: unknown setting {section}.{name}{hint}", field=str(name))
        if section in ("common", service):
            fields = SERVICES[service].model_fields
            values |= {
                name: _Value(raw, f"{path}: {section}.{name}") for name, raw in entries.items() if name in fields
            }
    return values


def _yaml_problem(err: Exception) -> str:
    """Where a file is not YAML and why, to come after its name; the parser's own text has several lines."""
    if isinstance(err, yaml.MarkedYAMLError) and err.problem_mark is not None:
        context = f"{err.context}, " if err.context else ""
        return f", line {err.problem_mark.line + 1}: is not YAML: {context}{err.problem}"
    if isinstance(err, yaml.reader.ReaderError):
        return f" is not YAML: {err.reason} at position {err.position}"
    reason = "nested too deeply" if isinstance(err, RecursionError) else str(err)
    return f" is not YAML: {' '.join(reason.split())}"


def _names_of(section: object, path: Path) -> Iterable[str]:
    if section not in SERVICES:
        known = ("common", *SERVICES)
        hint = _hint(str(section), known, _places(str(section)))
        raise ConfigError(f"{path}: unknown section {section!r}{hint}", field=str(section))
    return SERVICES[str(section)].model_fields


def _places(name: str) -> list[str]:
    """Where a setting of exactly this name belongs, as section.name."""
    if name in SHARED_NAMES:
        return [f"common.{name}"]
    return [f"{service}.{name}" for service, model in SERVICES.items() if name in model.model_fields]


def _from_environment(environment: Mapping[str, str], service: str) -> dict[str, _Value]:
    """This service's values; the names of all services are checked."""
    known = {f"PAGEMILL_{name}".upper(): ("common", name) for name in SHARED_NAMES}
    for section, model in SERVICES.items():
        known |= {environment_name(section, name): (section, name) for name in model.model_fields}
    common: dict[str, _Value] = {}
    own: dict[str, _Value] = {}
    for variable, raw in environment.items():
        if not variable.startswith("PAGEMILL_") or _is_exempt(variable, raw):
            continue
        if variable not in known:
            raise ConfigError(
                f"unknown environment variable {variable}{_hint(variable, [*known, *OTHER_VARIABLES])}", field=variable
            )
        section, name = known[variable]
        if section == "common" and name in SERVICES[service].model_fields:
            common[name] = _Value(raw, f"environment {variable}")
        elif section == service:
            own[name] = _Value(raw, f"environment {variable}")
    return common | own


def _hint(name: str, known: Iterable[str], elsewhere: Iterable[str] = ()) -> str:
    """The closest known name, and the places where exactly this one belongs."""
    close = difflib.get_close_matches(name, list(known), n=1, cutoff=0.6)
    candidates = [*close, *elsewhere]
    return f", did you mean {' or '.join(candidates)}?" if candidates else ""


def accepts_none(field: FieldInfo) -> bool:
    """Whether the setting may be unset."""
    return type(None) in get_args(field.annotation)


def is_list(field: FieldInfo) -> bool:
    """Whether the setting holds several values."""
    return get_origin(field.annotation) is list


def plain_type(field: FieldInfo) -> Any:
    """The annotation without `None`."""
    if get_origin(field.annotation) in (Union, types.UnionType):
        return next(arg for arg in get_args(field.annotation) if arg is not type(None))
    return field.annotation


def _coerce(field: FieldInfo, raw: Any) -> Any:
    """What text means where a setting is a list or may be unset; everything else is the model's business."""
    if isinstance(raw, str) and accepts_none(field) and raw.strip().lower() in ("", "none", "null"):
        return None
    if is_list(field) and isinstance(raw, str):
        if raw.lstrip().startswith("["):
            try:
                return json.loads(raw)
            except ValueError:
                return raw
        return [part.strip() for part in raw.split(",") if part.strip()]
    if is_list(field) and isinstance(raw, tuple | list):
        return [part.strip() for item in raw for part in str(item).split(",") if part.strip()]
    return raw


def _config_error(err: ValidationError, values: Mapping[str, _Value], service: str) -> ConfigError:
    """The first problem as one line that begins with where the value came from."""
    problem = err.errors()[0]
    name = str(problem["loc"][0]) if problem["loc"] else ""
    message = problem["msg"].removeprefix("Value error, ").removeprefix("Input ")
    if name in values:
        shown = masked(name, values[name].raw)
        text = f"{values[name].origin}: {message}, is {shown!r:.80}"
    else:
        text = f"{service}.{name}: {message}" if name else f"{service}: {message}"
    return ConfigError(text, field=name)
