"""Events of a manager, for tasks and sinks of the same process."""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import Callable
from functools import partial
from typing import Self

from aiokvoffload.errors import InvalidRequestError
from aiokvoffload.events import EventSink, OffloadingEvent
from aiokvoffload.offloader.waiting import Watchers
from aiokvoffload.ownership import Owner

_logger = logging.getLogger(__name__)

DEFAULT_EVENT_BUFFER = 4096


class EventStream:
    """An async iterator over events; one that is read too slowly loses the oldest.

    A loss shows as a gap in the sequence numbers.
    """

    def __init__(self, hub: EventHub, buffer_size: int) -> None:
        self._hub = hub
        self._owner = Owner("stream of events")
        self._owner.check_thread()
        self._buffer: deque[OffloadingEvent] = deque(maxlen=buffer_size)
        self._watchers = Watchers()
        self._is_closed = False

    def __aiter__(self) -> Self:
        return self

    async def __anext__(self) -> OffloadingEvent:
        """Wait for the next event.

        Raises:
            StopAsyncIteration: The offloader, or this stream, is closed and all events are read.
            WrongThreadError: Another thread reads.
        """
        self._owner.check_thread()
        await self._watchers.wait_until(lambda: bool(self._buffer) or self._is_closed)
        if not self._buffer:
            raise StopAsyncIteration
        return self._buffer.popleft()

    def push(self, event: OffloadingEvent) -> None:
        """Add an event; for the hub."""
        self._buffer.append(event)
        self._watchers.notify()

    def close(self) -> None:
        """End the stream after what is buffered."""
        self._is_closed = True
        self._hub.streams.discard(self)
        self._watchers.notify()


class EventHub:
    """Hands every event to all streams and sinks; an `EventSink`.

    Attributes:
        streams: The open streams.
        detached_count: Sinks that raised and were detached.
    """

    def __init__(self) -> None:
        self.streams: set[EventStream] = set()
        self.detached_count = 0
        self._sinks: list[EventSink] = []

    def __call__(self, event: OffloadingEvent) -> None:
        """Take an event; a sink that raises gets no further ones, and the others do not notice."""
        for stream in self.streams:
            stream.push(event)
        for sink in tuple(self._sinks):
            try:
                sink(event)
            except Exception:
                _logger.exception("an event sink raised and is detached: it gets no further events")
                self._remove(sink)
                self.detached_count += 1

    def add_sink(self, sink: EventSink) -> Callable[[], None]:
        """Let a sink take the events from now on; return what takes it away, which may be called again."""
        self._sinks.append(sink)
        return partial(self._remove, sink)

    def subscribe(self, buffer_size: int) -> EventStream:
        """Return a stream of the events from now on.

        Raises:
            InvalidRequestError: `buffer_size` is not positive.
        """
        if buffer_size < 1:
            raise InvalidRequestError(f"buffer_size is {buffer_size}, it must be at least 1")
        stream = EventStream(self, buffer_size)
        self.streams.add(stream)
        return stream

    def close(self) -> None:
        """End all streams, and forget the sinks."""
        for stream in list(self.streams):
            stream.close()
        self._sinks.clear()

    def _remove(self, sink: EventSink) -> None:
        if sink in self._sinks:
            self._sinks.remove(sink)
