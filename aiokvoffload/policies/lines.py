"""Slots in the order of their ranks, kept exact under pins, in steps that do not grow with what is held.

Slots stand in leaves of some hundred, themselves in order. A leaf counts how many of its slots could be evicted, so
that pinning and unpinning move nothing, and leaves without any are left out of the line: whatever is pinned, an
eviction looks at one leaf for each leaf that it takes from. A slot that is ranked anew leaves a stale entry behind,
which goes when its leaf is tidied.

Slots are kept in arrays, so that neither memory nor the garbage collector sees an object for each, and one operation
handles all slots of a call.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Iterator
from itertools import islice, pairwise
from operator import attrgetter

import numpy as np
import numpy.typing as npt

from aiokvoffload.policies.ranks import Rank, Ranks
from aiokvoffload.policies.slots import SlotArray

LEAF_SLOTS = 256

_NO_LEAF = -1
_FREED_AT_ONCE = 64
"""So many leaves from before a reset are let go of by a call."""
_NO_SLOTS: SlotArray = np.empty(0, dtype=np.int64)
_BOUND = attrgetter("bound")

LineIndices = npt.NDArray[np.uint8]
LeafNumbers = npt.NDArray[np.int32]


class Leaves:
    """Leaves in order of their bounds; taking away the first one does not move the others."""

    __slots__ = ("_leaves", "_start")

    def __init__(self) -> None:
        self._leaves: list[Leaf] = []
        self._start = 0

    def __len__(self) -> int:
        return len(self._leaves) - self._start

    def __iter__(self) -> Iterator[Leaf]:
        return iter(self._leaves[self._start :])

    def first(self) -> Leaf:
        """Return the first leaf, which there must be."""
        return self._leaves[self._start]

    def last(self) -> Leaf:
        """Return the last leaf, which there must be."""
        return self._leaves[-1]

    def around(self, leaf: Leaf) -> list[Leaf]:
        """Return a leaf and its neighbours, in order."""
        index = self._index_of(leaf)
        return self._leaves[max(self._start, index - 1) : index + 2]

    def for_rank(self, rank: Rank) -> list[Leaf]:
        """Return the leaf that a rank belongs to, and the one behind it if there is one."""
        index = max(self._start, bisect_right(self._leaves, rank, self._start, key=_BOUND) - 1)
        return self._leaves[index : index + 2]

    def append(self, leaf: Leaf) -> None:
        """Put a leaf at the end."""
        self._leaves.append(leaf)

    def add(self, leaf: Leaf) -> None:
        """Put a leaf where its bound belongs, behind those of the same bound."""
        self._leaves.insert(bisect_right(self._leaves, leaf.bound, self._start, key=_BOUND), leaf)

    def discard(self, leaf: Leaf) -> None:
        """Take a leaf out."""
        if self.first() is not leaf:
            del self._leaves[self._index_of(leaf)]
            return
        self._start += 1
        if 2 * self._start >= len(self._leaves):
            del self._leaves[: self._start]
            self._start = 0

    def _index_of(self, leaf: Leaf) -> int:
        return bisect_left(self._leaves, leaf.bound, self._start, key=_BOUND)


class Leaf:
    """Some slots of a line, in the order of their ranks.

    Attributes:
        number: A slot stands in the leaf whose number it has; any other entry for it is stale.
        line: The line it is part of.
        bound: Nothing in here, or in a later leaf, ranks below it.
        slots: The entries.
        is_sorted: The entries are in order.
    """

    __slots__ = ("bound", "is_sorted", "line", "number", "slots")

    def __init__(self, number: int, line: Line, bound: Rank) -> None:
        self.number = number
        self.line = line
        self.bound = bound
        self.slots = _NO_SLOTS
        self.is_sorted = True


class LeafCounts:
    """What is counted of every leaf, by its number.

    Attributes:
        entries: Slots in the leaf, stale ones included.
        residents: Those that are not stale.
        evictables: Those that could be evicted.
    """

    __slots__ = ("entries", "evictables", "residents")

    def __init__(self) -> None:
        self.entries, self.residents, self.evictables = np.zeros((3, 64), dtype=np.int64)

    def make_room_for(self, number: int) -> None:
        """Have counts for a new leaf number, all of them 0."""
        if number >= len(self.entries):
            counts = np.zeros((3, 2 * number), dtype=np.int64)
            counts[:, : len(self.entries)] = self.entries, self.residents, self.evictables
            self.entries, self.residents, self.evictables = counts


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
        self.leaves = Leaves()
        self.open_leaves = Leaves()
        self.last_rank: Rank = (0, 0, 0)


class SlotLines:
    """Lines of slots; each slot stands in one of them or in none.

    Slots of one call are distinct.

    Args:
        ranks: The rank of every slot; a slot in line changes its rank only by leaving and entering again.
        capacity: Number of slots.
        line_count: Number of lines.
    """

    def __init__(self, ranks: Ranks, capacity: int, line_count: int) -> None:
        self._ranks = ranks
        self._leaf_of = np.full(capacity, _NO_LEAF, dtype=np.int32)
        self._line_of = np.zeros(capacity, dtype=np.uint8)
        self._is_evictable = np.zeros(capacity, dtype=np.bool_)
        self._line_count = line_count
        self._lines: list[Line] = []
        self._leaves: list[Leaf] = []
        self._given_up: list[Leaf] = []
        self.clear()

    def __len__(self) -> int:
        return self._line_count

    def __getitem__(self, index: int) -> Line:
        return self._lines[index]

    def __iter__(self) -> Iterator[Line]:
        return iter(self._lines)

    def clear(self) -> None:
        """Empty all lines; the memory of their leaves is given back by later calls, some at a time."""
        # The leaf numbers of slots stay behind; nobody looks at them before the slots enter again.
        for line in self._lines:
            line.leaves = line.open_leaves = Leaves()  # leaf and line would wait for the garbage collector together
        self._given_up += self._leaves
        self._lines = [Line(index) for index in range(self._line_count)]
        self._leaves = []
        self._counts = LeafCounts()
        self._unused_numbers: list[int] = []
        self._is_evictable.fill(False)

    # Looking

    def indices_of(self, slots: SlotArray) -> LineIndices:
        """Return for each slot, which must stand in one, the index of its line."""
        return self._line_of[slots]

    def evictable_among(self, slots: SlotArray) -> SlotArray:
        """Return those slots that could be evicted."""
        return slots[self._is_evictable[slots]]

    def coldest(self, line: int, count: int) -> list[int]:
        """Return up to `count` slots of a line that could be evicted, lowest rank first."""
        return list(islice(self.evictable_in(line), count))

    def evictable_in(self, line: int) -> Iterator[int]:
        """Yield the slots of a line that could be evicted, lowest rank first; nothing may move meanwhile."""
        for leaf in self._lines[line].open_leaves:
            self._tidy(leaf)
            yield from self.evictable_among(leaf.slots).tolist()

    # Pinning

    def pin(self, slots: SlotArray) -> None:
        """Let slots count as not evictable."""
        self._is_evictable[slots] = False
        self._lose_each(slots)

    def unpin(self, slots: SlotArray) -> None:
        """Let slots count as evictable."""
        self._is_evictable[slots] = True
        self._gain_each(slots)

    # Entering and leaving

    def enter(self, line: int, run: SlotArray) -> None:
        """Let slots, which are in the order of their ranks, enter a line, evictable as they were."""
        if not len(run):
            return
        if self._given_up:
            del self._given_up[-_FREED_AT_ONCE:]
        entered = self._lines[line]
        first, last = self._ranks.of(run.item(0)), self._ranks.of(run.item(-1))
        if not entered.leaves or first >= entered.last_rank:
            entered.last_rank = last
            self._append(entered, run)
        else:
            entered.last_rank = max(entered.last_rank, last)
            self._merge(entered, run)

    def leave(self, slots: SlotArray) -> None:
        """Let slots leave their lines; whether they are evictable stays noted."""
        numbers, counts = self._leaf_of[slots], self._counts
        self._lose_each(self.evictable_among(slots))
        self._leaf_of[slots] = _NO_LEAF
        np.subtract.at(counts.residents, numbers, 1)
        for line, count in self._lines_of(slots):
            line.resident_count -= count
        thinned = numbers[counts.entries[numbers] > 2 * counts.residents[numbers]]
        for leaf in [self._leaves[number] for number in _each_once(thinned)]:
            if len(leaf.slots):  # not joined with another one meanwhile
                self._drop_stale(leaf)
                self._shrink(leaf)

    def drop(self, slots: SlotArray) -> None:
        """Let slots leave their lines as not evictable."""
        self.leave(slots)
        self._is_evictable[slots] = False

    def take(self, line: int, count: int) -> SlotArray:
        """Drop the first `count` evictable slots of a line, which has that many and at least one, and return them."""
        emptied = self._lines[line]
        parts: list[SlotArray] = []
        while count:
            leaf = emptied.open_leaves.first()
            self._tidy(leaf)
            found = self._cut(leaf, count)
            self._is_evictable[found] = False
            parts.append(found)
            count -= len(found)
            self._counts.residents[leaf.number] -= len(found)
            emptied.resident_count -= len(found)
            self._lose(leaf, len(found))
            if not self._counts.evictables[leaf.number]:
                self._shrink(leaf)
        return parts[0] if len(parts) == 1 else np.concatenate(parts)

    def _cut(self, leaf: Leaf, count: int) -> SlotArray:
        """Take the entries of the first evictable slots, at most `count`, out of a tidy leaf and return them."""
        slots = leaf.slots
        is_evictable = self._is_evictable[slots]
        if np.count_nonzero(is_evictable[:count]) == min(count, len(slots)):
            self._fill(leaf, slots[count:])
            return slots[:count]
        positions = np.flatnonzero(is_evictable)[:count]
        found = slots[positions]
        is_kept = np.ones(len(slots), dtype=np.bool_)
        is_kept[positions] = False
        self._fill(leaf, slots[is_kept])
        return found

    def _append(self, line: Line, run: SlotArray) -> None:
        """Let slots enter at the end of a line."""
        position = 0
        leaf = line.leaves.last() if line.leaves else None
        while position < len(run):
            if leaf is not None:
                self._drop_stale(leaf)
            if leaf is None or len(leaf.slots) >= LEAF_SLOTS:
                leaf = self._new_leaf(line, self._ranks.of(run.item(position)))
                line.leaves.append(leaf)
            piece = run[position : position + LEAF_SLOTS - len(leaf.slots)]
            self._place(leaf, piece)
            position += len(piece)

    def _merge(self, line: Line, run: SlotArray) -> None:
        """Let slots enter a line where their ranks say."""
        ranks = self._ranks.of_each(run)
        position = 0
        while position < len(run):
            rank = ranks[position]
            leaf, *following = line.leaves.for_rank(rank)
            end = bisect_left(ranks, following[0].bound, position) if following else len(run)
            leaf.bound = min(leaf.bound, rank)
            # A stale entry of a slot that comes back would look like the slot itself.
            self._drop_stale(leaf)
            self._place(leaf, run[position:end])
            leaf.is_sorted = False
            if len(leaf.slots) > 2 * LEAF_SLOTS:
                self._split(leaf)
            position = end

    def _place(self, leaf: Leaf, slots: SlotArray) -> None:
        """Put slots at the end of a leaf that has no stale entries."""
        self._leaf_of[slots] = leaf.number
        self._line_of[slots] = leaf.line.index
        self._fill(leaf, np.concatenate((leaf.slots, slots)))
        self._counts.residents[leaf.number] += len(slots)
        leaf.line.resident_count += len(slots)
        self._gain(leaf, int(np.count_nonzero(self._is_evictable[slots])))

    # Leaves

    def _fill(self, leaf: Leaf, slots: SlotArray) -> None:
        """Give a leaf other entries."""
        leaf.slots = slots
        self._counts.entries[leaf.number] = len(slots)

    def _lines_of(self, slots: SlotArray) -> Iterator[tuple[Line, int]]:
        """Yield each line, and how many of `slots` stand in it."""
        if len(self._lines) == 1:
            yield self._lines[0], len(slots)
        else:
            counts = np.bincount(self._line_of[slots], minlength=len(self._lines)).tolist()
            yield from zip(self._lines, counts, strict=True)

    def _only_leaf(self, numbers: LeafNumbers) -> Leaf | None:
        """Return the leaf that has all of some numbers, at least one; blocks of one request mostly stand together."""
        is_only_one = np.count_nonzero(numbers == numbers[0]) == len(numbers)
        return self._leaves[numbers.item(0)] if is_only_one else None

    def _gain_each(self, slots: SlotArray) -> None:
        """Count slots that could be evicted into their leaves."""
        numbers = self._leaf_of[slots]
        if not len(numbers):
            return
        if leaf := self._only_leaf(numbers):
            self._gain(leaf, len(numbers))
            return
        evictables = self._counts.evictables
        for number in _each_once(numbers[evictables[numbers] == 0]):
            leaf = self._leaves[number]
            leaf.line.open_leaves.add(leaf)
        np.add.at(evictables, numbers, 1)
        for line, count in self._lines_of(slots):
            line.evictable_count += count

    def _lose_each(self, slots: SlotArray) -> None:
        """Count slots that could be evicted out of their leaves."""
        numbers = self._leaf_of[slots]
        if not len(numbers):
            return
        if leaf := self._only_leaf(numbers):
            self._lose(leaf, len(numbers))
            return
        evictables = self._counts.evictables
        np.subtract.at(evictables, numbers, 1)
        for number in _each_once(numbers[evictables[numbers] == 0]):
            leaf = self._leaves[number]
            leaf.line.open_leaves.discard(leaf)
        for line, count in self._lines_of(slots):
            line.evictable_count -= count

    def _gain(self, leaf: Leaf, evictable_count: int) -> None:
        """Count slots that could be evicted into a leaf."""
        if evictable_count:
            evictables = self._counts.evictables
            if not evictables[leaf.number]:
                leaf.line.open_leaves.add(leaf)
            evictables[leaf.number] += evictable_count
            leaf.line.evictable_count += evictable_count

    def _lose(self, leaf: Leaf, evictable_count: int) -> None:
        """Count slots that could be evicted out of a leaf."""
        if evictable_count:
            evictables = self._counts.evictables
            evictables[leaf.number] -= evictable_count
            leaf.line.evictable_count -= evictable_count
            if not evictables[leaf.number]:
                leaf.line.open_leaves.discard(leaf)

    def _new_leaf(self, line: Line, bound: Rank) -> Leaf:
        if self._unused_numbers:
            number = self._unused_numbers.pop()
            self._leaves[number] = leaf = Leaf(number, line, bound)
        else:
            leaf = Leaf(len(self._leaves), line, bound)
            self._leaves.append(leaf)
            self._counts.make_room_for(leaf.number)
        return leaf

    def _drop_stale(self, leaf: Leaf) -> None:
        if len(leaf.slots) > self._counts.residents[leaf.number]:
            self._fill(leaf, leaf.slots[self._leaf_of[leaf.slots] == leaf.number])

    def _tidy(self, leaf: Leaf) -> None:
        """Drop stale entries and sort the others, for one who looks at their order."""
        self._drop_stale(leaf)
        if not leaf.is_sorted:
            leaf.slots = self._ranks.in_order(leaf.slots)
            leaf.is_sorted = True

    def _split(self, leaf: Leaf) -> None:
        """Cut a leaf that has become too long."""
        self._tidy(leaf)
        moved = leaf.slots[LEAF_SLOTS:]
        self._fill(leaf, leaf.slots[:LEAF_SLOTS])
        self._lose(leaf, int(np.count_nonzero(self._is_evictable[moved])))
        self._counts.residents[leaf.number] -= len(moved)
        leaf.line.resident_count -= len(moved)
        for start in range(0, len(moved), LEAF_SLOTS):
            piece = moved[start : start + LEAF_SLOTS]
            part = self._new_leaf(leaf.line, self._ranks.of(piece.item(0)))
            leaf.line.leaves.add(part)
            self._place(part, piece)

    def _shrink(self, leaf: Leaf) -> None:
        """Drop an empty leaf, and join a small one with a neighbour, so that their number follows the slots."""
        residents = self._counts.residents
        if not residents[leaf.number]:
            self._drop_leaf(leaf)
            return
        for left, right in pairwise(leaf.line.leaves.around(leaf)):
            if residents[left.number] + residents[right.number] <= LEAF_SLOTS // 2:
                self._join(left, right)
                return

    def _join(self, leaf: Leaf, following: Leaf) -> None:
        """Let a leaf take in the one behind it."""
        self._drop_stale(leaf)
        self._drop_stale(following)
        moved = following.slots
        leaf.is_sorted = leaf.is_sorted and following.is_sorted
        self._lose(following, self._counts.evictables.item(following.number))
        following.line.resident_count -= len(moved)
        self._counts.residents[following.number] = 0
        self._drop_leaf(following)
        self._place(leaf, moved)

    def _drop_leaf(self, leaf: Leaf) -> None:
        """Take an empty leaf out of its line."""
        self._fill(leaf, _NO_SLOTS)
        leaf.line.leaves.discard(leaf)
        self._unused_numbers.append(leaf.number)


def _each_once(numbers: LeafNumbers) -> list[int]:
    """Return leaf numbers without repeats."""
    distinct: list[int] = np.bincount(numbers).nonzero()[0].tolist()
    return distinct
