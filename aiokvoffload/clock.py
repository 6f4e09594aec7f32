"""Time, as an argument: whatever waits for time is handed a `Clock`, and no other module reads one."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import Protocol

import anyio


class Clock(Protocol):
    """A monotonic clock, in seconds, that can also end a wait."""

    def now(self) -> float:
        """Return the time in seconds; only differences mean something."""

    def cancel_at(self, deadline: float | None) -> AbstractContextManager[anyio.CancelScope]:
        """Return a scope that is cancelled once `now()` reaches `deadline` (None: never)."""

    def pause(self, seconds: float) -> None:
        """Block the calling thread for about `seconds`; for hosts without an event loop."""


class SystemClock:
    """The monotonic clock of this machine."""

    def now(self) -> float:
        """Return `time.monotonic()`."""
        return time.monotonic()

    @contextmanager
    def cancel_at(self, deadline: float | None) -> Iterator[anyio.CancelScope]:
        """Return a scope of the running event loop that ends at `deadline`."""
        with anyio.CancelScope() as scope:
            if deadline is not None:
                scope.deadline = anyio.current_time() + deadline - self.now()
            yield scope

    def pause(self, seconds: float) -> None:
        """Sleep in the calling thread."""
        time.sleep(max(0.0, seconds))


def deadline_after(clock: Clock, seconds: float | None) -> float | None:
    """Return the absolute deadline `seconds` from now, or None for no deadline."""
    return None if seconds is None else clock.now() + seconds


def wall_seconds() -> float:
    """Return the seconds since 1970, to be written where others read them; no wait and no deadline rests on it."""
    return time.time()
