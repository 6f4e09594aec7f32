"""Slots in the order in which they would leave, kept exact under pins.

A rank is `(base, -depth, insertion order)`. The base is the tick, so that older requests leave first, or whatever whole
number a policy ranks by; of one base the deepest block leaves first, because a block without its prefix is useless;
blocks without a depth leave before those, the first inserted first.

Slots stand in leaves of some hundred, themselves in order. A leaf counts how many of its slots could be evicted, so
that pinning and unpinning move nothing, and leaves without any are left out of the line: whatever is pinned, an
eviction looks at one leaf for each leaf that it takes from. A slot that is ranked anew leaves a stale entry behind,
which goes when its leaf is tidied.

What is kept per slot lies in arrays, so that neither memory nor the garbage collector sees an object for it.
"""

from __future__ import annotations

from array import array
from bisect import bisect_left, bisect_right, insort
from collections.abc import Collection, Iterator, Sequence
from itertools import islice, repeat
from operator import attrgetter
from typing import Any

import numpy as np
import numpy.typing as npt

from aiokvoffload.keys import OffloadKey
from aiokvoffload.policies.base import Access, CachePolicy

LEAF_SLOTS = 256
BATCH_SLOTS = 16
"""From so many slots on, one operation on an array is cheaper than a loop."""

_NO_LEAF = -1
_NO_DEPTH = 1 << 40
_BOUND = attrgetter("bound")

Rank = tuple[int, int, int]


class Ranks:
    """The rank of every slot; those demoted have base 0, all others a base of at least 1.

    Args:
        capacity: Number of slots.
    """

    __slots__ = ("_base_of", "_depth_of", "_depths", "_order_of", "_orders", "_ranked_count")

    def __init__(self, capacity: int) -> None:
        # Bases may be of any size, and the garbage collector does not walk an array of objects as it does a list.
        self._base_of: npt.NDArray[Any] = np.zeros(capacity, dtype=object)
        self._depth_of = array("q", bytes(8 * capacity))
        self._order_of = array("q", bytes(8 * capacity))
        # The same memory: single slots are read and written faster through the arrays, batches through these.
        self._depths = np.frombuffer(self._depth_of, dtype=np.int64)
        self._orders = np.frombuffer(self._order_of, dtype=np.int64)
        self._ranked_count = 0

    def of(self, slot: int) -> Rank:
        """Return the rank of a slot; the lowest leaves first."""
        return self._base_of[slot], -self._depth_of[slot], self._order_of[slot]

    def is_first(self, slot: int) -> bool:
        """Return whether a slot was demoted."""
        return not self._base_of[slot]

    def assign(self, slots: Sequence[int], base: int, depths: Sequence[int] | None) -> Sequence[int]:
        """Rank slots at one base, and return them in the order of their ranks, equals in the order given."""
        self._assign(slots, base, depths)
        if depths is None:
            return slots
        if isinstance(depths, range) and depths.step > 0:
            return slots[::-1]
        return sorted(slots, key=self.of)

    def assign_each(self, slots: Sequence[int], bases: Sequence[int], depths: Sequence[int] | None) -> Sequence[int]:
        """Rank each slot at a base of its own, and return them in the order of their ranks."""
        self._assign(slots, bases, depths)
        return sorted(slots, key=self.of)

    def rebase(self, slots: Sequence[int], bases: Sequence[int]) -> Sequence[int]:
        """Rank slots at another base each, their depth and order as before, and return them in that order."""
        for slot, base in zip(slots, bases, strict=True):
            self._base_of[slot] = base
        return sorted(slots, key=self.of)

    def select_older(self, slots: Sequence[int], access: Access) -> tuple[Sequence[int], Access]:
        """Return those of `slots` whose last access was before that of `access`, and the access to just them."""
        base_of, tick = self._base_of, access.tick
        bases = base_of[np.array(slots)] if len(slots) >= BATCH_SLOTS else [base_of[slot] for slot in slots]
        older = [position for position, base in enumerate(bases) if base < tick]
        if len(older) == len(slots):
            return slots, access
        return [slots[position] for position in older], access.select(older)

    def _assign(self, slots: Sequence[int], bases: int | Sequence[int], depths: Sequence[int] | None) -> None:
        first = self._ranked_count
        self._ranked_count += len(slots)
        if len(slots) >= BATCH_SLOTS:
            batch = np.array(slots)
            self._base_of[batch] = bases
            self._depths[batch] = _NO_DEPTH if depths is None else depths
            self._orders[batch] = np.arange(first, self._ranked_count)
            return
        each_base = repeat(bases) if isinstance(bases, int) else bases
        each_depth = repeat(_NO_DEPTH) if depths is None else depths
        for order, slot, base, depth in zip(
            range(first, self._ranked_count), slots, each_base, each_depth, strict=False
        ):
            self._base_of[slot] = base
            self._depth_of[slot] = depth
            self._order_of[slot] = order


class Leaf:
    """Some slots of a line, in the order of their ranks.

    Attributes:
        number: A slot stands in the leaf whose number it has; any other entry for it is stale.
        line: The line it is part of.
        bound: Nothing in here, or in a later leaf, ranks below it.
        slots: The entries.
        resident_count: How many of them are not stale.
        evictable_count: How many of them could be evicted.
        is_sorted: The entries are in order.
        scan_from: None of the entries before this one could be evicted.
    """

    __slots__ = ("bound", "evictable_count", "is_sorted", "line", "number", "resident_count", "scan_from", "slots")

    def __init__(self, number: int, line: Line, bound: Rank) -> None:
        self.number = number
        self.line = line
        self.bound = bound
        self.slots: list[int] = []
        self.resident_count = 0
        self.evictable_count = 0
        self.is_sorted = True
        self.scan_from = 0


class Line:
    """The resident slots of one queue, sorted by rank.

    Attributes:
        index: Which line it is.
        resident_count: Slots in line, pinned or not.
        evictable_count: Those that could be evicted.
        leaves: All leaves, in order.
        open_leaves: Those with a slot that could be evicted, in order.
        last_rank: No slot in line ranks above it.
    """

    __slots__ = ("evictable_count", "index", "last_rank", "leaves", "open_leaves", "resident_count")

    def __init__(self, index: int) -> None:
        self.index = index
        self.resident_count = 0
        self.evictable_count = 0
        self.leaves: list[Leaf] = []
        self.open_leaves: list[Leaf] = []
        self.last_rank: Rank = (0, 0, 0)


class RankedPolicy(CachePolicy):
    """The part that policies by rank share: slots stand in one of several lines, each sorted by rank.

    Args:
        capacity: Number of slots.
        line_count: Number of lines; a slot enters line 0.
        first_line: The line that is emptied first, where demoted slots go.
    """

    def __init__(self, capacity: int, line_count: int = 1, first_line: int = 0) -> None:
        super().__init__(capacity)
        self._line_count = line_count
        self._first_line = first_line
        self._ranks = Ranks(capacity)
        self._leaf_of = array("i", [_NO_LEAF]) * capacity
        self._leaf_numbers = np.frombuffer(self._leaf_of, dtype=np.int32)  # the same memory, for batches
        self._is_taken_along = bytearray(capacity)
        self._start()

    @property
    def evictable_count(self) -> int:
        """How many slots could be evicted now."""
        if self._line_count == 1:
            return self._lines[0].evictable_count
        return sum(line.evictable_count for line in self._lines)

    def insert(self, slots: Sequence[int], keys: Sequence[OffloadKey], access: Access) -> None:
        """Make `slots` resident and pinned, in the first line at the rank of `access`."""
        self._insert(slots, access)

    def pin(self, slots: Collection[int]) -> None:
        """Let slots count as not evictable."""
        is_evictable, leaf_of, leaves = self._is_evictable, self._leaf_of, self._leaves
        for slot in slots:
            is_evictable[slot] = 0
            leaf = leaves[leaf_of[slot]]
            leaf.evictable_count = left = leaf.evictable_count - 1
            if not left:
                _discard(leaf.line.open_leaves, leaf)
        self._count_evictable(slots, -1)

    def unpin(self, slots: Collection[int]) -> None:
        """Let slots count as evictable, at the rank they have."""
        is_evictable, leaf_of, leaves = self._is_evictable, self._leaf_of, self._leaves
        for slot in slots:
            is_evictable[slot] = 1
        numbers = [leaf_of[slot] for slot in slots]
        if numbers and numbers.count(numbers[0]) == len(numbers):
            self._gain(leaves[numbers[0]], len(numbers))
            return
        for number in numbers:
            leaf = leaves[number]
            if not leaf.evictable_count:
                insort(leaf.line.open_leaves, leaf, key=_BOUND)
            leaf.evictable_count += 1
            leaf.scan_from = 0
        self._count_evictable(slots, 1)

    def demote(self, slots: Sequence[int]) -> None:
        """Put slots first in the line that is emptied first."""
        self._rerank(slots, Access(0), self._first_line)
        for slot in slots:
            self._is_taken_along[slot] = 0

    def take_along(self, slots: Sequence[int]) -> None:
        """Demote slots, and know why."""
        self.demote(slots)
        for slot in slots:
            self._is_taken_along[slot] = 1

    def rescue(self, slots: Sequence[int], access: Access) -> None:
        """Rank demoted slots among the others again; the rank of those comes from their uses and stays."""
        first = [position for position, slot in enumerate(slots) if self._ranks.is_first(slot)]
        if first:
            self._reenter([slots[position] for position in first], access.select(first))

    def coldest(self, count: int) -> list[int]:
        """Return up to `count` slots, first to leave first."""
        found: list[int] = []
        seen = [0] * self._line_count
        for index, share in self._shares(min(count, self.evictable_count)):
            found += self._coldest_of(index, seen[index] + share)[seen[index] :]
            seen[index] += share
        return found

    def evict(self, count: int, protected: Collection[int] = ()) -> list[int] | None:
        """Drop the `count` slots that leave first, or none."""
        is_evictable = self._is_evictable
        kept = [slot for slot in protected if is_evictable[slot]]
        if count > self.evictable_count - len(kept):
            return None
        victims: list[int] = []
        if count:
            self.pin(kept)
            victims = self._drop_coldest(count)
            self.unpin(kept)
        return victims

    def remove(self, slots: Collection[int]) -> None:
        """Drop resident slots."""
        self._detach(slots)
        for slot in slots:
            self._is_evictable[slot] = 0

    def clear(self) -> None:
        """Drop all slots."""
        # The leaf numbers of dropped slots stay behind; nobody looks at them before the slots are used again.
        self._start()

    def _start(self) -> None:
        self._lines = [Line(index) for index in range(self._line_count)]
        self._leaves: list[Leaf] = []
        self._unused_numbers: list[int] = []
        self._is_evictable = bytearray(self.capacity)

    def _shares(self, count: int) -> Sequence[tuple[int, int]]:
        """Return which line gives up how many of `count` victims, in order; there are that many evictable."""
        return ((0, count),)

    def _drop_coldest(self, count: int) -> list[int]:
        """Drop the `count` slots that leave first and return them; there are that many evictable."""
        victims: list[int] = []
        for index, share in self._shares(count):
            gone = self._take(self._lines[index], share)
            self._leave(index, gone)
            victims += gone
        return victims

    def _leave(self, line: int, slots: Sequence[int]) -> None:
        """Note that slots of a line are evicted; for policies with ghosts."""
        return

    def _reenter(self, slots: Sequence[int], access: Access) -> None:
        """Rank demoted slots as if they were inserted at `access`, but for what is known of their uses."""
        self._rerank(slots, access)

    def _is_sent_away(self, slot: int) -> bool:
        """Return whether an evicted slot was demoted for another reason than that its block has moved up."""
        return self._ranks.is_first(slot) and not self._is_taken_along[slot]

    def _line_of(self, slot: int) -> int:
        """Return which line a resident slot stands in."""
        return self._leaves[self._leaf_of[slot]].line.index

    def _coldest_of(self, line: int, count: int) -> list[int]:
        """Return up to `count` evictable slots of a line, first to leave first."""
        return list(islice(self._evictable_in(line), count))

    def _evictable_in(self, line: int) -> Iterator[int]:
        """Yield the evictable slots of a line, first to leave first; nothing may move meanwhile."""
        is_evictable, leaf_of = self._is_evictable, self._leaf_of
        for leaf in self._lines[line].open_leaves:
            if not leaf.is_sorted:
                self._tidy(leaf)
            slots, number = leaf.slots, leaf.number
            for position in range(leaf.scan_from, len(slots)):
                slot = slots[position]
                if is_evictable[slot] and leaf_of[slot] == number:
                    yield slot
                elif position == leaf.scan_from:
                    leaf.scan_from += 1

    # Entering and leaving

    def _insert(self, slots: Sequence[int], access: Access, line: int = 0) -> None:
        """Make `slots` resident and pinned in a line, at the rank of `access`."""
        self._add(self._lines[line], self._ranks.assign(slots, access.tick, access.depths))

    def _enter(self, slots: Sequence[int], bases: Sequence[int], access: Access, line: int = 0) -> None:
        """Make `slots` resident and pinned in a line, each at a base of its own."""
        self._add(self._lines[line], self._ranks.assign_each(slots, bases, access.depths))

    def _rerank(self, slots: Sequence[int], access: Access, line: int = 0) -> None:
        """Move resident slots to a line, at the rank of `access`."""
        self._detach(slots)
        self._insert(slots, access, line)

    def _rerank_each(self, slots: Sequence[int], bases: Sequence[int], access: Access, line: int = 0) -> None:
        """Move resident slots to a line, each to a base of its own."""
        self._detach(slots)
        self._enter(slots, bases, access, line)

    def _rebase(self, slots: Sequence[int], bases: Sequence[int], line: int = 0) -> None:
        """Move resident slots to a line, each to a base of its own; their depth and order stay."""
        self._detach(slots)
        self._add(self._lines[line], self._ranks.rebase(slots, bases))

    def _add(self, line: Line, run: Sequence[int]) -> None:
        """Let slots enter a line; they are in the order of their ranks."""
        if not run:
            return
        first, last = self._ranks.of(run[0]), self._ranks.of(run[-1])
        if not line.leaves or first >= line.last_rank:
            line.last_rank = last
            self._append(line, run)
        else:
            line.last_rank = max(line.last_rank, last)
            self._merge(line, run)

    def _append(self, line: Line, run: Sequence[int]) -> None:
        """Let slots enter at the end of a line."""
        position = 0
        leaf = line.leaves[-1] if line.leaves else None
        while position < len(run):
            if leaf is not None:
                self._tidy(leaf)
            if leaf is None or len(leaf.slots) >= LEAF_SLOTS:
                leaf = self._new_leaf(line, self._ranks.of(run[position]))
                line.leaves.append(leaf)
            piece = run[position : position + LEAF_SLOTS - len(leaf.slots)]
            self._place(leaf, piece)
            position += len(piece)

    def _merge(self, line: Line, run: Sequence[int]) -> None:
        """Let slots enter a line where their ranks say."""
        position = 0
        while position < len(run):
            rank = self._ranks.of(run[position])
            index = max(0, bisect_right(line.leaves, rank, key=_BOUND) - 1)
            end = len(run)
            if index + 1 < len(line.leaves):
                end = bisect_left(run, line.leaves[index + 1].bound, position, key=self._ranks.of)
            leaf = line.leaves[index]
            leaf.bound = min(leaf.bound, rank)
            # A stale entry of a slot that comes back would look like the slot itself.
            self._tidy(leaf)
            self._place(leaf, run[position:end])
            leaf.is_sorted = False
            if len(leaf.slots) > 2 * LEAF_SLOTS:
                self._split(line, index)
            position = end

    def _place(self, leaf: Leaf, slots: Sequence[int]) -> None:
        """Put slots at the end of a leaf that has no stale entries."""
        if len(slots) >= BATCH_SLOTS:
            self._leaf_numbers[np.array(slots)] = leaf.number
        else:
            for slot in slots:
                self._leaf_of[slot] = leaf.number
        leaf.slots += slots
        leaf.resident_count += len(slots)
        leaf.line.resident_count += len(slots)
        is_evictable = self._is_evictable
        self._gain(leaf, sum([is_evictable[slot] for slot in slots]))

    def _gain(self, leaf: Leaf, evictable_count: int) -> None:
        """Count slots that could be evicted into a leaf."""
        if evictable_count:
            if not leaf.evictable_count:
                insort(leaf.line.open_leaves, leaf, key=_BOUND)
            leaf.evictable_count += evictable_count
            leaf.scan_from = 0
            leaf.line.evictable_count += evictable_count

    def _detach(self, slots: Collection[int]) -> None:
        """Let slots leave their lines; their entries become stale."""
        is_evictable, leaf_of, leaves = self._is_evictable, self._leaf_of, self._leaves
        for slot in slots:
            leaf = leaves[leaf_of[slot]]
            leaf_of[slot] = _NO_LEAF
            line = leaf.line
            line.resident_count -= 1
            leaf.resident_count -= 1
            if is_evictable[slot]:
                line.evictable_count -= 1
                leaf.evictable_count -= 1
                if not leaf.evictable_count:
                    _discard(line.open_leaves, leaf)
            if len(leaf.slots) > 2 * leaf.resident_count:
                self._tidy(leaf)
                self._shrink(leaf)

    def _take(self, line: Line, count: int) -> list[int]:
        """Drop the first `count` evictable slots of a line, which has that many, and return them."""
        is_evictable, leaf_of = self._is_evictable, self._leaf_of
        victims: list[int] = []
        while count:
            leaf = line.open_leaves[0]
            self._tidy(leaf)
            found = self._cut(leaf, count)
            for slot in found:
                is_evictable[slot] = 0
                leaf_of[slot] = _NO_LEAF
            victims += found
            count -= len(found)
            line.resident_count -= len(found)
            line.evictable_count -= len(found)
            leaf.resident_count -= len(found)
            leaf.evictable_count -= len(found)
            if not leaf.evictable_count:
                del line.open_leaves[0]
                self._shrink(leaf)
        return victims

    def _cut(self, leaf: Leaf, count: int) -> list[int]:
        """Take the entries of the first evictable slots, at most `count`, out of a tidy leaf and return them."""
        is_evictable, slots, start = self._is_evictable, leaf.slots, leaf.scan_from
        piece = slots[start : start + count]
        found = [slot for slot in piece if is_evictable[slot]]
        if len(found) == len(piece):
            del slots[start : start + count]
            return found
        found, kept, end = [], [], start
        for slot in slots[start:]:
            end += 1
            if is_evictable[slot]:
                found.append(slot)
                if len(found) == count:
                    break
            else:
                kept.append(slot)
        slots[start:end] = kept
        leaf.scan_from = start + len(kept)
        return found

    def _count_evictable(self, slots: Collection[int], change: int) -> None:
        if self._line_count == 1:
            self._lines[0].evictable_count += change * len(slots)
        else:
            leaf_of, leaves = self._leaf_of, self._leaves
            for slot in slots:
                leaves[leaf_of[slot]].line.evictable_count += change

    # Leaves

    def _new_leaf(self, line: Line, bound: Rank) -> Leaf:
        if self._unused_numbers:
            number = self._unused_numbers.pop()
            self._leaves[number] = leaf = Leaf(number, line, bound)
        else:
            leaf = Leaf(len(self._leaves), line, bound)
            self._leaves.append(leaf)
        return leaf

    def _tidy(self, leaf: Leaf) -> None:
        """Drop stale entries and sort the others."""
        if len(leaf.slots) > leaf.resident_count:
            leaf_of, number = self._leaf_of, leaf.number
            leaf.slots = [slot for slot in leaf.slots if leaf_of[slot] == number]
            leaf.scan_from = 0
        if not leaf.is_sorted:
            leaf.slots.sort(key=self._ranks.of)
            leaf.is_sorted = True
            leaf.scan_from = 0

    def _split(self, line: Line, index: int) -> None:
        """Cut a leaf that has become too long."""
        leaf = line.leaves[index]
        self._tidy(leaf)
        slots, leaf.slots = leaf.slots, leaf.slots[:LEAF_SLOTS]
        leaf.scan_from = 0
        moved = slots[LEAF_SLOTS:]
        is_evictable = self._is_evictable
        lost = sum([is_evictable[slot] for slot in moved])
        leaf.resident_count -= len(moved)
        line.resident_count -= len(moved)
        leaf.evictable_count -= lost
        line.evictable_count -= lost
        if lost and not leaf.evictable_count:
            _discard(line.open_leaves, leaf)
        for start in range(0, len(moved), LEAF_SLOTS):
            piece = moved[start : start + LEAF_SLOTS]
            part = self._new_leaf(line, self._ranks.of(piece[0]))
            index += 1
            line.leaves.insert(index, part)
            self._place(part, piece)

    def _shrink(self, leaf: Leaf) -> None:
        """Drop an empty leaf, and join a small one with a neighbour, so that their number follows the slots."""
        leaves = leaf.line.leaves
        if not leaf.resident_count:
            _discard(leaves, leaf)
            self._unused_numbers.append(leaf.number)
            return
        index = bisect_left(leaves, leaf.bound, key=_BOUND)
        for first in (index, index - 1):
            if first >= 0 and first + 1 < len(leaves):
                left, right = leaves[first : first + 2]
                if left.resident_count + right.resident_count <= LEAF_SLOTS // 2:
                    self._join(left, right)
                    return

    def _join(self, leaf: Leaf, following: Leaf) -> None:
        """Let a leaf take in the one behind it."""
        line = leaf.line
        self._tidy(leaf)
        self._tidy(following)
        if following.evictable_count:
            _discard(line.open_leaves, following)
        line.resident_count -= following.resident_count
        line.evictable_count -= following.evictable_count
        _discard(line.leaves, following)
        self._unused_numbers.append(following.number)
        self._place(leaf, following.slots)


def _discard(leaves: list[Leaf], leaf: Leaf) -> None:
    """Take a leaf out of a sorted list."""
    del leaves[bisect_left(leaves, leaf.bound, key=_BOUND)]


def split_by_line(
    slots: Sequence[int], lines: Sequence[int], access: Access
) -> Iterator[tuple[int, Sequence[int], Access]]:
    """Yield each line in turn, with the slots that are meant for it and the access to just them."""
    for line in sorted(set(lines)):
        chosen = [position for position, meant_for in enumerate(lines) if meant_for == line]
        if len(chosen) == len(slots):
            yield line, slots, access
        else:
            yield line, [slots[position] for position in chosen], access.select(chosen)
