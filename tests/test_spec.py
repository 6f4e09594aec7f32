from __future__ import annotations

import re
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch

from aiokvoffload.config import EngineShape, OffloadingConfig
from aiokvoffload.devices.base import CopyPlan, Device, Direction, Event, Stream
from aiokvoffload.devices.host import HostDevice
from aiokvoffload.errors import ClosedError, ConfigurationError, DeviceError, StateError
from aiokvoffload.events import EventKind, OffloadingEvent
from aiokvoffload.keys import make_offload_key
from aiokvoffload.kv_caches import CanonicalKVCacheRef, CanonicalKVCaches, CanonicalKVCacheTensor, KVGroup
from aiokvoffload.managers.base import OffloadingManager
from aiokvoffload.managers.cpu import CPUOffloadingManager
from aiokvoffload.managers.reuse import FilterReusedOffloadingManager
from aiokvoffload.spec import CPUOffloadingSpec, OffloadingSpec, OffloadingSpecFactory
from aiokvoffload.specs import CPULoadStoreSpec, GPULoadStoreSpec, LookupResult
from aiokvoffload.testing.clock import ManualClock
from aiokvoffload.testing.device import ManualDevice
from aiokvoffload.transfers.base import Transfer
from aiokvoffload.transfers.worker import OffloadingWorker

KEYS = [make_offload_key(bytes([number]) * 16) for number in range(8)]
BLOCK_COUNT = 12
LAYER_BYTES = 64
LAYER_COUNT = 2
BLOCK_BYTES = LAYER_COUNT * LAYER_BYTES

PLUGIN = """
from dataclasses import dataclass

from aiokvoffload.config import OffloadingConfig
from aiokvoffload.spec import CPUOffloadingSpec, OffloadingSpec


class PluggedSpec(CPUOffloadingSpec):
    pass


class UnfinishedSpec(OffloadingSpec):
    def build_manager(self):
        raise NotImplementedError


class Unrelated:
    pass
"""


@dataclass(frozen=True, slots=True, kw_only=True)
class TieredConfig(OffloadingConfig):
    tier_bytes: int = 0


class TieredSpec(CPUOffloadingSpec):
    config_class = TieredConfig


def config_of(slot_count: int = 4, **values: Any) -> OffloadingConfig:
    factor = int(values.get("block_size_factor", 1))
    return OffloadingConfig.from_mapping({"cpu_bytes_to_use": slot_count * factor * BLOCK_BYTES, **values})


def engine_shape(**changes: Any) -> EngineShape:
    sizes: dict[str, Any] = {
        "block_tokens": 16,
        "group_block_tokens": (16,),
        "block_count": BLOCK_COUNT,
        "kv_cache_bytes": BLOCK_COUNT * BLOCK_BYTES,
    }
    return EngineShape(**{**sizes, **changes})


def layers_of(count: int = LAYER_COUNT, block_count: int = BLOCK_COUNT) -> list[torch.Tensor]:
    return [
        torch.randint(0, 256, (block_count, LAYER_BYTES), dtype=torch.uint8, generator=torch.Generator().manual_seed(n))
        for n in range(count)
    ]


def kv_caches_of(groups: tuple[KVGroup, ...] = (), block_count: int = BLOCK_COUNT) -> CanonicalKVCaches:
    return CanonicalKVCaches.from_layers(layers_of(block_count=block_count), groups=groups)


def pinned_ranges_of(device: ManualDevice) -> int:
    """How many ranges could not be pinned again, of the one that a spec pins."""
    return len(device._pinned._ranges) if hasattr(device._pinned, "_ranges") else 0


@pytest.fixture
def factory() -> OffloadingSpecFactory:
    return OffloadingSpecFactory()


@pytest.fixture
def device() -> Iterator[ManualDevice]:
    manual = ManualDevice(auto_land=True)
    yield manual
    manual.close()


@pytest.fixture
def plugin(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    """Name of a module with specs that nobody has imported."""
    name = "offloading_spec_plugin"
    (tmp_path / f"{name}.py").write_text(PLUGIN)
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.delitem(sys.modules, name, raising=False)
    return name
