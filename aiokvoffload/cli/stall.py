"""How long an event loop keeps its tasks waiting, measured by a heartbeat on that loop."""

from __future__ import annotations

from types import TracebackType
from typing import Self

import anyio
from anyio.abc import TaskGroup

from aiokvoffload.clock import Clock
from aiokvoffload.errors import InvalidRequestError, StateError

NANOSECONDS = 1_000_000_000
SUB_BUCKET_BITS = 5
SUB_BUCKETS = 1 << SUB_BUCKET_BITS
BUCKETS = SUB_BUCKETS * 60


class DurationHistogram:
    """Counts durations in buckets that grow with them: 15 KiB, whatever is recorded.

    Minimum width is one nanosecond; a percentile is at most 1/32 above the true one. The maximum is exact.
    """

    def __init__(self) -> None:
        self._counts = [0] * BUCKETS
        self._count = 0
        self._max_seconds = 0.0

    @property
    def count(self) -> int:
        """Durations recorded."""
        return self._count

    @property
    def max_seconds(self) -> float:
        """The longest duration, 0 if there is none."""
        return self._max_seconds

    def record(self, seconds: float) -> None:
        """Add one duration; a negative one counts as 0."""
        nanoseconds = max(0, int(seconds * NANOSECONDS))
        self._counts[min(_bucket(nanoseconds), BUCKETS - 1)] += 1
        self._count += 1
        self._max_seconds = max(self._max_seconds, seconds)

    def percentile_seconds(self, percent: float) -> float:
        """Return the duration that `percent` of the recorded ones do not exceed, 0 if there is none.

        Raises:
            InvalidRequestError: `percent` is not between 0 and 100.
        """
        if not 0 <= percent <= 100:
            raise InvalidRequestError(f"percent is {percent}, it must be between 0 and 100")
        needed = max(1.0, self._count * percent / 100)
        seen = 0
        for bucket, count in enumerate(self._counts[:-1]):  # the last bucket has no upper end
            seen += count
            if seen >= needed:
                return min(self._max_seconds, _highest_nanoseconds(bucket) / NANOSECONDS)
        return self._max_seconds


class LoopStallMeter:
    """Lets a task wait about one millisecond over and over and records how much later it runs.

    Use it once, as `async with LoopStallMeter(clock) as meter`; the figures can be read meanwhile and afterwards. The
    body's exceptions pass unchanged. A stall that lasts until the end of the body counts.

    Args:
        clock: Ends the waits and tells the time.
        interval_seconds: Length of one wait.
    """

    def __init__(self, clock: Clock, *, interval_seconds: float = 0.001) -> None:
        if not interval_seconds > 0:
            raise InvalidRequestError(f"interval_seconds is {interval_seconds}, it must be above 0")
        self._clock = clock
        self._interval_seconds = interval_seconds
        self._lateness = DurationHistogram()
        self._due = 0.0
        self._tasks: TaskGroup | None = None

    @property
    def beat_count(self) -> int:
        """Waits recorded."""
        return self._lateness.count

    @property
    def max_stall_ms(self) -> float:
        """The most that a wait ended too late, in milliseconds."""
        return self._lateness.max_seconds * 1_000

    @property
    def p50_stall_ms(self) -> float:
        """What half of the waits were late by at most, in milliseconds."""
        return self._lateness.percentile_seconds(50) * 1_000

    @property
    def p99_stall_ms(self) -> float:
        """What 99 % of the waits were late by at most, in milliseconds."""
        return self._lateness.percentile_seconds(99) * 1_000

    async def __aenter__(self) -> Self:
        if self._tasks is not None:
            raise StateError("a LoopStallMeter measures once; make another one")
        # The first wait starts here and not in the task: a body that never awaits is one long stall.
        self._due = self._clock.now() + self._interval_seconds
        self._tasks = anyio.create_task_group()
        await self._tasks.__aenter__()
        self._tasks.start_soon(self._beat)
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        if self._tasks is None:
            raise StateError("this LoopStallMeter was not entered")
        late_seconds = self._clock.now() - self._due
        if late_seconds > 0:
            self._lateness.record(late_seconds)
        self._tasks.cancel_scope.cancel()
        # The group is not told of the body's exception, so that it does not wrap it into an exception group.
        await self._tasks.__aexit__(None, None, None)

    async def _beat(self) -> None:
        while True:
            with self._clock.cancel_at(self._due):
                await anyio.Event().wait()
            now = self._clock.now()
            self._lateness.record(now - self._due)
            self._due = now + self._interval_seconds


def _bucket(nanoseconds: int) -> int:
    """Return the index of the bucket: exact below 64, then 32 buckets for each doubling."""
    shift = max(0, nanoseconds.bit_length() - SUB_BUCKET_BITS - 1)
    return shift * SUB_BUCKETS + (nanoseconds >> shift)


def _highest_nanoseconds(bucket: int) -> int:
    shift = max(0, bucket // SUB_BUCKETS - 1)
    return ((bucket - shift * SUB_BUCKETS + 1) << shift) - 1
