"""What a tier's policy is told of uses."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
from picky import CountingPolicy

from aiokvoffload.policies.base import Access
from aiokvoffload.testing.strategies import make_keys
from aiokvoffload.testing.tier_contract import IDENTITY, payload
from aiokvoffload.tiers.memory import MemoryTier
from aiokvoffload.tiers.outcomes import Reason
from aiokvoffload.tiers.slots import BlockSlots


def slots_holding(*numbers: int) -> tuple[BlockSlots, CountingPolicy]:
    """Return slots that hold some blocks, in the order of their slots."""
    slots = BlockSlots(1000, 8, CountingPolicy)
    for key in make_keys(*numbers):
        slots.add(key, 1, Access(1), is_ready=True)
    policy = slots._policy
    assert isinstance(policy, CountingPolicy)
    return slots, policy


def test_the_blocks_of_a_use_are_told_at_once() -> None:
    slots, policy = slots_holding(1, 2, 3)
    access = Access(2, depths=[16, 32, 48])
    slots.touch(make_keys(3, 1, 2), access)
    assert policy.touched == [([2, 0, 1], access)]
    assert policy.missed == []


@pytest.mark.parametrize(
    ("used", "touched", "touched_depths", "missed", "missed_depths"),
    [
        ((1, 8, 2, 9), [0, 1], [1, 3], (8, 9), [2, 4]),
        ((8, 9), None, None, (8, 9), [1, 2]),
        ((1, 8, 1, 8, 2), [0, 1], [1, 5], (8,), [2]),
        ((2, 2, 1), [1, 0], [1, 3], None, None),
        ((), None, None, None, None),
    ],
)
def test_each_is_told_with_its_first_depth_whether_it_is_held(
    used: Sequence[int],
    touched: list[int] | None,
    touched_depths: list[int] | None,
    missed: Sequence[int] | None,
    missed_depths: list[int] | None,
) -> None:
    slots, policy = slots_holding(1, 2)
    slots.touch(make_keys(*used), Access(2, depths=range(1, len(used) + 1)))
    assert policy.touched == ([] if touched is None else [(touched, Access(2, depths=touched_depths))])
    assert policy.missed == ([] if missed is None else [(make_keys(*missed), Access(2, depths=missed_depths))])


def test_a_policy_that_raises_fails_the_touch_and_nothing_else(caplog: pytest.LogCaptureFixture) -> None:
    tier = MemoryTier(IDENTITY, block_bytes=100, capacity_bytes=600, policy="picky:BrokenPolicy")
    tier.start_put(make_keys(1, 2), [payload(number, 100) for number in (1, 2)])
    touch = tier.start_touch(make_keys(1, 2))
    assert [result.reason for result in touch.results] == [Reason.FAILED] * 2
    assert "touch failed" in caplog.text
    assert [result.is_good for result in tier.start_contains(make_keys(1, 2)).results] == [True, True]
