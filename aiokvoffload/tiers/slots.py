"""Which blocks a tier of bounded size holds, how large they are, and who leaves first."""

from __future__ import annotations

from collections.abc import Sequence

from aiokvoffload.errors import ConfigurationError
from aiokvoffload.keys import OffloadKey
from aiokvoffload.policies.base import Access, CachePolicy


class BlockSlots:
    """Bounds blocks by bytes; an eviction policy that knows slots by number says which one leaves.

    A block takes its bytes from `add` to `remove`, also while it is being written and while it is leaving.

    Args:
        capacity_bytes: What the blocks may take together.
        slot_count: Blocks at most.
        policy: Class of the eviction policy.
    """

    def __init__(self, capacity_bytes: int, slot_count: int, policy: type[CachePolicy]) -> None:
        self.capacity_bytes = capacity_bytes
        self.used_bytes = 0
        self.evicted_blocks = 0
        self._policy = policy(slot_count)
        self._slot_of: dict[OffloadKey, int] = {}
        self._key_of: dict[int, OffloadKey] = {}
        self._bytes_of: dict[OffloadKey, int] = {}
        self._leaving: set[OffloadKey] = set()
        self._used_slot_count = 0
        self._free_slots: list[int] = []

    @property
    def block_count(self) -> int:
        """Blocks that take bytes."""
        return len(self._bytes_of)

    def __contains__(self, key: OffloadKey) -> bool:
        return key in self._bytes_of

    def is_worth_room(self, key: OffloadKey, access: Access) -> bool:
        """Return whether the policy wants a block."""
        return bool(self._policy.admit([key], access))

    def has_room(self, byte_count: int) -> bool:
        """Return whether a block of so many bytes can be added."""
        has_slot = len(self._free_slots) > 0 or self._used_slot_count < self._policy.capacity
        return has_slot and self.used_bytes + byte_count <= self.capacity_bytes

    def add(self, key: OffloadKey, byte_count: int, access: Access, *, is_ready: bool) -> None:
        """Let a block take its bytes; it cannot leave before it is ready."""
        if self._free_slots:
            slot = self._free_slots.pop()
        else:
            slot = self._used_slot_count
            self._used_slot_count += 1
        self._key_of[slot] = key
        self._slot_of[key] = slot
        self._bytes_of[key] = byte_count
        self.used_bytes += byte_count
        self._policy.insert([slot], [key], access)
        if is_ready:
            self._policy.unpin([slot])

    def is_leaving(self, key: OffloadKey) -> bool:
        """Return whether a block was chosen as a victim and is not gone yet."""
        return key in self._leaving

    def make_ready(self, key: OffloadKey) -> None:
        """Let a block leave from now on."""
        self._policy.unpin([self._slot_of[key]])

    def touch(self, keys: Sequence[OffloadKey], access: Access) -> None:
        """Note a use of blocks, held or not; one that is named twice is used once."""
        first_place = {key: place for place, key in reversed(list(enumerate(keys)))}
        places = sorted(first_place.values())
        held = [place for place in places if keys[place] in self._slot_of]
        if held:
            self._policy.touch([self._slot_of[keys[place]] for place in held], access.select(held))
        if len(held) < len(places):
            absent = [place for place in places if keys[place] not in self._slot_of]
            self._policy.miss([keys[place] for place in absent], access.select(absent))

    def pick_victim(self) -> OffloadKey | None:
        """Choose the block that leaves first; it is leaving until `remove` or `keep`. None if none can."""
        chosen = self._policy.evict(1)
        if not chosen:
            return None
        victim = self._key_of.pop(chosen[0])
        del self._slot_of[victim]
        self._free_slots.append(chosen[0])
        self._leaving.add(victim)
        return victim

    def keep(self, victim: OffloadKey, access: Access) -> None:
        """Take a chosen victim back: it has been used."""
        self._leaving.discard(victim)
        byte_count = self._bytes_of.pop(victim)
        self.used_bytes -= byte_count
        self.add(victim, byte_count, access, is_ready=True)

    def remove(self, key: OffloadKey) -> int:
        """Let a block's bytes be free, and return how many; 0 if it has none."""
        byte_count = self._bytes_of.pop(key, 0)
        if not byte_count:
            return 0
        self.used_bytes -= byte_count
        if key in self._leaving:
            self._leaving.discard(key)
            self.evicted_blocks += 1
            return byte_count
        slot = self._slot_of.pop(key)
        self._policy.remove([slot])
        del self._key_of[slot]
        self._free_slots.append(slot)
        return byte_count


def check_capacity(url: str, capacity_bytes: int, block_bytes: int) -> None:
    """Refuse a capacity that no block fits into.

    Raises:
        ConfigurationError: It is smaller than one block.
    """
    if capacity_bytes < block_bytes:
        raise ConfigurationError(
            f"{url}: the capacity is {capacity_bytes} bytes, but one block takes {block_bytes} with its envelope"
        )
