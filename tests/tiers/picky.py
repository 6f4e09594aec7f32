"""A policy that stores a block only once it has missed it."""

from __future__ import annotations

from collections.abc import Sequence

from aiokvoffload.keys import OffloadKey
from aiokvoffload.policies.base import Access
from aiokvoffload.policies.lru import LRUPolicy


class SecondUsePolicy(LRUPolicy):
    def __init__(self, capacity: int) -> None:
        super().__init__(capacity)
        self._missed: set[OffloadKey] = set()

    def miss(self, keys: Sequence[OffloadKey], access: Access) -> None:
        self._missed.update(keys)

    def admit(self, keys: Sequence[OffloadKey], access: Access) -> Sequence[OffloadKey]:
        return [key for key in keys if key in self._missed]
