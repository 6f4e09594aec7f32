from __future__ import annotations

import pytest

from aiokvoffload.policies.adaptive import AdaptivePolicy
from aiokvoffload.testing.policy_contract import PolicyContract


class TestAdaptive(PolicyContract):
    def make_policy(self, capacity: int) -> AdaptivePolicy:
        return AdaptivePolicy(capacity)


class TestAdaptiveWithShortRounds(PolicyContract):
    """The winner changes in the middle of everything."""

    @pytest.fixture(autouse=True)
    def _short_rounds(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr("aiokvoffload.policies.adaptive._MIN_ROUND_BLOCKS", 2)
        monkeypatch.setattr("aiokvoffload.policies.adaptive._MIN_SAMPLE", 1)

    def make_policy(self, capacity: int) -> AdaptivePolicy:
        return AdaptivePolicy(capacity, history_bytes_per_block=100_000, store_cost=0.1)
