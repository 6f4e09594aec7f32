"""Vector clocks of streams, and the times of accesses to compare them with."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

VectorClock = NDArray[np.int32]
"""How much is known of each owner; the host has index 0, owners beyond the end are unknown."""


class Owner:
    """A stream, or the host.

    Attributes:
        name: For messages.
        index: Its place in every clock.
        clock: What it knows of everyone, itself included.
        labels: What it did at each of its times.
    """

    def __init__(self, name: str, index: int, capacity: int) -> None:
        self.name = name
        self.index = index
        self.clock: VectorClock = np.zeros(capacity, np.int32)
        self.labels = ["nothing"]

    def grow(self, owner_count: int) -> None:
        """Make room for more owners, of whom nothing is known yet."""
        self.clock = np.pad(self.clock, (0, owner_count - len(self.clock)))

    def tick(self, label: str) -> int:
        """Begin an operation; return its time."""
        self.labels.append(label)
        self.clock[self.index] += 1
        return int(self.clock[self.index])

    def learn(self, clock: VectorClock) -> None:
        """Add what `clock` knows."""
        # An event's clock is shorter if streams were added since.
        known = self.clock[: len(clock)]
        np.maximum(known, clock, out=known)


class AccessTable:
    """When each owner last read, or wrote, each cell: `times[cell, owner]`, 0 for never."""

    def __init__(self) -> None:
        self.times: NDArray[np.int32] = np.zeros((0, 0), np.int32)

    def grow(self, cell_count: int, owner_count: int) -> None:
        """Make room, if there is not as much already."""
        if self.times.shape == (cell_count, owner_count):
            return
        grown = np.zeros((cell_count, owner_count), np.int32)
        grown[: self.times.shape[0], : self.times.shape[1]] = self.times
        self.times = grown

    def unordered(self, cells: NDArray[np.int64], clock: VectorClock) -> list[tuple[int, int, int]]:
        """Return (cell, owner, time) for each cell with an access that `clock` does not know of."""
        times = self.times[cells]
        late = times[:, : len(clock)] > clock
        if not late.any():
            return []
        found = np.flatnonzero(late.any(axis=1))
        owners = late[found].argmax(axis=1)
        return list(zip(cells[found].tolist(), owners.tolist(), times[found, owners].tolist(), strict=True))
