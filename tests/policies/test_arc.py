from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from aiokvoffload.policies.arc import ARCPolicy, ReferenceARCPolicy
from aiokvoffload.policies.base import Access, CachePolicy
from aiokvoffload.testing.models import ARCModel
from aiokvoffload.testing.policy_contract import CONTRACT_SETTINGS, PolicyContract, fill, order_of, play_beside
from aiokvoffload.testing.strategies import make_keys


class TestARC(PolicyContract):
    def make_policy(self, capacity: int) -> ARCPolicy:
        return ARCPolicy(capacity)


class TestReferenceARC(PolicyContract):
    def make_policy(self, capacity: int) -> ReferenceARCPolicy:
        return ReferenceARCPolicy(capacity)


class TestARCModel(PolicyContract):
    def make_policy(self, capacity: int) -> ARCModel:
        return ARCModel(capacity)

    @pytest.mark.skip("a model is slow on purpose")
    def test_costs_follow_the_batch(self, kind: str) -> None: ...


@CONTRACT_SETTINGS
@given(st.data(), st.booleans())
def test_arc_leaves_and_learns_as_its_model(data: st.DataObject, are_ghosts_frequent: bool) -> None:
    policy = ARCPolicy(6, are_ghosts_frequent=are_ghosts_frequent)
    model = ARCModel(6, are_ghosts_frequent=are_ghosts_frequent)

    def check() -> None:
        assert policy.target_recent_count == model.target_recent_count
        assert list(policy._ghosts.keys_in(0)) == model.recent_ghosts
        assert list(policy._ghosts.keys_in(1)) == model.frequent_ghosts

    play_beside(policy, model, data, check)


def used_once_and_again(capacity: int) -> ARCPolicy:
    """The lower half was used once, the upper half again."""
    policy = ARCPolicy(capacity)
    fill(policy, range(capacity), Access(1))
    policy.touch(range(capacity // 2, capacity), Access(2))
    return policy


def test_what_was_used_once_leaves_first() -> None:
    policy = used_once_and_again(6)
    assert order_of(policy) == [0, 1, 2, 3, 4, 5]
    policy.touch([0], Access(3))
    assert order_of(policy) == [1, 2, 3, 4, 5, 0]


def test_a_block_being_written_is_not_used_again() -> None:
    policy = ARCPolicy(3)
    fill(policy, [0, 1, 2], Access(1), is_ready=False)
    policy.unpin([1, 2])
    policy.touch([1], Access(2))
    policy.touch([0], Access(3))
    policy.unpin([0])
    assert order_of(policy) == [2, 0, 1]
    # Nor is the next block of a slot whose last one was written.
    assert policy.evict(2) == [2, 0]
    policy.insert([2], make_keys(9), Access(4))
    policy.touch([2], Access(5))
    policy.unpin([2])
    assert order_of(policy) == [2, 1]


def test_ghosts_are_met_deepest_first() -> None:
    policy = used_once_and_again(4)
    assert policy.evict(3) == [0, 1, 2]
    # 2 is the only one of B2 and lowers nothing; then 1 and 0 of B1 raise. The other way round 2 would lower them.
    policy.miss(make_keys(0, 1, 2), Access(3))
    assert policy.target_recent_count == 2.0
    assert [*policy._ghosts.keys_in(0)] == make_keys(1, 0)


def test_one_request_meets_a_ghost_once() -> None:
    policy = used_once_and_again(4)
    assert policy.evict(1) == [0]
    for tick, target in ((3, 1.0), (3, 1.0), (2, 1.0), (4, 2.0), (4, 2.0)):
        policy.miss(make_keys(0), Access(tick))
        assert policy.target_recent_count == target


def test_a_miss_of_what_left_too_early_moves_the_target() -> None:
    policy = used_once_and_again(6)
    assert policy.evict(4) == [0, 1, 2, 3]
    policy.miss(make_keys(0, 1), Access(3))
    assert policy.target_recent_count == 2.0
    policy.miss(make_keys(3), Access(3))
    assert policy.target_recent_count == 0.0  # B1 is three times as long as B2
    policy.miss(make_keys(0, 1, 2), Access(4))
    assert policy.target_recent_count == 3.0
    policy.miss(make_keys(99), Access(5))
    assert policy.target_recent_count == 3.0


def test_the_target_stays_within_the_capacity() -> None:
    policy = used_once_and_again(4)
    assert policy.evict(3) == [0, 1, 2]
    for tick in range(3, 10):
        policy.miss(make_keys(0, 1), Access(tick))
    assert policy.target_recent_count == 4.0
    for tick in range(10, 20):
        policy.miss(make_keys(2), Access(tick))
    assert policy.target_recent_count == 0.0


def test_used_once_is_kept_up_to_the_target() -> None:
    policy = used_once_and_again(8)
    policy.touch([3], Access(3))
    assert policy.evict(1) == [0]
    for tick in (4, 5):
        policy.miss(make_keys(0), Access(tick))
    assert policy.target_recent_count == 2.0
    # 1 and 2 are left of those used once: one leaves, for there may be one less than the target.
    assert order_of(policy) == [1, 4, 5, 6, 7, 3, 2]


def test_pinned_blocks_count_towards_the_target() -> None:
    policy = used_once_and_again(8)
    assert policy.evict(1) == [0]
    policy.miss(make_keys(0), Access(4))
    policy.miss(make_keys(0), Access(5))
    policy.pin([1, 2])
    assert order_of(policy) == [3, 4, 5, 6, 7]
    policy.pin([3])
    assert order_of(policy) == [4, 5, 6, 7]


def test_one_list_gives_when_the_other_is_dry() -> None:
    policy = used_once_and_again(6)
    assert policy.evict(1) == [0]
    for tick in range(3, 9):
        policy.miss(make_keys(0), Access(tick))
    assert policy.target_recent_count == 6.0
    assert policy.evict(5) == [3, 4, 5, 1, 2]


@pytest.mark.parametrize("again", [False, True])
def test_each_ghost_list_is_no_longer_than_the_capacity(again: bool) -> None:
    policy = ARCPolicy(2)
    for number in range(5):
        policy.insert([0], make_keys(number), Access(2 * number + 1))
        policy.unpin([0])
        if again:
            policy.touch([0], Access(2 * number + 2))
        assert policy.evict(1) == [0]
    assert list(policy._ghosts.keys_in(again)) == make_keys(3, 4)
    assert not list(policy._ghosts.keys_in(not again))


@pytest.mark.parametrize(("policy_class", "order"), [(ARCPolicy, [1, 3, 0]), (ReferenceARCPolicy, [1, 0, 3])])
def test_a_ghost_that_comes_back_was_used_again(policy_class: type[CachePolicy], order: list[int]) -> None:
    policy = policy_class(4)
    fill(policy, range(4), Access(1))
    policy.touch([2, 3], Access(2))
    assert policy.evict(3) == [0, 1, 2]
    policy.miss(make_keys(2), Access(3))
    policy.insert([0, 1], make_keys(2, 9), Access(3))
    policy.touch([0, 1], Access(4, depths=[16, 32]))  # still being written: that moves neither into T2
    policy.unpin([0, 1])
    assert order_of(policy) == order


def test_a_key_that_was_missed_as_a_stranger_may_be_a_ghost_when_it_comes() -> None:
    policy = ARCPolicy(2)
    keys = make_keys(0)
    policy.miss(keys, Access(1))
    for tick in (1, 2):  # inserted again without being asked for, as a promotion is
        assert list(policy._ghosts.keys_in(0)) == (keys if tick == 2 else [])
        policy.insert([0], keys, Access(tick))
        policy.unpin([0])
        assert not list(policy._ghosts.keys_in(0))
        assert policy.evict(1) == [0]


def test_a_list_of_missed_keys_may_be_used_for_others() -> None:
    policy = ARCPolicy(2)
    ghosts = make_keys(0)
    fill(policy, [0], Access(1))
    assert policy.evict(1) == [0]
    keys = make_keys(1)
    policy.miss(keys, Access(2))
    keys[:] = ghosts
    policy.insert([0], keys, Access(2))
    assert not list(policy._ghosts.keys_in(0))
