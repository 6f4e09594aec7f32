"""From keys to small numbers, such as slots: one dict, or many small ones.

A dict of a million entries is rebuilt as a whole now and then, also at constant size, and that takes tens of
milliseconds. Many small ones are rebuilt one at a time. Freeing that many entries takes as long, so an index that is
cleared frees them in slices, while new ones come in.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Sequence

from aiokvoffload.keys import OffloadKey

SINGLE_DICT_KEYS = 65_536
"""Up to so many keys, one dict is rebuilt in less than a millisecond."""

_SHARD_KEYS = 32_768
"""Keys meant for one of many dicts, on average; some have more."""

_SHARD_SHIFT = 40
"""A dict looks at the low bits of a hash first; shards chosen by the same bits would make all its keys collide."""

_FREED_AT_ONCE = 1024
"""How many old entries are freed while a batch of new ones is added."""


class KeyIndex:
    """The number of each key; for up to `SINGLE_DICT_KEYS` keys."""

    def __init__(self) -> None:
        self._number_of: dict[OffloadKey, int] = {}
        self._given_up: list[dict[OffloadKey, int]] = []

    def find(self, keys: Iterable[OffloadKey]) -> list[int | None]:
        """Return the number of each key, None for unknown ones."""
        return list(map(self._number_of.get, keys))

    def get(self, key: OffloadKey) -> int | None:
        """Return the number of one key, or None."""
        return self._number_of.get(key)

    def put(self, keys: Sequence[OffloadKey], numbers: Sequence[int]) -> None:
        """Note the numbers of new keys."""
        self._number_of.update(zip(keys, numbers, strict=True))
        if self._given_up:
            self._free_some()

    def drop(self, keys: Iterable[OffloadKey]) -> None:
        """Forget keys, all of which must be known."""
        deque(map(self._number_of.__delitem__, keys), maxlen=0)

    def clear(self) -> None:
        """Forget all keys, at once; their entries are freed later."""
        self._given_up.append(self._number_of)
        self._number_of = {}

    def _free_some(self) -> None:
        left = _FREED_AT_ONCE
        while self._given_up and left:
            part = self._given_up[-1]
            count = min(left, len(part))
            for _ in range(count):
                part.popitem()
            left -= count
            if not part:
                self._given_up.pop()


class ShardedKeyIndex(KeyIndex):
    """The same for any number of keys.

    Args:
        key_count: How many there can be at a time.
    """

    def __init__(self, key_count: int) -> None:
        super().__init__()
        shard_count = 1 << (key_count // _SHARD_KEYS).bit_length()
        self._mask = shard_count - 1
        self._shards: list[dict[OffloadKey, int]] = [{} for _ in range(shard_count)]

    def find(self, keys: Iterable[OffloadKey]) -> list[int | None]:
        """Return the number of each key, None for unknown ones."""
        shards, mask = self._shards, self._mask
        return [shards[hash(key) >> _SHARD_SHIFT & mask].get(key) for key in keys]

    def get(self, key: OffloadKey) -> int | None:
        """Return the number of one key, or None."""
        return self._shards[hash(key) >> _SHARD_SHIFT & self._mask].get(key)

    def put(self, keys: Sequence[OffloadKey], numbers: Sequence[int]) -> None:
        """Note the numbers of new keys."""
        shards, mask = self._shards, self._mask
        for key, number in zip(keys, numbers, strict=True):
            shards[hash(key) >> _SHARD_SHIFT & mask][key] = number
        if self._given_up:
            self._free_some()

    def drop(self, keys: Iterable[OffloadKey]) -> None:
        """Forget keys, all of which must be known."""
        shards, mask = self._shards, self._mask
        for key in keys:
            del shards[hash(key) >> _SHARD_SHIFT & mask][key]

    def clear(self) -> None:
        """Forget all keys, at once; their entries are freed later."""
        self._given_up += self._shards
        self._shards = [{} for _ in self._shards]


def make_index(key_count: int) -> KeyIndex:
    """Return an index for that many keys."""
    return KeyIndex() if key_count <= SINGLE_DICT_KEYS else ShardedKeyIndex(key_count)
