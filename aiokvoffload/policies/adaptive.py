"""A tournament: small caches without bytes try every rank on a sample of the blocks, the winner ranks the real one.

After the idea of miniature simulations in C. Waldspurger et al., "Cache Modeling and Optimization using Miniature
Simulations", USENIX ATC 2017: a cache of a share of the capacity, asked for the blocks whose hash falls into that
share, hits about as often as the whole one.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import dataclass
from zlib import crc32

from aiokvoffload.errors import ConfigurationError
from aiokvoffload.keys import OffloadKey
from aiokvoffload.policies.base import Access
from aiokvoffload.policies.history import DEFAULT_HISTORY_BYTES_PER_BLOCK, InsertionClock
from aiokvoffload.policies.ranking import RankedPolicy
from aiokvoffload.policies.shadow import SHADOW_SLOT_BYTES, ShadowCache
from aiokvoffload.policies.slots import slot_array
from aiokvoffload.policies.uses import GhostRows, UseTable

_TICK_BITS = 48
_STEPS_PER_HALF_LIFE = 1 << 32
_DEMOTED = 2
_SAMPLED_SLOTS = 2048
"""Above this many sampled slots a coarser sample is as good and costs less."""
_MIN_SAMPLE = 4
_FINE_SAMPLE_CAPACITY = 1024
"""Up to this capacity the finest sample is taken; a coarser one leaves more memory for blocks that left."""
_MAX_SAMPLE = 1024
_ROUND_CAPACITIES = 0.1
"""After so many looked-up blocks, in units of the capacity, a round ends."""
_MIN_ROUND_BLOCKS = 256
_MEMORY_CAPACITIES = 10.0
_MIN_MEMORY_BLOCKS = 40_000
"""After so many looked-up blocks a round counts 1/e of a new one."""
_LEAD = 0.01
_LEAD_OVER_SAFE = 0.03
"""By what share a candidate must be better than the winner to replace it: by more to replace `lru`, the first of the
candidates, because nothing may be worse than that."""
_DEVIATIONS = 0.5
_DEVIATIONS_OVER_SAFE = 1.5
"""How many standard deviations of the difference between rounds that must be, so that it is not chance."""
_MOVES_PER_BLOCK = 4
GHOST_ROW_BYTES = 240


Ranking = Callable[[UseTable, Iterable[int]], list[int]]


def _by_last(uses: UseTable, rows: Iterable[int]) -> list[int]:
    last = uses.last_tick
    return [last[row] for row in rows]


def _by_last_but_one(uses: UseTable, rows: Iterable[int]) -> list[int]:
    last, previous = uses.last_tick, uses.previous_tick
    return [(previous[row] << _TICK_BITS) + last[row] for row in rows]


def _by_weight(half_life: int) -> Ranking:
    def ranks(uses: UseTable, rows: Iterable[int]) -> list[int]:
        weights = uses.weights[half_life]
        return [int(weights[row] * _STEPS_PER_HALF_LIFE) + 1 for row in rows]

    return ranks


HALF_LIVES = (1.0, 8.0)
"""In capacities."""

RANKINGS: tuple[Ranking, ...] = (_by_last, _by_last_but_one, _by_weight(0), _by_weight(1))


@dataclass(frozen=True, slots=True)
class Candidate:
    """One way to run a cache.

    Attributes:
        name: As `AdaptivePolicy.winner` shows it.
        ranking: Index in `RANKINGS`.
        is_filtered: Whether a block is stored only at its second use.
    """

    name: str
    ranking: int
    is_filtered: bool = False


CANDIDATES = (
    Candidate("lru", 0),
    Candidate("lrfu, half-life 1", 2),
    Candidate("lrfu, half-life 8", 3),
    Candidate("lru2", 1),
    Candidate("lru, filtered", 0, is_filtered=True),
    Candidate("lru2, filtered", 1, is_filtered=True),
)


class AdaptivePolicy(RankedPolicy):
    """Ranks as the candidate does whose shadow has hit most lately.

    Line 0 or 1 is in the order of the present winner. After a change the other one still holds the blocks that
    nobody has used since; every call moves some of them, coldest first.

    Args:
        capacity: Number of slots.
        store_cost: What storing a block costs, in hits. Above 0 a candidate that stores less may win.
        history_bytes_per_block: Memory for shadows and for blocks that left, per slot.

    Raises:
        ConfigurationError: A value is negative.
    """

    def __init__(
        self,
        capacity: int,
        *,
        store_cost: float = 0.0,
        history_bytes_per_block: int = DEFAULT_HISTORY_BYTES_PER_BLOCK,
    ) -> None:
        super().__init__(capacity, line_count=3, first_line=_DEMOTED)
        if not store_cost >= 0:
            raise ConfigurationError(f"store_cost is {store_cost}; it must be at least 0")
        if history_bytes_per_block < 0:
            raise ConfigurationError(f"history_bytes_per_block is {history_bytes_per_block}; it must be at least 0")
        self._store_cost = store_cost
        self._key_of: list[OffloadKey] = [OffloadKey(b"")] * capacity
        self._ranked_by = bytearray(capacity)
        self._sample = _MIN_SAMPLE
        if capacity > _FINE_SAMPLE_CAPACITY:
            self._sample *= 2
        while capacity // self._sample > _SAMPLED_SLOTS and self._sample < _MAX_SAMPLE:
            self._sample *= 2
        budget = capacity * history_bytes_per_block
        shadow_slots = max(1, capacity // self._sample)
        shadow_bytes = shadow_slots * SHADOW_SLOT_BYTES * len(CANDIDATES)
        self._has_shadows = shadow_bytes <= budget
        self._shadows = [ShadowCache(shadow_slots) for _ in CANDIDATES] if self._has_shadows else []
        ghost_limit = (budget - (shadow_bytes if self._has_shadows else 0)) // GHOST_ROW_BYTES
        self._ghosts = GhostRows(capacity, ghost_limit)
        self._scratch_row = capacity + ghost_limit
        self._uses = UseTable(self._scratch_row + 1, [half_life * capacity for half_life in HALF_LIVES])
        self._clock = InsertionClock()
        self._is_sampled = bytearray(capacity)
        self._heard: list[tuple[int, OffloadKey, tuple[int, ...], bool]] = []
        self._heard_tick = 0
        self._start_anew()

    @property
    def winner(self) -> str:
        """The candidate that ranks now."""
        return CANDIDATES[self._winner].name

    @property
    def history_bytes(self) -> int:
        """Memory taken by shadows and by what is remembered of blocks that left."""
        shadow_slots = sum(len(shadow) for shadow in self._shadows)
        return shadow_slots * SHADOW_SLOT_BYTES + len(self._ghosts) * GHOST_ROW_BYTES

    def admit(self, keys: Sequence[OffloadKey], access: Access) -> Sequence[OffloadKey]:
        """Return all of `keys`, or those used before if the winner stores no others."""
        if not CANDIDATES[self._winner].is_filtered:
            return keys
        return [key for key in keys if self._was_used_before(key, access.tick)]

    def insert(self, slots: Sequence[int], keys: Sequence[OffloadKey], access: Access) -> None:
        """Make `slots` resident and pinned; ghosts go on with their uses."""
        time = self._clock.at(access.tick)
        again = []
        for slot, key in zip(slots, keys, strict=True):
            self._key_of[slot] = key
            self._is_sampled[slot] = self._is_in_sample(key)
            ghost = self._ghosts.pop(key)
            if ghost is None:
                self._uses.start(slot, access.tick, time)
            else:
                self._uses.copy(ghost, slot)
                if self._uses.last_tick[slot] < access.tick:
                    again.append(slot)
        self._uses.use(again, access.tick, time)
        self._clock.advance(len(slots))
        self._enter(slots, self._bases(slots), access, self._current)
        self._catch_up(_MOVES_PER_BLOCK * len(slots))

    def touch(self, slots: Sequence[int], access: Access) -> None:
        """Note a use of what was last used before, and rank it anew."""
        last, tick = self._uses.last_tick, access.tick
        chosen = [position for position, slot in enumerate(slots) if last[slot] < tick or self._ranks.is_first(slot)]
        slots, access = [slots[position] for position in chosen], access.select(chosen)
        newer = [position for position, slot in enumerate(slots) if last[slot] < tick]
        self._uses.use([slots[position] for position in newer], tick, self._clock.at(tick))
        self._round_blocks += len(newer)
        sampled = [position for position in newer if self._is_sampled[slots[position]]]
        if sampled:
            rows = [slots[position] for position in sampled]
            self._hear([self._key_of[row] for row in rows], rows, access.select(sampled), [True] * len(rows))
        self._rerank_each(slots, self._bases(slots), access, self._current)
        self._catch_up(_MOVES_PER_BLOCK * len(slots))

    def miss(self, keys: Sequence[OffloadKey], access: Access) -> None:
        """Note a use of blocks that are not resident; strangers become ghosts if the winner may not store them."""
        uses, tick, time = self._uses, access.tick, self._clock.at(access.tick)
        is_filtered = CANDIDATES[self._winner].is_filtered
        self._round_blocks += len(keys)
        uses.start(self._scratch_row, tick, time)
        sampled: list[int] = []
        rows: list[int] = []
        for position, key in enumerate(keys):
            row = self._ghosts.get(key)
            if row is not None:
                if uses.last_tick[row] >= tick:
                    continue
                uses.use((row,), tick, time)
            elif is_filtered and (row := self._ghosts.put(key)) is not None:
                uses.copy(self._scratch_row, row)
            if self._is_in_sample(key):
                sampled.append(position)
                rows.append(self._scratch_row if row is None else row)
        if sampled:
            is_repeated = [uses.previous_tick[row] > 0 for row in rows]
            self._hear([keys[position] for position in sampled], rows, access.select(sampled), is_repeated)

    def unpin(self, slots: Collection[int]) -> None:
        """Put pinned slots back into their lines."""
        stale = [slot for slot in slots if self._ranked_by[slot] != self._winner]
        lines = self._lines.indices_of(slot_array(stale))
        stale = [slot for slot, line in zip(stale, lines, strict=True) if line != _DEMOTED]
        self._rebase(stale, self._bases(stale), self._current)
        super().unpin(slots)

    def _reenter(self, slots: Sequence[int], access: Access) -> None:
        """Rank by the uses before the demotion."""
        self._rerank_each(slots, self._bases(slots), access, self._current)

    def _leave(self, line: int, slots: Sequence[int]) -> None:
        """Remember the uses of evicted slots, unless they were sent away."""
        for slot in slots:
            if self._is_sent_away(slot):
                continue
            row = self._ghosts.put(self._key_of[slot])
            if row is not None:
                self._uses.copy(slot, row)

    def clear(self) -> None:
        """Drop all slots and all that is remembered or was learned."""
        super().clear()
        self._ghosts.clear()
        for shadow in self._shadows:
            shadow.clear()
        self._heard = []
        self._start_anew()

    def _start_anew(self) -> None:
        self._winner = self._current = self._round_blocks = 0
        self._scores = [0.0] * len(CANDIDATES)
        self._round = [0.0] * len(CANDIDATES)
        self._variances = [[0.0] * len(CANDIDATES) for _ in CANDIDATES]

    def _shares(self, count: int) -> Sequence[tuple[int, int]]:
        """What was demoted, then the line of the winner, then the one before."""
        shares = []
        for line in (_DEMOTED, self._current, 1 - self._current):
            share = min(count, self._lines[line].evictable_count)
            shares.append((line, share))
            count -= share
        return shares

    # The real cache follows the winner

    def _bases(self, slots: Sequence[int]) -> list[int]:
        """Return the number that the winner ranks each slot by, and note that it does."""
        for slot in slots:
            self._ranked_by[slot] = self._winner
        return RANKINGS[CANDIDATES[self._winner].ranking](self._uses, slots)

    def _catch_up(self, count: int) -> None:
        """Bring some slots from the order of the winner before into that of the present one."""
        slots = self._lines.coldest(1 - self._current, count)
        self._rebase(slots, self._bases(slots), self._current)

    def _was_used_before(self, key: OffloadKey, tick: int) -> bool:
        row = self._ghosts.get(key)
        return row is not None and (self._uses.last_tick[row] < tick or self._uses.previous_tick[row] > 0)

    # The shadows

    def _is_in_sample(self, key: OffloadKey) -> bool:
        return self._has_shadows and crc32(key) % self._sample == 0

    def _hear(self, keys: Sequence[OffloadKey], rows: Sequence[int], access: Access, is_repeated: list[bool]) -> None:
        """Note uses of sampled blocks for the shadows, which see those of one request together."""
        if access.tick != self._heard_tick:
            self._play()
            self._heard_tick = access.tick
        depths = access.depths or [0] * len(keys)
        bases = zip(*(bases_of(self._uses, rows) for bases_of in RANKINGS), strict=True)
        self._heard += zip(depths, keys, bases, is_repeated, strict=True)

    def _play(self) -> None:
        """Let every shadow serve the request that was heard; at the end of a round the best one wins."""
        heard, self._heard = self._heard, []
        if heard:
            heard.sort(key=lambda entry: entry[0])
            depths = [depth for depth, _, _, _ in heard]
            keys = [key for _, key, _, _ in heard]
            is_repeated = [flag for _, _, _, flag in heard]
            ranks = list(zip(*(bases for _, _, bases, _ in heard), strict=True))
            for index, (candidate, shadow) in enumerate(zip(CANDIDATES, self._shadows, strict=True)):
                bases = ranks[candidate.ranking]
                hits, stores = shadow.request(keys, bases, depths, is_repeated if candidate.is_filtered else None)
                self._round[index] += hits - self._store_cost * stores
        if self._round_blocks >= max(_MIN_ROUND_BLOCKS, _ROUND_CAPACITIES * self.capacity):
            self._end_round()

    def _end_round(self) -> None:
        """Add the round to the scores and change the winner if another one is better by more than chance."""
        fading = math.exp(-self._round_blocks / max(_MIN_MEMORY_BLOCKS, _MEMORY_CAPACITIES * self.capacity))
        self._round_blocks = 0
        scores, found = self._scores, self._round
        for index, new in enumerate(found):
            scores[index] = fading * scores[index] + new
            variances = self._variances[index]
            for other, reference in enumerate(found):
                variances[other] = fading * fading * variances[other] + (new - reference) ** 2
        self._round = [0.0] * len(CANDIDATES)
        winner = self._winner
        best = max(range(len(CANDIDATES)), key=scores.__getitem__)
        lead = scores[best] - scores[winner]
        share, deviations = (_LEAD, _DEVIATIONS) if winner else (_LEAD_OVER_SAFE, _DEVIATIONS_OVER_SAFE)
        needed = max(share * abs(scores[winner]), deviations * math.sqrt(self._variances[best][winner]))
        if lead > needed and not self._lines[1 - self._current].evictable_count:
            self._winner = best
            self._current = 1 - self._current
