"""Work that ends when its client hangs up."""

from __future__ import annotations

import asyncio
from types import TracebackType
from typing import Self

from starlette.types import Receive

from router.http.errors import ClientDisconnected


class CancelOnDisconnect:
    """Asynchronous context: cancels the task inside when the client is gone, and turns that into ClientDisconnected.

    The request body must have been read, since everything that arrives is taken for the end. Cancellation from
    elsewhere passes through unchanged. One task per context, which ends with it.
    """

    def __init__(self, receive: Receive) -> None:
        self._receive = receive
        self._hung_up = False

    async def __aenter__(self) -> Self:
        task = asyncio.current_task()
        assert task is not None
        self._task = task
        self._cancelling = task.cancelling()
        self._watcher = asyncio.create_task(self._watch(), name="disconnect-watcher")
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._watcher.cancel()
        if self._hung_up and self._task.uncancel() <= self._cancelling and kind is asyncio.CancelledError:
            raise ClientDisconnected from error

    async def _watch(self) -> None:
        while (await self._receive())["type"] != "http.disconnect":
            pass
        self._hung_up = True
        self._task.cancel()
