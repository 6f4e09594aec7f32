from __future__ import annotations

from collections.abc import Sequence
from typing import Self

import pytest
from hypothesis import given
from hypothesis import strategies as st

from aiokvoffload.keys import OffloadKey
from aiokvoffload.policies.base import Access
from aiokvoffload.policies.history import GHOST_BYTES
from aiokvoffload.policies.lru2 import LRU2Policy
from aiokvoffload.testing.models import PolicyModel, RankedEntry
from aiokvoffload.testing.policy_contract import CONTRACT_SETTINGS, PolicyContract, fill, order_of, play_beside
from aiokvoffload.testing.strategies import make_keys


class LRU2Model(PolicyModel):
    """Remembers the last two uses of every resident block and the last one of the latest that left."""

    def __init__(self, capacity: int, ghost_limit: int) -> None:
        super().__init__(capacity)
        self.ghost_limit = ghost_limit
        self.ghosts: dict[OffloadKey, int] = {}
        self.uses: dict[int, list[int]] = {}

    def insert(self, slots: Sequence[int], keys: Sequence[OffloadKey], access: Access) -> None:
        super().insert(slots, keys, access)
        for slot, key in zip(slots, keys, strict=True):
            used_at = self.ghosts.pop(key, 0)
            self.uses[slot] = [used_at if used_at < access.tick else 0, access.tick]

    def touch(self, slots: Sequence[int], access: Access) -> None:
        for position, slot in enumerate(slots):
            is_newer = self.uses[slot][-1] < access.tick
            if is_newer:
                self.uses[slot] = [self.uses[slot][-1], access.tick]
            if is_newer or self.entries[slot].tick == 0:
                self._rank(self.entries[slot], access, position)

    def clear(self) -> None:
        super().clear()
        self.ghosts.clear()

    def fork(self) -> Self:
        forked = super().fork()
        forked.ghosts = dict(self.ghosts)
        return forked

    def choose(self, candidates: Sequence[RankedEntry]) -> RankedEntry:
        return min(
            candidates,
            key=lambda entry: ([0, 0] if entry.tick == 0 else self.uses[entry.slot], -entry.depth, entry.order),
        )

    def leave_ghost(self, victim: RankedEntry) -> None:
        if victim.tick > 0:
            self.ghosts[victim.key] = self.uses[victim.slot][-1]
            if len(self.ghosts) > self.ghost_limit:
                del self.ghosts[next(iter(self.ghosts), victim.key)]


class TestLRU2(PolicyContract):
    def make_policy(self, capacity: int) -> LRU2Policy:
        return LRU2Policy(capacity)


@CONTRACT_SETTINGS
@given(st.data(), st.integers(0, 7))
def test_lru2_leaves_as_its_model(data: st.DataObject, ghost_limit: int) -> None:
    policy = LRU2Policy(6, history_bytes_per_block=-(-ghost_limit * GHOST_BYTES // 6))
    model = LRU2Model(6, ghost_limit)

    def check() -> None:
        assert policy.history_bytes == len(model.ghosts) * GHOST_BYTES

    play_beside(policy, model, data, check)


def test_what_was_used_twice_stays_before_what_was_used_later() -> None:
    policy = LRU2Policy(4)
    fill(policy, [0, 1], Access(1))
    policy.touch([0], Access(2))
    fill(policy, [2, 3], Access(3))
    assert order_of(policy) == [1, 2, 3, 0]
    policy.touch([3, 2], Access(4))
    assert order_of(policy) == [1, 0, 3, 2]  # 0 was used at 1 before its last use, the others at 3


def test_a_use_before_a_block_left_counts() -> None:
    policy = LRU2Policy(2)
    fill(policy, [0, 1], Access(1))
    assert policy.evict(1) == [0]
    policy.insert([0], make_keys(0), Access(2))
    policy.unpin([0])
    assert order_of(policy) == [1, 0]
    policy.touch([1], Access(3))
    assert order_of(policy) == [0, 1]


@pytest.mark.parametrize("history_bytes", [0, GHOST_BYTES])
def test_the_history_is_bounded(history_bytes: int) -> None:
    policy = LRU2Policy(2, history_bytes_per_block=history_bytes)
    for number in range(9):
        policy.insert([0], make_keys(number), Access(number + 1))
        policy.unpin([0])
        assert policy.evict(1) == [0]
    assert policy.history_bytes == 2 * history_bytes
