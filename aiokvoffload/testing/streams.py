"""The streams of a `ManualDevice`: what waits in them, what holds them back, and how it lands."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from dataclasses import dataclass

from aiokvoffload.devices.base import CopyPlan, Direction, Event, Stream
from aiokvoffload.devices.host_copy import copy_one_by_one
from aiokvoffload.errors import DeviceError

SECONDS_PER_OPERATION = 0.001
"""What each landed operation counts for `elapsed_seconds` where no clock was given."""

Work = CopyPlan | Callable[[], None]


class ManualEvent(Event):
    """An event of a `ManualDevice`."""

    def __init__(self, stream: ManualStream) -> None:
        self.stream = stream
        self.is_over = False
        self.error: Exception | None = None
        self.seconds = 0.0


class ManualStream(Stream):
    """A stream of a `ManualDevice`.

    Attributes:
        name: For messages.
        timeline: The streams it belongs to.
        is_hung: Nothing in it goes on until it is released.
        queue: What waits in it.
        error: Failed work that no event has reported yet.
    """

    def __init__(self, timeline: Timeline, name: str) -> None:
        self.timeline = timeline
        self.name = name
        self.is_hung = False
        self.queue: deque[Operation | Mark | Wait] = deque()
        self.error: Exception | None = None


@dataclass(frozen=True, slots=True)
class Operation:
    """A copy batch or launched work, numbered by submission."""

    number: int
    work: Work


@dataclass(frozen=True, slots=True)
class Mark:
    """The place of an event in its stream."""

    event: ManualEvent


@dataclass(frozen=True, slots=True)
class Wait:
    """A wait for an event of another stream."""

    event: ManualEvent


@dataclass(frozen=True, slots=True)
class Fault:
    """A failure that strikes the next operation on a stream, or in a direction, or any."""

    error: str
    stream: ManualStream | None = None
    direction: Direction | None = None
    moved_copies: int = 0

    def strikes(self, stream: ManualStream, work: Work) -> bool:
        """Return whether this operation is the one meant."""
        if self.stream is not None and self.stream is not stream:
            return False
        return self.direction is None or (isinstance(work, CopyPlan) and work.direction is self.direction)


class Timeline:
    """All streams of one device.

    Args:
        now: Returns the time at which an event is over; None counts landed operations.

    Attributes:
        finished_count: Events that have become over; whoever rings for them counts down.
    """

    def __init__(self, now: Callable[[], float] | None) -> None:
        self.streams: list[ManualStream] = []
        self.hung_directions: set[Direction] = set()
        self.faults: list[Fault] = []
        self.landed_copies: list[CopyPlan] = []
        self.landed_count = 0
        self.finished_count = 0
        self._now = now
        self._submitted_count = 0

    def submit(self, stream: ManualStream, work: Work) -> None:
        """Put an operation into `stream`."""
        self._submitted_count += 1
        stream.queue.append(Operation(self._submitted_count, work))

    def is_ready(self, stream: ManualStream) -> bool:
        """Return whether the head of `stream` is an operation that may land now."""
        head = stream.queue[0] if stream.queue else None
        if stream.is_hung or not isinstance(head, Operation):
            return False
        return not (isinstance(head.work, CopyPlan) and head.work.direction in self.hung_directions)

    def ready_streams(self) -> list[ManualStream]:
        """Return the streams that are ready, the one whose head was submitted first in front."""
        return sorted(filter(self.is_ready, self.streams), key=_head_number)

    def blocking_stream(self, event: ManualEvent) -> ManualStream:
        """Return the stream whose head stands before `event`; the event is not over."""
        stream = event.stream
        # A wait names an event recorded before it, so following waits cannot run in a circle.
        while not stream.is_hung and isinstance(head := stream.queue[0], Wait):
            stream = head.event.stream
        return stream

    def land_head(self, stream: ManualStream) -> None:
        """Run the head of a ready stream, then resolve what stood behind it."""
        operation = stream.queue.popleft()
        self.landed_count += 1
        try:
            if isinstance(operation, Operation):
                self._run(stream, operation.work)
        except Exception as exc:  # noqa: BLE001 - whatever work raises is reported by the next event
            stream.error = stream.error or exc
        self.resolve()

    def resolve(self) -> None:
        """Let every event and wait go that has nothing before it."""
        while any(self._resolve_stream(stream) for stream in self.streams):
            pass

    def _resolve_stream(self, stream: ManualStream) -> bool:
        has_moved = False
        while not stream.is_hung and stream.queue:
            head = stream.queue[0]
            if isinstance(head, Mark):
                self._finish(head.event)
            elif not isinstance(head, Wait) or not head.event.is_over:
                break
            stream.queue.popleft()
            has_moved = True
        return has_moved

    def _finish(self, event: ManualEvent) -> None:
        event.seconds = self.landed_count * SECONDS_PER_OPERATION if self._now is None else self._now()
        event.error, event.stream.error = event.stream.error, None
        event.is_over = True
        self.finished_count += 1

    def _run(self, stream: ManualStream, work: Work) -> None:
        fault = next((fault for fault in self.faults if fault.strikes(stream, work)), None)
        if fault is not None:
            self.faults.remove(fault)
        if isinstance(work, CopyPlan):
            count = None if fault is None else fault.moved_copies
            copy_one_by_one(work.sources[:count], work.destinations[:count], work.byte_counts[:count])
        if fault is not None:
            raise DeviceError(fault.error)
        if isinstance(work, CopyPlan):
            self.landed_copies.append(work)
        else:
            work()


def _head_number(stream: ManualStream) -> int:
    head = stream.queue[0]
    return head.number if isinstance(head, Operation) else 0
