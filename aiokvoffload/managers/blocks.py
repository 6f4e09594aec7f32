"""Which block lives in which slot of CPU memory, whose bytes are in use, and what the slots add up to.

What is kept per slot lies in arrays: a block costs memory in proportion to its index entry, the garbage collector sees
no object for it, and one operation handles all slots of a call.
"""

from __future__ import annotations

from array import array
from collections.abc import Collection, Sequence
from enum import IntEnum
from typing import cast

import numpy as np
import numpy.typing as npt

from aiokvoffload.key_index import NOT_FOUND, NumberArray, make_index
from aiokvoffload.keys import OffloadKey
from aiokvoffload.policies.base import Access, CachePolicy
from aiokvoffload.policies.slots import SlotArray, slot_array
from aiokvoffload.specs import LookupResult, PrepareStoreOutput

Keys = Sequence[OffloadKey]
Found = NumberArray
"""For each key of a call its slot, or `NOT_FOUND` for a block that is not there."""


class SlotState(IntEnum):
    """What a slot is for at this moment."""

    FREE = 0
    WRITING = 1
    READY = 2
    KEYLESS = 3
    """Its block is gone, but somebody may still touch its bytes."""


_FREE, _WRITING, _READY, _KEYLESS = map(int, SlotState)
_REMEMBERED_KEYS = 1024
"""So many keys of a call are remembered; to let go of a million would take milliseconds."""
_FEW_SLOTS = 8
"""Up to so many slots are counted faster one by one."""
_NOTHING_FOUND: Found = np.empty(0, dtype=np.int64)
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
        self._number_of = self._index.number_of
        self._users = np.zeros(slot_count, dtype=np.int32)
        self._states = np.zeros(slot_count + 1, dtype=np.uint8)  # the last one is what `NOT_FOUND` leads to
        # The same, for who asks for one.
        self._user_count_of, self._state_of = self._users.data, self._states.data
        self._write_number_of = np.zeros(slot_count, dtype=np.int64)
        self._writes: dict[int, PrepareStoreOutput] = {}
        self._write_total = 0
        self._asked: list[OffloadKey] = []
        self._found: Found = _NOTHING_FOUND
        self._start()

    def _start(self) -> None:
        """Hold no blocks; slots with users are keyless."""
        in_use = np.flatnonzero(self._users)
        self._states.fill(_FREE)
        self._states[in_use] = _KEYLESS
        self._count_of = [self.slot_count - len(in_use), 0, 0, len(in_use)]
        self._first_fresh = 0
        self._reusable = array("q")

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
        """Return the slot of each block, stored or being written; the answer is shared and must not be changed."""
        count, asked = len(keys), self._asked
        # A request's blocks are asked for again and again: all of them, those to load, those to store.
        if keys == asked[:count]:
            return self._found[:count]
        if keys == asked[-count:]:
            return self._found[-count:]
        if asked and keys[: len(asked)] == asked:
            found = np.concatenate((self._found, self._index.find(keys[len(asked) :])))
        else:
            found = self._index.find(keys)
        found.flags.writeable = False
        if count <= _REMEMBERED_KEYS:
            self._asked, self._found = list(keys), found
        return found

    def results(self, found: Found) -> list[LookupResult]:
        """Return MISS, HIT or PENDING for each block that was looked for."""
        return list(map(_RESULT_OF_STATE.__getitem__, self._states[found].tolist()))

    def result_of(self, key: OffloadKey) -> LookupResult:
        """Return MISS, HIT or PENDING for one block."""
        slot = self._number_of(key)
        return _MISS if slot is None else _RESULT_OF_STATE[self._state_of[slot]]

    def are_known(self, keys: Keys) -> list[bool]:
        """Return for each block whether it is stored or being written."""
        known: list[bool] = (self.find(keys) != NOT_FOUND).tolist()
        return known

    def are_ready(self, keys: Keys) -> list[bool]:
        """Return for each block whether it is stored."""
        ready: list[bool] = (self._states[self.find(keys)] == _READY).tolist()
        return ready

    def stored_among(self, found: Found) -> npt.NDArray[np.intp]:
        """Return the positions of those blocks that can be loaded."""
        return np.flatnonzero(self._states[found] == _READY)

    def all_ready(self, slots: Collection[int] | SlotArray) -> bool:
        """Return whether the blocks in all of `slots` are stored."""
        return bool((self._states[slot_array(slots)] == _READY).all())

    def writes(self, slots: Sequence[int] | SlotArray) -> set[PrepareStoreOutput]:
        """Return the tickets under which some of `slots` are being written."""
        if not self._count_of[_WRITING]:
            return set()
        asked = slot_array(slots)
        writing = asked[self._states[asked] == _WRITING]
        return {self._writes[number] for number in set(self._write_number_of[writing].tolist())}

    def room_beside(self, protected: Sequence[int]) -> int:
        """Return how many slots could be taken now, evicting anything but `protected`, which are stored."""
        room = self._count_of[_FREE] + self._policy.evictable_count
        if protected:
            room -= len(protected) - int(np.count_nonzero(self._users[slot_array(protected)]))
        return room

    def coldest(self, count: int) -> list[tuple[OffloadKey, int]]:
        """Return up to `count` blocks that would leave first, in that order, each with its slot."""
        slots = self._policy.coldest(count)
        return list(zip(self._index.keys_of(slot_array(slots)), slots, strict=True))

    # Using

    def touch(self, keys: Keys, found: Found, access: Access) -> None:
        """Tell the policy of one request's access."""
        is_missing = found == NOT_FOUND
        missing_count = int(np.count_nonzero(is_missing))
        lead = len(keys) - missing_count
        if missing_count == len(keys):
            self._policy.miss(keys, access)
        elif not missing_count:
            self._policy.touch(self._batch(found), access)
        elif np.count_nonzero(is_missing[lead:]) == missing_count:  # a prefix is there, and what follows is not
            self._policy.touch(self._batch(found[:lead]), access.part(0, lead))
            self._policy.miss(keys[lead:], access.part(lead, len(keys)))
        else:
            known, missing = np.flatnonzero(~is_missing), np.flatnonzero(is_missing).tolist()
            self._policy.touch(self._batch(found[known]), access.select(known.tolist()))
            self._policy.miss([keys[position] for position in missing], access.select(missing))

    def hold(self, slots: Sequence[int] | SlotArray, *, are_distinct: bool = False) -> None:
        """Count one more user of each slot; one named twice, by two KV groups, has one more user."""
        held = slot_array(slots)
        if are_distinct and len(held) <= _FEW_SLOTS:
            self._hold_few(held.tolist())
            return
        user_counts = self._users[held]
        self._users[held] = user_counts + 1
        unused = held[user_counts == 0]
        if len(unused):
            self._policy.pin(self._batch(unused if are_distinct else _each_once(unused)))

    def release(self, slots: Sequence[int] | SlotArray, *, are_distinct: bool = False) -> None:
        """Count one user less of each slot."""
        if are_distinct and len(slots) <= _FEW_SLOTS:
            self._release_few(slots.tolist() if isinstance(slots, np.ndarray) else slots)
            return
        released = slot_array(slots)
        user_counts = self._users[released] - 1
        self._users[released] = user_counts
        idle = released[user_counts == 0]
        if not are_distinct:
            idle = _each_once(idle)
        is_ready = self._states[idle] == _READY
        ready = idle[is_ready]
        if len(ready):
            self._policy.unpin(self._batch(ready))
        if len(ready) < len(idle):
            self._make_free(idle[~is_ready], _KEYLESS)

    def _hold_few(self, slots: Sequence[int]) -> None:
        counts = self._user_count_of
        unused = [slot for slot in slots if not counts[slot]]
        for slot in slots:
            counts[slot] += 1
        if unused:
            self._policy.pin(unused)

    def _release_few(self, slots: Sequence[int]) -> None:
        counts, states = self._user_count_of, self._state_of
        for slot in slots:
            counts[slot] -= 1
        idle = [slot for slot in slots if not counts[slot]]
        ready = [slot for slot in idle if states[slot] == _READY]
        if ready:
            self._policy.unpin(ready)
        if len(ready) < len(idle):
            self._make_free(slot_array([slot for slot in idle if states[slot] != _READY]), _KEYLESS)

    # Placement

    def is_stored(self, slot: int) -> bool:
        """Return whether the block of a slot can be loaded."""
        return bool(self._states[slot] == _READY)

    def idle(self, slots: Sequence[int]) -> list[int]:
        """Return those of `slots` whose block can be loaded and that have no users."""
        asked = slot_array(slots)
        idle: list[int] = asked[(self._users[asked] == 0) & (self._states[asked] == _READY)].tolist()
        return idle

    def count_used_once(self, mask: npt.NDArray[np.bool_]) -> int:
        """Return how many of the slots in a mask have exactly one user."""
        return int(np.count_nonzero(self._users[mask] == 1))

    def drop_one_user(self, mask: npt.NDArray[np.bool_]) -> None:
        """Count one user less of each slot in a mask, just before `clear`."""
        self._users[mask] -= 1

    # Changing

    def reserve(
        self, keys: Keys, write: PrepareStoreOutput, access: Access, protected: Sequence[int]
    ) -> tuple[list[int], list[OffloadKey]] | None:
        """Give each key a slot, to be written under a ticket, evicting others if need be.

        Slots that were never used come first, then the one given up last.

        Args:
            keys: None of them has a slot.
            write: The ticket.
            access: To `keys`.
            protected: Slots that are not evicted.

        Returns:
            The slots, and the keys that had to leave for them. None if the policy cannot give up as many: then nothing
            has changed.
        """
        if not keys:
            return [], []
        wanted = len(keys) - self.free_count
        victims = self._policy.evict_array(wanted, protected) if wanted > 0 else _NOTHING_FOUND
        if victims is None:
            return None
        evicted: list[OffloadKey] = []
        taken = _NOTHING_FOUND
        if len(victims):
            taken = victims[::-1]
            evicted = self._index.take(victims)
        if len(victims) < len(keys):
            taken = self._take_free(len(keys) - len(victims), taken)
        slots: list[int] = taken.tolist()
        self._index.put(keys, taken)
        self._forget_found()
        self._write_total = number = self._write_total + 1
        self._writes[number] = write
        self._users[taken] = 1
        self._states[taken] = _WRITING
        self._write_number_of[taken] = number
        self._count_of[_READY] -= len(victims)
        self._count_of[_FREE] -= len(slots) - len(victims)
        self._count_of[_WRITING] += len(slots)
        self._policy.insert(self._batch(taken), keys, access)
        return slots, evicted

    def end_write(self, write: PrepareStoreOutput, written: Sequence[int], failed: Sequence[int]) -> None:
        """Make written slots of a ticket ready, and take failed ones away from their keys; it is still their user."""
        if failed:
            dropped = slot_array(failed)
            self._policy.remove(failed)
            self._index.drop(dropped)
            self._forget_found()
            self._states[dropped] = _KEYLESS
        self._states[slot_array(written)] = _READY
        self._count_of[_WRITING] -= len(written) + len(failed)
        self._count_of[_READY] += len(written)
        self._count_of[_KEYLESS] += len(failed)
        if write.slots:
            del self._writes[self._write_number_of.item(write.slots[0])]

    def clear(self) -> None:
        """Take every block away; slots without users are free, the others become keyless."""
        self._policy.clear()
        self._index.clear()
        self._forget_found()
        self._writes = {}
        self._start()

    def _forget_found(self) -> None:
        """Forget the last answer of `find`, which may be wrong from now on."""
        self._asked = []
        self._found = _NOTHING_FOUND

    def _take_free(self, count: int, given_up: SlotArray) -> SlotArray:
        """Take free slots, and put those that were given up just now among them."""
        if count <= self.slot_count - self._first_fresh and not len(given_up) and not self._count_of[_KEYLESS]:
            self._first_fresh += count
            return np.arange(self._first_fresh - count, self._first_fresh)
        parts: list[SlotArray] = []
        while count and self._first_fresh < self.slot_count:
            start = self._first_fresh
            self._first_fresh = min(self.slot_count, start + count)
            # After a reset, slots that are still in use lie among the fresh ones.
            parts.append(start + np.flatnonzero(self._states[start : self._first_fresh] == _FREE))
            count -= len(parts[-1])
        first = len(self._reusable) - count
        parts += given_up, np.array(self._reusable[first:])[::-1]
        del self._reusable[first:]
        return np.concatenate(parts)

    def _make_free(self, slots: SlotArray, old: int) -> None:
        self._states[slots] = _FREE
        self._count_of[old] -= len(slots)
        self._count_of[_FREE] += len(slots)
        if self._first_fresh < self.slot_count:
            slots = slots[slots < self._first_fresh]
        self._reusable.frombytes(slots.tobytes())

    def _batch(self, slots: SlotArray) -> Sequence[int]:
        """Return slots as the policy takes them."""
        return cast("Sequence[int]", slots) if self._policy.takes_arrays else slots.tolist()


def _each_once(slots: SlotArray) -> SlotArray:
    numbers = slots.tolist()
    return slots if len(set(numbers)) == len(numbers) else slot_array(dict.fromkeys(numbers))
