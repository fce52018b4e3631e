#!/usr/bin/env python3
"""Installs what pyproject.toml asks for, with one of its extras, but not the project itself (that builds the kernels).

install_dependencies.py EXTRA
"""

from __future__ import annotations

import re
import subprocess
import sys
import tomllib
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
_OWN_EXTRAS = re.compile(r"pagemill\[([\w,-]+)\]")


def requirements(project: dict[str, object], extra: str) -> list[str]:
    """All requirements of the project and of `extra`, the project's own extras expanded."""
    extras: dict[str, list[str]] = project["optional-dependencies"]  # type: ignore[assignment]
    found: list[str] = list(project["dependencies"])  # type: ignore[call-overload]
    waiting = [extra]
    while waiting:
        for requirement in extras[waiting.pop()]:
            own = _OWN_EXTRAS.fullmatch(requirement)
            if own:
                waiting += own[1].split(",")
            elif requirement not in found:
                found.append(requirement)
    return found


def main() -> int:
    if len(sys.argv) != 2:
        print(__doc__, file=sys.stderr)
        return 2
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    # What is there already is not worth a line each; what is fetched is shown as it comes.
    command = [
        sys.executable,
        "-m",
        "pip",
        "install",
        "--disable-pip-version-check",
        *requirements(project, sys.argv[1]),
    ]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as pip:
        assert pip.stdout is not None
        for line in pip.stdout:
            if not line.startswith("Requirement already satisfied"):
                print(line, end="", file=sys.stderr, flush=True)
    return pip.returncode


if __name__ == "__main__":
    sys.exit(main())
