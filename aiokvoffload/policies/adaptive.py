"""Ranks the blocks as whoever wins a tournament of policies does."""

from __future__ import annotations

from collections.abc import Collection, Sequence

import numpy as np
import numpy.typing as npt

from aiokvoffload.errors import ConfigurationError
from aiokvoffload.keys import OffloadKey
from aiokvoffload.policies.base import Access
from aiokvoffload.policies.candidates import CANDIDATES, HALF_LIVES
from aiokvoffload.policies.history import DEFAULT_HISTORY_BYTES_PER_BLOCK, InsertionClock
from aiokvoffload.policies.ranking import RankedPolicy
from aiokvoffload.policies.slots import SlotArray, slot_array
from aiokvoffload.policies.tournament import Tournament
from aiokvoffload.policies.uses import LAST, PREVIOUS, GhostRows, Uses, UseTable

_DEMOTED = 2
_MOVES_PER_BLOCK = 4
GHOST_ROW_BYTES = 224
"""Upper bound of what one remembered block takes; a test holds it to that."""
RESERVED_ROW_BYTES = 48
"""What of it is taken from the beginning."""


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
        budget_bytes = capacity * history_bytes_per_block
        self._tournament = Tournament(capacity, budget_bytes, store_cost)
        ghost_limit = (budget_bytes - self._tournament.reserved_bytes) // GHOST_ROW_BYTES
        self._ghosts = GhostRows(capacity, ghost_limit)
        self._uses = UseTable(capacity + ghost_limit, [half_life * capacity for half_life in HALF_LIVES])
        self._clock = InsertionClock()
        self._hash_of = np.zeros(capacity, dtype=np.int64)
        self._is_sampled = np.zeros(capacity, dtype=bool)
        self._ranked_by = np.zeros(capacity, dtype=np.uint8)
        self._winner = self._current = 0

    @property
    def winner(self) -> str:
        """The candidate that ranks now."""
        return CANDIDATES[self._winner].name

    @property
    def history_bytes(self) -> int:
        """Memory taken by shadows and by what is remembered of blocks that left."""
        reserved_bytes = self._ghosts.limit * RESERVED_ROW_BYTES
        return self._tournament.used_bytes + reserved_bytes + len(self._ghosts) * (GHOST_ROW_BYTES - RESERVED_ROW_BYTES)

    def admit(self, keys: Sequence[OffloadKey], access: Access) -> Sequence[OffloadKey]:
        """Return all of `keys`, or those used before if the winner stores no others."""
        if not CANDIDATES[self._winner].is_filtered:
            return keys
        rows = self._ghosts.get(map(hash, keys))
        uses = self._uses.of([row or 0 for row in rows])
        was_used = ((uses[:, LAST] < access.tick) | (uses[:, PREVIOUS] > 0)).tolist()
        return [key for key, row, flag in zip(keys, rows, was_used, strict=True) if row is not None and flag]

    def insert(self, slots: Sequence[int], keys: Sequence[OffloadKey], access: Access) -> None:
        """Make `slots` resident and pinned; ghosts go on with their uses."""
        uses, tick, time = self._uses, access.tick, self._clock.at(access.tick)
        batch, hashes = slot_array(slots), list(map(hash, keys))
        self._hash_of[batch] = hashes
        self._is_sampled[batch] = self._tournament.sampled(keys)
        uses.start(batch, tick, time)
        rows = self._ghosts.pop(hashes)
        if rows.count(None) < len(rows):
            was_ghost = np.array([row is not None for row in rows])
            known = batch[was_ghost]
            uses.copy([row for row in rows if row is not None], known)
            uses.use(known[uses.last_ticks(known) < tick], tick, time)
        self._clock.advance(len(slots))
        self._rank(batch, access, is_new=True)

    def touch(self, slots: Sequence[int], access: Access) -> None:
        """Note a use of what was last used before, and rank it anew."""
        batch = slot_array(slots)
        if not len(batch):
            return
        is_newer = self._uses.last_ticks(batch) < access.tick
        newer, access_to_newer = _select(batch, access, is_newer)
        self._uses.use(newer, access.tick, self._clock.at(access.tick))
        self._tournament.count(len(newer))
        sampled, access_to_sampled = _select(newer, access_to_newer, self._is_sampled[newer])
        self._hear(self._hash_of[sampled].tolist(), self._uses.of(sampled), access_to_sampled)
        if self._lines[_DEMOTED].resident_count:
            is_demoted = [self._ranks.is_first(slot) for slot in slots]
            newer, access_to_newer = _select(batch, access, is_newer | np.array(is_demoted))
        self._rank(newer, access_to_newer, is_new=False)

    def miss(self, keys: Sequence[OffloadKey], access: Access) -> None:
        """Note a use of blocks that are not resident; strangers become ghosts if the winner may not store them."""
        uses, tick, time = self._uses, access.tick, self._clock.at(access.tick)
        self._tournament.count(len(keys))
        hashes = list(map(hash, keys))
        rows = self._ghosts.get(hashes)
        known = slot_array([row for row in rows if row is not None])
        uses.use(known[uses.last_ticks(known) < tick], tick, time)
        sampled, access_to_sampled = _select(
            np.arange(len(keys)), access, np.array(self._tournament.sampled(keys), bool)
        )
        if len(sampled):
            sampled_rows = [rows[position] for position in sampled.tolist()]
            sampled_uses = uses.of(slot_array([row or 0 for row in sampled_rows]))
            sampled_uses[[row is None for row in sampled_rows]] = uses.first_use(tick, time)
            self._hear([hashes[position] for position in sampled.tolist()], sampled_uses, access_to_sampled)
        if CANDIDATES[self._winner].is_filtered:
            strangers = [hashed for hashed, row in zip(hashes, rows, strict=True) if row is None]
            uses.start(self._ghosts.put(strangers), tick, time)

    def unpin(self, slots: Collection[int]) -> None:
        """Put pinned slots back into their lines."""
        batch = slot_array(slots)
        stale = batch[self._ranked_by[batch] != self._winner]
        if len(stale):
            stale = stale[self._lines.indices_of(stale) != _DEMOTED]
            self._rebase(stale, self._bases(stale), self._current)
        super().unpin(slots)

    def _reenter(self, slots: Sequence[int], access: Access) -> None:
        """Rank by the uses before the demotion."""
        batch = slot_array(slots)
        self._rerank_each(batch, self._bases(batch), access, self._current)

    def _leave(self, line: int, slots: Sequence[int]) -> None:
        """Remember the uses of evicted slots, unless they were sent away."""
        if line == _DEMOTED:
            slots = [slot for slot in slots if not self._is_sent_away(slot)]
        if slots:
            rows = self._ghosts.put(self._hash_of[slots].tolist())
            self._uses.copy(slots[len(slots) - len(rows) :], rows)

    def clear(self) -> None:
        """Drop all slots and all that is remembered or was learned."""
        super().clear()
        self._ghosts.clear()
        self._tournament.clear()
        self._winner = self._current = 0

    def _shares(self, count: int) -> Sequence[tuple[int, int]]:
        """What was demoted, then the line of the winner, then the one before."""
        shares = []
        for line in (_DEMOTED, self._current, 1 - self._current):
            share = min(count, self._lines[line].evictable_count)
            shares.append((line, share))
            count -= share
        return shares

    # The real cache follows the winner

    def _hear(self, hashes: Sequence[int], uses: Uses, access: Access) -> None:
        """Let the tournament know, and follow a new winner once nothing is left in the order of the one before."""
        if hashes:
            depths = access.depths or [0] * len(hashes)
            self._tournament.hear(hashes, uses, depths, access.tick, self._clock.at(access.tick))
        if self._tournament.winner != self._winner and not self._lines[1 - self._current].evictable_count:
            self._winner = self._tournament.winner
            self._current = 1 - self._current

    def _rank(self, slots: SlotArray, access: Access, *, is_new: bool) -> None:
        """Let slots stand where the winner wants them, and bring some of the others over from where they stood."""
        if is_new:
            self._enter(slots, self._bases(slots), access, self._current)
        else:
            self._rerank_each(slots, self._bases(slots), access, self._current)
        if self._lines[1 - self._current].evictable_count:
            left = slot_array(self._lines.coldest(1 - self._current, _MOVES_PER_BLOCK * len(slots)))
            self._rebase(left, self._bases(left), self._current)

    def _bases(self, slots: SlotArray) -> list[int]:
        """Return the number that the winner ranks each slot by, and note that it does."""
        self._ranked_by[slots] = self._winner
        return CANDIDATES[self._winner].ranking(self._uses.of(slots))


def _select(slots: SlotArray, access: Access, flags: npt.NDArray[np.bool_]) -> tuple[SlotArray, Access]:
    """Return the flagged ones of `slots`, and the access to just them."""
    if flags.all():
        return slots, access
    chosen = np.flatnonzero(flags)
    return slots[chosen], access.select(chosen.tolist())
