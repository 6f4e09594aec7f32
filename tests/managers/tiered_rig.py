"""A tiered manager over tiers that work one step at a time, and the bytes of its slots."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np

from aiokvoffload.events import OffloadingEvent
from aiokvoffload.keys import CacheIdentity, OffloadKey
from aiokvoffload.managers.cpu import CPUOffloadingManager
from aiokvoffload.managers.tier_plan import TierPlan
from aiokvoffload.managers.tiered import TieredOffloadingManager
from aiokvoffload.policies.base import CachePolicy
from aiokvoffload.specs import Completion, PrepareLoadOutput, ReqContext
from aiokvoffload.testing.clock import ManualClock
from aiokvoffload.testing.manual_tier import ManualTier
from aiokvoffload.testing.strategies import make_keys

BLOCK_BYTES = 16


class Slots:
    """The bytes of some slots.

    Args:
        slot_count: How many.
    """

    def __init__(self, slot_count: int) -> None:
        self.rows = np.zeros((slot_count, BLOCK_BYTES), dtype=np.uint8)

    def group_bytes(self, group: int) -> int:
        return BLOCK_BYTES

    def view(self, slot: int, group: int) -> memoryview:
        view: memoryview = self.rows[slot].data
        return view


def content(key: OffloadKey) -> list[int]:
    return list((key * BLOCK_BYTES)[:BLOCK_BYTES])


@dataclass
class Rig:
    """What the tests use."""

    manager: TieredOffloadingManager
    tiers: list[ManualTier]
    slots: Slots
    clock: ManualClock
    events: list[OffloadingEvent] = field(default_factory=list)
    request_count: int = 0

    @property
    def tier(self) -> ManualTier:
        return self.tiers[0]

    def context(self) -> ReqContext:
        self.request_count += 1
        return ReqContext(f"request {self.request_count}")

    def store(self, *numbers: int, ctx: ReqContext | None = None) -> None:
        """Store blocks in CPU memory; whether they are written down is another matter."""
        ticket = self.manager.prepare_store_nowait(
            make_keys(*numbers), ctx or self.context(), when_full="leading", depths=range(1, len(numbers) + 1)
        )
        for key, slot in zip(ticket.keys_to_store, ticket.slots, strict=True):
            self.slots.rows[slot] = content(key)
        assert self.manager.complete_store_nowait(ticket) is Completion.APPLIED

    def put_into_tier(self, *numbers: int, tier: int = 0) -> None:
        """Let a tier have blocks that CPU memory may not have."""
        keys = make_keys(*numbers)
        call = self.tiers[tier].start_put(keys, [bytes(content(key)) for key in keys])
        self.tiers[tier].land()
        assert all(result.is_good for result in call.results)

    def tier_has(self, *numbers: int, tier: int = 0) -> list[bool]:
        return [key in self.tiers[tier].blocks for key in make_keys(*numbers)]

    def load(self, *numbers: int, ctx: ReqContext | None = None) -> PrepareLoadOutput:
        return self.manager.prepare_load_nowait(make_keys(*numbers), ctx or self.context(), take="leading")

    def land(self, count: int) -> None:
        """Let the first tier work on so many blocks, one after the other."""
        for _ in range(count):
            self.tier.land(1)

    def land_all(self) -> None:
        """Let the tiers work until nothing is left to do."""
        while any(tier.waiting_count or tier.begun_count for tier in self.tiers):
            for tier in self.tiers:
                tier.land()
            self.manager.poll_nowait()

    def finish(self, ticket: PrepareLoadOutput) -> int:
        """Land everything, check the bytes of a load, end it, and return its tokens."""
        self.land_all()
        assert not ticket.is_waiting
        self.check_bytes(ticket)
        tokens = ticket.token_count
        self.manager.complete_load_nowait(ticket)
        return tokens

    def check_bytes(self, ticket: PrepareLoadOutput) -> None:
        for key, slot in zip(ticket.keys, ticket.slots, strict=True):
            assert self.slots.rows[slot].tolist() == content(key)

    def assert_at_rest(self) -> None:
        """Nothing is used any more."""
        statistics = self.manager.statistics()
        assert (statistics.pinned, statistics.writing, statistics.promoting, statistics.leased_without_key) == (0,) * 4
        assert statistics.waiting_loads == 0
        assert self.manager.is_at_rest
        for counts in self.manager.tier_statistics():
            assert (counts.reading_bytes, counts.writing_bytes, counts.waiting_write_bytes) == (0, 0, 0)


def make_rig(
    slot_count: int = 8,
    *plans: TierPlan,
    speed: float | None = None,
    policy: str | type[CachePolicy] = "lru",
    tier_blocks: Sequence[int] = (1000, 1000, 1000),
) -> Rig:
    clock = ManualClock(start=100.0)
    events: list[OffloadingEvent] = []
    slots = Slots(slot_count)
    tiers = [
        ManualTier(
            CacheIdentity(),
            block_bytes=BLOCK_BYTES,
            capacity_bytes=count * (BLOCK_BYTES + 200),
            clock=clock,
            url=f"memory://{number}",
        )
        for number, (_, count) in enumerate(zip(plans or (TierPlan(),), tier_blocks, strict=False))
    ]
    manager = TieredOffloadingManager(
        CPUOffloadingManager(slot_count, policy=policy, event_sink=events.append, clock=clock),
        list(zip(tiers, plans or (TierPlan(),), strict=True)),
        slots,
        recompute_tokens_per_second=speed,
    )
    return Rig(manager, tiers, slots, clock, events)
