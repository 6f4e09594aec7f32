"""Keeps calls away from a tier that fails, stalls or has become slow, and tries it again after a pause."""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum

from aiokvoffload.clock import Clock

_NEWEST_WEIGHT = 0.2
_MEASURED_BEFORE_JUDGED = 5


class BreakerState(Enum):
    """Whether calls are let through."""

    CLOSED = "closed"
    OPEN = "open"
    HALF_OPEN = "half-open"
    """One call is under way to find out whether the tier is back."""


@dataclass(frozen=True, slots=True, kw_only=True)
class BreakerLimits:
    """When a breaker opens, and for how long.

    Attributes:
        failures: So many in a row open it.
        pause_seconds: From opening to the first probe; doubled with each probe that fails.
        longest_pause_seconds: Where the doubling ends.
        latency_seconds: An average above it opens the breaker; None: however slow.
    """

    failures: int = 3
    pause_seconds: float = 5.0
    longest_pause_seconds: float = 60.0
    latency_seconds: float | None = None


class Breaker:
    """Opens after failures in a row, after a stall, or when the average latency is too high.

    What calls report that were let through before it opened changes nothing until it is closed again.

    Args:
        clock: Where the pause is read.
        limits: When it opens.
    """

    def __init__(self, clock: Clock, limits: BreakerLimits | None = None) -> None:
        self._clock = clock
        self._limits = limits or BreakerLimits()
        self._failures_in_row = 0
        self._pause_seconds = self._limits.pause_seconds
        self._probe_at = 0.0
        self._measured_count = 0
        self.state = BreakerState.CLOSED
        self.reason = ""
        """Why it is not closed."""
        self.average_seconds = 0.0
        self.opened_count = 0

    def admits_probe_only(self) -> bool:
        """Return whether a call that `admit` lets through now is a probe."""
        return self.state is not BreakerState.CLOSED

    def admit(self) -> bool:
        """Return whether a call may go through; after the pause, one may, as a probe."""
        if self.state is BreakerState.OPEN and self._clock.now() >= self._probe_at:
            self.state = BreakerState.HALF_OPEN
            return True
        return self.state is BreakerState.CLOSED

    def record_success(self, seconds: float, *, is_probe: bool) -> None:
        """Note that the tier has answered, after so many seconds; a miss is an answer."""
        if is_probe and self.state is BreakerState.HALF_OPEN:
            self._close()
        if self.state is not BreakerState.CLOSED:
            return
        self._failures_in_row = 0
        weight = _NEWEST_WEIGHT if self._measured_count else 1.0
        self.average_seconds += weight * (seconds - self.average_seconds)
        self._measured_count += 1
        limit = self._limits.latency_seconds
        if limit is not None and self._measured_count >= _MEASURED_BEFORE_JUDGED and self.average_seconds > limit:
            self._open(f"answers take {self.average_seconds:.3g} s on average, more than {limit:g} s")

    def record_failure(self, why: str, *, is_probe: bool) -> None:
        """Note that the tier has failed or has missed a deadline."""
        if is_probe and self.state is BreakerState.HALF_OPEN:
            self._reopen(why)
        elif self.state is BreakerState.CLOSED:
            self._failures_in_row += 1
            if self._failures_in_row >= self._limits.failures:
                self._open(f"{self._failures_in_row} failures in a row, the last: {why}")

    def record_stall(self, why: str, *, is_probe: bool) -> None:
        """Note that the tier has not answered for so long that one more try would be one too many."""
        if is_probe and self.state is BreakerState.HALF_OPEN:
            self._reopen(why)
        elif self.state is BreakerState.CLOSED:
            self._open(why)

    def end_probe(self) -> None:
        """Note that a probe is over; if it has found out nothing, the next call is a probe."""
        if self.state is BreakerState.HALF_OPEN:
            self.state = BreakerState.OPEN

    def _open(self, why: str) -> None:
        self.state = BreakerState.OPEN
        self.reason = why
        self.opened_count += 1
        self._probe_at = self._clock.now() + self._pause_seconds

    def _reopen(self, why: str) -> None:
        self._pause_seconds = min(2 * self._pause_seconds, self._limits.longest_pause_seconds)
        self._open(why)

    def _close(self) -> None:
        self.state = BreakerState.CLOSED
        self.reason = ""
        self._failures_in_row = 0
        self._pause_seconds = self._limits.pause_seconds
        self._measured_count = 0
        self.average_seconds = 0.0
