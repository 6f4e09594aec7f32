from __future__ import annotations

from aiokvoffload.policies.lru import LRUPolicy
from aiokvoffload.testing.models import LRUModel
from aiokvoffload.testing.policy_contract import PolicyContract


class TestLRU(PolicyContract):
    def make_policy(self, capacity: int) -> LRUPolicy:
        return LRUPolicy(capacity)


class TestLRUModel(PolicyContract):
    def make_policy(self, capacity: int) -> LRUModel:
        return LRUModel(capacity)
