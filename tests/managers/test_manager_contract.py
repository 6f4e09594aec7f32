from __future__ import annotations

from typing import Any

from tiered_rig import BLOCK_BYTES, Slots

from aiokvoffload.keys import CacheIdentity
from aiokvoffload.managers.base import OffloadingManager
from aiokvoffload.managers.cpu import CPUOffloadingManager
from aiokvoffload.managers.reuse import FilterReusedOffloadingManager
from aiokvoffload.managers.tier_plan import TierPlan
from aiokvoffload.managers.tiered import TieredOffloadingManager
from aiokvoffload.testing.manager_contract import ManagerContract
from aiokvoffload.tiers.memory import MemoryTier


class TestCPUManagerWithLRU(ManagerContract):
    def make_manager(self, block_count: int, **options: Any) -> OffloadingManager:
        return CPUOffloadingManager(block_count, policy="lru", **options)


class TestCPUManagerWithARC(ManagerContract):
    def make_manager(self, block_count: int, **options: Any) -> OffloadingManager:
        return CPUOffloadingManager(block_count, policy="arc", **options)


class TestReuseFilter(ManagerContract):
    def make_manager(self, block_count: int, **options: Any) -> OffloadingManager:
        return FilterReusedOffloadingManager(CPUOffloadingManager(block_count, **options))


class TestTieredManager(ManagerContract):
    def make_manager(self, block_count: int, **options: Any) -> OffloadingManager:
        tier = MemoryTier(CacheIdentity(), block_bytes=BLOCK_BYTES, capacity_bytes=1 << 16, clock=options.get("clock"))
        backing = CPUOffloadingManager(block_count, **options)
        # Blocks that come back from a tier would be hits where the contract expects misses.
        plan = TierPlan(cascade="reused", min_uses=1_000)
        return TieredOffloadingManager(backing, [(tier, plan)], Slots(block_count))
