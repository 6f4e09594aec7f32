"""Policies that are told more than most, or take less."""

from __future__ import annotations

from collections.abc import Sequence

from aiokvoffload.keys import OffloadKey
from aiokvoffload.policies.base import Access
from aiokvoffload.policies.lru import LRUPolicy


class SecondUsePolicy(LRUPolicy):
    """Stores a block only once it has missed it."""

    def __init__(self, capacity: int) -> None:
        super().__init__(capacity)
        self._missed: set[OffloadKey] = set()

    def miss(self, keys: Sequence[OffloadKey], access: Access) -> None:
        self._missed.update(keys)

    def admit(self, keys: Sequence[OffloadKey], access: Access) -> Sequence[OffloadKey]:
        return [key for key in keys if key in self._missed]


class CountingPolicy(LRUPolicy):
    """Notes of what it is told in one call."""

    def __init__(self, capacity: int) -> None:
        super().__init__(capacity)
        self.touched: list[tuple[list[int], Access]] = []
        self.missed: list[tuple[list[OffloadKey], Access]] = []

    def touch(self, slots: Sequence[int], access: Access) -> None:
        self.touched.append((list(slots), access))
        super().touch(slots, access)

    def miss(self, keys: Sequence[OffloadKey], access: Access) -> None:
        self.missed.append((list(keys), access))


class BrokenPolicy(LRUPolicy):
    """Cannot bear a use."""

    def touch(self, slots: Sequence[int], access: Access) -> None:
        raise RuntimeError("out of order")
