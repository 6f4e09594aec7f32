"""Slots in the order in which they would leave, kept exact under pins.

A rank is `(tick, -depth, insertion order)` in one integer: older requests leave first; of one request the
deepest block leaves first, because a block without its prefix is useless; without depths the first inserted.

Only evictable slots stand in a `RankedSlots`: a pinned one is taken out and comes back at its rank, so nothing
is ever scanned over. Batches are runs of neighbours as a rule, and a run costs one search, however long.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence

from aiokvoffload.keys import OffloadKey
from aiokvoffload.policies.base import Access, CachePolicy

_FIELD_BITS = 40
_TICK_SHIFT = 2 * _FIELD_BITS
_MAX_DEPTH = (1 << _FIELD_BITS) - 1

_BELOW_BASE = (1 << _TICK_SHIFT) - 1

LEAF_SLOTS = 256


class Ranks:
    """The rank of every slot."""

    def __init__(self, capacity: int) -> None:
        self.of_slot: list[int] = [-1] * capacity
        self._insertions = 0

    def assign(self, slots: Sequence[int], access: Access) -> None:
        """Rank `slots` at `access`; of equals the first one given leaves first."""
        self._assign(slots, access.tick << _TICK_SHIFT, access.depths)

    def assign_first(self, slots: Sequence[int]) -> None:
        """Rank `slots` before everything that has a tick, in the order given."""
        self._assign(slots, 0, None)

    def assign_each(self, slots: Sequence[int], bases: Sequence[int], access: Access) -> None:
        """Rank each slot at a base of its own in place of the tick, at least 1."""
        of_slot = self.of_slot
        first = self._insertions
        self._insertions += len(slots)
        depths = access.depths
        if depths is None:
            for order, (slot, base) in enumerate(zip(slots, bases, strict=True), first):
                of_slot[slot] = (base << _TICK_SHIFT) + order
        else:
            first += _MAX_DEPTH << _FIELD_BITS
            for order, (slot, base, depth) in enumerate(zip(slots, bases, depths, strict=True), first):
                of_slot[slot] = (base << _TICK_SHIFT) - (depth << _FIELD_BITS) + order

    def rebase(self, slots: Sequence[int], bases: Sequence[int]) -> None:
        """Rank slots at another base each; their depth and order stay."""
        of_slot = self.of_slot
        for slot, base in zip(slots, bases, strict=True):
            of_slot[slot] = (base << _TICK_SHIFT) + (of_slot[slot] & _BELOW_BASE)

    def is_first(self, slot: int) -> bool:
        """Return whether a slot was ranked before everything that has a tick."""
        return self.of_slot[slot] < 1 << _TICK_SHIFT

    def select_older(self, slots: Sequence[int], access: Access) -> tuple[Sequence[int], Access]:
        """Return those of `slots` whose last access was before that of `access`, and the access to just them."""
        of_slot = self.of_slot
        bound = access.tick << _TICK_SHIFT
        older = [position for position, slot in enumerate(slots) if of_slot[slot] < bound]
        if len(older) == len(slots):
            return slots, access
        return [slots[position] for position in older], access.select(older)

    def _assign(self, slots: Sequence[int], base: int, depths: Sequence[int] | None) -> None:
        of_slot = self.of_slot
        first = self._insertions
        self._insertions += len(slots)
        if depths is None:
            for slot, rank in zip(slots, range(base + first, base + first + len(slots)), strict=True):
                of_slot[slot] = rank
        else:
            base += (_MAX_DEPTH << _FIELD_BITS) + first
            for order, (slot, depth) in enumerate(zip(slots, depths, strict=True)):
                of_slot[slot] = base - (depth << _FIELD_BITS) + order


class RankedSlots:
    """A set of slots sorted by rank: leaves of up to twice `LEAF_SLOTS` slots, themselves in order.

    The rank of a slot must not change while it is in here.

    Args:
        ranks: Shared with whoever else ranks the same slots.
    """

    def __init__(self, ranks: Ranks) -> None:
        self._rank = ranks.of_slot.__getitem__
        self._leaves: list[list[int]] = []
        self._count = 0

    def __len__(self) -> int:
        return self._count

    def __iter__(self) -> Iterator[int]:
        for leaf in self._leaves:
            yield from leaf

    def add(self, slots: Iterable[int]) -> None:
        """Put slots in, none of which may be in here."""
        run = sorted(slots, key=self._rank)
        self._count += len(run)
        position = 0
        while position < len(run):
            index, position_end = self._leaf_for(run, position)
            if index == len(self._leaves):
                self._leaves.append([])
            leaf = self._leaves[index]
            piece = run[position:position_end]
            gap = bisect_right(leaf, self._rank(piece[0]), key=self._rank)
            if gap == len(leaf) or self._rank(piece[-1]) < self._rank(leaf[gap]):
                leaf[gap:gap] = piece
            else:
                leaf.extend(piece)
                leaf.sort(key=self._rank)
            if len(leaf) > 2 * LEAF_SLOTS:
                self._leaves[index : index + 1] = [
                    leaf[start : start + LEAF_SLOTS] for start in range(0, len(leaf), LEAF_SLOTS)
                ]
            position = position_end

    def discard(self, slots: Iterable[int]) -> None:
        """Take slots out, all of which must be in here."""
        run = sorted(slots, key=self._rank)
        self._count -= len(run)
        position = 0
        while position < len(run):
            index, position_end = self._leaf_for(run, position)
            leaf = self._leaves[index]
            piece = run[position:position_end]
            start = bisect_left(leaf, self._rank(piece[0]), key=self._rank)
            if leaf[start : start + len(piece)] == piece:
                del leaf[start : start + len(piece)]
            else:
                gone = set(piece)
                leaf[:] = [slot for slot in leaf if slot not in gone]
            self._shrink(index)
            position = position_end

    def coldest(self, count: int) -> list[int]:
        """Return the first `count` slots, fewer if there are not that many."""
        found: list[int] = []
        for leaf in self._leaves:
            if len(found) >= count:
                break
            found += leaf[: count - len(found)]
        return found

    def pop_coldest(self, count: int) -> list[int]:
        """Take the first `count` slots out and return them in order."""
        found = self.coldest(count)
        self._count -= len(found)
        left = len(found)
        whole = 0
        while left and len(self._leaves[whole]) <= left:
            left -= len(self._leaves[whole])
            whole += 1
        del self._leaves[:whole]
        if left:
            del self._leaves[0][:left]
            self._shrink(0)
        return found

    def clear(self) -> None:
        """Take everything out."""
        self._leaves = []
        self._count = 0

    def _leaf_for(self, run: list[int], position: int) -> tuple[int, int]:
        """Return the leaf that `run[position]` belongs to and where the part of `run` in that leaf ends."""
        leaves = self._leaves
        rank = self._rank(run[position])
        if not leaves or rank > self._rank(leaves[-1][-1]):
            is_room = bool(leaves) and len(leaves[-1]) < LEAF_SLOTS
            return len(leaves) - is_room, min(len(run), position + LEAF_SLOTS)
        index = max(0, bisect_right(leaves, rank, key=self._first_rank) - 1)
        if index + 1 == len(leaves):
            return index, len(run)
        return index, bisect_left(run, self._first_rank(leaves[index + 1]), position, key=self._rank)

    def _first_rank(self, leaf: list[int]) -> int:
        return self._rank(leaf[0])

    def _shrink(self, index: int) -> None:
        """Drop an empty leaf and join a small one with a small neighbour, so that their number follows the slots."""
        leaves = self._leaves
        if not leaves[index]:
            del leaves[index]
        for first in (index, index - 1):
            if 0 <= first < len(leaves) - 1 and len(leaves[first]) + len(leaves[first + 1]) < LEAF_SLOTS // 2:
                leaves[first : first + 2] = [leaves[first] + leaves[first + 1]]


class RankedPolicy(CachePolicy):
    """The part that policies by rank share: slots stand in one of several lines, each sorted by rank.

    Args:
        capacity: Number of slots.
        line_count: Number of lines; a slot enters line 0.
        first_line: The line that demoted slots move to.
    """

    def __init__(self, capacity: int, line_count: int = 1, first_line: int = 0) -> None:
        super().__init__(capacity)
        self._first_line = first_line
        self._ranks = Ranks(capacity)
        self._lines = [RankedSlots(self._ranks) for _ in range(line_count)]
        self._line_sizes = [0] * line_count
        self._line_of = bytearray(capacity)
        self._is_evictable = bytearray(capacity)

    @property
    def evictable_count(self) -> int:
        """How many slots could be evicted now."""
        return sum(map(len, self._lines))

    def insert(self, slots: Sequence[int], keys: Sequence[OffloadKey], access: Access) -> None:
        """Make `slots` resident and pinned, in the first line at the rank of `access`."""
        self._ranks.assign(slots, access)
        self._line_sizes[0] += len(slots)
        for slot in slots:
            self._line_of[slot] = 0

    def pin(self, slots: Collection[int]) -> None:
        """Take evictable slots out of their lines."""
        for line, members in self._by_line(slots):
            line.discard(members)
        for slot in slots:
            self._is_evictable[slot] = 0

    def unpin(self, slots: Collection[int]) -> None:
        """Put pinned slots back into their lines, at their rank."""
        for line, members in self._by_line(slots):
            line.add(members)
        for slot in slots:
            self._is_evictable[slot] = 1

    def demote(self, slots: Sequence[int]) -> None:
        """Put slots first in the line that is emptied first."""
        self._move(slots, self._first_line, self._ranks.assign_first)

    def coldest(self, count: int) -> list[int]:
        """Return up to `count` slots, first to leave first."""
        found: list[int] = []
        seen = [0] * len(self._lines)
        for index, share in self._shares(min(count, self.evictable_count)):
            found += self._lines[index].coldest(seen[index] + share)[seen[index] :]
            seen[index] += share
        return found

    def evict(self, count: int, protected: Collection[int] = ()) -> list[int] | None:
        """Drop the `count` slots that leave first, or none."""
        kept = self._evictable_among(protected)
        if count > self.evictable_count - len(kept):
            return None
        self.pin(kept)
        victims: list[int] = []
        for index, share in self._shares(count):
            victims += self._lines[index].pop_coldest(share)
            self._line_sizes[index] -= share
        for slot in victims:
            self._is_evictable[slot] = 0
        self.unpin(kept)
        return victims

    def remove(self, slots: Collection[int]) -> None:
        """Drop resident slots."""
        self.pin(self._evictable_among(slots))
        for slot in slots:
            self._line_sizes[self._line_of[slot]] -= 1

    def clear(self) -> None:
        """Drop all slots."""
        for line in self._lines:
            line.clear()
        self._line_sizes = [0] * len(self._lines)
        self._is_evictable = bytearray(self.capacity)

    def _shares(self, count: int) -> Sequence[tuple[int, int]]:
        """Return which line gives up how many of `count` victims, in order; there are that many evictable."""
        return ((0, count),)

    def _rerank(self, slots: Sequence[int], access: Access, line: int = 0) -> None:
        """Move resident slots to a line, at the rank of `access`."""
        self._move(slots, line, lambda slots: self._ranks.assign(slots, access))

    def _enter(self, slots: Sequence[int], bases: Sequence[int], access: Access) -> None:
        """Make `slots` resident and pinned, in the first line, each at a base of its own."""
        self._ranks.assign_each(slots, bases, access)
        self._line_sizes[0] += len(slots)
        for slot in slots:
            self._line_of[slot] = 0

    def _rerank_each(self, slots: Sequence[int], bases: Sequence[int], access: Access) -> None:
        """Move resident slots within the first line, each to a base of its own."""
        self._move(slots, 0, lambda slots: self._ranks.assign_each(slots, bases, access))

    def _move(self, slots: Sequence[int], line: int, assign: Callable[[Sequence[int]], None]) -> None:
        """Move resident slots to a line, at the rank that `assign` gives them."""
        evictable = self._evictable_among(slots)
        self.pin(evictable)
        assign(slots)
        for slot in slots:
            self._line_sizes[self._line_of[slot]] -= 1
            self._line_of[slot] = line
        self._line_sizes[line] += len(slots)
        self.unpin(evictable)

    def _evictable_among(self, slots: Collection[int]) -> list[int]:
        is_evictable = self._is_evictable
        return [slot for slot in slots if is_evictable[slot]]

    def _by_line(self, slots: Collection[int]) -> Iterable[tuple[RankedSlots, Collection[int]]]:
        if len(self._lines) == 1:
            return ((self._lines[0], slots),)
        line_of = self._line_of
        return ((line, [slot for slot in slots if line_of[slot] == index]) for index, line in enumerate(self._lines))
