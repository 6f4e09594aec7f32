from __future__ import annotations

from aiokvoffload.policies.arc import ARCPolicy
from aiokvoffload.testing.models import ARCModel
from aiokvoffload.testing.policy_contract import PolicyContract


class TestARC(PolicyContract):
    def make_policy(self, capacity: int) -> ARCPolicy:
        return ARCPolicy(capacity)


class TestARCModel(PolicyContract):
    def make_policy(self, capacity: int) -> ARCModel:
        return ARCModel(capacity)
