"""The time of the last use but one decides: what was used once leaves before what was used twice.

After E. O'Neil, P. O'Neil, G. Weikum, "The LRU-K Page Replacement Algorithm For Database Disk Buffering", SIGMOD
1993, with K = 2. Its "correlated references" are the calls of one request, which share a tick and count once; its
retained information is the tick of the last use of blocks that left.
"""

from __future__ import annotations

from array import array
from collections.abc import Sequence

import numpy as np

from aiokvoffload.keys import OffloadKey
from aiokvoffload.policies.base import Access
from aiokvoffload.policies.history import DEFAULT_HISTORY_BYTES_PER_BLOCK, History, history_limit
from aiokvoffload.policies.ranking import RankedPolicy

_TICK_BITS = 48


class LRU2Policy(RankedPolicy):
    """Evicts by the last use but one; blocks without one leave first, by their only use.

    Args:
        capacity: Number of slots.
        history_bytes_per_block: Memory for blocks that left, per slot; without it a block must be used twice within
            one stay.
    """

    def __init__(self, capacity: int, *, history_bytes_per_block: int = DEFAULT_HISTORY_BYTES_PER_BLOCK) -> None:
        super().__init__(capacity)
        self._history = History(history_limit(capacity, history_bytes_per_block))
        self._key_of = np.empty(capacity, dtype=object)  # a list would be walked through by the garbage collector
        self._last_tick = array("q", bytes(8 * capacity))
        self._previous_tick = array("q", bytes(8 * capacity))

    @property
    def history_bytes(self) -> int:
        """Memory taken by what is remembered of blocks that left."""
        return self._history.used_bytes

    def insert(self, slots: Sequence[int], keys: Sequence[OffloadKey], access: Access) -> None:
        """Make `slots` resident and pinned; a ghost's last use becomes the last but one."""
        for slot, key in zip(slots, keys, strict=True):
            used_at = self._history.pop(key) or 0
            self._key_of[slot] = key
            self._previous_tick[slot] = int(used_at) if used_at < access.tick else 0
            self._last_tick[slot] = access.tick
        self._enter(slots, self._bases(slots), access)

    def touch(self, slots: Sequence[int], access: Access) -> None:
        """Rank anew what was last used before."""
        last, previous, tick = self._last_tick, self._previous_tick, access.tick
        older = [position for position, slot in enumerate(slots) if last[slot] < tick or self._ranks.is_first(slot)]
        slots, access = [slots[position] for position in older], access.select(older)
        for slot in slots:
            if last[slot] < tick:
                previous[slot] = last[slot]
                last[slot] = tick
        self._rerank_each(slots, self._bases(slots), access)

    def _reenter(self, slots: Sequence[int], access: Access) -> None:
        """Rank by the uses before the demotion."""
        self._rerank_each(slots, self._bases(slots), access)

    def _leave(self, line: int, slots: Sequence[int]) -> None:
        """Remember the tick of the last use of evicted slots, unless they were sent away."""
        for slot in slots:
            if not self._is_sent_away(slot):
                self._history.put(self._key_of[slot], self._last_tick[slot])

    def clear(self) -> None:
        """Drop all slots and all that is remembered."""
        super().clear()
        self._history.clear()

    def _bases(self, slots: Sequence[int]) -> list[int]:
        previous, last = self._previous_tick, self._last_tick
        return [(previous[slot] << _TICK_BITS) + last[slot] for slot in slots]
