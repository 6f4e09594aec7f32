"""Which block lives in which slot of CPU memory, whose bytes are in use, and what the slots add up to."""

from __future__ import annotations

from collections.abc import Sequence
from enum import IntEnum

from aiokvoffload.keys import OffloadKey
from aiokvoffload.policies.base import Access, CachePolicy
from aiokvoffload.specs import LookupResult, PrepareStoreOutput

Keys = Sequence[OffloadKey]


class SlotState(IntEnum):
    """What a slot is for at this moment."""

    FREE = 0
    WRITING = 1
    READY = 2
    KEYLESS = 3
    """Its block is gone, but somebody may still touch its bytes."""


class BlockTable:
    """Keys, slots and their users; tells the policy which slots it may rank and which it may evict.

    A user of a slot is an open ticket or a lease. A ready slot without users may be evicted; a keyless one is free.

    Args:
        slot_count: Number of slots.
        policy: Ranks the slots.
    """

    def __init__(self, slot_count: int, policy: CachePolicy) -> None:
        self.slot_count = slot_count
        self.count_of = [0] * len(SlotState)
        self.count_of[SlotState.FREE] = slot_count
        self._policy = policy
        self._slot_of: dict[OffloadKey, int] = {}
        self._key_of: list[OffloadKey | None] = [None] * slot_count
        self._write_of: list[PrepareStoreOutput | None] = [None] * slot_count
        self._state = bytearray(slot_count)
        self._users = [0] * slot_count
        self._first_fresh = 0
        self._reusable: list[int] = []

    # Looking

    @property
    def free_count(self) -> int:
        """How many slots hold no block and have no users."""
        return self.count_of[SlotState.FREE]

    @property
    def pinned_count(self) -> int:
        """How many ready slots have users."""
        return self.count_of[SlotState.READY] - self._policy.evictable_count

    def lookup(self, keys: Keys) -> list[LookupResult]:
        """Return MISS, HIT or PENDING for each key."""
        slot_of, state = self._slot_of, self._state
        return [
            LookupResult.MISS
            if (slot := slot_of.get(key)) is None
            else LookupResult.HIT
            if state[slot] == SlotState.READY
            else LookupResult.PENDING
            for key in keys
        ]

    def is_known(self, key: OffloadKey) -> bool:
        """Return whether a block is stored or being written."""
        return key in self._slot_of

    def is_ready(self, key: OffloadKey) -> bool:
        """Return whether a block is stored."""
        slot = self._slot_of.get(key)
        return slot is not None and self._state[slot] == SlotState.READY

    def all_ready(self, slots: Sequence[int]) -> bool:
        """Return whether all of some slots hold stored blocks."""
        state = self._state
        return all(state[slot] == SlotState.READY for slot in slots)

    def missing(self, keys: Keys) -> list[OffloadKey]:
        """Return those of `keys` that are neither stored nor being written."""
        slot_of = self._slot_of
        return [key for key in keys if key not in slot_of]

    def slots(self, keys: Keys) -> list[int]:
        """Return the slots of known blocks."""
        slot_of = self._slot_of
        return [slot_of[key] for key in keys]

    def writes(self, slots: Sequence[int]) -> set[PrepareStoreOutput]:
        """Return the tickets under which some of `slots` are being written."""
        return {write for slot in slots if (write := self._write_of[slot]) is not None}

    def room_beside(self, protected: Sequence[int]) -> int:
        """Return how many slots could be taken now, evicting anything but `protected`, which are stored."""
        users = self._users
        idle = [slot for slot in protected if not users[slot]]
        return self.free_count + self._policy.evictable_count - len(idle)

    # Using

    def touch(self, keys: Keys, access: Access) -> None:
        """Tell the policy of one request's access."""
        slot_of = self._slot_of
        slots = [slot_of.get(key, -1) for key in keys]
        if -1 not in slots:
            self._policy.touch(slots, access)
            return
        known = [position for position, slot in enumerate(slots) if slot >= 0]
        missing = [position for position, slot in enumerate(slots) if slot < 0]
        self._policy.touch([slots[position] for position in known], access.select(known))
        self._policy.miss([keys[position] for position in missing], access.select(missing))

    def hold(self, slots: Sequence[int]) -> None:
        """Count one more user of each slot."""
        users = self._users
        unused = []
        for slot in slots:  # one may be given twice
            if not users[slot]:
                unused.append(slot)
            users[slot] += 1
        if unused:
            self._policy.pin(unused)

    def release(self, slots: Sequence[int]) -> None:
        """Count one user less of each slot."""
        users, state = self._users, self._state
        idle = []
        for slot in slots:
            users[slot] -= 1
            if not users[slot]:
                idle.append(slot)
        if idle:
            ready = [slot for slot in idle if state[slot] == SlotState.READY]
            self._policy.unpin(ready)
            if len(ready) < len(idle):
                self._make_free([slot for slot in idle if state[slot] == SlotState.KEYLESS], SlotState.KEYLESS)

    # Changing

    def evict(self, count: int, protected: Sequence[int]) -> list[OffloadKey] | None:
        """Let `count` blocks leave and return their keys; None, and no change, if the policy has not that many."""
        victims = self._policy.evict(count, protected)
        if victims is None:
            return None
        keys = self._take_keys(victims)
        self._make_free(victims, SlotState.READY)
        return keys

    def reserve(self, keys: Keys, write: PrepareStoreOutput, access: Access) -> list[int]:
        """Give each key one of the free slots, which there must be, to be written under a ticket.

        Slots that were never used come first, then the one freed last.
        """
        fresh_end = min(self.slot_count, self._first_fresh + len(keys))
        slots = list(range(self._first_fresh, fresh_end))
        self._first_fresh = fresh_end
        if reused := len(keys) - len(slots):
            slots += self._reusable[: -reused - 1 : -1]
            del self._reusable[-reused:]
        self._slot_of.update(zip(keys, slots, strict=True))
        for key, slot in zip(keys, slots, strict=True):
            self._key_of[slot] = key
            self._write_of[slot] = write
            self._users[slot] = 1
        self._mark(slots, SlotState.FREE, SlotState.WRITING)
        self._policy.insert(slots, keys, access)
        return slots

    def commit(self, slots: Sequence[int]) -> None:
        """Make written slots ready; the ticket that wrote them is still their user."""
        for slot in slots:
            self._write_of[slot] = None
        self._mark(slots, SlotState.WRITING, SlotState.READY)

    def drop(self, slots: Sequence[int]) -> None:
        """Take slots whose write has failed away from their keys; the ticket is still their user."""
        self._policy.remove(slots)
        self._take_keys(slots)
        self._mark(slots, SlotState.WRITING, SlotState.KEYLESS)

    def clear(self) -> None:
        """Take every block away; slots without users are free, the others become keyless."""
        slots = list(self._slot_of.values())
        ready = [slot for slot in slots if self._state[slot] == SlotState.READY]
        writing = [slot for slot in slots if self._state[slot] == SlotState.WRITING]
        self._policy.clear()
        self._take_keys(slots)
        self._make_free([slot for slot in ready if not self._users[slot]], SlotState.READY)
        self._mark([slot for slot in ready if self._users[slot]], SlotState.READY, SlotState.KEYLESS)
        self._mark(writing, SlotState.WRITING, SlotState.KEYLESS)

    def _take_keys(self, slots: Sequence[int]) -> list[OffloadKey]:
        keys: list[OffloadKey] = []
        for slot in slots:
            key = self._key_of[slot]
            if key is not None:
                keys.append(key)
                del self._slot_of[key]
            self._key_of[slot] = None
            self._write_of[slot] = None
        return keys

    def _make_free(self, slots: Sequence[int], old: SlotState) -> None:
        self._mark(slots, old, SlotState.FREE)
        self._reusable.extend(slots)

    def _mark(self, slots: Sequence[int], old: SlotState, new: SlotState) -> None:
        """Change the state of slots that are all `old`."""
        state = self._state
        for slot in slots:
            state[slot] = new
        self.count_of[old] -= len(slots)
        self.count_of[new] += len(slots)
