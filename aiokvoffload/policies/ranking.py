"""The part that policies by rank share: slots stand in lines, each sorted by rank, and leave from the front."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence

import numpy as np
import numpy.typing as npt

from aiokvoffload.keys import OffloadKey
from aiokvoffload.policies.base import Access, CachePolicy
from aiokvoffload.policies.lines import SlotLines
from aiokvoffload.policies.ranks import Ranks
from aiokvoffload.policies.slots import SlotArray, slot_array


class RankedPolicy(CachePolicy):
    """A policy whose slots stand in one of several lines.

    Args:
        capacity: Number of slots.
        line_count: Number of lines; a slot enters line 0.
        first_line: The line that is emptied first, where demoted slots go.
        are_ranked_by_tick: Whether slots are only ever ranked by the ticks of accesses.
    """

    def __init__(
        self, capacity: int, line_count: int = 1, first_line: int = 0, *, are_ranked_by_tick: bool = False
    ) -> None:
        super().__init__(capacity)
        self._first_line = first_line
        self._ranks = Ranks(capacity, are_bases_ticks=are_ranked_by_tick)
        self._lines = SlotLines(self._ranks, capacity, line_count)
        self._is_taken_along = np.zeros(capacity, dtype=np.bool_)

    @property
    def evictable_count(self) -> int:
        """How many slots could be evicted now."""
        if len(self._lines) == 1:
            return self._lines[0].evictable_count
        return sum(line.evictable_count for line in self._lines)

    def insert(self, slots: Sequence[int], keys: Sequence[OffloadKey], access: Access) -> None:
        """Make `slots` resident and pinned, in the first line at the rank of `access`."""
        self._insert(slots, access)

    def pin(self, slots: Collection[int]) -> None:
        """Let slots count as not evictable."""
        self._lines.pin(slot_array(slots))

    def unpin(self, slots: Collection[int]) -> None:
        """Let slots count as evictable, at the rank they have."""
        self._lines.unpin(slot_array(slots))

    def demote(self, slots: Sequence[int]) -> None:
        """Put slots first in the line that is emptied first."""
        moved = slot_array(slots)
        self._rerank(moved, Access(0), self._first_line)
        self._is_taken_along[moved] = False

    def take_along(self, slots: Sequence[int]) -> None:
        """Demote slots, and know why."""
        moved = slot_array(slots)
        self._rerank(moved, Access(0), self._first_line)
        self._is_taken_along[moved] = True

    def rescue(self, slots: Sequence[int], access: Access) -> None:
        """Rank demoted slots among the others again; the rank of those comes from their uses and stays."""
        first = [position for position, slot in enumerate(slots) if self._ranks.is_first(slot)]
        if first:
            self._reenter([slots[position] for position in first], access.select(first))

    def coldest(self, count: int) -> list[int]:
        """Return up to `count` slots, first to leave first."""
        found: list[int] = []
        seen = [0] * len(self._lines)
        for index, share in self._shares(min(count, self.evictable_count)):
            found += self._lines.coldest(index, seen[index] + share)[seen[index] :]
            seen[index] += share
        return found

    def evict(self, count: int, protected: Collection[int] = ()) -> list[int] | None:
        """Drop the `count` slots that leave first, or none."""
        if not protected:
            return self._drop_coldest(count) if count <= self.evictable_count else None
        kept = self._lines.evictable_among(slot_array(protected))
        if count > self.evictable_count - len(kept):
            return None
        self._lines.pin(kept)
        victims = self._drop_coldest(count)
        self._lines.unpin(kept)
        return victims

    def remove(self, slots: Collection[int]) -> None:
        """Drop resident slots."""
        self._lines.drop(slot_array(slots))

    def clear(self) -> None:
        """Drop all slots."""
        self._lines.clear()

    def _shares(self, count: int) -> Sequence[tuple[int, int]]:
        """Return which line gives up how many of `count` victims, in order; there are that many evictable."""
        return ((0, count),)

    def _drop_coldest(self, count: int) -> list[int]:
        """Drop the `count` slots that leave first and return them; there are that many evictable."""
        victims: list[int] = []
        for index, share in self._shares(count):
            if share:
                gone = self._lines.take(index, share).tolist()
                self._leave(index, gone)
                victims += gone
        return victims

    def _leave(self, line: int, slots: Sequence[int]) -> None:
        """Note that slots of a line are evicted; for policies with ghosts."""
        return

    def _reenter(self, slots: Sequence[int], access: Access) -> None:
        """Rank demoted slots as if they were inserted at `access`, but for what is known of their uses."""
        self._rerank(slots, access)

    def _is_sent_away(self, slot: int) -> bool:
        """Return whether an evicted slot was demoted for another reason than that its block has moved up."""
        return self._ranks.is_first(slot) and not self._is_taken_along[slot]

    # Entering lines

    def _insert(self, slots: Collection[int] | SlotArray, access: Access, line: int = 0) -> None:
        """Make `slots` resident and pinned in a line, at the rank of `access`."""
        self._lines.enter(line, self._ranks.assign(slot_array(slots), access.tick, access.depths))

    def _enter(self, slots: Collection[int], bases: Sequence[int], access: Access, line: int = 0) -> None:
        """Make `slots` resident and pinned in a line, each at a base of its own."""
        self._lines.enter(line, self._ranks.assign_each(slot_array(slots), bases, access.depths))

    def _rerank(self, slots: Collection[int] | SlotArray, access: Access, line: int = 0) -> None:
        """Move resident slots to a line, at the rank of `access`."""
        moved = slot_array(slots)
        self._lines.leave(moved)
        self._insert(moved, access, line)

    def _rerank_each(self, slots: Collection[int], bases: Sequence[int], access: Access, line: int = 0) -> None:
        """Move resident slots to a line, each to a base of its own."""
        self._lines.leave(slot_array(slots))
        self._enter(slots, bases, access, line)

    def _rebase(self, slots: Collection[int], bases: Sequence[int], line: int = 0) -> None:
        """Move resident slots to a line, each to a base of its own; their depth and order stay."""
        moved = slot_array(slots)
        self._lines.leave(moved)
        self._lines.enter(line, self._ranks.rebase(moved, bases))


def split_by_line(
    slots: SlotArray, is_for_second: npt.NDArray[np.bool_], access: Access
) -> Iterator[tuple[int, SlotArray, Access]]:
    """Yield lines 0 and 1, each with the slots that are meant for it, and the access to just them; neither if empty."""
    second_count = np.count_nonzero(is_for_second)
    if second_count in (0, len(slots)):
        if len(slots):
            yield int(second_count > 0), slots, access
        return
    for line, positions in enumerate((np.flatnonzero(~is_for_second), np.flatnonzero(is_for_second))):
        yield line, slots[positions], access.select(positions.tolist())
