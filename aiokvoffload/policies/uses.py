"""When blocks were used: a row of numbers for each slot and for each of the blocks that left lately."""

from __future__ import annotations

from array import array
from collections.abc import Iterable, Sequence
from zlib import crc32

from aiokvoffload.keys import OffloadKey
from aiokvoffload.policies.lrfu import used_again

_SHARD_SIZE = 2048


class UseTable:
    """The last two uses of a block, as ticks, and its weight for each of some half-lives.

    Args:
        row_count: Number of rows.
        half_lives: In insertions; see `LRFUPolicy`.
    """

    def __init__(self, row_count: int, half_lives: Sequence[float]) -> None:
        self.last_tick = array("q", bytes(8 * row_count))
        self.previous_tick = array("q", bytes(8 * row_count))
        self.weights = [array("d", bytes(8 * row_count)) for _ in half_lives]
        self._half_lives = list(half_lives)

    def start(self, row: int, tick: int, time: int) -> None:
        """Note the first use of a block."""
        self.last_tick[row] = tick
        self.previous_tick[row] = 0
        for weights, half_life in zip(self.weights, self._half_lives, strict=True):
            weights[row] = time / half_life

    def use(self, rows: Iterable[int], tick: int, time: int) -> None:
        """Note another use of blocks whose last one was before `tick`."""
        rows = list(rows)
        last, previous = self.last_tick, self.previous_tick
        for row in rows:
            previous[row] = last[row]
            last[row] = tick
        for weights, half_life in zip(self.weights, self._half_lives, strict=True):
            now = time / half_life
            for row in rows:
                weights[row] = used_again(weights[row], now)

    def copy(self, source: int, target: int) -> None:
        """Give one row the numbers of another."""
        self.last_tick[target] = self.last_tick[source]
        self.previous_tick[target] = self.previous_tick[source]
        for weights in self.weights:
            weights[target] = weights[source]


class GhostRows:
    """Which row belongs to which block that left; the oldest makes room.

    Args:
        first_row: The first row that is for ghosts.
        limit: How many there are.
    """

    def __init__(self, first_row: int, limit: int) -> None:
        self._first_row = first_row
        self._limit = limit
        self._shards: list[dict[OffloadKey, int]] = []
        self._key_of: list[OffloadKey | None] = []
        self._next = 0
        self.clear()

    def __len__(self) -> int:
        return sum(map(len, self._shards))

    def get(self, key: OffloadKey) -> int | None:
        """Return the row of a ghost, None for a stranger."""
        return self._shard(key).get(key)

    def pop(self, key: OffloadKey) -> int | None:
        """End a ghost and return its row, which keeps its numbers until the next `put`."""
        row = self._shard(key).pop(key, None)
        if row is not None:
            self._key_of[row - self._first_row] = None
        return row

    def put(self, key: OffloadKey) -> int | None:
        """Return the row of a new ghost, None if there is no room for any."""
        if not self._limit:
            return None
        index = self._next
        self._next = (index + 1) % self._limit
        if index == len(self._key_of):
            self._key_of.append(None)
        elif (oldest := self._key_of[index]) is not None:
            del self._shard(oldest)[oldest]
        self._key_of[index] = key
        row = self._shard(key)[key] = self._first_row + index
        return row

    def clear(self) -> None:
        """End all ghosts."""
        self._shards = [{} for _ in range(max(1, -(-self._limit // _SHARD_SIZE)))]
        self._key_of = []
        self._next = 0

    def _shard(self, key: OffloadKey) -> dict[OffloadKey, int]:
        return self._shards[crc32(key) % len(self._shards)]
