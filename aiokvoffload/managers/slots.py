"""The slots of CPU memory: which are free, whose bytes are in use, and what they add up to."""

from __future__ import annotations

from collections.abc import Sequence
from enum import IntEnum

from aiokvoffload.policies.base import CachePolicy


class SlotState(IntEnum):
    """What a slot is for at this moment."""

    FREE = 0
    WRITING = 1
    READY = 2
    KEYLESS = 3
    """Its block is gone, but somebody may still touch its bytes."""


class SlotTable:
    """Counts the users of every slot, and tells the policy which slots have none.

    A user is an open ticket or a lease. A ready slot without users may be evicted; a keyless one is free.

    Args:
        count: Number of slots.
        policy: Ranks the slots.
    """

    def __init__(self, count: int, policy: CachePolicy) -> None:
        self.state = bytearray(count)
        self.policy = policy
        self.count_of = [0] * len(SlotState)
        self.count_of[SlotState.FREE] = count
        self._total = count
        self._first_fresh = 0
        self._reusable: list[int] = []
        self._users = [0] * count

    def room_beside(self, protected: Sequence[int]) -> int:
        """Return how many slots could be taken now, evicting anything but `protected`, which are resident."""
        users = self._users
        idle = [slot for slot in protected if not users[slot]]
        return self.count_of[SlotState.FREE] + self.policy.evictable_count - len(idle)

    @property
    def pinned_count(self) -> int:
        """How many ready slots have users."""
        return self.count_of[SlotState.READY] - self.policy.evictable_count

    def take(self, count: int) -> list[int]:
        """Take `count` free slots, which there must be, with one user each; fresh ones first, then the last freed."""
        fresh_end = min(self._total, self._first_fresh + count)
        slots = list(range(self._first_fresh, fresh_end))
        self._first_fresh = fresh_end
        reused = count - len(slots)
        if reused:
            slots += self._reusable[: -reused - 1 : -1]
            del self._reusable[-reused:]
        for slot in slots:
            self._users[slot] = 1
        self.mark(slots, SlotState.FREE, SlotState.WRITING)
        return slots

    def mark(self, slots: Sequence[int], old: SlotState, new: SlotState) -> None:
        """Change the state of slots that are all `old`."""
        state = self.state
        for slot in slots:
            state[slot] = new
        self.count_of[old] -= len(slots)
        self.count_of[new] += len(slots)

    def give_back(self, slots: Sequence[int], old: SlotState) -> None:
        """Make slots free that are all `old` and have no users."""
        self.mark(slots, old, SlotState.FREE)
        self._reusable.extend(slots)

    def hold(self, slots: Sequence[int]) -> None:
        """Count one more user of each slot."""
        users = self._users
        unused = []
        for slot in slots:
            if not users[slot]:
                unused.append(slot)
            users[slot] += 1
        if unused:
            self.policy.pin(unused)

    def release(self, slots: Sequence[int]) -> None:
        """Count one user less of each slot."""
        users = self._users
        idle = []
        for slot in slots:
            users[slot] -= 1
            if not users[slot]:
                idle.append(slot)
        if idle:
            state = self.state
            ready = [slot for slot in idle if state[slot] == SlotState.READY]
            self.policy.unpin(ready)
            if len(ready) < len(idle):
                self.give_back([slot for slot in idle if state[slot] == SlotState.KEYLESS], SlotState.KEYLESS)

    def clear(self, slots_in_use: Sequence[int]) -> None:
        """Take every block away from its slot; slots that nobody uses are free, the others become keyless."""
        users = self._users
        ready = [slot for slot in slots_in_use if self.state[slot] == SlotState.READY]
        writing = [slot for slot in slots_in_use if self.state[slot] == SlotState.WRITING]
        self.policy.clear()
        self.give_back([slot for slot in ready if not users[slot]], SlotState.READY)
        self.mark([slot for slot in ready if users[slot]], SlotState.READY, SlotState.KEYLESS)
        self.mark(writing, SlotState.WRITING, SlotState.KEYLESS)
