"""A generator in a process of its own, so that one engine's memory, threads and CUDA context touch no other."""

from __future__ import annotations

import multiprocessing
import os
import traceback
from collections.abc import Callable, Iterator
from multiprocessing.connection import Connection
from typing import Any, TypeVar

from pagemill.errors import PagemillError
from pagemill.process_guard import die_with_parent

Item = TypeVar("Item")

_JOIN_TIMEOUT_S = 30.0


def isolated(function: Callable[..., Iterator[Item]], *arguments: object) -> Iterator[Item]:
    """Items of `function(*arguments)`, made in a new process as they are wanted to be; it is gone afterwards.

    Args:
        function: of a module, so that the process can import it.
        arguments: what can be pickled.

    Raises:
        PagemillError: the same that the function raised, or one that says how the process ended.
    """
    context = multiprocessing.get_context("spawn")
    ours, theirs = context.Pipe(duplex=False)
    process = context.Process(target=_run, args=(function, arguments, theirs, os.getpid()))
    process.start()
    theirs.close()
    try:
        while True:
            try:
                kind, value = ours.recv()
            except EOFError:
                process.join(_JOIN_TIMEOUT_S)
                raise PagemillError(f"the measuring process died with code {process.exitcode}") from None
            if kind == "item":
                yield value
            elif kind == "error":
                raise value
            else:
                break
        process.join(_JOIN_TIMEOUT_S)
    finally:
        ours.close()
        if process.is_alive():
            process.terminate()
            process.join(_JOIN_TIMEOUT_S)
        if process.is_alive():
            process.kill()
            process.join()


def _run(
    function: Callable[..., Iterator[Any]], arguments: tuple[object, ...], connection: Connection, parent_pid: int
) -> None:
    die_with_parent(parent_pid)
    try:
        for item in function(*arguments):
            connection.send(("item", item))
        connection.send(("end", None))
    except PagemillError as err:
        connection.send(("error", err))
    except Exception as err:
        traceback.print_exc()
        connection.send(("error", PagemillError(f"{type(err).__name__}: {err}")))
    finally:
        connection.close()
