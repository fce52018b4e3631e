"""The limit of open files is raised to what a process may set itself."""

from __future__ import annotations

import resource
import subprocess
import sys

SCRIPT = """
import resource
from pagemill.open_files import allow_most_open_files
_, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
resource.setrlimit(resource.RLIMIT_NOFILE, (64, hard))
print(allow_most_open_files(), resource.getrlimit(resource.RLIMIT_NOFILE)[0], allow_most_open_files())
"""


def test_the_soft_limit_becomes_the_hard_one() -> None:
    run = subprocess.run([sys.executable, "-c", SCRIPT], capture_output=True, text=True, check=True)
    hard = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
    assert [int(word) for word in run.stdout.split()] == [hard] * 3
