"""A set of slots sorted by rank, for those who need no more than that."""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Iterable, Sequence

LEAF_SLOTS = 256


class SortedSlots:
    """A set of slots sorted by rank: leaves of up to twice `LEAF_SLOTS` slots, themselves in order.

    The rank of a slot must not change while it is in here.

    Args:
        rank_of: The rank of every slot, the lowest first; no two in here may be equal.
    """

    def __init__(self, rank_of: Sequence[int]) -> None:
        self._rank = rank_of.__getitem__
        self._leaves: list[list[int]] = []
        self._count = 0

    def __len__(self) -> int:
        return self._count

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
