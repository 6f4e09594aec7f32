from __future__ import annotations

from typing import Any

from aiokvoffload.managers.base import OffloadingManager
from aiokvoffload.managers.cpu import CPUOffloadingManager
from aiokvoffload.managers.reuse import FilterReusedOffloadingManager
from aiokvoffload.testing.manager_contract import ManagerContract


class TestCPUManagerWithLRU(ManagerContract):
    def make_manager(self, block_count: int, **options: Any) -> OffloadingManager:
        return CPUOffloadingManager(block_count, policy="lru", **options)


class TestCPUManagerWithARC(ManagerContract):
    def make_manager(self, block_count: int, **options: Any) -> OffloadingManager:
        return CPUOffloadingManager(block_count, policy="arc", **options)


class TestReuseFilter(ManagerContract):
    def make_manager(self, block_count: int, **options: Any) -> OffloadingManager:
        return FilterReusedOffloadingManager(CPUOffloadingManager(block_count, **options))
