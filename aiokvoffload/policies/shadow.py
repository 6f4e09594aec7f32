"""Small caches without bytes that show how other ranks would have done."""

from __future__ import annotations

from collections.abc import Sequence
from heapq import heapify, heappop, heappush
from itertools import compress

from aiokvoffload.policies.candidates import CANDIDATES, HALF_LIVES
from aiokvoffload.policies.uses import PREVIOUS, Uses, UseTable

ROW_BYTES = 240
"""Upper bound of what one block that some shadow holds takes; a test holds it to that."""
ENTRY_BYTES = 88
"""Upper bound of what a shadow needs besides, for each block that it holds."""

_ROW_BITS = 32
_ROW_MASK = (1 << _ROW_BITS) - 1
_DEPTH_BITS = 40
_MAX_DEPTH = (1 << _DEPTH_BITS) - 1
_ABSENT, _STAYING = 0, -1


class ShadowCaches:
    """Keeps a sample of the blocks in one cache for each candidate, and when they were used.

    Args:
        capacity: How many blocks the real cache holds.
        sampled_capacity: How many blocks each of these holds.
    """

    def __init__(self, capacity: int, sampled_capacity: int) -> None:
        self._row_of: dict[int, int] = {}
        self._hash_of: list[int] = []
        self._holder_count: list[int] = []
        self._free_rows: list[int] = []
        self._uses = UseTable(0, [half_life * capacity for half_life in HALF_LIVES])
        self._sampled_capacity = sampled_capacity
        self._caches = [_Shadow(sampled_capacity) for _ in CANDIDATES]
        self._given_up: list[object] = []

    @property
    def used_bytes(self) -> int:
        """Upper bound of the memory that is taken now."""
        return len(self._hash_of) * ROW_BYTES + sum(map(len, self._caches)) * ENTRY_BYTES

    def request(
        self, hashes: Sequence[int], uses: Uses, depths: Sequence[int], tick: int, time: int
    ) -> list[tuple[int, int]]:
        """Return for each candidate how many of a request's blocks lead and hit, and how many it stores.

        Args:
            hashes: The sampled blocks of the request, by the hashes of their keys, in order, each once.
            uses: What the real cache knows of each, this use counted.
            depths: The token position of each.
            tick: When they were used.
            time: The same in insertions.
        """
        if self._given_up:
            self._given_up.pop()
        rows, uses = self._rows(hashes, uses, tick, time)
        # As in `ranking`: by base, then deepest first.
        places = [((_MAX_DEPTH - depth) << _ROW_BITS) + row for depth, row in zip(depths, rows, strict=True)]
        is_repeated = (uses[:, PREVIOUS] > 0).tolist()
        outcomes = []
        left = rows
        for cache, candidate in zip(self._caches, CANDIDATES, strict=True):
            entries = [
                (base << (_DEPTH_BITS + _ROW_BITS)) + place
                for base, place in zip(candidate.ranking(uses), places, strict=True)
            ]
            hit_count, stored, evicted = cache.request(rows, entries, is_repeated if candidate.is_filtered else None)
            for row in stored:
                self._holder_count[row] += 1
            for row in evicted:
                self._holder_count[row] -= 1
            left = left + evicted
            outcomes.append((hit_count, len(stored)))
        for row in {row for row in left if not self._holder_count[row]}:
            del self._row_of[self._hash_of[row]]
            self._free_rows.append(row)
        max(self._caches, key=_Shadow.overgrowth).tidy()  # one at a time, which bounds what a call costs
        return outcomes

    def clear(self) -> None:
        """Drop all blocks; their memory is given back by later calls, piece by piece."""
        self._given_up += [self._row_of, self._hash_of, *self._caches]
        self._row_of, self._hash_of, self._holder_count, self._free_rows = {}, [], [], []
        self._caches = [_Shadow(self._sampled_capacity) for _ in CANDIDATES]

    def _rows(self, hashes: Sequence[int], uses: Uses, tick: int, time: int) -> tuple[list[int], Uses]:
        """Return the row of each block, and its uses: what the real cache forgot may be known here."""
        rows = [self._row_of.get(hashed, -1) for hashed in hashes]
        self._uses.use([row for row in rows if row >= 0], tick, time)
        strangers = [position for position, row in enumerate(rows) if row < 0]
        for position in strangers:
            rows[position] = self._row_of[hashes[position]] = self._new_row(hashes[position])
        self._uses.put([rows[position] for position in strangers], uses[strangers])
        return rows, self._uses.of(rows)

    def _new_row(self, hashed: int) -> int:
        if self._free_rows:
            row = self._free_rows.pop()
            self._hash_of[row] = hashed
            return row
        self._hash_of.append(hashed)
        self._holder_count.append(0)
        self._uses.reserve(len(self._hash_of))
        for cache in self._caches:
            cache.add_row()
        return len(self._hash_of) - 1


class _Shadow:
    """One cache: a heap of entries, of which only the latest of each row counts."""

    def __init__(self, capacity: int) -> None:
        self._capacity = capacity
        self._count = 0
        self._entry_of: list[int] = []
        self._heap: list[int] = []

    def __len__(self) -> int:
        return self._count

    def add_row(self) -> None:
        self._entry_of.append(_ABSENT)

    def request(
        self, rows: Sequence[int], entries: Sequence[int], is_worth: Sequence[bool] | None
    ) -> tuple[int, list[int], list[int]]:
        """Return how many of `rows` lead and hit, and which are stored and evicted."""
        entry_of, heap = self._entry_of, self._heap
        is_held = [entry_of[row] != _ABSENT for row in rows]
        hit_count = is_held.index(False) if False in is_held else len(rows)
        room = self._capacity - sum(is_held)
        stored = [row for row, held in zip(rows, is_held, strict=True) if not held]
        if is_worth is not None:
            stored = [row for row, held, worth in zip(rows, is_held, is_worth, strict=True) if worth and not held]
        del stored[room:]
        for row in stored:
            entry_of[row] = _STAYING
        for row in compress(rows, is_held):
            entry_of[row] = _STAYING
        self._count += len(stored)
        evicted = []
        while self._count > self._capacity:
            entry = heappop(heap)
            row = entry & _ROW_MASK
            if entry_of[row] == entry:
                entry_of[row] = _ABSENT
                evicted.append(row)
                self._count -= 1
        for row, entry in zip(rows, entries, strict=True):
            if entry_of[row] == _STAYING:
                entry_of[row] = entry
                heappush(heap, entry)
        return hit_count, stored, evicted

    def overgrowth(self) -> int:
        """Return how many entries of the heap do not count."""
        return len(self._heap) - self._count

    def tidy(self) -> None:
        """Drop the entries that do not count if they are too many."""
        if self.overgrowth() > self._capacity:
            self._heap = list(filter(None, self._entry_of))
            heapify(self._heap)
