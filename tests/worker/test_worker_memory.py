from __future__ import annotations

import sys
from pathlib import Path

import pytest
import torch

from worker import kv_cache
from worker.device import pick_device
from worker.memory import available_bytes

GIB = 1 << 30


def system(root: Path, files: dict[str, object]) -> Path:
    for name, text in files.items():
        path = root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(f"{text}\n")
    return root


MACHINE = {"proc/meminfo": f"MemTotal: 1 kB\nMemAvailable: {8 * GIB >> 10} kB"}
GROUP = "sys/fs/cgroup/app/pod"


def test_the_smaller_of_machine_and_group_counts(tmp_path: Path) -> None:
    files = MACHINE | {"proc/self/cgroup": "0::/app/pod", f"{GROUP}/memory.max": 3 * GIB}
    assert available_bytes(system(tmp_path, files | {f"{GROUP}/memory.current": GIB})) == 2 * GIB
    assert available_bytes(system(tmp_path, {f"{GROUP}/memory.max": 64 * GIB})) == 8 * GIB
    assert available_bytes(system(tmp_path, {f"{GROUP}/memory.max": "max"})) == 8 * GIB


def test_a_group_around_the_own_one_limits_too(tmp_path: Path) -> None:
    outer = {"sys/fs/cgroup/app/memory.max": 2 * GIB, "sys/fs/cgroup/app/memory.current": GIB}
    inner = {"proc/self/cgroup": "0::/app/pod", f"{GROUP}/memory.max": "max", f"{GROUP}/memory.current": 1}
    assert available_bytes(system(tmp_path, MACHINE | outer | inner)) == GIB


def test_a_container_sees_its_group_as_the_root(tmp_path: Path) -> None:
    files = {"sys/fs/cgroup/memory.max": GIB, "sys/fs/cgroup/memory.current": 0}
    assert available_bytes(system(tmp_path, MACHINE | files | {"proc/self/cgroup": "0::/kubepods/x"})) == GIB


def test_file_pages_that_can_be_given_up_count_as_available(tmp_path: Path) -> None:
    files = {
        "proc/self/cgroup": "0::/app/pod",
        f"{GROUP}/memory.max": 4 * GIB,
        f"{GROUP}/memory.current": 4 * GIB,
        f"{GROUP}/memory.stat": f"anon 5\ninactive_file {GIB}",
    }
    assert available_bytes(system(tmp_path, MACHINE | files)) == GIB


def test_version_1_of_control_groups(tmp_path: Path) -> None:
    group = "sys/fs/cgroup/memory/docker/1"
    files = MACHINE | {
        "proc/self/cgroup": "5:cpu,cpuacct:/docker/1\n4:memory:/docker/1",
        f"{group}/memory.limit_in_bytes": 3 * GIB,
        f"{group}/memory.usage_in_bytes": GIB,
        "sys/fs/cgroup/memory/memory.limit_in_bytes": 9223372036854771712,
        "sys/fs/cgroup/memory/memory.usage_in_bytes": 5 * GIB,
    }
    assert available_bytes(system(tmp_path, files)) == 2 * GIB


def test_nothing_known_limits_nothing(tmp_path: Path) -> None:
    assert available_bytes(tmp_path) == sys.maxsize


def test_a_pool_that_does_not_fit_is_refused_with_its_size(monkeypatch: pytest.MonkeyPatch) -> None:
    spec = kv_cache.KVSpec(num_layers=2, num_kv_heads=1, head_size=8)
    monkeypatch.setattr(kv_cache, "available_bytes", lambda: 1000)
    with pytest.raises(kv_cache.ConfigError, match="8 blocks needs 16384 bytes"):
        kv_cache.allocate_cache(spec, torch.float32, 16, 8, pick_device("cpu"))
