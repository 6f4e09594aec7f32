"""A cache of nothing but keys: a policy at work on requests that come one after the other."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from aiokvoffload.keys import OffloadKey
from aiokvoffload.policies.base import Access, CachePolicy


@dataclass(slots=True)
class MetadataCacheCounts:
    """What a metadata cache has counted.

    Attributes:
        requests: Accesses.
        blocks_looked_up: Their blocks.
        blocks_hit: Those within an access' leading run of cached blocks.
        blocks_stored: Blocks that were inserted.
        blocks_evicted: Blocks that left for others.
        blocks_refused: Blocks that found no room beside the others of their request.
    """

    requests: int = 0
    blocks_looked_up: int = 0
    blocks_hit: int = 0
    blocks_stored: int = 0
    blocks_evicted: int = 0
    blocks_refused: int = 0


class MetadataCache:
    """Does with a policy what a manager does whose stores land at once, without anything that only bytes need.

    Args:
        policy: Ranks the slots; there are as many as its capacity.
    """

    def __init__(self, policy: CachePolicy) -> None:
        self.policy = policy
        self.counts = MetadataCacheCounts()
        self._slot_of: dict[OffloadKey, int] = {}
        self._key_of: list[OffloadKey | None] = [None] * policy.capacity
        self._free = list(range(policy.capacity - 1, -1, -1))

    def __contains__(self, key: OffloadKey) -> bool:
        return key in self._slot_of

    def request(self, keys: Sequence[OffloadKey], access: Access) -> int:
        """Look up, touch and store the blocks of one request, each key once; return how many lead and hit."""
        slot_of, policy, counts = self._slot_of, self.policy, self.counts
        slots = [slot_of.get(key, -1) for key in keys]
        counts.requests += 1
        counts.blocks_looked_up += len(keys)
        if -1 not in slots:
            policy.touch(slots, access)
            counts.blocks_hit += len(slots)
            return len(slots)
        hit_count = slots.index(-1)
        counts.blocks_hit += hit_count
        known = [position for position, slot in enumerate(slots) if slot >= 0]
        resident = [slots[position] for position in known]
        policy.touch(resident, access.select(known))
        missing_at = [position for position, slot in enumerate(slots) if slot < 0]
        missing = [keys[position] for position in missing_at]
        access_to_missing = access.select(missing_at)
        policy.miss(missing, access_to_missing)
        admitted = policy.admit(missing, access_to_missing)
        room = len(self._free) + policy.evictable_count - len(resident)
        taken = admitted[:room]
        counts.blocks_refused += len(admitted) - len(taken)
        self._evict(max(0, len(taken) - len(self._free)), resident)
        if len(taken) < len(missing):
            chosen = set(taken)
            access_to_missing = access.select([position for position in missing_at if keys[position] in chosen])
        self._store(taken, access_to_missing)
        return hit_count

    def _evict(self, count: int, protected: Sequence[int]) -> None:
        if not count:
            return
        victims = self.policy.evict(count, protected) or []
        self.counts.blocks_evicted += len(victims)
        for slot in victims:
            key = self._key_of[slot]
            if key is not None:
                del self._slot_of[key]
        self._free += victims

    def _store(self, keys: Sequence[OffloadKey], access: Access) -> None:
        if not keys:
            return
        slots = self._free[: -len(keys) - 1 : -1]
        del self._free[-len(keys) :]
        self.counts.blocks_stored += len(keys)
        self._slot_of.update(zip(keys, slots, strict=True))
        for slot, key in zip(slots, keys, strict=True):
            self._key_of[slot] = key
        self.policy.insert(slots, keys, access)
        self.policy.unpin(slots)
