"""Least recently used: the request that has waited longest loses its deepest block first."""

from __future__ import annotations

from collections.abc import Sequence

from aiokvoffload.policies.base import Access
from aiokvoffload.policies.ranking import RankedPolicy
from aiokvoffload.policies.slots import slot_array


class LRUPolicy(RankedPolicy):
    """Evicts by last access.

    Args:
        capacity: Number of slots.
    """

    takes_arrays = True

    def __init__(self, capacity: int) -> None:
        super().__init__(capacity, are_ranked_by_tick=True)

    def touch(self, slots: Sequence[int], access: Access) -> None:
        """Rank `slots` anew at `access`."""
        self._rerank(*self._ranks.select_older(slot_array(slots), access))

    def rescue(self, slots: Sequence[int], access: Access) -> None:
        """Rank `slots` as if they were inserted at `access`; nothing counts uses here."""
        self.touch(slots, access)
