"""What an offloader has done and is doing."""

from __future__ import annotations

from dataclasses import dataclass

from aiokvoffload.managers.base import ManagerStatistics
from aiokvoffload.managers.tier_plan import TierUseStatistics


@dataclass(frozen=True, slots=True)
class OffloaderStatistics:
    """What an offloader has done and is doing.

    Attributes:
        manager: Where the slots are.
        queued_transfers: Not sent yet.
        sent_transfers: Sent and not landed.
        in_flight_bytes: Bytes sent and not landed.
        stored_bytes: Bytes landed in CPU memory.
        loaded_bytes: Bytes landed in GPU memory.
        store_seconds: Device time of the stores.
        load_seconds: Device time of the loads.
        memory_is_pinned: Whether the device copies CPU memory at full speed.
        joined_blocks: GPU blocks whose load joined a copy under way.
        fault: Why everything is now a miss and a refusal; None while all is well.
        tiers: Each tier below CPU memory.
    """

    manager: ManagerStatistics
    queued_transfers: int
    sent_transfers: int
    in_flight_bytes: int
    stored_bytes: int
    loaded_bytes: int
    store_seconds: float
    load_seconds: float
    joined_blocks: int
    memory_is_pinned: bool
    fault: str | None
    tiers: tuple[TierUseStatistics, ...] = ()
