"""One line in the order of the last uses, into which uses are put many at once.

Engines come with a few blocks at a time, and putting a few slots in line costs about what putting a hundred there
does. So the latest uses wait until they are many, or until somebody has to know who leaves first.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass

import numpy as np

from aiokvoffload.keys import OffloadKey
from aiokvoffload.policies.base import Access
from aiokvoffload.policies.ranking import RankedPolicy
from aiokvoffload.policies.slots import SlotArray, slot_array

LATE_SLOTS = 128

_IN_LINE, _PINNED, _EVICTABLE = range(3)


@dataclass(frozen=True, slots=True)
class _Use:
    """A use that is not in line yet."""

    slots: SlotArray
    tick: int
    depths: Sequence[int] | None


class LastUsePolicy(RankedPolicy):
    """A policy whose slots stand in one line, ranked by their last use, or by when they were inserted.

    Args:
        capacity: Number of slots.
        late_slots: So many are put in line together; below 2**16.
    """

    takes_arrays = True

    def __init__(self, capacity: int, *, late_slots: int = LATE_SLOTS) -> None:
        super().__init__(capacity, are_ranked_by_tick=True)
        self._late_limit = late_slots
        self._last_use_of = np.zeros(capacity, dtype=np.uint16)
        self._newcomer_state_of = np.zeros(capacity, dtype=np.uint8)
        self._newest_tick = self._newest_tick_in_line = 0
        self._forget_late()

    @property
    def evictable_count(self) -> int:
        """How many slots could be evicted now."""
        return self._lines[0].evictable_count + self._evictable_newcomer_count

    def insert(self, slots: Sequence[int], keys: Sequence[OffloadKey], access: Access) -> None:
        """Make `slots` resident and pinned, at the rank of `access`."""
        added = slot_array(slots)
        if len(added) < self._late_limit:
            self._note_use(added, access, are_newcomers=True)
        else:
            self._catch_up()
            self._insert(added, access)
            self._note_tick_in_line(access.tick)

    def touch(self, slots: Sequence[int], access: Access) -> None:
        """Rank `slots` anew at `access`."""
        moved = slot_array(slots)
        if access.tick > self._newest_tick and len(moved) < self._late_limit:
            self._note_use(moved, access, are_newcomers=False)
        else:
            self._catch_up()
            self._rerank(*self._ranks.select_older(moved, access))
            self._note_tick_in_line(access.tick)

    def rescue(self, slots: Sequence[int], access: Access) -> None:
        """Rank `slots` as if they were inserted at `access`; nothing counts uses here."""
        self.touch(slots, access)

    def pin(self, slots: Collection[int]) -> None:
        """Let slots count as not evictable."""
        pinned = slot_array(slots)
        if self._are_newcomers(pinned):
            self._newcomer_state_of[pinned] = _PINNED
            self._evictable_newcomer_count -= len(pinned)
        else:
            self._lines.pin(pinned)

    def unpin(self, slots: Collection[int]) -> None:
        """Let slots count as evictable, at the rank they have."""
        unpinned = slot_array(slots)
        if self._are_newcomers(unpinned):
            self._newcomer_state_of[unpinned] = _EVICTABLE
            self._evictable_newcomer_count += len(unpinned)
        else:
            self._lines.unpin(unpinned)

    def demote(self, slots: Sequence[int]) -> None:
        """Put slots first in line."""
        self._catch_up()
        super().demote(slots)

    def take_along(self, slots: Sequence[int]) -> None:
        """Demote slots, and know why."""
        self._catch_up()
        super().take_along(slots)

    def coldest(self, count: int) -> list[int]:
        """Return up to `count` slots, first to leave first."""
        self._catch_up()
        return super().coldest(count)

    def evict(self, count: int, protected: Collection[int] = ()) -> list[int] | None:
        """Drop the `count` slots that leave first, or none."""
        victims = self.evict_array(count, protected)
        return None if victims is None else victims.tolist()

    def evict_array(self, count: int, protected: Collection[int] = ()) -> SlotArray | None:
        """Drop the `count` slots that leave first, or none."""
        if count and not (self._is_line_valid and count + len(protected) <= self._lines[0].evictable_count):
            self._catch_up()
        if 0 < count <= self.evictable_count and not protected:
            return self._lines.take(0, count)
        victims = super().evict(count, protected)
        return None if victims is None else slot_array(victims)

    def remove(self, slots: Collection[int]) -> None:
        """Drop resident slots."""
        self._catch_up()
        super().remove(slots)

    def clear(self) -> None:
        """Drop all slots."""
        self._newcomer_state_of[:] = _IN_LINE
        self._forget_late()
        super().clear()

    # Uses that are not in line yet

    def _note_use(self, slots: SlotArray, access: Access, *, are_newcomers: bool) -> None:
        """Put a use off; of a slot's uses the last one counts, for only newer ticks touch what is noted."""
        if not len(slots):
            return
        depths = access.depths
        if depths is not None and not isinstance(depths, range):
            depths = tuple(depths)
        if self._late and (depths is None) != (self._late[-1].depths is None):
            self._catch_up()
        self._late.append(_Use(slots, access.tick, depths))
        self._late_count += len(slots)
        self._last_use_of[slots] = len(self._late)
        self._newest_tick = max(self._newest_tick, access.tick)
        if are_newcomers:
            self._newcomer_state_of[slots] = _PINNED
            self._newcomer_count += len(slots)
        if not are_newcomers or access.tick <= self._newest_tick_in_line:
            self._is_line_valid = False
        if self._late_count >= self._late_limit:
            self._catch_up()

    def _are_newcomers(self, slots: SlotArray) -> bool:
        """Return whether slots are not in line yet; if just some are, all are put there."""
        if not self._newcomer_count:
            return False
        count = int(np.count_nonzero(self._newcomer_state_of[slots]))
        if 0 < count < len(slots):
            self._catch_up()
        return 0 < count == len(slots)

    def _catch_up(self) -> None:
        """Put all that is noted in line."""
        if not self._late:
            return
        slots, ranked = self._rank_late()
        states = self._newcomer_state_of[slots]
        self._lines.leave(slots[states == _IN_LINE])
        self._lines.enter(0, ranked)
        self._lines.unpin(slots[states == _EVICTABLE])
        self._newcomer_state_of[slots] = _IN_LINE
        self._forget_late()
        self._note_tick_in_line(self._newest_tick)

    def _rank_late(self) -> tuple[SlotArray, SlotArray]:
        """Rank the slots that are noted, and return them as they came, and in the order of their ranks."""
        if len(self._late) == 1:
            use = self._late[0]
            return use.slots, self._ranks.assign(use.slots, use.tick, use.depths)
        slots = np.concatenate([use.slots for use in self._late])
        bases = [use.tick for use in self._late for _ in range(len(use.slots))]
        depths = None
        if self._late[0].depths is not None:
            depths = [depth for use in self._late for depth in use.depths or ()]
        numbers = np.repeat(np.arange(1, len(self._late) + 1), [len(use.slots) for use in self._late])
        last = np.flatnonzero(self._last_use_of[slots] == numbers)
        if len(last) < len(slots):
            slots = slots[last]
            chosen = last.tolist()
            bases = [bases[position] for position in chosen]
            depths = None if depths is None else [depths[position] for position in chosen]
        return slots, self._ranks.assign_each(slots, bases, depths)

    def _forget_late(self) -> None:
        self._late: list[_Use] = []
        self._late_count = 0
        self._newcomer_count = self._evictable_newcomer_count = 0
        self._is_line_valid = True

    def _note_tick_in_line(self, tick: int) -> None:
        self._newest_tick_in_line = max(self._newest_tick_in_line, tick)
        self._newest_tick = max(self._newest_tick, tick)
