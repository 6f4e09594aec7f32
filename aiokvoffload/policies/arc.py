"""Adaptive replacement: recent blocks against frequent ones, the balance learned from what was evicted wrongly.

After N. Megiddo, D. Modha, "ARC: A Self-Tuning, Low Overhead Replacement Cache", FAST 2003, with two
differences, both of the system this library re-thinks: a block that is still being written is not promoted by
a touch, and both ghost lists are each bounded by the capacity. That system also let a block that comes back from
a ghost list enter T1; `ReferenceARCPolicy` does so still.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence

import numpy as np
import numpy.typing as npt

from aiokvoffload.key_index import NOT_FOUND
from aiokvoffload.keys import OffloadKey
from aiokvoffload.policies.base import Access
from aiokvoffload.policies.ghosts import GhostLists
from aiokvoffload.policies.ranking import RankedPolicy, split_by_line
from aiokvoffload.policies.slots import slot_array

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

    takes_arrays = True

    def __init__(self, capacity: int, *, are_ghosts_frequent: bool = True) -> None:
        super().__init__(capacity, line_count=3, first_line=_DEMOTED, are_ranked_by_tick=True)
        self._are_ghosts_frequent = are_ghosts_frequent
        self._key_of: npt.NDArray[np.object_] = np.empty(capacity, dtype=object)
        self._is_written = np.zeros(capacity, dtype=np.bool_)
        self._ghosts = GhostLists(capacity, list_count=2)
        self._target = 0.0
        # The keys of the last miss, if none was a ghost: none becomes one before it is inserted.
        self._strangers: Sequence[OffloadKey] = ()

    @property
    def target_recent_count(self) -> float:
        """How many slots T1 should have."""
        return self._target

    def insert(self, slots: Sequence[int], keys: Sequence[OffloadKey], access: Access) -> None:
        """Make `slots` resident and pinned, in T1 or, where their keys are ghosts, in T2; the ghosts end."""
        inserted = slot_array(slots)
        self._key_of[inserted] = keys
        self._is_written[inserted] = False
        strangers, self._strangers = self._strangers, ()
        if keys == strangers:
            self._insert(inserted, access)
            return
        rows = self._ghosts.rows(keys)
        was_ghost = rows != NOT_FOUND
        if not np.count_nonzero(was_ghost):
            self._insert(inserted, access)
            return
        self._ghosts.remove(rows[was_ghost])
        is_frequent = was_ghost & self._are_ghosts_frequent
        for line, part, its_access in split_by_line(inserted, is_frequent, access):
            self._insert(part, its_access, line)

    def touch(self, slots: Sequence[int], access: Access) -> None:
        """Move ready `slots` to T2; one still being written stays where it is, as most recent."""
        used, access = self._ranks.select_older(slot_array(slots), access)
        is_frequent = self._is_written[used] | (self._lines.indices_of(used) == _T2)
        for line, part, its_access in split_by_line(used, is_frequent, access):
            self._rerank(part, its_access, line)

    def rescue(self, slots: Sequence[int], access: Access) -> None:
        """Make `slots` the most recent of their line; those that were demoted enter T1 as new ones do."""
        given_up, access = self._ranks.select_older(slot_array(slots), access)
        is_frequent = self._lines.indices_of(given_up) == _T2
        for line, part, its_access in split_by_line(given_up, is_frequent, access):
            self._rerank(part, its_access, line)

    def miss(self, keys: Sequence[OffloadKey], access: Access) -> None:
        """Learn from ghosts: one of B1 says that T1 was too small, one of B2 that it was too large.

        Deepest first, as blocks leave.
        """
        ghosts = self._ghosts
        rows = ghosts.rows(keys)
        known = rows[rows != NOT_FOUND].tolist()
        self._strangers = () if known else list(keys)
        for row in reversed(known):
            if not ghosts.renew(row, access.tick):
                continue
            recent_count, frequent_count = ghosts.counts
            if ghosts.list_of(row) == _T1:
                self._target = min(self._target + max(1.0, frequent_count / recent_count), float(self.capacity))
            else:
                self._target = max(self._target - max(1.0, recent_count / frequent_count), 0.0)

    def unpin(self, slots: Collection[int]) -> None:
        """Put pinned slots back into their lines; from now on they count as written."""
        written = slot_array(slots)
        self._lines.unpin(written)
        self._is_written[written] = True

    def _leave(self, line: int, slots: Sequence[int]) -> None:
        """Let the keys of evicted slots become ghosts, unless they were demoted."""
        if line != _DEMOTED:
            self._ghosts.add(line, self._key_of[slot_array(slots)].tolist())

    def clear(self) -> None:
        """Drop all slots, ghosts and what was learned."""
        super().clear()
        self._ghosts.clear()
        self._target = 0.0
        self._strangers = ()

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
