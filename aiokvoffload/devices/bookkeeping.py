"""What every device keeps itself: pinned ranges and doorbells."""

from __future__ import annotations

import logging
import threading
from bisect import bisect_left, insort
from collections.abc import Callable

import numpy as np

from aiokvoffload.devices.ranges import ByteRanges
from aiokvoffload.errors import DeviceError

logger = logging.getLogger(__name__)


class PinnedRanges:
    """The pinned ranges of host memory, none of which overlap; may be used from any thread."""

    def __init__(self) -> None:
        self._starts: list[int] = []
        self._end_of: dict[int, int] = {}
        self._ranges: ByteRanges | None = None
        self._lock = threading.Lock()

    def __len__(self) -> int:
        return len(self._starts)

    @property
    def addresses(self) -> list[int]:
        """Where the ranges begin."""
        with self._lock:
            return list(self._starts)

    @property
    def ranges(self) -> ByteRanges:
        """The ranges, to compare with many others at once."""
        with self._lock:
            if self._ranges is None:
                starts = np.array(self._starts, np.int64)
                self._ranges = ByteRanges(starts, np.array([self._end_of[start] for start in self._starts], np.int64))
            return self._ranges

    def add(self, address: int, byte_count: int) -> None:
        """Note a range.

        Raises:
            DeviceError: It is empty, or overlaps a pinned range.
        """
        if address <= 0 or byte_count <= 0:
            raise DeviceError(f"cannot pin {byte_count} bytes at {address:#x}; a range has an address and a size")
        end = address + byte_count
        with self._lock:
            index = bisect_left(self._starts, end)
            # Ranges do not overlap, so the last one that starts before `end` also ends last.
            if index and self._end_of[self._starts[index - 1]] > address:
                start = self._starts[index - 1]
                raise DeviceError(
                    f"cannot pin {byte_count} bytes at {address:#x}: "
                    f"{self._end_of[start] - start} bytes at {start:#x} are pinned already; unpin them first"
                )
            insort(self._starts, address)
            self._end_of[address] = end
            self._ranges = None

    def remove(self, address: int) -> int:
        """Forget the range that starts at `address`; return its byte count.

        Raises:
            DeviceError: No pinned range starts there.
        """
        with self._lock:
            if address not in self._end_of:
                raise DeviceError(f"cannot unpin {address:#x}: no pinned range starts there")
            del self._starts[bisect_left(self._starts, address)]
            self._ranges = None
            return self._end_of.pop(address) - address

    def clear(self) -> None:
        """Forget all ranges."""
        with self._lock:
            self._starts.clear()
            self._end_of.clear()
            self._ranges = None


class Doorbells:
    """The callables that want to hear of finished events; rung from any thread."""

    def __init__(self) -> None:
        self._rings: dict[object, Callable[[], None]] = {}

    def add(self, ring: Callable[[], None]) -> Callable[[], None]:
        """Add `ring`, once more if it is there already; return what takes it away again."""
        token = object()
        self._rings[token] = ring

        def remove() -> None:
            self._rings.pop(token, None)

        return remove

    def ring(self) -> None:
        """Ring all of them; one that raises is logged and never rung again."""
        for token, ring in list(self._rings.items()):
            try:
                ring()
            except Exception:
                self._rings.pop(token, None)
                logger.exception("a doorbell raised and was taken away; polling goes on without it")
