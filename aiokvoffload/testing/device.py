"""A device without threads or time, whose work lands when a test says so."""

from __future__ import annotations

import random
from collections import deque
from collections.abc import Callable

from aiokvoffload.clock import Clock
from aiokvoffload.devices.base import CopyPlan, Direction, Event, SimulatedDevice, Stream
from aiokvoffload.devices.bookkeeping import Doorbells, PinnedRanges
from aiokvoffload.errors import ClosedError, DeviceError, InvalidRequestError, StateError
from aiokvoffload.testing.streams import Fault, ManualEvent, ManualStream, Mark, Operation, Timeline, Wait


class ManualDevice(SimulatedDevice):
    """A deterministic device on which copies and launched work land one by one, under the test's control.

    Operations are the copy batches and the launched work; they wait in their streams until `land_next`,
    `land_all` or a `synchronize` of the host lets them land, and only then do bytes move. Events and waits between
    streams need no landing: they resolve as soon as all before them has. Everything runs in the caller's thread,
    doorbells too, after the state is consistent.

    Args:
        random_order: Picks which stream goes next where `land_next` is free to choose; without it the operation
            that was submitted first does.
        clock: Read for `elapsed_seconds`, and paused for the timeout of a `synchronize` that cannot reach its
            event; without it, each landed operation counts a millisecond, and nothing is waited for.
        auto_land: Let each operation land as soon as nothing holds it back.

    Attributes:
        copies: All copy plans that were submitted, in order.
        landed_copies: Those whose bytes have all been moved, in the order in which they landed.
    """

    def __init__(
        self, *, random_order: random.Random | None = None, clock: Clock | None = None, auto_land: bool = False
    ) -> None:
        self.copies: list[CopyPlan] = []
        self._random_order = random_order
        self._clock = clock
        self._auto_land = auto_land
        self._timeline = Timeline(clock.now if clock else None)
        self.landed_copies = self._timeline.landed_copies
        self._refusals: deque[str] = deque()
        self._pinned = PinnedRanges()
        self._doorbells = Doorbells()
        self._is_ringing = False
        self._is_closed = False

    # What the test controls

    @property
    def is_idle(self) -> bool:
        """Nothing waits in any stream, hung ones included."""
        return not any(stream.queue for stream in self._timeline.streams)

    @property
    def pending_copies(self) -> list[CopyPlan]:
        """The copy plans that have neither landed nor failed, stream by stream."""
        queued = (entry for stream in self._timeline.streams for entry in stream.queue)
        return [entry.work for entry in queued if isinstance(entry, Operation) and isinstance(entry.work, CopyPlan)]

    def land_next(self, stream: Stream | None = None) -> bool:
        """Let the next operation land, of `stream` or of any; return False if none can land now."""
        if stream is None:
            ready = self._timeline.ready_streams()
        else:
            ready = list(filter(self._timeline.is_ready, [self._own_stream(stream)]))
        if not ready:
            return False
        self._land_head(ready[0] if self._random_order is None else self._random_order.choice(ready))
        return True

    def land_all(self) -> int:
        """Let operations land until none can any more; return how many did."""
        landed_before = self._timeline.landed_count
        while self.land_next():
            pass
        return self._timeline.landed_count - landed_before

    def fail_next(self, stream: Stream | None, error: str, *, moved_copies: int = 0) -> None:
        """Let the next operation that lands, on `stream` or on any, fail instead of running.

        Args:
            stream: Where, or None for any stream.
            error: Named by the `DeviceError` of the next event on the stream.
            moved_copies: How many copies of a batch are made before it fails.
        """
        self._timeline.faults.append(
            Fault(error, self._own_stream(stream) if stream is not None else None, moved_copies=moved_copies)
        )

    def fail_next_copy(self, direction: Direction, error: str, *, moved_copies: int = 0) -> None:
        """Let the next copy batch in `direction` that lands fail, as `fail_next` does."""
        self._timeline.faults.append(Fault(error, direction=direction, moved_copies=moved_copies))

    def refuse_next(self, error: str) -> None:
        """Let the next `copy_batch` raise `DeviceError(error)` at its submission; adds up when called again."""
        self._refusals.append(error)

    def hang(self, stream: Stream) -> None:
        """Let nothing on `stream` go on, events included, until it is released."""
        self._own_stream(stream).is_hung = True

    def hang_direction(self, direction: Direction) -> None:
        """Let no copy batch in `direction` land until it is released; what stands behind one waits with it."""
        self._timeline.hung_directions.add(direction)

    def release(self, hung: Stream | Direction | None = None) -> None:
        """End what `hang` or `hang_direction` began, or all of it; what was held can then land."""
        if isinstance(hung, Stream):
            self._own_stream(hung).is_hung = False
        elif isinstance(hung, Direction):
            self._timeline.hung_directions.discard(hung)
        else:
            self._timeline.hung_directions.clear()
            for stream in self._timeline.streams:
                stream.is_hung = False
        self._advance()

    # The device contract

    def create_stream(self, name: str) -> ManualStream:
        """Return a new stream."""
        self._check_open()
        stream = ManualStream(self._timeline, name)
        self._timeline.streams.append(stream)
        return stream

    def adopt_stream(self, stream: object) -> Stream:
        """Return `stream` if it was made by this device."""
        self._check_open()
        return self._own_stream(stream)

    def record(self, stream: Stream) -> ManualEvent:
        """Return an event that is done once all work now in `stream` has landed."""
        owned = self._open_stream(stream)
        event = ManualEvent(owned)
        owned.queue.append(Mark(event))
        self._advance()
        return event

    def is_done(self, event: Event) -> bool:
        """Return whether the work before `event` has landed."""
        owned = self._open_event(event)
        if owned.error is not None:
            raise DeviceError(f"work on stream {owned.stream.name!r} failed: {owned.error}") from owned.error
        return owned.is_over

    def elapsed_seconds(self, start: Event, end: Event) -> float:
        """Return the time between two events, by the clock or by landed operations."""
        first, last = self._open_event(start), self._open_event(end)
        if not (first.is_over and last.is_over):
            raise StateError("the time between two events is known once both are over; ask is_done() first")
        return last.seconds - first.seconds

    def wait_event(self, stream: Stream, event: Event) -> None:
        """Let work put into `stream` from now on land only after `event`."""
        owned_stream, owned_event = self._open_stream(stream), self._open_event(event)
        owned_stream.queue.append(Wait(owned_event))
        self._advance()

    def copy_batch(self, plan: CopyPlan, stream: Stream) -> None:
        """Put the copies of `plan` into `stream`."""
        owned = self._open_stream(stream)
        plan.validate()
        if self._refusals:
            raise DeviceError(self._refusals.popleft())
        self.copies.append(plan)
        self._timeline.submit(owned, plan)
        self._advance()

    def launch(self, stream: Stream, work: Callable[[], None]) -> None:
        """Put `work` into `stream`; it runs in the thread that lets it land."""
        self._timeline.submit(self._open_stream(stream), work)
        self._advance()

    def synchronize(self, event: Event, timeout_seconds: float) -> bool:
        """Let land what stands before `event`, and nothing else; return False if something is hung.

        A timeout of 0 lets nothing land.
        """
        owned = self._open_event(event)
        while not owned.is_over and timeout_seconds > 0:
            blocking = self._timeline.blocking_stream(owned)
            if not self._timeline.is_ready(blocking):
                if self._clock is not None:
                    self._clock.pause(timeout_seconds)
                break
            self._land_head(blocking)
        return owned.is_over

    def pin(self, address: int, byte_count: int) -> None:
        """Note a range as pinned."""
        self._check_open()
        self._pinned.add(address, byte_count)

    def unpin(self, address: int) -> None:
        """Forget a pinned range."""
        self._check_open()
        self._pinned.remove(address)

    def add_doorbell(self, ring: Callable[[], None]) -> Callable[[], None]:
        """Let `ring` be called, in the thread that lets work land, after each event that is over."""
        self._check_open()
        return self._doorbells.add(ring)

    def close(self) -> None:
        """Drop what has not landed: no byte moves any more."""
        self._is_closed = True
        for stream in self._timeline.streams:
            stream.queue.clear()
        self._pinned.clear()

    # Inside

    def _land_head(self, stream: ManualStream) -> None:
        self._timeline.land_head(stream)
        self._ring()

    def _advance(self) -> None:
        """Resolve what needs no landing, and land what may land by itself."""
        self._timeline.resolve()
        self._ring()
        if self._auto_land:
            self.land_all()

    def _ring(self) -> None:
        # A doorbell may call the device again; what that finishes is rung for here, not inside the ring.
        if self._is_ringing:
            return
        self._is_ringing = True
        try:
            while self._timeline.finished_count:
                self._timeline.finished_count -= 1
                self._doorbells.ring()
        finally:
            self._is_ringing = False

    def _check_open(self) -> None:
        if self._is_closed:
            raise ClosedError("this ManualDevice was closed; make a new one")

    def _own_stream(self, stream: object) -> ManualStream:
        if not isinstance(stream, ManualStream) or stream.timeline is not self._timeline:
            raise InvalidRequestError(f"{stream!r} is not a stream of this ManualDevice; make one with create_stream()")
        return stream

    def _open_stream(self, stream: Stream) -> ManualStream:
        self._check_open()
        return self._own_stream(stream)

    def _open_event(self, event: Event) -> ManualEvent:
        self._check_open()
        if not isinstance(event, ManualEvent) or event.stream.timeline is not self._timeline:
            raise InvalidRequestError(f"{event!r} is not an event of this ManualDevice; make one with record()")
        return event
