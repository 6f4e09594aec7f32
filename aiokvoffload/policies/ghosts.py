"""Keys of blocks that left, in lists from the oldest to the youngest, in steps that do not grow with what is kept."""

from __future__ import annotations

from array import array
from collections.abc import Iterator, Sequence

import numpy as np

from aiokvoffload.key_index import NumberArray, make_index
from aiokvoffload.keys import OffloadKey
from aiokvoffload.policies.slots import SlotArray, slot_array


class GhostLists:
    """Some lists of keys, each key in one of them at most; the oldest of a full list is forgotten.

    Every key has a row, and the rows of a list are linked by arrays in both directions, around a row of the list
    itself. All lists share one index, so that a key is looked for once.

    Args:
        limit: How many keys a list keeps at most.
        list_count: Number of lists.
    """

    def __init__(self, limit: int, list_count: int) -> None:
        self._limit = limit
        self._list_count = list_count
        self._row_count = row_count = limit * list_count
        self._list_of = np.zeros(row_count, dtype=np.uint8)
        self._seen_at = np.zeros(row_count, dtype=np.int64)
        self._next_row = array("i", bytes(4 * (row_count + list_count)))
        self._previous_row = array("i", bytes(4 * (row_count + list_count)))
        # The same memory: single rows are read and written faster through the arrays, batches through these.
        self._next_rows = np.frombuffer(self._next_row, dtype=np.int32)
        self._previous_rows = np.frombuffer(self._previous_row, dtype=np.int32)
        self._index = make_index(row_count)
        self.clear()

    def clear(self) -> None:
        """Forget all keys."""
        self._index.clear()
        self._first_fresh = 0
        self._reusable: array[int] = array("q")
        self.counts = [0] * self._list_count
        for end in range(self._row_count, self._row_count + self._list_count):
            self._next_row[end] = self._previous_row[end] = end

    def keys_in(self, list_index: int) -> Iterator[OffloadKey]:
        """Yield the keys of a list, oldest first."""
        end = self._row_count + list_index
        row = self._next_row[end]
        while row != end:
            yield from self._index.keys_of(np.array([row]))
            row = self._next_row[row]

    def rows(self, keys: Sequence[OffloadKey]) -> NumberArray:
        """Return the row of each key, `NOT_FOUND` for strangers."""
        return self._index.find(keys)

    def list_of(self, row: int) -> int:
        """Return which list a row is in."""
        return self._list_of.item(row)

    def renew(self, row: int, tick: int) -> bool:
        """Make a key the youngest of its list, seen at `tick`; False if it was seen at that tick or a later one."""
        if self._seen_at.item(row) >= tick:
            return False
        self._seen_at[row] = tick
        self._unlink(row)
        self._link(self._list_of.item(row), row, row)
        return True

    def add(self, list_index: int, keys: Sequence[OffloadKey]) -> None:
        """Put new keys, at least one and at most `limit`, at the young end of a list."""
        excess = self.counts[list_index] + len(keys) - self._limit
        if excess > 0:
            self._forget_oldest(list_index, excess)
        rows = self._take_rows(len(keys))
        self._index.put(keys, rows)
        self._list_of[rows] = list_index
        self._seen_at[rows] = -1
        self._next_rows[rows[:-1]] = rows[1:]
        self._previous_rows[rows[1:]] = rows[:-1]
        self._link(list_index, rows.item(0), rows.item(-1))
        self.counts[list_index] += len(keys)

    def remove(self, rows: NumberArray) -> None:
        """Forget the keys of some rows."""
        self._index.drop(rows)
        for row in rows.tolist():
            self._unlink(row)
            self.counts[self._list_of.item(row)] -= 1
        self._reusable.frombytes(rows.tobytes())

    def _forget_oldest(self, list_index: int, count: int) -> None:
        end = self._row_count + list_index
        next_row = self._next_row
        rows = []
        row = end
        for _ in range(count):
            row = next_row[row]
            rows.append(row)
        first_kept = next_row[row]
        next_row[end] = first_kept
        self._previous_row[first_kept] = end
        self._index.drop(slot_array(rows))
        self.counts[list_index] -= count
        self._reusable.extend(rows)

    def _take_rows(self, count: int) -> SlotArray:
        kept_count = max(0, len(self._reusable) - count)
        rows = np.array(self._reusable[kept_count:])
        del self._reusable[kept_count:]
        if len(rows) == count:
            return rows
        first = self._first_fresh
        self._first_fresh += count - len(rows)
        return np.concatenate((rows, np.arange(first, self._first_fresh)))

    def _link(self, list_index: int, first: int, last: int) -> None:
        """Put a chain of rows at the young end of a list."""
        end = self._row_count + list_index
        youngest = self._previous_row[end]
        self._next_row[youngest], self._previous_row[first] = first, youngest
        self._next_row[last], self._previous_row[end] = end, last

    def _unlink(self, row: int) -> None:
        before, behind = self._previous_row[row], self._next_row[row]
        self._next_row[before] = behind
        self._previous_row[behind] = before
