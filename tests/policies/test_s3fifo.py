from __future__ import annotations

import copy
from collections.abc import Collection, Sequence
from typing import Self

import pytest
from hypothesis import given
from hypothesis import strategies as st

from aiokvoffload.keys import OffloadKey
from aiokvoffload.policies import s3fifo
from aiokvoffload.policies.base import Access
from aiokvoffload.policies.history import GHOST_BYTES
from aiokvoffload.policies.s3fifo import S3FIFOPolicy
from aiokvoffload.testing.models import PolicyModel, RankedEntry
from aiokvoffload.testing.policy_contract import CONTRACT_SETTINGS, PolicyContract, fill, order_of, play_beside
from aiokvoffload.testing.strategies import make_keys


class S3FIFOModel(PolicyModel):
    """Finds one victim after the other by the words of the paper; `is_frequent` is the main queue."""

    def __init__(self, capacity: int) -> None:
        super().__init__(capacity)
        self.ghosts: list[OffloadKey] = []
        self.uses: dict[int, int] = {}
        self.last_tick: dict[int, int] = {}
        self.latest_tick = 1
        self.passes = s3fifo._MAX_PASSES

    def insert(self, slots: Sequence[int], keys: Sequence[OffloadKey], access: Access) -> None:
        super().insert(slots, keys, access)
        self.latest_tick = max(self.latest_tick, access.tick)
        for slot, key in zip(slots, keys, strict=True):
            self.uses[slot] = 0
            self.last_tick[slot] = access.tick
            self.entries[slot].is_frequent = key in self.ghosts
            if key in self.ghosts:
                self.ghosts.remove(key)

    def touch(self, slots: Sequence[int], access: Access) -> None:
        self.latest_tick = max(self.latest_tick, access.tick)
        for position, slot in enumerate(slots):
            if self.entries[slot].tick == 0:
                self._rank(self.entries[slot], access, position)
            if self.last_tick[slot] < access.tick:
                self.last_tick[slot] = access.tick
                self.uses[slot] = min(3, self.uses[slot] + 1)

    def clear(self) -> None:
        super().clear()
        self.ghosts.clear()

    def fork(self) -> Self:
        return copy.deepcopy(self)

    def evict(self, count: int, protected: Collection[int] = ()) -> list[int] | None:
        pinned = [slot for slot in protected if not self.entries[slot].is_pinned]
        if self.evictable_count - len(pinned) < count:
            return None
        for slot in pinned:
            self.entries[slot].is_pinned = True
        victims = super().evict(count)
        for slot in pinned:
            self.entries[slot].is_pinned = False
        return victims

    def choose(self, candidates: Sequence[RankedEntry]) -> RankedEntry:
        if candidates[0].tick == 0:
            return candidates[0]
        self.passes = min(s3fifo._MAX_PASSES, self.passes + s3fifo._PASSES_PER_VICTIM)
        while True:
            ranked = sorted(candidates, key=lambda entry: entry.rank)
            small = [entry for entry in ranked if not entry.is_frequent]
            main = [entry for entry in ranked if entry.is_frequent]
            small_size = sum(entry.tick > 0 and not entry.is_frequent for entry in self.entries.values())
            coming = self.capacity - len(self.entries)
            is_small_large = small_size + coming >= max(1, self.capacity // 10)
            entry = small[0] if small and (is_small_large or not main) else main[0]
            uses = self.uses[entry.slot]
            if not self.passes or uses < (1 if entry.is_frequent else 2):
                return entry
            self.passes -= 1
            self.uses[entry.slot] = uses - 1 if entry.is_frequent else 0
            entry.is_frequent = True
            self._rank(entry, Access(self.latest_tick, depths=[0]), 0)

    def leave_ghost(self, victim: RankedEntry) -> None:
        if victim.tick > 0 and not victim.is_frequent:
            self.ghosts.append(victim.key)
            del self.ghosts[: -(self.capacity - self.capacity // 10)]


class TestS3FIFO(PolicyContract):
    def make_policy(self, capacity: int) -> S3FIFOPolicy:
        return S3FIFOPolicy(capacity)


@CONTRACT_SETTINGS
@given(st.data(), st.sampled_from([3, 10]), st.booleans())
def test_s3fifo_leaves_as_its_model(data: st.DataObject, capacity: int, is_bound_near: bool) -> None:
    with pytest.MonkeyPatch.context() as patch:
        if is_bound_near:
            patch.setattr(s3fifo, "_MAX_PASSES", 2)
            patch.setattr(s3fifo, "_PASSES_PER_VICTIM", 1)
        policy, model = S3FIFOPolicy(capacity), S3FIFOModel(capacity)

        def check() -> None:
            assert policy.history_bytes == len(model.ghosts) * GHOST_BYTES

        play_beside(policy, model, data, check)


def test_one_use_in_the_small_queue_is_not_enough() -> None:
    policy = S3FIFOPolicy(4)
    fill(policy, range(4), Access(1))
    policy.touch([0, 1], Access(2))
    policy.touch([0], Access(3))
    assert order_of(policy) == [1, 2, 3, 0]


def test_a_ghost_enters_the_main_queue() -> None:
    policy = S3FIFOPolicy(21)
    fill(policy, range(20), Access(1))
    assert policy.evict(1) == [0]
    policy.insert([0], make_keys(0), Access(2))
    policy.unpin([0])
    fill(policy, [20], Access(3))
    assert order_of(policy) == [*range(1, 21), 0]  # the main queue gives once the small one is dry
    for slot in (1, 2, 3):
        policy.remove([slot])
        policy.insert([slot], make_keys(100 + slot), Access(4))
    policy.remove(range(4, 21))
    assert policy.evict(1) == [0]


def test_a_call_passes_over_a_bounded_number() -> None:
    size = 4 * s3fifo._MAX_PASSES
    policy = S3FIFOPolicy(size)
    fill(policy, range(size), Access(1))
    for tick in (2, 3):
        policy.touch(range(size), Access(tick))
    assert policy.evict(1) == [s3fifo._MAX_PASSES]
