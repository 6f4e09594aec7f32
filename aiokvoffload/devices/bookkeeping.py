"""What devices that are written in Python keep themselves: pinned ranges and doorbells."""

from __future__ import annotations

import logging
from bisect import bisect_left, insort
from collections.abc import Callable

from aiokvoffload.errors import DeviceError

logger = logging.getLogger(__name__)


class PinnedRanges:
    """The pinned ranges of host memory, none of which overlap."""

    def __init__(self) -> None:
        self._starts: list[int] = []
        self._end_of: dict[int, int] = {}

    def __len__(self) -> int:
        return len(self._starts)

    def add(self, address: int, byte_count: int) -> None:
        """Note a range.

        Raises:
            DeviceError: It is empty, or overlaps a pinned range.
        """
        if address <= 0 or byte_count <= 0:
            raise DeviceError(f"cannot pin {byte_count} bytes at {address:#x}; a range has an address and a size")
        end = address + byte_count
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

    def remove(self, address: int) -> None:
        """Forget the range that starts at `address`.

        Raises:
            DeviceError: No pinned range starts there.
        """
        if address not in self._end_of:
            raise DeviceError(f"cannot unpin {address:#x}: no pinned range starts there")
        del self._end_of[address]
        del self._starts[bisect_left(self._starts, address)]

    def clear(self) -> None:
        """Forget all ranges."""
        self._starts.clear()
        self._end_of.clear()


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
