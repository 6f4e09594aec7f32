"""A clock that stands still until the test moves it."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import anyio


class ManualClock:
    """Time moves by `advance` only, and ends the waits whose deadline it passes.

    A host without an event loop that pauses moves it too, so that its waits end.

    Args:
        start: First reading, in seconds.
    """

    def __init__(self, start: float = 0.0) -> None:
        self._now = start
        self._waits: list[tuple[float, anyio.CancelScope]] = []

    def now(self) -> float:
        """Return the time in seconds."""
        return self._now

    def advance(self, seconds: float) -> None:
        """Let time pass, and cancel the scopes whose deadline has come."""
        self._now += seconds
        for deadline, scope in list(self._waits):
            if deadline <= self._now:
                scope.cancel()

    @property
    def next_deadline(self) -> float | None:
        """When the next wait ends, or None if none will."""
        return min((deadline for deadline, _ in self._waits), default=None)

    @contextmanager
    def cancel_at(self, deadline: float | None) -> Iterator[anyio.CancelScope]:
        """Return a scope that `advance` cancels at `deadline`."""
        with anyio.CancelScope() as scope:
            if deadline is None:
                yield scope
                return
            wait = (deadline, scope)
            self._waits.append(wait)
            if deadline <= self._now:
                scope.cancel()
            try:
                yield scope
            finally:
                self._waits.remove(wait)

    def pause(self, seconds: float) -> None:
        """Let time pass."""
        self.advance(seconds)
