"""Memory and copy plans for tests of devices."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from aiokvoffload.devices.base import CopyPlan, Direction


class DeviceMemory:
    """Bytes that a device can copy; this one is host memory, which stands in for a simulated device's.

    Subclass it for a device with memory of its own, and return it from `DeviceContract.make_device_memory`.
    """

    def __init__(self, content: NDArray[np.uint8]) -> None:
        self._array = content.copy()

    @property
    def address(self) -> int:
        """Where the bytes begin."""
        return self._array.ctypes.data

    def read(self) -> NDArray[np.uint8]:
        """Return a copy of the bytes, as they are now."""
        return self._array.copy()


def pattern(byte_count: int) -> NDArray[np.uint8]:
    """Return bytes that are not zero and tell their places."""
    return (np.arange(byte_count) % 251 + 1).astype(np.uint8)


def plan_of(direction: Direction, copies: Sequence[tuple[int, int, int]], *owners: object) -> CopyPlan:
    """Return a plan of (source, destination, byte count)."""
    columns = np.array(copies, np.int64).reshape(-1, 3)
    return CopyPlan(columns[:, 0].copy(), columns[:, 1].copy(), columns[:, 2].copy(), direction, owners)


def scattered(random: np.random.Generator, sizes: NDArray[np.int64]) -> NDArray[np.int64]:
    """Return offsets that lay ranges of `sizes` apart from each other, in random order, with gaps between some."""
    order = random.permutation(len(sizes))
    gaps = random.integers(0, 2, len(sizes)) * random.integers(0, 64, len(sizes)) % np.maximum(sizes[order], 1)
    offsets = np.empty(len(sizes), np.int64)
    offsets[order] = np.cumsum(sizes[order] + gaps) - sizes[order]
    return offsets
