"""Which slots are kept from being evicted, and until when.

The slots of one deadline are linked to each other in arrays, so that keeping a slot, letting go of it and finding it
expired each cost the same, however many are kept.
"""

from __future__ import annotations

import heapq
from collections.abc import Iterable, Sequence

import numpy as np
import numpy.typing as npt

_NONE = -1
_NOT_KEPT = 0.0


class KeptSlots:
    """Slots with deadlines; at most half of all.

    Args:
        slot_count: Number of slots.
    """

    def __init__(self, slot_count: int) -> None:
        self._slot_count = slot_count
        self.limit = slot_count // 2
        self.count = 0
        self._first_of: dict[float, int] = {}
        self._deadlines: list[float] = []
        self._is_open = False

    def __contains__(self, slot: int) -> bool:
        return self._is_open and bool(self._deadline_of[slot] != _NOT_KEPT)

    @property
    def mask(self) -> npt.NDArray[np.bool_]:
        """Which slots are kept; there must be some."""
        is_kept: npt.NDArray[np.bool_] = self._deadline_of != _NOT_KEPT
        return is_kept

    def keep(self, slots: Sequence[int], deadline: float) -> list[int]:
        """Keep slots until a time above 0, also those that were kept until another, and return those newly kept.

        Those that come after the limit is reached are left alone.
        """
        self._open()
        added = []
        for slot in slots:
            if slot in self:
                self._unlink(slot)
            elif self.count < self.limit:
                added.append(slot)
            else:
                continue
            self._link(slot, deadline)
        self._forget_empty_deadlines()
        return added

    def let_go(self, slots: Iterable[int]) -> list[int]:
        """Keep slots no longer, and return those that were kept."""
        found = [slot for slot in slots if slot in self]
        for slot in found:
            self._unlink(slot)
        return found

    def expire(self, now: float, limit: int) -> list[int]:
        """Let go of up to `limit` slots whose time has come, and return them."""
        expired: list[int] = []
        while self._deadlines and self._deadlines[0] <= now and len(expired) < limit:
            slot = self._first_of.get(self._deadlines[0], _NONE)
            if slot == _NONE:
                heapq.heappop(self._deadlines)
            else:
                self._unlink(slot)
                expired.append(slot)
        return expired

    def clear(self) -> None:
        """Let go of everything."""
        self.count = 0
        self._first_of = {}
        self._deadlines = []
        self._is_open = False

    def _open(self) -> None:
        """Make room for what is kept per slot; nobody pays for it before the first slot is kept."""
        if not self._is_open:
            self._is_open = True
            self._deadline_of = np.zeros(self._slot_count)
            self._next_of = np.empty(self._slot_count, dtype=np.int64)
            self._previous_of = np.empty(self._slot_count, dtype=np.int64)

    def _link(self, slot: int, deadline: float) -> None:
        first = self._first_of.get(deadline)
        if first is None:
            heapq.heappush(self._deadlines, deadline)
            first = _NONE
        else:
            self._previous_of[first] = slot
        self._next_of[slot], self._previous_of[slot] = first, _NONE
        self._first_of[deadline] = slot
        self._deadline_of[slot] = deadline
        self.count += 1

    def _unlink(self, slot: int) -> None:
        before, after = int(self._previous_of[slot]), int(self._next_of[slot])
        if before != _NONE:
            self._next_of[before] = after
        elif after != _NONE:
            self._first_of[self._deadline_of[slot]] = after
        else:
            del self._first_of[self._deadline_of[slot]]
        if after != _NONE:
            self._previous_of[after] = before
        self._deadline_of[slot] = _NOT_KEPT
        self.count -= 1

    def _forget_empty_deadlines(self) -> None:
        """Drop deadlines that no slot has any more, once they are the most."""
        if len(self._deadlines) > 2 * len(self._first_of) + 64:
            self._deadlines = list(self._first_of)
            heapq.heapify(self._deadlines)
