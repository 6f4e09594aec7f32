"""What policies remember of blocks that left, and of when requests came; both bounded."""

from __future__ import annotations

from collections import OrderedDict
from zlib import crc32

from aiokvoffload.errors import ConfigurationError
from aiokvoffload.keys import OffloadKey

DEFAULT_HISTORY_BYTES_PER_BLOCK = 1024
GHOST_BYTES = 192
"""Upper bound of what one remembered block takes, its key included; a test holds it to that."""

_SHARD_SIZE = 2048
_REMEMBERED_TICKS = 4096
_FREED_AT_ONCE = 16
"""How many blocks that are given up are let go of with each new one."""


class History:
    """One number for each block that left lately; the oldest is forgotten first.

    Kept in shards, so that no call ever rebuilds, or frees, one large table; and in plain dicts, which the garbage
    collector leaves alone as long as there are only keys and numbers in them.

    Args:
        limit: How many blocks are remembered at most.
    """

    def __init__(self, limit: int) -> None:
        self._shard_limits: list[int] = []
        if limit > 0:
            shard_count = -(-limit // _SHARD_SIZE)
            self._shard_limits = [limit // shard_count + (shard < limit % shard_count) for shard in range(shard_count)]
        self._no_shard: dict[OffloadKey, float] = {}  # stays empty, in place of those that nothing was put into
        self._shards = [self._no_shard] * len(self._shard_limits)
        self._given_up: list[dict[OffloadKey, float]] = []

    def __len__(self) -> int:
        return sum(map(len, self._shards))

    @property
    def used_bytes(self) -> int:
        """Upper bound of the memory that is taken now."""
        return len(self) * GHOST_BYTES

    def get(self, key: OffloadKey) -> float | None:
        """Return the number remembered for a block, None for a stranger."""
        if not self._shards:
            return None
        return self._shards[crc32(key) % len(self._shards)].get(key)

    def pop(self, key: OffloadKey) -> float | None:
        """Forget a block and return its number, None for a stranger."""
        if not self._shards:
            return None
        return self._shards[crc32(key) % len(self._shards)].pop(key, None)

    def put(self, key: OffloadKey, number: float) -> None:
        """Remember a number for a block, as the youngest."""
        if not self._shards:
            return
        index = crc32(key) % len(self._shards)
        shard = self._shards[index]
        if shard is self._no_shard:
            shard = self._shards[index] = {}
        shard.pop(key, None)
        shard[key] = number
        if len(shard) > self._shard_limits[index]:
            del shard[next(iter(shard))]
        if self._given_up:
            self._free_some()

    def clear(self) -> None:
        """Forget all blocks; their memory is given back by later calls, piece by piece."""
        self._given_up += filter(None, self._shards)
        self._shards = [self._no_shard] * len(self._shard_limits)

    def _free_some(self) -> None:
        part = self._given_up[-1]
        for _ in range(min(_FREED_AT_ONCE, len(part))):
            part.popitem()
        if not part:
            self._given_up.pop()


def history_limit(capacity: int, history_bytes_per_block: int) -> int:
    """Return how many blocks may be remembered for a cache of `capacity` slots.

    Raises:
        ConfigurationError: The number of bytes is negative.
    """
    if history_bytes_per_block < 0:
        raise ConfigurationError(
            f"history_bytes_per_block is {history_bytes_per_block}; it must be at least 0, which remembers nothing"
        )
    return capacity * history_bytes_per_block // GHOST_BYTES


class InsertionClock:
    """Time counted in inserted blocks; it stands still for the length of one request.

    A cache that is asked for more turns over faster, so this clock follows what a slot costs.
    """

    def __init__(self) -> None:
        self._inserted_count = 0
        self._time_of_tick: OrderedDict[int, int] = OrderedDict()

    def at(self, tick: int) -> int:
        """Return the time at which a request's access was counted, the present for one that is forgotten."""
        time = self._time_of_tick.get(tick)
        if time is None:
            time = self._time_of_tick[tick] = self._inserted_count
            if len(self._time_of_tick) > _REMEMBERED_TICKS:
                self._time_of_tick.popitem(last=False)
        return time

    def advance(self, block_count: int) -> None:
        """Count inserted blocks."""
        self._inserted_count += block_count
