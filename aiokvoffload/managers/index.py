"""From keys to slots: one dict, or many small ones.

A dict of a million entries is rebuilt as a whole now and then, also at constant size, and that takes tens of
milliseconds. Many small ones are rebuilt one at a time.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Sequence

from aiokvoffload.keys import OffloadKey

SHARD_SLOTS = 16_384
"""Largest number of slots behind one dict; rebuilding it takes well under a millisecond."""


class KeyIndex:
    """Where each block lives; for up to `SHARD_SLOTS` slots."""

    def __init__(self) -> None:
        self._slot_of: dict[OffloadKey, int] = {}

    def find(self, keys: Iterable[OffloadKey]) -> list[int | None]:
        """Return the slot of each key, None for unknown ones."""
        return list(map(self._slot_of.get, keys))

    def get(self, key: OffloadKey) -> int | None:
        """Return the slot of one key, or None."""
        return self._slot_of.get(key)

    def put(self, keys: Sequence[OffloadKey], slots: Sequence[int]) -> None:
        """Note where new keys live."""
        self._slot_of.update(zip(keys, slots, strict=True))

    def drop(self, keys: Iterable[OffloadKey]) -> None:
        """Forget keys, all of which must be known."""
        deque(map(self._slot_of.__delitem__, keys), maxlen=0)

    def parts(self) -> list[dict[OffloadKey, int]]:
        """Return the dicts behind the index, to be freed one by one when the index is given up."""
        return [self._slot_of]


class ShardedKeyIndex(KeyIndex):
    """The same for any number of slots.

    Args:
        slot_count: How many keys there can be at a time.
    """

    def __init__(self, slot_count: int) -> None:
        super().__init__()
        shard_count = 1 << (slot_count // SHARD_SLOTS).bit_length()
        self._mask = shard_count - 1
        self._shards: list[dict[OffloadKey, int]] = [{} for _ in range(shard_count)]

    def find(self, keys: Iterable[OffloadKey]) -> list[int | None]:
        """Return the slot of each key, None for unknown ones."""
        shards, mask = self._shards, self._mask
        return [shards[hash(key) & mask].get(key) for key in keys]

    def get(self, key: OffloadKey) -> int | None:
        """Return the slot of one key, or None."""
        return self._shards[hash(key) & self._mask].get(key)

    def put(self, keys: Sequence[OffloadKey], slots: Sequence[int]) -> None:
        """Note where new keys live."""
        shards, mask = self._shards, self._mask
        for key, slot in zip(keys, slots, strict=True):
            shards[hash(key) & mask][key] = slot

    def drop(self, keys: Iterable[OffloadKey]) -> None:
        """Forget keys, all of which must be known."""
        shards, mask = self._shards, self._mask
        for key in keys:
            del shards[hash(key) & mask][key]

    def parts(self) -> list[dict[OffloadKey, int]]:
        """Return the dicts behind the index."""
        return self._shards


def make_index(slot_count: int) -> KeyIndex:
    """Return an index for that many slots."""
    return KeyIndex() if slot_count <= SHARD_SLOTS else ShardedKeyIndex(slot_count)
