"""The rank of every slot: who leaves before whom.

A rank is `(base, -depth, insertion order)`. The base is the tick, so that older requests leave first, or whatever whole
number a policy ranks by; of one base the deepest block leaves first, because a block without its prefix is useless;
blocks without a depth leave before those, the first inserted first.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from aiokvoffload.policies.base import Access
from aiokvoffload.policies.slots import SlotArray

_NO_DEPTH = 1 << 40

Rank = tuple[int, int, int]


class Ranks:
    """The rank of every slot; those demoted have base 0, all others a base of at least 1.

    Args:
        capacity: Number of slots.
        are_bases_ticks: Whether all bases are; others may be of any size, and take longer.
    """

    __slots__ = ("_base_of", "_depth_of", "_order_of", "_ranked_count")

    def __init__(self, capacity: int, *, are_bases_ticks: bool = False) -> None:
        # The garbage collector does not walk an array of objects as it does a list.
        self._base_of: npt.NDArray[Any] = np.zeros(capacity, dtype=np.int64 if are_bases_ticks else object)
        self._depth_of = np.zeros(capacity, dtype=np.int64)
        self._order_of = np.zeros(capacity, dtype=np.int64)
        self._ranked_count = 0

    def of(self, slot: int) -> Rank:
        """Return the rank of a slot; the lowest leaves first."""
        return self._base_of.item(slot), -self._depth_of.item(slot), self._order_of.item(slot)

    def of_each(self, slots: SlotArray) -> list[Rank]:
        """Return the rank of each slot."""
        depths, orders = -self._depth_of[slots], self._order_of[slots]
        return list(zip(self._base_of[slots].tolist(), depths.tolist(), orders.tolist(), strict=True))

    def is_first(self, slot: int) -> bool:
        """Return whether a slot was demoted."""
        return not self._base_of.item(slot)

    def assign(self, slots: SlotArray, base: int, depths: Sequence[int] | None) -> SlotArray:
        """Rank slots at one base, and return them in the order of their ranks, equals in the order given."""
        self._assign(slots, base, depths)
        if depths is None:
            return slots
        if isinstance(depths, range) and depths.step > 0:
            return slots[::-1]
        return slots[np.argsort(-self._depth_of[slots], kind="stable")]

    def assign_each(self, slots: SlotArray, bases: Sequence[int], depths: Sequence[int] | None) -> SlotArray:
        """Rank each slot at a base of its own, and return them in the order of their ranks."""
        if bases and bases.count(bases[0]) == len(bases):
            return self.assign(slots, bases[0], depths)
        self._assign(slots, bases, depths)
        return self.in_order(slots)

    def rebase(self, slots: SlotArray, bases: Sequence[int]) -> SlotArray:
        """Rank slots at another base each, their depth and order as before, and return them in that order."""
        self._base_of[slots] = bases
        return self.in_order(slots)

    def in_order(self, slots: SlotArray) -> SlotArray:
        """Return slots in the order of their ranks."""
        depths, orders = self._depth_of[slots], self._order_of[slots]
        try:
            return slots[np.lexsort((orders, -depths, self._base_of[slots].astype(np.int64, copy=False)))]
        except OverflowError:  # a base larger than that
            ranks = self.of_each(slots)
            return slots[sorted(range(len(ranks)), key=ranks.__getitem__)]

    def select_older(self, slots: SlotArray, access: Access) -> tuple[SlotArray, Access]:
        """Return those of `slots` whose last access was before that of `access`, and the access to just them."""
        older = np.flatnonzero(self._base_of[slots] < access.tick)
        if len(older) == len(slots):
            return slots, access
        return slots[older], access.select(older.tolist())

    def _assign(self, slots: SlotArray, bases: int | Sequence[int], depths: Sequence[int] | None) -> None:
        first = self._ranked_count
        self._ranked_count += len(slots)
        self._base_of[slots] = bases
        if depths is None:
            self._depth_of[slots] = _NO_DEPTH
        elif isinstance(depths, range):
            self._depth_of[slots] = np.arange(depths.start, depths.stop, depths.step)
        else:
            self._depth_of[slots] = depths
        self._order_of[slots] = np.arange(first, self._ranked_count)
