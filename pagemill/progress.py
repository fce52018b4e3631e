"""What a supervisor shows on stderr, lines of its processes included: a live status on a terminal, else plain lines."""

from __future__ import annotations

import contextlib
import sys
import time
from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:
    import rich.progress


class Progress(Protocol):
    """Where the supervisor's words go."""

    def line(self, text: str) -> None:
        """A line that stays."""

    def status(self, text: str) -> None:
        """What is waited for now; "" where nothing is."""


class PlainProgress:
    """Lines, those of the start with the seconds that have passed."""

    def __init__(self) -> None:
        self._started_s = time.monotonic()

    def line(self, text: str) -> None:
        # Nobody may be reading any more; that is no reason to end.
        with contextlib.suppress(OSError):
            print(text, file=sys.stderr, flush=True)

    def status(self, text: str) -> None:
        if text:
            self.line(f"[{time.monotonic() - self._started_s:5.1f} s] {text}")


class TerminalProgress:
    """A spinner with the seconds that the present step has taken, below the lines of the processes."""

    def __init__(self) -> None:
        from rich.console import Console

        self._console = Console(stderr=True, highlight=False)
        self._progress: rich.progress.Progress | None = None

    def line(self, text: str) -> None:
        self._console.print(text, markup=False, soft_wrap=True)

    def status(self, text: str) -> None:
        if self._progress is not None:
            self._progress.stop()
            self._progress = None
        if text:
            from rich.progress import Progress, SpinnerColumn, TextColumn, TimeElapsedColumn

            columns = (SpinnerColumn(), TextColumn("{task.description}"), TimeElapsedColumn())
            self._progress = Progress(*columns, console=self._console, transient=True)
            self._progress.start()
            self._progress.add_task(text, total=None)


def make_progress() -> Progress:
    """The form that fits stderr."""
    return TerminalProgress() if sys.stderr.isatty() else PlainProgress()
