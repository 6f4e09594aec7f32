"""Waits that no cancellation ends."""

from __future__ import annotations

from collections.abc import Callable

import anyio

from aiokvoffload.clock import Clock


class Watchers:
    """Callbacks to be called once, at the next change."""

    __slots__ = ("_callbacks",)

    def __init__(self) -> None:
        self._callbacks: list[Callable[[], None]] = []

    def add(self, callback: Callable[[], None]) -> None:
        """Call `callback` at the next change."""
        self._callbacks.append(callback)

    def remove(self, callback: Callable[[], None]) -> None:
        """Do not call `callback` any more."""
        if callback in self._callbacks:
            self._callbacks.remove(callback)

    def notify(self) -> None:
        """Something has changed."""
        callbacks, self._callbacks = self._callbacks, []
        for callback in callbacks:
            callback()

    async def wait_until(self, is_over: Callable[[], bool]) -> None:
        """Wait for the change that makes `is_over` true; cancelling the wait changes nothing."""
        while not is_over():
            event = anyio.Event()
            self.add(event.set)
            try:
                await event.wait()
            finally:
                self.remove(event.set)

    async def wait_out(self, is_over: Callable[[], bool], clock: Clock, deadline: float | None = None) -> None:
        """Wait for the change that makes `is_over` true, or the deadline, whatever cancels the caller meanwhile.

        A shield keeps anyio's cancellation out, but not a native one of asyncio (`asyncio.timeout`,
        `Task.cancel`), which is delivered once per request: it is taken, the wait goes on, and it is raised at
        the end.
        """
        cancellation: BaseException | None = None
        while not is_over() and (deadline is None or clock.now() < deadline):
            try:
                with clock.cancel_at(deadline) as scope:
                    scope.shield = True
                    await self.wait_until(is_over)
            except anyio.get_cancelled_exc_class() as exc:
                cancellation = exc
        if cancellation is not None:
            raise cancellation
