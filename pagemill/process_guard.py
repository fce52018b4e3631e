"""Ties a process to its parent: `python process_guard.py PARENT_PID COMMAND...` becomes COMMAND and dies with it.

Run as a script it imports nothing of Pagemill, so that it costs a few milliseconds and works for foreign programs.
"""

import ctypes
import os
import signal
import sys

_PR_SET_PDEATHSIG = 1


def die_with_parent(parent_pid: int) -> None:
    """Have the kernel kill this process when the parent ends, however it ends. Survives exec; Linux alone has it.

    Args:
        parent_pid: the expected parent. Where another one has taken its place, it is dead already and so are we.
    """
    if sys.platform != "linux":
        return
    ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
    if os.getppid() != parent_pid:
        os._exit(1)


if __name__ == "__main__":
    die_with_parent(int(sys.argv[1]))
    try:
        os.execvp(sys.argv[2], sys.argv[2:])
    except OSError as err:
        sys.exit(f"cannot start {sys.argv[2]}: {err.strerror}")
