"""Recency and frequency in one number: every use counts, and counts half as much a half-life later.

After D. Lee et al., "LRFU: A Spectrum of Policies that Subsumes the Least Recently Used and Least Frequently Used
Policies", IEEE Transactions on Computers 50 (12), 2001. The weight of a block at time t is the sum of
2 ** ((used_at - t) / half_life) over its uses. All weights shrink alike, so the order changes only with a use, and
the logarithm of the weight at time 0 is a rank: after one use it is that time in half-lives, and doubling the weight
adds 1.
"""

from __future__ import annotations

import math
from array import array
from collections.abc import Sequence

import numpy as np

from aiokvoffload.errors import ConfigurationError
from aiokvoffload.keys import OffloadKey
from aiokvoffload.policies.base import Access
from aiokvoffload.policies.history import (
    DEFAULT_HISTORY_BYTES_PER_BLOCK,
    History,
    InsertionClock,
    history_limit,
)
from aiokvoffload.policies.ranking import RankedPolicy

_STEPS_PER_HALF_LIFE = 1 << 32
"""Ranks are whole numbers; far finer than one insertion into the largest cache."""

_NEGLIGIBLE_HALF_LIVES = 50.0


class LRFUPolicy(RankedPolicy):
    """Evicts the lowest weight.

    Args:
        capacity: Number of slots.
        half_life_capacities: After how many insertions, in units of the capacity, a use counts half. Small values
            behave like `lru`, large ones like "least frequently used".
        history_bytes_per_block: Memory for blocks that left, per slot; without it a block starts anew each time.

    Raises:
        ConfigurationError: The half-life is not positive.
    """

    def __init__(
        self,
        capacity: int,
        *,
        half_life_capacities: float = 1.0,
        history_bytes_per_block: int = DEFAULT_HISTORY_BYTES_PER_BLOCK,
    ) -> None:
        super().__init__(capacity)
        if not 0 < half_life_capacities < math.inf:
            raise ConfigurationError(f"half_life_capacities is {half_life_capacities}; it must be above 0 and finite")
        self._half_life = half_life_capacities * capacity
        self._clock = InsertionClock()
        self._history = History(history_limit(capacity, history_bytes_per_block))
        self._key_of = np.empty(capacity, dtype=object)  # a list would be walked through by the garbage collector
        self._last_tick = array("q", bytes(8 * capacity))
        self._weight = array("d", bytes(8 * capacity))
        self._has_level_above = False
        self._missed_tick = 0

    def widen(self, blocks_above: int) -> None:
        """Let the half-life be one of both levels, and count uses of blocks when they are missed, not when stored.

        A block of the level above is stored long after its uses.
        """
        self._half_life *= (self.capacity + blocks_above) / self.capacity
        self._has_level_above = True

    @property
    def history_bytes(self) -> int:
        """Memory taken by what is remembered of blocks that left."""
        return self._history.used_bytes

    def insert(self, slots: Sequence[int], keys: Sequence[OffloadKey], access: Access) -> None:
        """Make `slots` resident and pinned; a ghost goes on with its weight."""
        now = self._clock.at(access.tick) / self._half_life
        for slot, key in zip(slots, keys, strict=True):
            past = self._history.pop(key)
            self._key_of[slot] = key
            if past is None:
                self._weight[slot] = now
            else:
                self._weight[slot] = past if self._has_level_above else used_again(past, now)
            self._last_tick[slot] = access.tick
        self._clock.advance(len(slots))
        self._enter(slots, self._bases(slots), access)

    def touch(self, slots: Sequence[int], access: Access) -> None:
        """Add to the weight of what was last used before."""
        last, tick = self._last_tick, access.tick
        older = [position for position, slot in enumerate(slots) if last[slot] < tick or self._ranks.is_first(slot)]
        slots, access = [slots[position] for position in older], access.select(older)
        now = self._clock.at(tick) / self._half_life
        for slot in slots:
            if last[slot] < tick:
                self._weight[slot] = used_again(self._weight[slot], now)
                last[slot] = tick
        self._rerank_each(slots, self._bases(slots), access)

    def miss(self, keys: Sequence[OffloadKey], access: Access) -> None:
        """Count uses of blocks that the level above has or will have; a request that asks again counts nothing more."""
        if not self._has_level_above or access.tick <= self._missed_tick:
            return
        self._missed_tick = access.tick
        now = self._clock.at(access.tick) / self._half_life
        for key in keys:
            past = self._history.get(key)
            self._history.put(key, now if past is None else used_again(past, now))

    def _reenter(self, slots: Sequence[int], access: Access) -> None:
        """Rank by the uses before the demotion."""
        self._rerank_each(slots, self._bases(slots), access)

    def _leave(self, line: int, slots: Sequence[int]) -> None:
        """Remember the weights of evicted slots, unless they were sent away."""
        for slot in slots:
            if not self._is_sent_away(slot):
                self._history.put(self._key_of[slot], self._weight[slot])

    def clear(self) -> None:
        """Drop all slots and all that is remembered."""
        super().clear()
        self._history.clear()

    def _bases(self, slots: Sequence[int]) -> list[int]:
        weight = self._weight
        return [int(weight[slot] * _STEPS_PER_HALF_LIFE) + 1 for slot in slots]


def used_again(weight: float, now: float) -> float:
    """Return the logarithm of the sum of a weight and a new use, both logarithms, in half-lives."""
    high, low = (now, weight) if now > weight else (weight, now)
    if high - low > _NEGLIGIBLE_HALF_LIVES:
        return high
    return high + math.log2(1.0 + 2.0 ** (low - high))
