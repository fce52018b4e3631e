"""What the processes of a server count, kept beside the rows: Prometheus text, one section per row and process."""

from __future__ import annotations

import urllib.request
from collections.abc import Mapping
from pathlib import Path

from pagemill.errors import ConfigError, UnavailableError

_TIMEOUT_S = 10.0


class MetricsFile:
    """Appends the metrics of all processes of a server.

    Args:
        path: None keeps nothing.

    Raises:
        ConfigError: there is no such folder.
    """

    def __init__(self, path: Path | None) -> None:
        self._path = path
        if path is not None and not path.parent.is_dir():
            raise ConfigError(f"{path}: there is no folder {path.parent}", field="metrics_file")

    def append(self, title: str, urls: Mapping[str, str]) -> None:
        """Ask each process.

        Raises:
            UnavailableError: one of them does not answer.
        """
        if self._path is None:
            return
        for process, url in urls.items():
            try:
                with urllib.request.urlopen(url, timeout=_TIMEOUT_S) as response:
                    text = response.read().decode()
            except OSError as err:
                raise UnavailableError(f"{process} has no metrics at {url}: {err}") from err
            with self._path.open("a", encoding="utf-8") as file:
                file.write(f"# {process} after {title}\n{text.rstrip()}\n\n")
