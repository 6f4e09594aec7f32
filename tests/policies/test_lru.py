from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from aiokvoffload.policies.base import Access
from aiokvoffload.policies.last_use import LATE_SLOTS
from aiokvoffload.policies.lines import LEAF_SLOTS
from aiokvoffload.policies.lru import LRUPolicy
from aiokvoffload.testing.models import LRUModel
from aiokvoffload.testing.policy_contract import CONTRACT_SETTINGS, PolicyContract, fill, order_of, play_beside
from aiokvoffload.testing.strategies import make_keys


class TestLRU(PolicyContract):
    def make_policy(self, capacity: int) -> LRUPolicy:
        return LRUPolicy(capacity)


class TestLRUModel(PolicyContract):
    def make_policy(self, capacity: int) -> LRUModel:
        return LRUModel(capacity)

    @pytest.mark.skip("a model is slow on purpose")
    def test_costs_follow_the_batch(self, kind: str) -> None: ...


@CONTRACT_SETTINGS
@given(st.data())
def test_lru_leaves_as_its_model(data: st.DataObject) -> None:
    play_beside(LRUPolicy(10), LRUModel(10), data)


@pytest.mark.parametrize("late_slots", [4, LATE_SLOTS])
@CONTRACT_SETTINGS
@given(data=st.data())
def test_nobody_sees_what_is_put_off(late_slots: int, data: st.DataObject) -> None:
    play_beside(LRUPolicy(10, late_slots=late_slots), LRUModel(10), data, is_order_asked=False)


def test_an_eviction_that_the_line_can_serve_leaves_late_uses_alone() -> None:
    policy = LRUPolicy(8)
    fill(policy, range(4), Access(1))
    assert policy.coldest(1) == [0]  # all four are in line now
    policy.insert([4, 5], make_keys(4, 5), Access(2))
    policy.unpin([4])
    assert policy.evictable_count == 5
    assert policy.evict(2) == [0, 1]
    assert policy.evict(3) == [2, 3, 4]
    assert policy.evict(1) is None


def test_an_eviction_knows_of_late_uses() -> None:
    policy = LRUPolicy(8)
    fill(policy, range(4), Access(1))
    assert policy.coldest(1) == [0]
    policy.touch([0, 1], Access(2))
    assert policy.evict(1) == [2]
    fill(policy, [2], Access(2, depths=[16]))
    fill(policy, [4], Access(1, depths=[16]))  # of the old request, so it leaves early
    assert policy.evict(2) == [3, 4]


def test_what_is_in_line_and_what_is_not_yet_are_pinned_together() -> None:
    policy = LRUPolicy(6)
    fill(policy, range(3), Access(1))
    assert policy.coldest(1) == [0]
    policy.insert([3, 4, 5], make_keys(3, 4, 5), Access(2))
    policy.unpin([3, 4])
    policy.pin([2, 3])
    assert order_of(policy) == [0, 1, 4]
    policy.unpin([3, 5, 2])
    assert order_of(policy) == [0, 1, 2, 3, 4, 5]


def test_a_deeper_block_of_a_request_in_line_leaves_before_it() -> None:
    policy = LRUPolicy(2)
    fill(policy, [0], Access(1, depths=[16]))
    assert policy.coldest(1) == [0]
    fill(policy, [1], Access(1, depths=[32]))
    assert policy.evict(1) == [1]


def test_the_oldest_request_loses_its_deepest_block_first() -> None:
    policy = LRUPolicy(9)
    fill(policy, [0, 1, 2], Access(1, depths=[16, 32, 48]))
    fill(policy, [3, 4, 5], Access(2, depths=[16, 32, 48]))
    assert order_of(policy) == [2, 1, 0, 5, 4, 3]
    policy.touch([0, 1], Access(3, depths=[16, 32]))
    fill(policy, [6, 7, 8], Access(3, depths=[48, 64, 80]))
    assert order_of(policy) == [2, 5, 4, 3, 8, 7, 6, 1, 0]


def test_what_a_request_stores_later_stands_at_its_access() -> None:
    policy = LRUPolicy(4)
    fill(policy, [0], Access(1, depths=[16]))
    fill(policy, [1], Access(2, depths=[16]))
    fill(policy, [2, 3], Access(1, depths=[32, 48]))
    assert order_of(policy) == [3, 2, 0, 1]


def test_siblings_of_other_groups_leave_together() -> None:
    policy = LRUPolicy(6)
    fill(policy, range(6), Access(1, depths=[16, 32, 48, 16, 32, 48]))
    assert order_of(policy) == [2, 5, 1, 4, 0, 3]


def test_a_pin_of_many_leaves_the_rest_in_order() -> None:
    size = 6 * LEAF_SLOTS
    policy = LRUPolicy(size)
    fill(policy, range(size), Access(1))
    policy.pin(range(0, size, 3))
    assert order_of(policy) == [slot for slot in range(size) if slot % 3]
    assert (
        policy.evict(size // 2, protected=range(1, size // 4, 3))
        == [slot for slot in range(size) if slot % 3 == 2 or (slot % 3 == 1 and slot >= size // 4)][: size // 2]
    )
    policy.unpin(range(0, size, 3))
    assert order_of(policy)[: size // 12] == [slot for slot in range(size) if slot % 3 != 2][: size // 12]


def test_evictions_go_on_where_the_last_one_stopped() -> None:
    size = 3 * LEAF_SLOTS
    policy = LRUPolicy(size)
    fill(policy, range(size), Access(1))
    pinned = [slot for slot in range(size) if slot % 5 in (1, 2)]
    policy.pin(pinned)
    expected = [slot for slot in range(size) if slot % 5 not in (1, 2)]
    for count in (3, 1, 7, 40, 2, 100, 1, 1, 60):
        assert policy.coldest(count + 1) == expected[: count + 1]
        assert policy.evict(count) == expected[:count]
        del expected[:count]
    policy.unpin(pinned)
    assert order_of(policy) == sorted([*pinned, *expected])
