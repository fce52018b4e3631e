#!/usr/bin/env python3
"""Writes docs/configuration.md from the settings models, so that page and code cannot disagree.

write_configuration_docs.py            write the page
write_configuration_docs.py --check    fail where the page is not current
"""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable, Collection
from pathlib import Path

from pydantic.fields import FieldInfo
from pydantic_core import PydanticUndefined

from pagemill.config import CommonSettings
from pagemill.config_loader import OTHER_VARIABLES, SERVICES, environment_name, option_name

PAGE = Path(__file__).resolve().parent.parent / "docs" / "configuration.md"

HEAD = """# Configuration

<!-- Written by tools/write_configuration_docs.py from pagemill/config.py; edit there. -->

Every setting has one name. Its value comes from, later ones winning:

1. the default,
2. a YAML file (`--config-file FILE` or `PAGEMILL_CONFIG_FILE`) with the sections `common`, `router`, `scheduler`,
   `worker` and `serve`; `common` takes what several services share, and a service's own section wins over it,
3. the environment: `PAGEMILL_<SECTION>_<NAME>`, and `PAGEMILL_<NAME>` for what several services share,
4. the command line: `--name value`, `--name` or `--no-name` for switches.

An unknown name is refused in the whole file and in the whole `PAGEMILL_` environment, with the closest known one as a
hint; so is a value of the wrong kind, NaN included. The process then exits with code 2. Lists are written
comma-separated or, on the command line, by repeating the option. `none` unsets what may be unset.

`pagemill config [COMMAND]` prints the settings in force and where each came from, `--json` for programs; COMMAND is
`router`, `scheduler`, `worker` or `serve`, which prints those of all four, as no COMMAND does. It takes the options of
that command and refuses what that would refuse. Secrets are masked there.

`api_key` names the keys that clients may send, comma-separated, in YAML also as a list. `TENANT=KEY` gives a key's
tenant a name; a KEY alone is a tenant of its own. Tenants share neither prefix cache nor cached responses.

`pagemill serve` takes the options of all services; a name that several share is given to all of them. It decides the
scheduler's address itself, picks a free port for the scheduler unless `--scheduler-port` is given, and spreads one
`--metrics-port` over its processes: router, scheduler, workers get consecutive ports.

Settings that contradict each other are refused, naming both: `num_blocks` and `kv_cache_gib`; `gpu_memory_utilization`
on `device: cpu`; a `max_model_len` that `num_blocks` cannot hold. Limits that are not set follow the device; see
`Device` and `Memory` in the [worker's page](worker.md). Of several GPUs `CUDA_VISIBLE_DEVICES` chooses; with
`--num-workers N` each worker gets one, in turn.

```yaml
common:
  log_format: json
  otlp_endpoint: http://127.0.0.1:4317
router:
  http_host: 0.0.0.0
  served_model_name: [smollm2]
  api_key: [alice=KEY, bob=KEY2]
scheduler:
  max_num_seqs: 64
worker:
  dtype: float32
```
"""


def page() -> str:
    """The whole page."""
    parts = [HEAD, _section("All services", CommonSettings, lambda name: f"PAGEMILL_{name}".upper(), ())]
    for service, model in SERVICES.items():
        summary = (model.__doc__ or "").strip().splitlines()[0]
        parts.append(
            _section(
                f"{service}: {summary.removeprefix('`pagemill serve`: ').rstrip('.')}",
                model,
                functools.partial(environment_name, service),
                CommonSettings.model_fields,
            )
        )
    rows = "\n".join(f"| `{name}` | {meaning} |" for name, meaning in OTHER_VARIABLES.items())
    parts.append(f"## Variables that are no settings\n\n| variable | meaning |\n|---|---|\n{rows}\n")
    return "\n".join(parts)


def _section(title: str, model: type[CommonSettings], variable: Callable[[str], str], left_out: Collection[str]) -> str:
    rows = [
        f"| `{option_name(name)}` | `{variable(name)}` | {_default(field)} | {field.description} |"
        for name, field in model.model_fields.items()
        if name not in left_out
    ]
    return f"## {title}\n\n| option | variable | default | meaning |\n|---|---|---|---|\n" + "\n".join(rows) + "\n"


def _default(field: FieldInfo) -> str:
    value = field.default
    if value is PydanticUndefined and field.default_factory is not None:
        value = ",".join(field.default_factory())  # type: ignore[call-arg]
    if isinstance(value, bool):
        value = str(value).lower()
    return "" if value in (None, "") else f"`{value}`"


def main() -> int:
    if sys.argv[1:] == ["--check"]:
        current = PAGE.is_file() and PAGE.read_text(encoding="utf-8") == page()
        if not current:
            print(f"{PAGE.name} is not current; run tools/write_configuration_docs.py", file=sys.stderr)
        return 0 if current else 1
    PAGE.write_text(page(), encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
