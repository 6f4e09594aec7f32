"""The parts of an offloader, built from plain arguments."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field, replace

from aiokvoffload.clock import Clock
from aiokvoffload.devices.base import Device
from aiokvoffload.errors import ConfigurationError
from aiokvoffload.keys import CacheIdentity
from aiokvoffload.kv_caches import CacheShape, CanonicalKVCaches
from aiokvoffload.managers.base import OffloadingManager
from aiokvoffload.managers.cpu import CPUOffloadingManager
from aiokvoffload.managers.reuse import with_reuse_filter
from aiokvoffload.managers.tier_plan import TierPlan
from aiokvoffload.managers.tiered import TieredOffloadingManager
from aiokvoffload.memory.base import HostMemory, Report, ignore_progress
from aiokvoffload.memory.pinned import PinnedMemory
from aiokvoffload.memory.preparation import PreparationOptions
from aiokvoffload.offloader.deadlines import Deadlines
from aiokvoffload.offloader.subscriptions import EventHub
from aiokvoffload.policies.base import CachePolicy
from aiokvoffload.specs import Placement, check_placement
from aiokvoffload.tiers.base import Tier
from aiokvoffload.tiers.opening import open_tier
from aiokvoffload.transfers.assembly import build_worker, open_device, prepare_device, prepares_at_once
from aiokvoffload.transfers.base import TransferWorker
from aiokvoffload.transfers.pointers import SlotLayout
from aiokvoffload.transfers.worker import IN_FLIGHT_BYTES, STREAMS_PER_DIRECTION

TierChoice = str | Tier | tuple[str | Tier, TierPlan]
"""The URL of a tier, or an open one, which stays the caller's; and how it is used."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Parts:
    """What an offloader is made of.

    Attributes:
        cache: The KV cache.
        memory: The slots.
        manager: Decides.
        worker: Moves, in this process or in others.
        identity: What must agree for blocks to be shared.
        clock: Where deadlines are read.
        deadlines: How long anything may take.
        own_device: Closed with the rest.
        hub: Where the manager's events go.
        placement: Where blocks live.
        tiers: Those that are closed with the rest.
    """

    cache: CacheShape
    memory: HostMemory
    manager: OffloadingManager
    worker: TransferWorker
    identity: CacheIdentity
    clock: Clock
    deadlines: Deadlines
    own_device: Device | None = None
    hub: EventHub = field(default_factory=EventHub)
    placement: Placement = "inclusive"
    tiers: tuple[Tier, ...] = ()

    @property
    def prepares_at_once(self) -> bool:
        """Whether `prepare` takes no time; see `HostMemory.prepares_at_once`."""
        return self.memory.prepares_at_once

    def prepare(self, report: Report = ignore_progress) -> None:
        """Get everything ready for copies; see `HostMemory.prepare`."""
        self.memory.prepare(report)

    def close(self, *, has_copies_under_way: bool = False) -> None:
        """Give everything back; memory that copies still touch stays mapped until they let go of it."""
        for tier in self.tiers:
            tier.close(drain_seconds=0.0)
        self.worker.close()
        if not has_copies_under_way:
            self.memory.close()
        if self.own_device is not None:
            self.own_device.close()


@dataclass(frozen=True, slots=True, kw_only=True)
class LocalParts(Parts):
    """What an offloader is made of that moves the bytes itself; see `build_parts`.

    Attributes:
        layout: How GPU blocks lie in slots.
        device: Does the copying.
    """

    layout: SlotLayout
    device: Device

    @property
    def prepares_at_once(self) -> bool:
        """Whether `prepare` takes no time, of memory and device."""
        return self.memory.prepares_at_once and prepares_at_once(self.layout, self.device)

    def prepare(self, report: Report = ignore_progress) -> None:
        """Get memory and device ready for copies.

        Raises:
            ConfigurationError: The machine cannot give that much memory.
            DeviceError: The device cannot be used any more.
        """
        prepare_device(self.layout, self.device, report)
        self.memory.prepare(report)


class SlotViews:
    """The bytes of slots, as tiers read and write them.

    Args:
        memory: Where the slots are.
        group_slot_bytes: How much of a slot each KV group fills.
    """

    def __init__(self, memory: HostMemory, group_slot_bytes: Sequence[int]) -> None:
        self._memory = memory
        self._group_slot_bytes = group_slot_bytes

    @property
    def block_bytes(self) -> set[int]:
        """The sizes that blocks have."""
        return set(self._group_slot_bytes)

    def group_bytes(self, group: int) -> int:
        """Return the size of a block of a KV group."""
        return self._group_slot_bytes[group]

    def view(self, slot: int, group: int) -> memoryview:
        """Return the bytes of a slot that a block of a KV group fills."""
        start = slot * self._memory.slot_stride_bytes
        return self._memory.buffer[start : start + self._group_slot_bytes[group]].data


def build_parts(
    kv_caches: CanonicalKVCaches,
    *,
    cpu_bytes: int,
    block_size_factor: int,
    identity: CacheIdentity,
    policy: str | type[CachePolicy] | CachePolicy,
    store_threshold: int,
    device: Device | str | None,
    compute_stream: object | None,
    deadlines: Deadlines,
    clock: Clock,
    streams_per_direction: int = STREAMS_PER_DIRECTION,
    in_flight_bytes: int = IN_FLIGHT_BYTES,
    numa_node: int | None = None,
    placement: Placement = "inclusive",
    tiers: Sequence[TierChoice] = (),
    recompute_tokens_per_second: float | None = None,
) -> LocalParts:
    """Build what an offloader is made of, yet to be prepared; arguments as in `open_offloader`."""
    check_placement(placement, block_size_factor)
    if streams_per_direction < 1 or in_flight_bytes < 1:
        raise ConfigurationError(
            f"streams_per_direction is {streams_per_direction} and in_flight_bytes {in_flight_bytes}; "
            "both must be at least 1"
        )
    layout = SlotLayout(kv_caches, block_size_factor)
    block_count = cpu_bytes // layout.slot_bytes
    if block_count < 1:
        raise ConfigurationError(
            f"cpu_bytes is {cpu_bytes}, but one block of {block_size_factor} GPU blocks needs {layout.slot_bytes}"
        )
    identity = identity_of(identity, layout.shape)
    hub = EventHub()
    cpu_manager = build_cpu_manager(layout.shape, block_count, policy=policy, placement=placement, hub=hub, clock=clock)
    with ExitStack() as stack:
        used_device, stream = open_device(kv_caches, device, compute_stream, stack)
        options = PreparationOptions(numa_node=numa_node)
        memory = PinnedMemory(block_count, layout.slot_bytes, used_device, options=options)
        stack.callback(memory.close)
        worker = build_worker(
            layout,
            memory,
            used_device,
            clock,
            compute_stream=stream,
            landing_seconds=deadlines.landing_seconds,
            streams_per_direction=streams_per_direction,
            in_flight_bytes=in_flight_bytes,
        )
        manager, own_tiers = with_tiers(
            cpu_manager,
            tiers,
            SlotViews(memory, layout.group_slot_bytes),
            identity=identity,
            recompute_tokens_per_second=recompute_tokens_per_second,
            clock=clock,
        )
        for tier in own_tiers:
            stack.callback(tier.close)
        manager = with_reuse_filter(manager, store_threshold)
        stack.pop_all()
    return LocalParts(
        cache=layout.shape,
        layout=layout,
        memory=memory,
        device=used_device,
        own_device=None if used_device is device else used_device,
        manager=manager,
        worker=worker,
        identity=identity,
        clock=clock,
        deadlines=deadlines,
        hub=hub,
        placement=placement,
        tiers=own_tiers,
    )


def build_cpu_manager(
    cache: CacheShape,
    block_count: int,
    *,
    policy: str | type[CachePolicy] | CachePolicy,
    placement: Placement,
    hub: EventHub,
    clock: Clock,
) -> CPUOffloadingManager:
    """Return what decides over `block_count` slots; arguments as in `open_offloader`."""
    return CPUOffloadingManager(
        block_count,
        policy=policy,
        groups=cache.groups,
        block_size_factor=cache.block_size_factor,
        blocks_above=cache.block_count if placement == "exclusive" else 0,
        event_sink=hub,
        clock=clock,
    )


def with_tiers(
    manager: CPUOffloadingManager,
    tiers: Sequence[TierChoice],
    slots: SlotViews,
    *,
    identity: CacheIdentity,
    recompute_tokens_per_second: float | None,
    clock: Clock,
) -> tuple[OffloadingManager, tuple[Tier, ...]]:
    """Return a manager that also uses tiers, and those of them that are to be closed; arguments as in `open_offloader`.

    Raises:
        ConfigurationError: A tier cannot be opened; then none stays open.
    """
    if not tiers:
        return manager, ()
    own_tiers: list[Tier] = []
    planned: list[tuple[Tier, TierPlan]] = []
    with ExitStack() as stack:
        for choice in tiers:
            tier, plan = _open_tier(choice, identity, slots.block_bytes, clock)
            if tier is not _given_tier(choice):
                own_tiers.append(tier)
                stack.callback(tier.close)
            planned.append((tier, plan))
        tiered = TieredOffloadingManager(
            manager, planned, slots, recompute_tokens_per_second=recompute_tokens_per_second
        )
        stack.pop_all()
    return tiered, tuple(own_tiers)


def identity_of(given: CacheIdentity, cache: CacheShape) -> CacheIdentity:
    """Return an identity with what follows from the caches filled in."""
    return replace(given, page_bytes=cache.group_page_bytes, block_tokens=cache.offloaded_block_tokens)


def _given_tier(choice: TierChoice) -> str | Tier:
    return choice[0] if isinstance(choice, tuple) else choice


def _open_tier(
    choice: TierChoice, identity: CacheIdentity, block_bytes: set[int], clock: Clock
) -> tuple[Tier, TierPlan]:
    plan = choice[1] if isinstance(choice, tuple) else TierPlan()
    given = _given_tier(choice)
    if isinstance(given, str):
        given = open_tier(given, identity=identity, block_bytes=block_bytes, clock=clock)
    return given, plan
