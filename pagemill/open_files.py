"""How many files and sockets a process may have open at once."""

from __future__ import annotations

import contextlib
import resource


def allow_most_open_files() -> int:
    """Raise this process's limit to the highest that it may set itself; the limit then in force.

    The usual soft limit of 1,024 is left for programs that use `select`, which nothing here does; a router with as many
    streams would refuse connections.
    """
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft != hard:
        # A container may forbid it; the limit then stays as it is.
        with contextlib.suppress(OSError, ValueError):
            resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
    return resource.getrlimit(resource.RLIMIT_NOFILE)[0]
