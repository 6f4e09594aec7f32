"""One task that polls for everybody who waits, and outlives them all.

It is no child of the caller's task: cancelling the scope around an offloader must not stop the one who finds out
that a copy has landed, or whoever waits for that copy, uncancelled, would wait for ever. On asyncio it is a task
of its own, on trio a system task; so an offloader can also be entered in one task and left in another. When the
event loop ends and cancels it, it waits for the copies under way, blocking and bounded, and ends them.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

import anyio

from aiokvoffload.clock import Clock, deadline_after
from aiokvoffload.event_loops import caller_from_threads, is_trio, running_loop

_logger = logging.getLogger(__name__)

_MIN_SLEEP_SECONDS = 0.001
"""Below it asyncio rounds up, and uvloop spins."""
_MAX_BACKOFF = 64


@dataclass(frozen=True, slots=True)
class PollStep:
    """What one poll found, and when the next one is due.

    Attributes:
        has_news: Something had landed.
        seconds_to_landing: Estimate for what lands next; None if nothing is under way.
        seconds_to_deadline: When something becomes overdue; None if nothing will.
    """

    has_news: bool
    seconds_to_landing: float | None
    seconds_to_deadline: float | None


class Pace:
    """How long to sleep between polls.

    Args:
        has_doorbell: Something rings when there is news, so that polling need not look for it.
    """

    def __init__(self, *, has_doorbell: bool) -> None:
        self._has_doorbell = has_doorbell
        self._backoff = _MAX_BACKOFF if has_doorbell else 1

    def seconds_to_next(self, step: PollStep) -> float | None:
        """Return how long to sleep after `step`; None until something rings."""
        backoff = self._backoff
        if not self._has_doorbell:
            # What lands later than expected is polled for less and less often, after a first millisecond.
            is_late = step.seconds_to_landing is not None and not step.has_news
            backoff = backoff if is_late else 1
            self._backoff = min(2 * backoff, _MAX_BACKOFF) if is_late else 1
        seconds = step.seconds_to_deadline
        if seconds is not None:
            seconds = max(seconds, _MIN_SLEEP_SECONDS)
        if step.seconds_to_landing is not None:
            to_landing = max(step.seconds_to_landing, _MIN_SLEEP_SECONDS * backoff)
            seconds = to_landing if seconds is None else min(seconds, to_landing)
        return seconds


class Lateness:
    """How long the poller has waited for its turn: from the ring or the timer that woke it to its next poll.

    That is how long the event loop kept its tasks waiting while something was under way, the grain of its timers, about
    a millisecond, included.

    Args:
        now: The time.
    """

    def __init__(self, now: Callable[[], float]) -> None:
        self._now = now
        self._rung_at: float | None = None
        self.total_seconds = 0.0
        self.longest_seconds = 0.0

    def note_ring(self) -> None:
        """Note that the poller is to poll; from any thread."""
        if self._rung_at is None:
            self._rung_at = self._now()

    def note_turn(self, deadline: float | None) -> None:
        """Note that the poller has its turn, which a timer would have given it at `deadline`."""
        rung_at, self._rung_at = self._rung_at, None
        due = min((time for time in (rung_at, deadline) if time is not None), default=None)
        if due is not None:
            seconds = max(0.0, self._now() - due)
            self.total_seconds += seconds
            self.longest_seconds = max(self.longest_seconds, seconds)


class Doorbell(Protocol):
    """Something that can ring when there is news, such as a device or a worker."""

    def add_doorbell(self, ring: Callable[[], None]) -> Callable[[], None] | None:
        """See `Device.add_doorbell`."""


class Poller:
    """Polls when a copy is expected to have landed; parked while nothing is under way.

    Args:
        step: Polls once; must not raise.
        drain: Blocks until the copies under way are over or a bound is reached; must not raise.
        doorbell: Wakes the poller, if it rings at all.
        clock: What the poller sleeps by.
        add_doorbell: Another doorbell that wakes it, not by the landing of copies.
    """

    def __init__(
        self,
        step: Callable[[], PollStep],
        drain: Callable[[], None],
        doorbell: Doorbell,
        clock: Clock,
        *,
        add_doorbell: Callable[[Callable[[], None]], Callable[[], None]] = lambda _ring: lambda: None,
    ) -> None:
        self._step = step
        self._drain = drain
        self._doorbell = doorbell
        self._clock = clock
        self._add_doorbell = add_doorbell
        self._is_stopping = False
        self.lateness = Lateness(clock.now)
        self._call_in_loop: Callable[[Callable[[], object]], None] = lambda call: None
        self._task: asyncio.Task[None] | None = None
        self.poll_count = 0

    def start(self) -> None:
        """Start polling in the running event loop."""
        self._wake_up = anyio.Event()
        self._finished = anyio.Event()
        self._loop = running_loop()
        # A closed loop has cancelled the poller, which has drained: a ring that comes later has nobody to wake.
        self._call_in_loop = caller_from_threads()
        if is_trio():
            import trio

            trio.lowlevel.spawn_system_task(self._run, name="aiokvoffload poller")
        else:
            self._task = asyncio.get_running_loop().create_task(self._run(), name="aiokvoffload poller")
            self._task.add_done_callback(self._end)

    @property
    def is_running(self) -> bool:
        """Started, and neither stopped nor cancelled by the end of its event loop."""
        return not self._finished.is_set()

    @property
    def is_elsewhere(self) -> bool:
        """The poller runs, but in another event loop than the caller."""
        return self.is_running and running_loop() not in (None, self._loop)

    def wake(self) -> None:
        """Let the poller poll soon; from the event loop's thread."""
        self.lateness.note_ring()
        self._wake_up.set()

    def ring(self) -> None:
        """Let the poller poll soon; from any thread."""
        self.lateness.note_ring()
        self._call_in_loop(self._wake_up_now)

    def _wake_up_now(self) -> None:
        self._wake_up.set()

    async def stop(self) -> None:
        """Stop polling, and wait until it has stopped."""
        self._is_stopping = True
        if not self.is_running:
            return  # what it would be waited with is of a loop that has ended, maybe of another kind
        self.wake()
        with anyio.CancelScope(shield=True):
            await self._finished.wait()

    async def _run(self) -> None:
        silence = self._doorbell.add_doorbell(self.ring)
        silence_other = self._add_doorbell(self.ring)
        try:
            await self._poll_until_stopped(has_doorbell=silence is not None)
        except Exception:
            # A task that fails would take the loop down on trio, and go unseen on asyncio.
            _logger.exception("the poller has failed")
        finally:
            if silence is not None:
                silence()
            silence_other()
            self._end()

    def _end(self, _task: object = None) -> None:
        """Say that the poller has ended; on asyncio it may have been cancelled before it ever ran."""
        if self.is_running:
            if not self._is_stopping:
                self._drain()
            self._finished.set()

    async def _poll_until_stopped(self, *, has_doorbell: bool) -> None:
        pace = Pace(has_doorbell=has_doorbell)
        while not self._is_stopping:
            self._wake_up = anyio.Event()
            self.poll_count += 1
            seconds = pace.seconds_to_next(self._step())
            deadline = deadline_after(self._clock, seconds)
            with self._clock.cancel_at(deadline):
                await self._wake_up.wait()
            self.lateness.note_turn(deadline)
