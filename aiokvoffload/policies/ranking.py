"""Slots in the order in which they would leave, kept exact under pins.

A rank is `(tick, -depth, insertion order)`: older requests leave first; of one request the deepest block leaves
first, because a block without its prefix is useless; blocks without a depth leave before those, the first inserted
first.

Slots stand in leaves of some hundred, themselves in order. A leaf counts how many of its slots could be evicted, so
that pinning and unpinning move nothing, and leaves without any are left out of the line: whatever is pinned, an
eviction looks at one leaf for each leaf that it takes from. A slot that is ranked anew leaves a stale entry behind,
which goes when its leaf is tidied.

What is kept per slot lies in arrays, so that neither memory nor the garbage collector sees an object for it.
"""

from __future__ import annotations

from array import array
from bisect import bisect_left, bisect_right, insort
from collections.abc import Collection, Sequence
from fractions import Fraction
from itertools import repeat
from operator import attrgetter

import numpy as np

from aiokvoffload.keys import OffloadKey
from aiokvoffload.policies.base import Access, CachePolicy

LEAF_SLOTS = 256
BATCH_SLOTS = 16
"""From so many slots on, one operation on an array is cheaper than a loop."""

_NO_LEAF = -1
_NO_DEPTH = 1 << 40
_AFTER_EQUALS = 1 << 62
_BOUND = attrgetter("bound")


class Ranks:
    """The rank of every slot: its tick and, within the tick, its depth.

    Args:
        capacity: Number of slots.
    """

    __slots__ = ("_depth_of", "_depths", "_tick_of", "_ticks")

    def __init__(self, capacity: int) -> None:
        self._tick_of = array("q", bytes(8 * capacity))
        self._depth_of = array("q", bytes(8 * capacity))
        # The same memory: single slots are read and written faster through the arrays, batches through these.
        self._ticks = np.frombuffer(self._tick_of, dtype=np.int64)
        self._depths = np.frombuffer(self._depth_of, dtype=np.int64)

    def of(self, slot: int) -> tuple[int, int]:
        """Return the rank of a slot; the lowest leaves first."""
        return self._tick_of[slot], -self._depth_of[slot]

    def assign(self, slots: Sequence[int], tick: int, depths: Sequence[int] | None) -> Sequence[int]:
        """Rank slots, and return them in the order of their ranks, equals in the order given."""
        if len(slots) >= BATCH_SLOTS:
            batch = np.array(slots)
            self._ticks[batch] = tick
            self._depths[batch] = _NO_DEPTH if depths is None else depths
        else:
            for slot, depth in zip(slots, repeat(_NO_DEPTH) if depths is None else depths, strict=False):
                self._tick_of[slot] = tick
                self._depth_of[slot] = depth
        if depths is None:
            return slots
        if isinstance(depths, range) and depths.step > 0:
            return slots[::-1]
        return sorted(slots, key=self.of)

    def select_older(self, slots: Sequence[int], access: Access) -> tuple[Sequence[int], Access]:
        """Return those of `slots` whose last access was before that of `access`, and the access to just them."""
        tick_of, tick = self._tick_of, access.tick
        older = [position for position, slot in enumerate(slots) if tick_of[slot] < tick]
        if len(older) == len(slots):
            return slots, access
        return [slots[position] for position in older], access.select(older)


class Leaf:
    """Some slots of a line, in the order of their ranks.

    Attributes:
        number: A slot stands in the leaf whose number it has; any other entry for it is stale.
        line: The line it is part of.
        bound: Nothing in here, or in a later leaf, ranks below `(tick, -depth)`; a third number orders equals.
        slots: The entries.
        resident_count: How many of them are not stale.
        evictable_count: How many of them could be evicted.
        is_sorted: The entries are in order.
        scan_from: None of the entries before this one could be evicted.
    """

    __slots__ = ("bound", "evictable_count", "is_sorted", "line", "number", "resident_count", "scan_from", "slots")

    def __init__(self, number: int, line: Line, bound: tuple[int, int, Fraction | int]) -> None:
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
        self.last_rank = (0, 0)


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
        self._leaf_total = 0
        self._start()

    @property
    def evictable_count(self) -> int:
        """How many slots could be evicted now."""
        if self._line_count == 1:
            return self._lines[0].evictable_count
        return sum(line.evictable_count for line in self._lines)

    def insert(self, slots: Sequence[int], keys: Sequence[OffloadKey], access: Access) -> None:
        """Make `slots` resident and pinned, in the first line at the rank of `access`."""
        self._add(self._lines[0], self._ranks.assign(slots, access.tick, access.depths))

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
        self._move(slots, self._lines[self._first_line], 0, None)

    def coldest(self, count: int) -> list[int]:
        """Return up to `count` slots, first to leave first."""
        is_evictable = self._is_evictable
        found: list[int] = []
        seen = [0] * self._line_count
        for index, share in self._shares(min(count, self.evictable_count)):
            wanted = seen[index] + share
            in_line: list[int] = []
            for leaf in self._lines[index].open_leaves:
                if len(in_line) >= wanted:
                    break
                self._tidy(leaf)
                in_line += [slot for slot in leaf.slots if is_evictable[slot]]
            found += in_line[seen[index] : wanted]
            seen[index] = wanted
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
            for index, share in self._shares(count):
                gone = self._take(self._lines[index], share)
                self._leave(index, gone)
                victims += gone
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

    def _leave(self, line: int, slots: Sequence[int]) -> None:
        """Note that slots of a line are evicted; for policies with ghosts."""
        return

    def _line_of(self, slot: int) -> int:
        """Return which line a resident slot stands in."""
        return self._leaves[self._leaf_of[slot]].line.index

    # Entering and leaving

    def _rerank(self, slots: Sequence[int], access: Access, line: int = 0) -> None:
        """Move resident slots to a line, at the rank of `access`."""
        self._move(slots, self._lines[line], access.tick, access.depths)

    def _move(self, slots: Sequence[int], line: Line, tick: int, depths: Sequence[int] | None) -> None:
        """Rank resident slots anew, in a line."""
        if slots:
            self._detach(slots)
            self._add(line, self._ranks.assign(slots, tick, depths))

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
        """Let slots enter a line where their ranks say, after their equals."""
        position = 0
        while position < len(run):
            rank = self._ranks.of(run[position])
            index = max(0, bisect_right(line.leaves, (*rank, _AFTER_EQUALS), key=_BOUND) - 1)
            end = len(run)
            if index + 1 < len(line.leaves):
                end = bisect_left(run, line.leaves[index + 1].bound[:2], position, key=self._ranks.of)
            leaf = line.leaves[index]
            if rank < leaf.bound[:2]:
                leaf.bound = (*rank, leaf.bound[2])
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

    def _new_leaf(self, line: Line, rank: tuple[int, int]) -> Leaf:
        self._leaf_total += 1
        bound = (*rank, self._leaf_total)
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
            before, behind = line.leaves[index], line.leaves[index + 1 : index + 2]
            part = self._new_leaf(line, self._ranks.of(piece[0]))
            if behind and behind[0].bound[:2] == part.bound[:2]:
                # Equals stand on both sides of the cut: the new leaf goes between them.
                end = behind[0].bound[2]
                start_of_equals = before.bound[2] if before.bound[:2] == part.bound[:2] else end - 1
                part.bound = (*part.bound[:2], Fraction(start_of_equals + end) / 2)
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
