"""The memory tier."""

from __future__ import annotations

import pytest

from aiokvoffload.clock import Clock
from aiokvoffload.errors import ConfigurationError
from aiokvoffload.keys import CacheIdentity
from aiokvoffload.testing.strategies import make_keys
from aiokvoffload.testing.tier_contract import BLOCK_BYTES, CAPACITY_BLOCKS, IDENTITY, TierContract, payload
from aiokvoffload.tiers.memory import MemoryTier
from aiokvoffload.tiers.opening import open_tier
from aiokvoffload.tiers.outcomes import Reason


class TestMemoryTier(TierContract):
    keeps_over_restart = False

    def open_tier(self, identity: CacheIdentity, clock: Clock | None = None) -> MemoryTier:
        capacity_bytes = CAPACITY_BLOCKS * (BLOCK_BYTES + 200)
        return MemoryTier(identity, block_bytes=BLOCK_BYTES, capacity_bytes=capacity_bytes, clock=clock)


def small_tier(policy: str = "lru") -> MemoryTier:
    return MemoryTier(IDENTITY, block_bytes=100, capacity_bytes=3 * (72 + 20 + 100), policy=policy)


def store(tier: MemoryTier, *numbers: int, request_id: str | None = None, depth: int | None = None) -> list[bool]:
    buffers = [payload(number, 100) for number in numbers]
    depths = None if depth is None else [depth] * len(numbers)
    call = tier.start_put(make_keys(*numbers), buffers, request_id=request_id, depths=depths)
    return [result.is_good for result in call.results]


def held(tier: MemoryTier, *numbers: int) -> list[bool]:
    return [result.is_good for result in tier.start_contains(make_keys(*numbers)).results]


def test_the_longest_unused_block_leaves() -> None:
    tier = small_tier()
    store(tier, 1)
    store(tier, 2)
    store(tier, 3)
    tier.start_touch(make_keys(1))
    store(tier, 4)
    assert held(tier, 1, 2, 3, 4) == [True, False, True, True]
    assert tier.statistics().holdings.evicted_blocks == 1


def test_calls_of_one_request_are_one_use_and_its_deepest_block_leaves_first() -> None:
    tier = small_tier()
    store(tier, 1, request_id="r", depth=16)
    store(tier, 2, request_id="r", depth=32)
    store(tier, 3, request_id="other", depth=16)
    tier.start_touch(make_keys(1), request_id="r", depths=[16])
    store(tier, 4)
    assert held(tier, 1, 2, 3, 4) == [True, False, True, True]


def test_a_policy_may_refuse_what_was_used_once() -> None:
    tier = MemoryTier(IDENTITY, block_bytes=100, capacity_bytes=600, policy="picky:SecondUsePolicy")
    first = tier.start_put(make_keys(1), [payload(1, 100)])
    assert first.results[0].reason is Reason.NOT_ADMITTED
    tier.start_touch(make_keys(1))
    assert store(tier, 1) == [True]


def test_a_block_larger_than_the_capacity_is_refused() -> None:
    tier = small_tier()
    call = tier.start_put(make_keys(1), [payload(1, 1000)])
    assert call.results[0].reason is Reason.FULL


@pytest.mark.parametrize("position", [0, 9, 30, 60, 72, 92, 150])
def test_a_wrong_byte_is_a_miss_and_removed(position: int) -> None:
    tier = small_tier()
    store(tier, 1)
    stored = bytearray(tier.blocks[make_keys(1)[0]])
    stored[position] ^= 1
    tier.blocks[make_keys(1)[0]] = bytes(stored)
    result = tier.start_get_into(make_keys(1), [bytearray(100)]).results[0]
    assert not result.is_good
    assert result.reason is not None
    assert tier.statistics().removed_by_reason == {result.reason.value: 1}
    assert held(tier, 1) == [False]
    assert tier.statistics().holdings.used_bytes == 0


def test_it_is_opened_by_url() -> None:
    tier = open_tier("memory://?capacity=1MiB&policy=arc&timeout=2s", identity=IDENTITY, block_bytes=1000)
    assert isinstance(tier, MemoryTier)
    assert tier.statistics().holdings.capacity_bytes == 1 << 20
    assert tier.timeout_seconds == 2.0


@pytest.mark.parametrize(
    ("url", "message"),
    [
        ("memory://?capacity=1kB", "the capacity is 1000 bytes, but one block takes 1108"),
        ("memory://host", "a memory tier has no name"),
        ("memory://?capcity=1GB", "unknown option 'capcity'; did you mean 'capacity'"),
        ("memory://?policy=lrv", "unknown eviction policy 'lrv'; did you mean"),
        ("memory://?timeout=0", "timeout: '0' is no duration"),
        ("memory://?capacity=1MiB&capacity=2MiB", "option 'capacity' is given twice"),
    ],
)
def test_a_bad_url_is_refused_with_a_sentence(url: str, message: str) -> None:
    with pytest.raises(ConfigurationError, match=message):
        open_tier(url, identity=IDENTITY, block_bytes=1000)
