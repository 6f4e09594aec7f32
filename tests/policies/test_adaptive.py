from __future__ import annotations

import pytest

from aiokvoffload.errors import ConfigurationError
from aiokvoffload.policies.adaptive import AdaptivePolicy
from aiokvoffload.policies.base import Access
from aiokvoffload.policies.metadata import MetadataCache
from aiokvoffload.testing.policy_contract import PolicyContract, count_instructions, order_of
from aiokvoffload.testing.strategies import make_keys


class TestAdaptive(PolicyContract):
    def make_policy(self, capacity: int) -> AdaptivePolicy:
        return AdaptivePolicy(capacity)


class TestAdaptiveWithShortRounds(PolicyContract):
    """The winner changes in the middle of everything."""

    @pytest.fixture(autouse=True)
    def _short_rounds(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr("aiokvoffload.policies.tournament._MIN_ROUND_BLOCKS", 2)
        monkeypatch.setattr("aiokvoffload.policies.tournament._MIN_SAMPLE", 1)

    def make_policy(self, capacity: int) -> AdaptivePolicy:
        return AdaptivePolicy(capacity, history_bytes_per_block=100_000, store_cost=0.1)


def repeat_and_scan(cache: MetadataCache, request_count: int) -> None:
    """Every other request is one of a few that come back, the others never do."""
    for tick in range(1, request_count + 1):
        first = tick % 40 // 2 * 10 if tick % 2 else 10_000 + 30 * tick
        keys = make_keys(*range(first, first + (10 if tick % 2 else 24)))
        cache.request(keys, Access(tick, depths=range(16, 16 * (len(keys) + 1), 16)))


def test_a_better_candidate_takes_over() -> None:
    policy = AdaptivePolicy(240)
    cache = MetadataCache(policy)
    repeat_and_scan(cache, 200)
    assert policy.winner != "lru"
    early = cache.counts.blocks_hit
    repeat_and_scan(cache, 2000)
    assert cache.counts.blocks_hit - early > 8000


def test_a_cost_of_stores_saves_stores() -> None:
    free, dear = (MetadataCache(AdaptivePolicy(240, store_cost=cost)) for cost in (0.0, 0.5))
    for cache in (free, dear):
        repeat_and_scan(cache, 2000)
    assert dear.counts.blocks_stored <= free.counts.blocks_stored
    assert dear.counts.blocks_stored < 0.1 * dear.counts.blocks_looked_up
    assert dear.counts.blocks_hit >= 0.95 * free.counts.blocks_hit


def test_after_a_change_blocks_move_over_in_slices() -> None:
    policy = AdaptivePolicy(400)
    for tick in range(1, 41):
        slots = range(10 * tick - 10, 10 * tick)
        policy.insert(slots, make_keys(*slots), Access(tick))
        policy.unpin(slots)
    order = order_of(policy)
    policy._winner = policy._tournament.winner = 1
    policy._current = 1
    assert order_of(policy) == order
    policy.touch([order[-1]], Access(50))
    assert 0 < policy._lines[0].evictable_count < 399
    assert sorted(order_of(policy)) == sorted(order)
    for tick in range(51, 200):
        policy.touch([order[-1]], Access(tick))
    assert not policy._lines[0].evictable_count
    assert order_of(policy) == order


@pytest.mark.parametrize("history_bytes", [0, 300, 1024])
def test_shadows_and_ghosts_stay_within_their_memory(history_bytes: int) -> None:
    policy = AdaptivePolicy(240, history_bytes_per_block=history_bytes)
    cache = MetadataCache(policy)
    repeat_and_scan(cache, 500)
    assert policy.history_bytes <= 240 * history_bytes
    assert policy.history_bytes >= 0.8 * 240 * history_bytes


def test_values_that_cannot_work_are_refused() -> None:
    with pytest.raises(ConfigurationError, match=r"store_cost is -0\.5"):
        AdaptivePolicy(4, store_cost=-0.5)
    with pytest.raises(ConfigurationError, match="history_bytes_per_block is -1"):
        AdaptivePolicy(4, history_bytes_per_block=-1)


def test_the_same_requests_lead_to_the_same_end() -> None:
    ends = []
    for _ in range(2):
        policy = AdaptivePolicy(240)
        repeat_and_scan(MetadataCache(policy), 500)
        ends.append((policy.winner, order_of(policy), policy._tournament.scores.tolist()))
    assert ends[0] == ends[1]


def test_a_giant_request_costs_the_next_one_nothing() -> None:
    def cost_after(block_count: int) -> int:
        policy = AdaptivePolicy(1_000)
        policy.miss(make_keys(*range(block_count)), Access(1, depths=range(block_count)))
        return count_instructions(lambda: policy.miss(make_keys(*range(40)), Access(2, depths=range(40))))

    assert cost_after(8_000) < 2 * cost_after(40)
