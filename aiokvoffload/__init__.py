"""Async offloading of LLM KV-cache blocks from GPU memory to CPU memory and below.

Names are imported when they are first used: bookkeeping (keys, specs, policies, managers) needs no torch.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from aiokvoffload.clock import Clock, SystemClock
    from aiokvoffload.errors import (
        BlocksInFlightError,
        ClosedError,
        ConfigurationError,
        DeviceError,
        InvalidRequestError,
        LayoutError,
        OffloadError,
        StateError,
        TraceError,
        WrongThreadError,
    )
    from aiokvoffload.events import EventKind, OffloadingEvent
    from aiokvoffload.keys import CacheIdentity, OffloadKey, make_offload_key, offload_keys
    from aiokvoffload.kv_caches import CanonicalKVCaches, KVGroup
    from aiokvoffload.managers.cpu import CPUOffloadingManager
    from aiokvoffload.managers.reuse import FilterReusedOffloadingManager
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

_HOME_OF = {
    "ALREADY_DONE": "offloader",
    "BlocksInFlightError": "errors",
    "CPULoadStoreSpec": "specs",
    "CPUOffloadingManager": "managers.cpu",
    "CacheIdentity": "keys",
    "CanonicalKVCaches": "kv_caches",
    "Clock": "clock",
    "ClosedError": "errors",
    "Completion": "specs",
    "ConfigurationError": "errors",
    "Deadlines": "offloader",
    "DeviceError": "errors",
    "EventKind": "events",
    "FilterReusedOffloadingManager": "managers.reuse",
    "GPULoadStoreSpec": "specs",
    "InvalidRequestError": "errors",
    "KVGroup": "kv_caches",
    "LayoutError": "errors",
    "LoadTicket": "offloader",
    "LookupResult": "specs",
    "OffloadError": "errors",
    "OffloadKey": "keys",
    "Offloader": "offloader",
    "OffloaderStatistics": "offloader",
    "OffloadingEvent": "events",
    "PrepareLoadOutput": "specs",
    "PrepareStoreOutput": "specs",
    "ReqContext": "specs",
    "StateError": "errors",
    "StoreOutcome": "specs",
    "SyncOffloader": "offloader",
    "SystemClock": "clock",
    "TierFilter": "specs",
    "TraceError": "errors",
    "TransferHandle": "offloader",
    "TransferResult": "specs",
    "WrongThreadError": "errors",
    "make_offload_key": "keys",
    "offload_keys": "keys",
    "open_offloader": "offloader",
}

__all__ = list(_HOME_OF)  # noqa: PLE0604  the names above


def __getattr__(name: str) -> object:
    home = _HOME_OF.get(name)
    if home is None:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(f"{__name__}.{home}"), name)


def __dir__() -> list[str]:
    return sorted({*globals(), *_HOME_OF})
