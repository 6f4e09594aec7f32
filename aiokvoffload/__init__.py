"""Async offloading of LLM KV-cache blocks from GPU memory to CPU memory and below.

Names are imported when they are first used: bookkeeping (keys, specs, policies, managers) needs no torch.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from aiokvoffload.clock import Clock, SystemClock
    from aiokvoffload.cluster import WorkerPort, join_offloader
    from aiokvoffload.errors import (
        BlocksInFlightError,
        ClosedError,
        ConfigurationError,
        DeviceError,
        InvalidRequestError,
        LayoutError,
        OffloadError,
        PartialCopyError,
        RankLostError,
        StateError,
        TraceError,
        WrongThreadError,
    )
    from aiokvoffload.events import EventKind, OffloadingEvent
    from aiokvoffload.keys import CacheIdentity, OffloadKey, make_offload_key, offload_keys
    from aiokvoffload.kv_caches import CanonicalKVCaches, KVGroup
    from aiokvoffload.managers.cpu import CPUOffloadingManager
    from aiokvoffload.managers.reuse import FilterReusedOffloadingManager
    from aiokvoffload.managers.tier_plan import TierPlan
    from aiokvoffload.managers.tiered import TieredOffloadingManager
    from aiokvoffload.offloader import (
        ALREADY_DONE,
        Deadlines,
        LoadTicket,
        Offloader,
        OffloaderStatistics,
        SyncOffloader,
        TransferHandle,
        open_offloader,
    )
    from aiokvoffload.specs import (
        Completion,
        CPULoadStoreSpec,
        GPULoadStoreSpec,
        LookupResult,
        PrepareLoadOutput,
        PrepareStoreOutput,
        ReqContext,
        StoreOutcome,
        TierFilter,
        TransferResult,
    )
    from aiokvoffload.tiers.opening import open_tier

__all__ = [
    "ALREADY_DONE",
    "BlocksInFlightError",
    "CPULoadStoreSpec",
    "CPUOffloadingManager",
    "CacheIdentity",
    "CanonicalKVCaches",
    "Clock",
    "ClosedError",
    "Completion",
    "ConfigurationError",
    "Deadlines",
    "DeviceError",
    "EventKind",
    "FilterReusedOffloadingManager",
    "GPULoadStoreSpec",
    "InvalidRequestError",
    "KVGroup",
    "LayoutError",
    "LoadTicket",
    "LookupResult",
    "OffloadError",
    "OffloadKey",
    "Offloader",
    "OffloaderStatistics",
    "OffloadingEvent",
    "PartialCopyError",
    "PrepareLoadOutput",
    "PrepareStoreOutput",
    "RankLostError",
    "ReqContext",
    "StateError",
    "StoreOutcome",
    "SyncOffloader",
    "SystemClock",
    "TierFilter",
    "TierPlan",
    "TieredOffloadingManager",
    "TraceError",
    "TransferHandle",
    "TransferResult",
    "WorkerPort",
    "WrongThreadError",
    "join_offloader",
    "make_offload_key",
    "offload_keys",
    "open_offloader",
    "open_tier",
]

_NAMES_OF = {
    "clock": "Clock SystemClock",
    "cluster": "WorkerPort join_offloader",
    "errors": "BlocksInFlightError ClosedError ConfigurationError DeviceError InvalidRequestError "
    "LayoutError OffloadError PartialCopyError RankLostError StateError TraceError WrongThreadError",
    "events": "EventKind OffloadingEvent",
    "keys": "CacheIdentity OffloadKey make_offload_key offload_keys",
    "kv_caches": "CanonicalKVCaches KVGroup",
    "managers.cpu": "CPUOffloadingManager",
    "managers.reuse": "FilterReusedOffloadingManager",
    "managers.tier_plan": "TierPlan",
    "managers.tiered": "TieredOffloadingManager",
    "offloader": "ALREADY_DONE Deadlines LoadTicket Offloader "
    "OffloaderStatistics SyncOffloader TransferHandle open_offloader",
    "specs": "CPULoadStoreSpec Completion GPULoadStoreSpec LookupResult PrepareLoadOutput "
    "PrepareStoreOutput ReqContext StoreOutcome TierFilter TransferResult",
    "tiers.opening": "open_tier",
}
_HOME_OF = {name: home for home, names in _NAMES_OF.items() for name in names.split()}


def __getattr__(name: str) -> object:
    home = _HOME_OF.get(name)
    if home is None:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(f"{__name__}.{home}"), name)


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
