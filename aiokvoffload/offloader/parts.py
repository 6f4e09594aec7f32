"""The parts of an offloader, built from plain arguments."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field, replace

from aiokvoffload.clock import Clock
from aiokvoffload.devices.base import DEVICES, Device, Stream, check_copies, device_for_tensors
from aiokvoffload.errors import ConfigurationError
from aiokvoffload.keys import CacheIdentity
from aiokvoffload.kv_caches import CanonicalKVCaches
from aiokvoffload.managers.base import OffloadingManager
from aiokvoffload.managers.cpu import CPUOffloadingManager
from aiokvoffload.managers.reuse import with_reuse_filter
from aiokvoffload.managers.tier_plan import TierPlan
from aiokvoffload.managers.tiered import TieredOffloadingManager
from aiokvoffload.memory.base import HostMemory
from aiokvoffload.memory.pinned import PinnedMemory
from aiokvoffload.memory.preparation import PreparationOptions
from aiokvoffload.offloader.deadlines import Deadlines
from aiokvoffload.offloader.subscriptions import EventHub
from aiokvoffload.policies.base import CachePolicy
from aiokvoffload.specs import Placement, check_placement
from aiokvoffload.tiers.base import Tier
from aiokvoffload.tiers.opening import open_tier
from aiokvoffload.transfers.assembly import build_worker
from aiokvoffload.transfers.pointers import SlotLayout
from aiokvoffload.transfers.worker import IN_FLIGHT_BYTES, STREAMS_PER_DIRECTION, OffloadingWorker

TierChoice = str | Tier | tuple[str | Tier, TierPlan]
"""The URL of a tier, or an open one, which stays the caller's; and how it is used."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Parts:
    """What an offloader is made of; see `build_parts`."""

    layout: SlotLayout
    memory: HostMemory
    device: Device
    is_own_device: bool
    manager: OffloadingManager
    worker: OffloadingWorker
    identity: CacheIdentity
    compute_stream: Stream | None
    clock: Clock
    deadlines: Deadlines
    hub: EventHub = field(default_factory=EventHub)
    placement: Placement = "inclusive"
    tiers: tuple[Tier, ...] = ()
    """Those that the offloader closes."""

    def discard(self) -> None:
        """Give everything back before an offloader was made of it."""
        for tier in self.tiers:
            tier.close(drain_seconds=0.0)
        self.memory.close()
        if self.is_own_device:
            self.device.close()


class SlotViews:
    """The bytes of slots, as tiers read and write them.

    Args:
        memory: Where the slots are.
        group_slot_bytes: How much of a slot each KV group fills.
    """

    def __init__(self, memory: HostMemory, group_slot_bytes: Sequence[int]) -> None:
        self._memory = memory
        self._group_slot_bytes = group_slot_bytes

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
    placement: Placement = "inclusive",
    tiers: Sequence[TierChoice] = (),
    recompute_tokens_per_second: float | None = None,
    numa_node: int | None = None,
) -> Parts:
    """Build what an offloader is made of, its memory not yet prepared; arguments as in `open_offloader`."""
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
    hub = EventHub()
    identity = replace(
        identity,
        page_bytes=kv_caches.group_page_bytes,
        block_tokens=tuple(group.block_tokens * block_size_factor for group in kv_caches.groups),
    )
    manager: OffloadingManager
    manager = cpu_manager = CPUOffloadingManager(
        block_count,
        policy=policy,
        groups=kv_caches.groups,
        block_size_factor=block_size_factor,
        blocks_above=kv_caches.block_count if placement == "exclusive" else 0,
        event_sink=hub,
        clock=clock,
    )
    own_tiers: list[Tier] = []
    with ExitStack() as stack:
        if isinstance(device, Device):
            used_device = device
        else:
            tensors = kv_caches.device
            used_device = (
                device_for_tensors(tensors.type, tensors.index)
                if device is None
                else DEVICES.resolve(device).for_tensors(tensors.index)
            )
            stack.callback(used_device.close)
        check_copies(used_device, kv_caches.device)
        if compute_stream is None and kv_caches.device.type != "cpu":
            raise ConfigurationError(
                f"KV caches on {kv_caches.device} need compute_stream, such as torch.cuda.current_stream(): without it "
                "copies would not wait for the engine's kernels"
            )
        stream = None if compute_stream is None else used_device.adopt_stream(compute_stream)
        options = PreparationOptions(numa_node=numa_node)
        memory = PinnedMemory(block_count, layout.slot_bytes, used_device, options=options)
        stack.callback(memory.close)
        worker = build_worker(
            layout,
            memory,
            used_device,
            clock,
            landing_seconds=deadlines.landing_seconds,
            streams_per_direction=streams_per_direction,
            in_flight_bytes=in_flight_bytes,
        )
        if tiers:
            planned = []
            for choice in tiers:
                tier, plan = _open_tier(choice, identity, layout.group_slot_bytes, clock)
                if tier is not _given_tier(choice):
                    own_tiers.append(tier)
                    stack.callback(tier.close)
                planned.append((tier, plan))
            manager = TieredOffloadingManager(
                cpu_manager,
                planned,
                SlotViews(memory, layout.group_slot_bytes),
                recompute_tokens_per_second=recompute_tokens_per_second,
            )
        manager = with_reuse_filter(manager, store_threshold)
        stack.pop_all()
    return Parts(
        layout=layout,
        memory=memory,
        device=used_device,
        is_own_device=used_device is not device,
        manager=manager,
        worker=worker,
        identity=identity,
        compute_stream=stream,
        clock=clock,
        deadlines=deadlines,
        hub=hub,
        placement=placement,
        tiers=tuple(own_tiers),
    )


def _given_tier(choice: TierChoice) -> str | Tier:
    return choice[0] if isinstance(choice, tuple) else choice


def _open_tier(
    choice: TierChoice, identity: CacheIdentity, group_slot_bytes: Sequence[int], clock: Clock
) -> tuple[Tier, TierPlan]:
    plan = choice[1] if isinstance(choice, tuple) else TierPlan()
    given = _given_tier(choice)
    if isinstance(given, str):
        given = open_tier(given, identity=identity, block_bytes=set(group_slot_bytes), clock=clock)
    return given, plan
