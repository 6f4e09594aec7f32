"""Which block lives in which slot of CPU memory, whose bytes are in use, and what the slots add up to.

What is kept per slot lies in arrays: a block costs memory in proportion to its index entry, and the garbage
collector sees no object for it. A reset takes the same time at any size: old entries are freed in slices, later.
"""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from enum import IntEnum

import numpy as np
import numpy.typing as npt

from aiokvoffload.keys import OffloadKey
from aiokvoffload.managers.index import make_index
from aiokvoffload.policies.base import Access, CachePolicy
from aiokvoffload.specs import LookupResult, PrepareStoreOutput

Keys = Sequence[OffloadKey]
Found = Sequence[int | None]
"""For each key of a call its slot, or None for a block that is not there."""


class SlotState(IntEnum):
    """What a slot is for at this moment."""

    FREE = 0
    WRITING = 1
    READY = 2
    KEYLESS = 3
    """Its block is gone, but somebody may still touch its bytes."""


_FREE, _WRITING, _READY, _KEYLESS = map(int, SlotState)
_MISS = LookupResult.MISS
_RESULT_OF_STATE = (LookupResult.MISS, LookupResult.PENDING, LookupResult.HIT, LookupResult.MISS)


class BlockTable:
    """Keys, slots and their users; tells the policy which slots it may rank and which it may evict.

    A user of a slot is an open ticket or a lease. A ready slot without users may be evicted; a keyless one is free.

    Args:
        slot_count: Number of slots.
        policy: Ranks the slots.
    """

    def __init__(self, slot_count: int, policy: CachePolicy) -> None:
        self.slot_count = slot_count
        self._policy = policy
        self._index = make_index(slot_count)
        self._key_of = np.empty(slot_count, dtype=object)  # a list would be walked through by the garbage collector
        self._users = array("i", bytes(4 * slot_count))
        self._write_number_of = array("q", bytes(8 * slot_count))
        self._writes: dict[int, PrepareStoreOutput] = {}
        self._write_total = 0
        self._state = bytearray(slot_count)
        self._count_of = [slot_count, 0, 0, 0]
        self._first_fresh = 0
        self._reusable: list[int] = []
        self._given_up: list[dict[OffloadKey, int]] = []

    # Looking

    @property
    def free_count(self) -> int:
        """How many slots hold no block and have no users."""
        return self._count_of[_FREE]

    @property
    def pinned_count(self) -> int:
        """How many ready slots have users."""
        return self._count_of[_READY] - self._policy.evictable_count

    def count(self, state: SlotState) -> int:
        """Return how many slots are in a state."""
        return self._count_of[state]

    def find(self, keys: Keys) -> Found:
        """Return the slot of each block, stored or being written."""
        return self._index.find(keys)

    def results(self, found: Found) -> list[LookupResult]:
        """Return MISS, HIT or PENDING for each block that was looked for."""
        state = self._state
        return [_MISS if slot is None else _RESULT_OF_STATE[state[slot]] for slot in found]

    def is_known(self, key: OffloadKey) -> bool:
        """Return whether a block is stored or being written."""
        return self._index.get(key) is not None

    def is_ready(self, key: OffloadKey) -> bool:
        """Return whether a block is stored."""
        slot = self._index.get(key)
        return slot is not None and self._state[slot] == _READY

    def all_ready(self, found: Found) -> bool:
        """Return whether all blocks that were looked for are stored."""
        state = self._state
        return all(slot is not None and state[slot] == _READY for slot in found)

    def writes(self, slots: Sequence[int]) -> set[PrepareStoreOutput]:
        """Return the tickets under which some of `slots` are being written."""
        state = self._state
        writing = [slot for slot in slots if state[slot] == _WRITING]
        return {self._writes[self._write_number_of[slot]] for slot in writing}

    def room_beside(self, protected: Sequence[int]) -> int:
        """Return how many slots could be taken now, evicting anything but `protected`, which are stored."""
        users = self._users
        idle = [slot for slot in protected if not users[slot]]
        return self._count_of[_FREE] + self._policy.evictable_count - len(idle)

    # Using

    def touch(self, keys: Keys, found: Found, access: Access) -> None:
        """Tell the policy of one request's access."""
        missing_count = found.count(None)
        if missing_count == len(keys):
            self._policy.miss(keys, access)
        elif not missing_count:
            self._policy.touch([slot for slot in found if slot is not None], access)
        else:
            known = [position for position, slot in enumerate(found) if slot is not None]
            missing = [position for position, slot in enumerate(found) if slot is None]
            self._policy.touch([slot for slot in found if slot is not None], access.select(known))
            self._policy.miss([keys[position] for position in missing], access.select(missing))

    def hold(self, slots: Sequence[int]) -> None:
        """Count one more user of each slot."""
        users = self._users
        unused = []
        for slot in slots:
            count = users[slot]
            users[slot] = count + 1
            if not count:
                unused.append(slot)
        if unused:
            self._policy.pin(unused)

    def release(self, slots: Sequence[int]) -> None:
        """Count one user less of each slot."""
        users, state = self._users, self._state
        idle = []
        for slot in slots:
            users[slot] = count = users[slot] - 1
            if not count:
                idle.append(slot)
        ready = [slot for slot in idle if state[slot] == _READY]
        if ready:
            self._policy.unpin(ready)
        if len(ready) < len(idle):
            self._make_free([slot for slot in idle if state[slot] == _KEYLESS], _KEYLESS)

    # Placement

    def is_stored(self, slot: int) -> bool:
        """Return whether the block of a slot can be loaded."""
        return self._state[slot] == _READY

    def idle(self, slots: Sequence[int]) -> list[int]:
        """Return those of `slots` whose block can be loaded and that have no users."""
        users, state = self._users, self._state
        return [slot for slot in slots if not users[slot] and state[slot] == _READY]

    def count_used_once(self, mask: npt.NDArray[np.bool_]) -> int:
        """Return how many of the slots in a mask have exactly one user."""
        return int(np.count_nonzero(np.frombuffer(self._users, dtype=np.int32)[mask] == 1))

    def drop_one_user(self, mask: npt.NDArray[np.bool_]) -> None:
        """Count one user less of each slot in a mask, just before `clear`."""
        np.frombuffer(self._users, dtype=np.int32)[mask] -= 1

    # Changing

    def evict(self, count: int, protected: Sequence[int]) -> list[OffloadKey] | None:
        """Let `count` blocks leave and return their keys; None, and no change, if the policy has not that many."""
        victims = self._policy.evict(count, protected)
        if victims is None:
            return None
        if not victims:
            return []
        keys: list[OffloadKey] = [self._key_of[slot] for slot in victims]
        self._index.drop(keys)
        self._make_free(victims, _READY)
        return keys

    def reserve(self, keys: Keys, write: PrepareStoreOutput, access: Access) -> list[int]:
        """Give each key one of the free slots, which there must be, to be written under a ticket.

        Slots that were never used come first, then the one freed last.
        """
        if not keys:
            return []
        slots = self._take_free(len(keys))
        self._write_total = number = self._write_total + 1
        self._writes[number] = write
        self._index.put(keys, slots)
        key_of, users, state, write_number_of = self._key_of, self._users, self._state, self._write_number_of
        for key, slot in zip(keys, slots, strict=True):
            key_of[slot] = key
        for slot in slots:
            users[slot] = 1
            state[slot] = _WRITING
            write_number_of[slot] = number
        self._count_of[_FREE] -= len(slots)
        self._count_of[_WRITING] += len(slots)
        self._policy.insert(slots, keys, access)
        return slots

    def commit(self, slots: Sequence[int]) -> None:
        """Make written slots ready; the ticket that wrote them is still their user."""
        self._end_write(slots, _READY)

    def drop(self, slots: Sequence[int]) -> None:
        """Take slots whose write has failed away from their keys; the ticket is still their user."""
        self._policy.remove(slots)
        self._index.drop([self._key_of[slot] for slot in slots])
        self._end_write(slots, _KEYLESS)

    def clear(self) -> None:
        """Take every block away; slots without users are free, the others become keyless."""
        in_use = np.flatnonzero(np.frombuffer(self._users, dtype=np.int32)).tolist()
        self._policy.clear()
        self._given_up += self._index.parts()
        self._index = make_index(self.slot_count)
        self._writes = {}
        self._state = bytearray(self.slot_count)
        for slot in in_use:
            self._state[slot] = _KEYLESS
        self._count_of = [self.slot_count - len(in_use), 0, 0, len(in_use)]
        self._first_fresh = 0
        self._reusable = []

    def free_given_up(self) -> None:
        """Free a slice of what the last reset has left behind."""
        if self._given_up:
            self._given_up.pop()

    def _take_free(self, count: int) -> list[int]:
        state, total = self._state, self.slot_count
        slots: list[int] = []
        while len(slots) < count and self._first_fresh < total:
            start = self._first_fresh
            self._first_fresh = min(total, start + count - len(slots))
            # After a reset, slots that are still in use lie among the fresh ones.
            slots += [slot for slot in range(start, self._first_fresh) if state[slot] == _FREE]
        if reused := count - len(slots):
            slots += self._reusable[: -reused - 1 : -1]
            del self._reusable[-reused:]
        return slots

    def _make_free(self, slots: Sequence[int], old: int) -> None:
        state, first_fresh = self._state, self._first_fresh
        for slot in slots:
            state[slot] = _FREE
        self._count_of[old] -= len(slots)
        self._count_of[_FREE] += len(slots)
        if first_fresh == self.slot_count:
            self._reusable.extend(slots)
        else:
            self._reusable.extend([slot for slot in slots if slot < first_fresh])

    def _end_write(self, slots: Sequence[int], new: int) -> None:
        """Change the state of slots that were all being written, under one ticket."""
        state = self._state
        for slot in slots:
            state[slot] = new
        self._count_of[_WRITING] -= len(slots)
        self._count_of[new] += len(slots)
        if slots:
            del self._writes[self._write_number_of[slots[0]]]
