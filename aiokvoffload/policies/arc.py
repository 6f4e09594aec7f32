"""Adaptive replacement: recent blocks against frequent ones, the balance learned from what was evicted wrongly.

After N. Megiddo, D. Modha, "ARC: A Self-Tuning, Low Overhead Replacement Cache", FAST 2003, with two
differences, both of the system this library re-thinks: a block that is still being written is not promoted by
a touch, and both ghost lists are each bounded by the capacity. That system also let a block that comes back from
a ghost list enter T1; `ReferenceARCPolicy` does so still.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Collection, Sequence

import numpy as np

from aiokvoffload.keys import OffloadKey
from aiokvoffload.policies.base import Access
from aiokvoffload.policies.ranking import RankedPolicy, split_by_line

_T1, _T2, _DEMOTED = 0, 1, 2


class ARCPolicy(RankedPolicy):
    """Evicts from T1 (used once) while it is above its target size, else from T2 (used again).

    Hits in the ghost lists B1 and B2, the keys lately evicted from T1 and T2, move the target. Demoted slots are in
    neither and leave before both.

    Args:
        capacity: Number of slots.
        are_ghosts_frequent: Whether a block that comes back from a ghost list enters T2, as in the original
            algorithm, or T1.
    """

    def __init__(self, capacity: int, *, are_ghosts_frequent: bool = True) -> None:
        super().__init__(capacity, line_count=3, first_line=_DEMOTED)
        self._are_ghosts_frequent = are_ghosts_frequent
        self._key_of = np.empty(capacity, dtype=object)  # a list would be walked through by the garbage collector
        self._is_written = bytearray(capacity)
        self._ghosts: tuple[OrderedDict[OffloadKey, int], OrderedDict[OffloadKey, int]] = (OrderedDict(), OrderedDict())
        self._target = 0.0

    @property
    def target_recent_count(self) -> float:
        """How many slots T1 should have."""
        return self._target

    def insert(self, slots: Sequence[int], keys: Sequence[OffloadKey], access: Access) -> None:
        """Make `slots` resident and pinned, in T1 or, where their keys are ghosts, in T2; the ghosts end."""
        recent, frequent = self._ghosts
        lines = []
        for slot, key in zip(slots, keys, strict=True):
            self._key_of[slot] = key
            self._is_written[slot] = 0
            was_ghost = recent.pop(key, None) is not None or frequent.pop(key, None) is not None
            lines.append(_T2 if was_ghost and self._are_ghosts_frequent else _T1)
        for line, part, its_access in split_by_line(slots, lines, access):
            self._insert(part, its_access, line)

    def touch(self, slots: Sequence[int], access: Access) -> None:
        """Move ready `slots` to T2; one still being written stays where it is, as most recent."""
        slots, access = self._ranks.select_older(slots, access)
        lines = [_T2 if self._is_written[slot] or self._line_of(slot) == _T2 else _T1 for slot in slots]
        for line, part, its_access in split_by_line(slots, lines, access):
            self._rerank(part, its_access, line)

    def miss(self, keys: Sequence[OffloadKey], access: Access) -> None:
        """Learn from ghosts: one of B1 says that T1 was too small, one of B2 that it was too large.

        Deepest first, as blocks leave.
        """
        recent, frequent = self._ghosts
        for key in reversed(keys):
            if recent.get(key, access.tick) < access.tick:
                self._target = min(self._target + max(1.0, len(frequent) / len(recent)), float(self.capacity))
                _renew(recent, key, access.tick)
            elif frequent.get(key, access.tick) < access.tick:
                self._target = max(self._target - max(1.0, len(recent) / len(frequent)), 0.0)
                _renew(frequent, key, access.tick)

    def unpin(self, slots: Collection[int]) -> None:
        """Put pinned slots back into their lines; from now on they count as written."""
        super().unpin(slots)
        for slot in slots:
            self._is_written[slot] = 1

    def _leave(self, line: int, slots: Sequence[int]) -> None:
        """Let the keys of evicted slots become ghosts, unless they were demoted."""
        if line == _DEMOTED:
            return
        ghosts, key_of = self._ghosts[line], self._key_of
        for slot in slots:
            ghosts[key_of[slot]] = -1
        while len(ghosts) > self.capacity:
            ghosts.popitem(last=False)

    def clear(self) -> None:
        """Drop all slots, ghosts and what was learned."""
        super().clear()
        for ghosts in self._ghosts:
            ghosts.clear()
        self._target = 0.0

    def _shares(self, count: int) -> Sequence[tuple[int, int]]:
        """What was demoted, then T1 down to its target, then T2, then what is left of T1."""
        recent_evictable, frequent_evictable, demoted_evictable = (line.evictable_count for line in self._lines)
        from_demoted = min(count, demoted_evictable)
        count -= from_demoted
        above_target = max(0, self._lines[_T1].resident_count - int(self._target) + 1)
        from_recent = min(count, recent_evictable, above_target)
        from_frequent = min(count - from_recent, frequent_evictable)
        return (
            (_DEMOTED, from_demoted),
            (_T1, from_recent),
            (_T2, from_frequent),
            (_T1, count - from_recent - from_frequent),
        )


class ReferenceARCPolicy(ARCPolicy):
    """ARC whose ghosts come back into T1, as in the system that this library re-thinks."""

    def __init__(self, capacity: int) -> None:
        super().__init__(capacity, are_ghosts_frequent=False)


def _renew(ghosts: OrderedDict[OffloadKey, int], key: OffloadKey, tick: int) -> None:
    """Make a ghost the youngest and note the tick that it was last missed at."""
    ghosts[key] = tick
    ghosts.move_to_end(key)
