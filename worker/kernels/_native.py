"""Loads the compiled kernels, or says what is missing and how to build it."""

from __future__ import annotations

import importlib
import importlib.machinery
from pathlib import Path
from types import ModuleType

from pagemill.errors import NativeLibraryError

BUILD_COMMAND = "pip install --no-build-isolation -e ."


def load_native() -> ModuleType:
    """The module `worker.kernels._C`.

    Raises:
        NativeLibraryError: the file is missing or does not load; names the file and the command that builds it.
    """
    folder = Path(__file__).parent
    expected = folder / f"_C{importlib.machinery.EXTENSION_SUFFIXES[0]}"
    try:
        return importlib.import_module("worker.kernels._C")
    except ImportError as error:
        if not expected.exists():
            reason = f"the compiled kernels are missing: {expected} does not exist"
        else:
            reason = f"the compiled kernels {expected} do not load ({error})"
        raise NativeLibraryError(f"{reason}; build them with `{BUILD_COMMAND}` in {folder.parents[1]}") from error
