"""When blocks were used: a row of numbers for each slot and for each of the blocks that left lately."""

from __future__ import annotations

from array import array
from collections.abc import Iterable, Sequence

import numpy as np
import numpy.typing as npt

from aiokvoffload.policies.slots import SlotArray

_SHARD_SIZE = 2048

LAST, PREVIOUS, FIRST, WEIGHTS = 0, 1, 2, 3
"""The columns of a use table: ticks of the last use, the last but one and the first one, then a weight for each
half-life."""

Rows = Sequence[int] | SlotArray
Uses = npt.NDArray[np.float64]
"""Rows of a use table."""


class UseTable:
    """The first and the last two uses of a block, as ticks, and its weight for each of some half-lives.

    All calls take batches of rows.

    Args:
        row_count: Number of rows.
        half_lives: In insertions; see `LRFUPolicy`.
    """

    def __init__(self, row_count: int, half_lives: Sequence[float]) -> None:
        # Whole numbers as large as ticks are exact in a float, and one block's numbers lie side by side. All of it is
        # written to here, because memory that is met for the first time stops a call for milliseconds.
        column_count = WEIGHTS + len(half_lives)
        self._table: Uses = np.frombuffer(bytearray(8 * row_count * column_count)).reshape(row_count, column_count)
        self._half_lives = np.array(half_lives)

    def of(self, rows: Rows) -> Uses:
        """Return a copy of some rows."""
        return self._table[rows]

    def last_ticks(self, rows: Rows) -> Uses:
        """Return when blocks were used last."""
        last: Uses = self._table[rows, LAST]
        return last

    def start(self, rows: Rows, tick: int, time: int) -> None:
        """Note the first use of blocks."""
        self._table[rows] = self.first_use(tick, time)

    def first_use(self, tick: int, time: int) -> Uses:
        """Return the row of a block that is used for the first time."""
        return np.array([tick, 0.0, tick, *(time / self._half_lives)])

    def use(self, rows: Rows, tick: int, time: int) -> None:
        """Note another use of blocks whose last one was before `tick`."""
        uses = self._table[rows]
        uses[:, PREVIOUS] = uses[:, LAST]
        uses[:, LAST] = tick
        # The logarithm of the sum of two weights that are logarithms; see `LRFUPolicy`.
        np.logaddexp2(uses[:, WEIGHTS:], time / self._half_lives, out=uses[:, WEIGHTS:])
        self._table[rows] = uses

    def put(self, rows: Rows, uses: Uses) -> None:
        """Overwrite rows."""
        self._table[rows] = uses

    def reserve(self, row_count: int) -> None:
        """Make room for so many rows, and as many again if there was none."""
        if row_count > len(self._table):
            self._table = np.concatenate([self._table, np.zeros((row_count, self._table.shape[1]))])

    def copy(self, sources: Rows, targets: Rows) -> None:
        """Give rows the numbers of others."""
        self._table[targets] = self._table[sources]


class GhostRows:
    """Which row belongs to which block that left; the oldest makes room.

    A block is known by the hash of its key, which takes less memory than the key. Should two ever have the same one, a
    block is taken for another that left, and no harm is done.

    Args:
        first_row: The first row that is for ghosts.
        limit: How many there are.
    """

    def __init__(self, first_row: int, limit: int) -> None:
        self._first_row = first_row
        self.limit = limit
        # In shards, so that no call ever rebuilds, or frees, one large table.
        self._shards: list[dict[int, int]] = [{} for _ in range(1 << (limit // _SHARD_SIZE).bit_length())]
        self._given_up: list[dict[int, int]] = []
        self._hash_of = array("q", bytes(8 * limit))
        self._next = 0

    def __len__(self) -> int:
        return sum(map(len, self._shards))

    def get(self, hashes: Iterable[int]) -> list[int | None]:
        """Return the row of each ghost, None for a stranger."""
        shards, mask = self._shards, len(self._shards) - 1
        return [shards[hashed & mask].get(hashed) for hashed in hashes]

    def pop(self, hashes: Iterable[int]) -> list[int | None]:
        """End ghosts and return their rows, which keep their numbers until the next `put`."""
        shards, mask = self._shards, len(self._shards) - 1
        if self._given_up:
            self._given_up.pop()
        return [shards[hashed & mask].pop(hashed, None) for hashed in hashes]

    def put(self, hashes: Sequence[int]) -> list[int]:
        """Return the rows of new ghosts: of the last ones if there is no room for all of them."""
        shards, mask, hash_of = self._shards, len(self._shards) - 1, self._hash_of
        rows = []
        for hashed in hashes[max(0, len(hashes) - self.limit) :]:
            index = self._next
            self._next = index + 1 if index + 1 < self.limit else 0
            row = self._first_row + index
            oldest = hash_of[index]
            shard = shards[oldest & mask]
            if shard.get(oldest) == row:  # it may have ended, and be another ghost by now
                del shard[oldest]
            hash_of[index] = hashed
            shards[hashed & mask][hashed] = row
            rows.append(row)
        return rows

    def clear(self) -> None:
        """End all ghosts; their memory is given back by later calls, piece by piece."""
        self._given_up += self._shards
        self._shards = [{} for _ in self._shards]
