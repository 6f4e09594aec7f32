"""What a policy makes of a level above: blocks that have moved up, come back, or are used up there."""

from __future__ import annotations

import math

import pytest

from aiokvoffload.policies.adaptive import AdaptivePolicy
from aiokvoffload.policies.arc import ARCPolicy
from aiokvoffload.policies.base import POLICIES, Access, CachePolicy
from aiokvoffload.policies.lrfu import LRFUPolicy
from aiokvoffload.policies.lru2 import LRU2Policy
from aiokvoffload.testing.policy_contract import fill, order_of
from aiokvoffload.testing.strategies import make_keys


def test_lru2_knows_the_last_use_of_a_block_that_moved_up() -> None:
    for send_away, place in (("take_along", -1), ("demote", 0)):
        policy = LRU2Policy(4)
        fill(policy, range(4), Access(1))
        policy.touch([0], Access(2))
        getattr(policy, send_away)([0])
        assert policy.evict(1) == [0]
        fill(policy, [0], Access(3))
        policy.touch([1, 2, 3], Access(4))
        assert order_of(policy)[place] == 0


def test_lrfu_weighs_a_block_that_moved_up_with_all_its_uses() -> None:
    moved, sent_away = (LRFUPolicy(4, half_life_capacities=100.0) for _ in range(2))
    for policy, send_away in ((moved, "take_along"), (sent_away, "demote")):
        fill(policy, range(4), Access(1))
        policy.touch([0], Access(2))
        policy.touch([1, 2, 3], Access(3))
        getattr(policy, send_away)([0])
        policy.evict(1)
        fill(policy, [0], Access(4))
    assert order_of(moved)[-1] == 0
    assert order_of(sent_away)[0] == 0


def test_adaptive_remembers_a_block_that_moved_up_and_forgets_one_that_was_sent_away() -> None:
    for send_away, remembered in (("take_along", 1), ("demote", 0)):
        policy = AdaptivePolicy(8)
        fill(policy, range(8), Access(1))
        before = policy.history_bytes
        getattr(policy, send_away)([3])
        assert policy.evict(1) == [3]
        assert (policy.history_bytes > before) == bool(remembered)


@pytest.mark.parametrize("name", ["arc", "arc-reference", "s3fifo"])
def test_a_block_that_moved_up_is_no_ghost(name: str) -> None:
    """Coming back, it is as new as a stranger."""
    orders = []
    for key in (0, 99):
        policy = POLICIES.resolve(name)(4)
        fill(policy, range(4), Access(1))
        policy.take_along([0])
        assert policy.evict(1) == [0]
        policy.miss(make_keys(key), Access(2))
        policy.insert([0], make_keys(key), Access(3))
        policy.unpin([0])
        policy.touch([1], Access(4))
        orders.append(order_of(policy))
        if isinstance(policy, ARCPolicy):
            assert policy.target_recent_count == 0
    assert orders[0] == orders[1]


def test_arc_ranks_a_given_up_block_in_its_line_and_counts_no_use() -> None:
    policy = ARCPolicy(4)
    fill(policy, range(4), Access(1))
    policy.touch([0, 1], Access(2))
    policy.rescue([0, 2], Access(3))
    assert order_of(policy) == [3, 2, 1, 0]


def test_lru_ranks_a_given_up_block_as_new() -> None:
    policy = POLICIES.resolve("lru")(3)
    fill(policy, range(3), Access(1))
    policy.rescue([0, 1], Access(2, depths=[1, 2]))
    assert order_of(policy) == [2, 1, 0]


@pytest.mark.parametrize("policy_class", [LRU2Policy, LRFUPolicy])
def test_a_rescue_is_no_use(policy_class: type[CachePolicy]) -> None:
    policy = policy_class(4)
    fill(policy, range(4), Access(1))
    policy.touch([0, 1, 2], Access(2))
    policy.take_along([3])
    policy.rescue([3, 0], Access(3))
    assert order_of(policy)[0] == 3


# LRFU below a level


def widened(capacity: int = 4, blocks_above: int = 12, half_life_capacities: float = 1.0) -> LRFUPolicy:
    policy = LRFUPolicy(capacity, half_life_capacities=half_life_capacities)
    policy.widen(blocks_above)
    return policy


def weight_of(policy: LRFUPolicy, slot: int) -> float:
    return policy._weight[slot]


def test_the_half_life_is_one_of_both_levels() -> None:
    policy = widened()
    fill(policy, range(4), Access(1))  # the clock shows 4 insertions, in half-lives of 16
    assert policy.evict(4)
    fill(policy, [0], Access(2), is_ready=False)
    policy.remove([0])
    policy.insert([0], make_keys(50), Access(3))
    assert weight_of(policy, 0) == pytest.approx(5 / 16)


def test_uses_above_are_counted_when_they_are_missed_and_not_when_the_block_comes_down() -> None:
    policy = widened(half_life_capacities=1000.0)
    key = make_keys(7)
    for tick in (1, 2, 2, 1, 3):  # a request that asks twice counts once
        policy.miss(key, Access(tick))
    policy.insert([0], key, Access(4))
    assert weight_of(policy, 0) == pytest.approx(math.log2(3), abs=0.01)


def test_without_a_level_above_misses_are_nothing_to_lrfu() -> None:
    policy = LRFUPolicy(4)
    policy.miss(make_keys(7), Access(1))
    assert policy.history_bytes == 0


def test_strangers_are_remembered_within_the_history_limit() -> None:
    policy = LRFUPolicy(4, history_bytes_per_block=256)
    policy.widen(4)
    policy.miss(make_keys(*range(100)), Access(1))
    assert policy.history_bytes <= 4 * 256
