"""What a supervisor shows on stderr while it starts: a live status on a terminal, plain lines elsewhere."""

from __future__ import annotations

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

    @property
    def captures_output(self) -> bool:
        """Lines of the processes must come through `line`, or they would tear the status apart."""


class PlainProgress:
    """Lines with seconds since the start; processes write to stderr themselves."""

    captures_output = False

    def __init__(self) -> None:
        self._started_s = time.monotonic()

    def line(self, text: str) -> None:
        print(text, file=sys.stderr, flush=True)

    def status(self, text: str) -> None:
        if text:
            self.line(f"[{time.monotonic() - self._started_s:5.1f} s] {text}")


class TerminalProgress:
    """A spinner with the seconds that the present step has taken, below the lines of the processes."""

    captures_output = True

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
