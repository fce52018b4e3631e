"""How much memory this process may still take: of the machine, and of the control groups that it runs in."""

from __future__ import annotations

import sys
from pathlib import Path

from pagemill.errors import ConfigError

# A group without a limit has a number near 2^63 in version 1 of control groups, and the word max in version 2.
_NO_LIMIT = 1 << 62


def available_bytes(root: Path = Path("/")) -> int:
    """Memory that can be had without swapping and without being killed for it; more than any size where unknown.

    Args:
        root: of the file system that holds proc and sys.
    """
    return min(_of_machine(root), _of_cgroups(root))


def check_weights(num_bytes: int, dtype: str, root: Path = Path("/")) -> None:
    """Refuse weights of num_bytes, known before they are loaded, that do not fit into host memory.

    Raises:
        ConfigError: with the numbers.
    """
    available = available_bytes(root)
    if num_bytes > available:
        smaller = "dtype bfloat16 or a smaller model" if dtype == "float32" else "a smaller model"
        raise ConfigError(
            f"the model does not fit: its weights need {num_bytes / (1 << 30):.2f} GiB as {dtype}, "
            f"{available / (1 << 30):.2f} GiB of memory are available; use {smaller}, or more memory",
            field="model",
        )


def _of_machine(root: Path) -> int:
    for line in _read(root / "proc/meminfo").splitlines():
        if line.startswith("MemAvailable:"):
            return int(line.split()[1]) << 10
    return sys.maxsize


def _of_cgroups(root: Path) -> int:
    """The least that is left in this process's groups and in those around them."""
    least = sys.maxsize
    for line in _read(root / "proc/self/cgroup").splitlines():
        _, controllers, path = line.split(":", 2)
        if controllers == "":
            base, names = root / "sys/fs/cgroup", ("memory.max", "memory.current", "inactive_file")
        elif "memory" in controllers.split(","):
            base = root / "sys/fs/cgroup/memory"
            names = ("memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file")
        else:
            continue
        # In a container the path may be the one outside of it, while the group itself is mounted as the root.
        group = base / path.strip("/")
        for folder in (group, *group.parents):
            if folder.is_relative_to(base):
                least = min(least, _left_in(folder, *names))
    return least


def _left_in(folder: Path, limit_name: str, usage_name: str, reclaimable_name: str) -> int:
    limit, usage = _read(folder / limit_name).strip(), _read(folder / usage_name).strip()
    if not limit.isdecimal() or not usage.isdecimal() or int(limit) >= _NO_LIMIT:
        return sys.maxsize
    reclaimable = 0  # file pages that nobody used lately are given up before anybody is killed
    for line in _read(folder / "memory.stat").splitlines():
        if line.startswith(f"{reclaimable_name} "):
            reclaimable = int(line.split()[1])
    return max(0, int(limit) - int(usage) + reclaimable)


def _read(path: Path) -> str:
    try:
        return path.read_text()
    except OSError:
        return ""
