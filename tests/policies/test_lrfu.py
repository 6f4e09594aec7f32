from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Self

import pytest
from hypothesis import given
from hypothesis import strategies as st

from aiokvoffload.errors import ConfigurationError
from aiokvoffload.keys import OffloadKey
from aiokvoffload.policies.base import Access
from aiokvoffload.policies.history import GHOST_BYTES
from aiokvoffload.policies.lrfu import LRFUPolicy
from aiokvoffload.testing.models import PolicyModel, RankedEntry
from aiokvoffload.testing.policy_contract import CONTRACT_SETTINGS, PolicyContract, fill, order_of, play_beside
from aiokvoffload.testing.strategies import make_keys

HALF_LIFE_CAPACITIES = 0.7771
"""No small number of insertions, so that no two different histories weigh the same."""


class LRFUModel(PolicyModel):
    """Remembers every use of every block, in insertions, and adds up what they weigh."""

    def __init__(self, capacity: int, ghost_limit: int) -> None:
        super().__init__(capacity)
        self.ghost_limit = ghost_limit
        self.ghosts: dict[OffloadKey, list[int]] = {}
        self.uses: dict[int, list[int]] = {}
        self.last_tick: dict[int, int] = {}
        self.insertion_count = 0
        self.time_of_tick: dict[int, int] = {}

    def time(self, access: Access) -> int:
        return self.time_of_tick.setdefault(access.tick, self.insertion_count)

    def insert(self, slots: Sequence[int], keys: Sequence[OffloadKey], access: Access) -> None:
        super().insert(slots, keys, access)
        for slot, key in zip(slots, keys, strict=True):
            self.uses[slot] = [*self.ghosts.pop(key, []), self.time(access)]
            self.last_tick[slot] = access.tick
        self.time(access)
        self.insertion_count += len(slots)

    def touch(self, slots: Sequence[int], access: Access) -> None:
        self.time(access)
        for position, slot in enumerate(slots):
            is_newer = self.last_tick[slot] < access.tick
            if is_newer:
                self.uses[slot].append(self.time(access))
                self.last_tick[slot] = access.tick
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
        return min(candidates, key=lambda entry: (self.weight(entry), -entry.depth, entry.order))

    def weight(self, entry: RankedEntry) -> float:
        half_life = HALF_LIFE_CAPACITIES * self.capacity
        return round(sum(2.0 ** (time / half_life) for time in self.uses[entry.slot]), 6) if entry.tick else 0.0

    def leave_ghost(self, victim: RankedEntry) -> None:
        if victim.tick > 0:
            self.ghosts[victim.key] = self.uses[victim.slot]
            if len(self.ghosts) > self.ghost_limit:
                del self.ghosts[next(iter(self.ghosts), victim.key)]


class TestLRFU(PolicyContract):
    def make_policy(self, capacity: int) -> LRFUPolicy:
        return LRFUPolicy(capacity)


@CONTRACT_SETTINGS
@given(st.data(), st.integers(0, 7))
def test_lrfu_leaves_as_its_model(data: st.DataObject, ghost_limit: int) -> None:
    policy = LRFUPolicy(
        6,
        half_life_capacities=HALF_LIFE_CAPACITIES,
        history_bytes_per_block=-(-ghost_limit * GHOST_BYTES // 6),
    )
    model = LRFUModel(6, ghost_limit)

    def check() -> None:
        assert policy.history_bytes == len(model.ghosts) * GHOST_BYTES

    play_beside(policy, model, data, check)


@pytest.mark.parametrize(("half_life", "order"), [(0.01, [0, 1]), (100.0, [1, 0])])
def test_the_half_life_leads_from_recency_to_frequency(half_life: float, order: list[int]) -> None:
    policy = LRFUPolicy(4, half_life_capacities=half_life)
    fill(policy, [0], Access(1))
    policy.touch([0], Access(2))
    fill(policy, [2, 3], Access(3))
    policy.remove([2, 3])
    fill(policy, [1], Access(4))
    assert order_of(policy) == order


def test_a_use_counts_half_after_a_half_life() -> None:
    policy = LRFUPolicy(8, half_life_capacities=0.5)
    fill(policy, [0, 1, 2, 3], Access(1))
    policy.touch([0], Access(2))  # at the time 4, one half-life after its first use: 1 + 1/2
    fill(policy, [4, 5], Access(3))
    policy.touch([4], Access(4))  # at the time 6: 1 + 2 ** -0.5, while that of 0 has shrunk to 1.06
    assert order_of(policy)[-3:] == [5, 0, 4]


def test_a_use_before_a_block_left_counts() -> None:
    policy = LRFUPolicy(2)
    fill(policy, [0, 1], Access(1))
    assert policy.evict(1) == [0]
    policy.insert([0], make_keys(0), Access(2))
    policy.unpin([0])
    policy.touch([1], Access(2))
    assert policy._weight[0] == policy._weight[1] == pytest.approx(math.log2(1 + 2))


@pytest.mark.parametrize("half_life", [0.0, -1.0, math.inf, math.nan])
def test_a_half_life_that_cannot_work_is_refused(half_life: float) -> None:
    with pytest.raises(ConfigurationError, match="half_life_capacities"):
        LRFUPolicy(4, half_life_capacities=half_life)


def test_negative_history_is_refused() -> None:
    with pytest.raises(ConfigurationError, match="history_bytes_per_block is -1"):
        LRFUPolicy(4, history_bytes_per_block=-1)
