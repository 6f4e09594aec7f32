"""The CPU as a device: each stream is a thread, one more helps it, and the bytes move with the GIL released."""

from __future__ import annotations

import functools
import logging
import threading
import time
import weakref
from collections.abc import Callable
from queue import SimpleQueue

from aiokvoffload.devices.base import CopyPlan, Event, SimulatedDevice, Stream
from aiokvoffload.devices.bookkeeping import Doorbells, PinnedRanges
from aiokvoffload.devices.host_copy import HostCopier
from aiokvoffload.errors import ClosedError, DeviceError, InvalidRequestError, StateError

logger = logging.getLogger(__name__)


class HostEvent(Event):
    """An event of a `HostDevice`."""

    def __init__(self, device: HostDevice, stream_name: str, *, is_awaited: bool) -> None:
        self.device = weakref.ref(device)
        self.stream_name = stream_name
        self.is_awaited = is_awaited
        self.over = threading.Event()
        self.error: BaseException | None = None
        self.seconds = 0.0

    def finish(self, error: BaseException | None) -> None:
        """Say that the work before the event is over; by the thread of its stream."""
        self.seconds = time.perf_counter()
        self.error = error
        self.over.set()


class StreamThread:
    """The thread of one stream: takes operations and events off a queue, in order."""

    def __init__(self, name: str, doorbells: Doorbells) -> None:
        self._operations: SimpleQueue[Callable[[], object] | HostEvent | None] = SimpleQueue()
        self._doorbells = doorbells
        self._is_abandoned = False
        # A daemon: a stream that waits for ever must not keep the process from leaving.
        self._thread = threading.Thread(target=self._run, name=f"aiokvoffload-{name}", daemon=True)

    def put(self, operation: Callable[[], object] | HostEvent) -> None:
        """Queue an operation or an event."""
        if self._thread.ident is None:
            self._thread.start()
        self._operations.put(operation)

    def stop(self) -> None:
        """Let the thread end after what is queued."""
        self._operations.put(None)

    def join(self, timeout_seconds: float) -> bool:
        """Wait for the end of a stopped thread; if it is late, let it skip whatever it has not begun."""
        if self._thread.ident is not None:
            self._thread.join(timeout_seconds)
        self._is_abandoned = self._thread.is_alive()
        return not self._is_abandoned

    def _run(self) -> None:
        error: BaseException | None = None
        while (operation := self._operations.get()) is not None:
            if isinstance(operation, HostEvent):
                operation.finish(error)
                error = None
                if operation.is_awaited:
                    self._doorbells.ring()
            elif self._is_abandoned:
                error = error or ClosedError("the device was closed before this work began")
            else:
                try:
                    operation()
                except BaseException as exc:  # noqa: BLE001 - whatever work raises is reported by the next event
                    error = error or exc
            del operation  # what it keeps alive must not live until the next one comes


class HostStream(Stream):
    """A stream of a `HostDevice`."""

    def __init__(self, device: HostDevice, name: str, doorbells: Doorbells) -> None:
        self.device = weakref.ref(device)
        self.name = name
        self.thread = StreamThread(name, doorbells)
        # Ends the thread of a stream that nobody can put work into any more.
        weakref.finalize(self, self.thread.stop)


class HostDevice(SimulatedDevice):
    """Streams of threads over host memory, so that an engine and its transfers truly overlap on a CPU.

    Addresses must stay mapped until the copies are over. Pinning is only book-keeping.

    Args:
        close_timeout_seconds: How long `close` waits for queued work.
    """

    def __init__(self, *, close_timeout_seconds: float = 5.0) -> None:
        self._close_timeout_seconds = close_timeout_seconds
        self._copier = HostCopier()
        self._pinned = PinnedRanges()
        self._doorbells = Doorbells()
        self._streams: weakref.WeakSet[HostStream] = weakref.WeakSet()
        self._is_closed = False

    def create_stream(self, name: str) -> HostStream:
        """Return a new stream; its thread starts with its first work."""
        self._check_open()
        stream = HostStream(self, name, self._doorbells)
        self._streams.add(stream)
        return stream

    def adopt_stream(self, stream: object) -> Stream:
        """Return `stream` if it was made by this device."""
        return self._own_stream(stream)

    def record(self, stream: Stream) -> HostEvent:
        """Return an event that is done once all work now in `stream` is done."""
        return self._put_event(stream, is_awaited=True)

    def mark(self, stream: Stream) -> HostEvent:
        """Return such an event that no doorbell rings for."""
        return self._put_event(stream, is_awaited=False)

    def is_done(self, event: Event) -> bool:
        """Return whether the work before `event` is over; takes no lock."""
        owned = self._own_event(event)
        if not owned.over.is_set():
            return False
        if owned.error is not None:
            raise DeviceError(f"work on stream {owned.stream_name!r} failed: {owned.error}") from owned.error
        return True

    def elapsed_seconds(self, start: Event, end: Event) -> float:
        """Return the time between the moments at which two events were reached."""
        first, last = self._own_event(start), self._own_event(end)
        if not (first.over.is_set() and last.over.is_set()):
            raise StateError("the time between two events is known once both are over; ask is_done() first")
        return last.seconds - first.seconds

    def wait_event(self, stream: Stream, event: Event) -> None:
        """Let the thread of `stream` wait for `event`, failed or not."""
        thread, over = self._own_stream(stream).thread, self._own_event(event).over
        if not over.is_set():
            thread.put(over.wait)

    def copy_batch(self, plan: CopyPlan, stream: Stream) -> None:
        """Put the copies of `plan` into `stream`."""
        owned = self._own_stream(stream)
        plan.validate()
        owned.thread.put(functools.partial(self._copier.copy, plan))

    def launch(self, stream: Stream, work: Callable[[], None]) -> None:
        """Put `work` into `stream`; it runs in the stream's thread."""
        self._own_stream(stream).thread.put(work)

    def synchronize(self, event: Event, timeout_seconds: float) -> bool:
        """Block until `event` is over; return False at the timeout."""
        return self._own_event(event).over.wait(max(0.0, timeout_seconds))

    def pin(self, address: int, byte_count: int) -> None:
        """Note a range as pinned."""
        self._check_open()
        self._pinned.add(address, byte_count)

    def unpin(self, address: int) -> None:
        """Forget a pinned range."""
        self._check_open()
        self._pinned.remove(address)

    def add_doorbell(self, ring: Callable[[], None]) -> Callable[[], None]:
        """Let `ring` be called by the thread of a stream after each of its events."""
        self._check_open()
        return self._doorbells.add(ring)

    def close(self) -> None:
        """End the streams after their queued work; what has not begun within the timeout never runs."""
        if self._is_closed:
            return
        self._is_closed = True
        self._pinned.clear()
        streams = list(self._streams)
        for stream in streams:
            stream.thread.stop()
        deadline = time.perf_counter() + self._close_timeout_seconds
        for stream in streams:
            if not stream.thread.join(max(0.0, deadline - time.perf_counter())):
                logger.warning("stream %r has not ended in time; the rest of its work will be skipped", stream.name)
        self._copier.close()

    def _put_event(self, stream: Stream, *, is_awaited: bool) -> HostEvent:
        owned = self._own_stream(stream)
        event = HostEvent(self, owned.name, is_awaited=is_awaited)
        owned.thread.put(event)
        return event

    def _check_open(self) -> None:
        if self._is_closed:
            raise ClosedError("this HostDevice was closed; make a new one")

    def _own_stream(self, stream: object) -> HostStream:
        self._check_open()
        if not isinstance(stream, HostStream) or stream.device() is not self:
            raise InvalidRequestError(f"{stream!r} is not a stream of this HostDevice; make one with create_stream()")
        return stream

    def _own_event(self, event: Event) -> HostEvent:
        self._check_open()
        if not isinstance(event, HostEvent) or event.device() is not self:
            raise InvalidRequestError(f"{event!r} is not an event of this HostDevice; make one with record()")
        return event
