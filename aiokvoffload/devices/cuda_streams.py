"""Streams and events of a GPU, and what may be under way on them."""

from __future__ import annotations

import weakref
from collections import deque
from collections.abc import Callable
from typing import TYPE_CHECKING

from aiokvoffload.devices.base import CopyPlan, Direction, Event, Stream
from aiokvoffload.devices.cuda_driver import CudaDriver
from aiokvoffload.devices.ranges import ByteRanges

if TYPE_CHECKING:
    from aiokvoffload.devices.cuda import CudaDevice

_LEGACY_STREAMS = (0, 1)


class CudaEvent(Event):
    """An event of a `CudaDevice`; its handle goes back to the pool when nobody holds it any more."""

    def __init__(self, device: CudaDevice, handle: int, give_back: Callable[[int], None]) -> None:
        self.device = weakref.ref(device)
        self.handle = handle
        self.is_over = False
        self.error: str | None = None
        self._give_back = give_back

    def __del__(self) -> None:
        # The driver has noted what a wait refers to, so the handle may be recorded again although a stream waits.
        self._give_back(self.handle)


class EventPool:
    """Events of the driver to record again and again.

    Args:
        driver: Makes them.

    Attributes:
        handles: All that were made.
    """

    def __init__(self, driver: CudaDriver) -> None:
        self._driver = driver
        self.handles: list[int] = []
        self._free: deque[int] = deque()  # appended to by destructors, from any thread

    def take(self) -> int:
        """Return an event that nobody else uses."""
        try:
            return self._free.pop()
        except IndexError:
            self.handles.append(self._driver.create_event())
            return self.handles[-1]

    def give_back(self, handle: int) -> None:
        """Take an event back."""
        self._free.append(handle)


class Batch:
    """Copies that may be under way, and the event that tells when they are over."""

    def __init__(self, plan: CopyPlan) -> None:
        self.plan = plan
        self.end: CudaEvent | None = None
        self.is_over = False
        self._written: ByteRanges | None = None

    def writes(self, plan: CopyPlan) -> bool:
        """Return whether this is a store that writes what `plan` reads."""
        if self.plan.direction is not Direction.STORE:
            return False
        if self._written is None:
            self._written = ByteRanges(self.plan.destinations, self.plan.destinations + self.plan.byte_counts)
        return self._written.overlap(plan.sources, plan.byte_counts)


class CudaStream(Stream):
    """A stream of a `CudaDevice`.

    Attributes:
        handle: The driver's.
        adopted: What it was made of elsewhere, if it was.
        batches: What may be under way on it, oldest first.
    """

    def __init__(self, device: CudaDevice, name: str, handle: int, adopted: object = None) -> None:
        self.device = weakref.ref(device)
        self.name = name
        self.handle = handle
        self.adopted = adopted
        self.batches: deque[Batch] = deque()

    @property
    def is_legacy_default(self) -> bool:
        """It is the stream that every blocking stream waits for."""
        return self.handle in _LEGACY_STREAMS


def handle_of(stream: object) -> int | None:
    """Return the driver's handle of a stream of torch, or of one that keeps the protocol of cuda.core."""
    handle = getattr(stream, "cuda_stream", None)
    if handle is None and hasattr(stream, "__cuda_stream__"):
        _, handle = stream.__cuda_stream__()
    return handle if isinstance(handle, int) else None
