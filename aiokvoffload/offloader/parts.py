"""The parts of an offloader, built from plain arguments."""

from __future__ import annotations

from contextlib import ExitStack
from dataclasses import dataclass, field, replace

from aiokvoffload.clock import Clock
from aiokvoffload.devices.base import DEVICES, Device, device_for_tensors
from aiokvoffload.errors import ConfigurationError
from aiokvoffload.keys import CacheIdentity
from aiokvoffload.kv_caches import CacheShape, CanonicalKVCaches
from aiokvoffload.managers.base import OffloadingManager
from aiokvoffload.managers.cpu import CPUOffloadingManager
from aiokvoffload.managers.reuse import with_reuse_filter
from aiokvoffload.memory.base import HostMemory
from aiokvoffload.memory.pinned import PinnedMemory
from aiokvoffload.memory.preparation import PreparationOptions
from aiokvoffload.offloader.deadlines import Deadlines
from aiokvoffload.offloader.subscriptions import EventHub
from aiokvoffload.policies.base import CachePolicy
from aiokvoffload.specs import Placement, check_placement
from aiokvoffload.transfers.assembly import build_worker
from aiokvoffload.transfers.base import TransferWorker
from aiokvoffload.transfers.pointers import SlotLayout
from aiokvoffload.transfers.worker import IN_FLIGHT_BYTES, STREAMS_PER_DIRECTION


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

    def close(self, *, has_copies_under_way: bool = False) -> None:
        """Give everything back; memory that copies still touch stays mapped until they let go of it."""
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
) -> LocalParts:
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
    manager = build_manager(
        layout.shape,
        block_count,
        policy=policy,
        placement=placement,
        store_threshold=store_threshold,
        hub=hub,
        clock=clock,
    )
    with ExitStack() as stack:
        if isinstance(device, Device):
            used_device = device
        else:
            used_device = device_for_tensors(kv_caches.device.type) if device is None else DEVICES.resolve(device)()
            stack.callback(used_device.close)
        stream = None if compute_stream is None else used_device.adopt_stream(compute_stream)
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
        stack.pop_all()
    return LocalParts(
        cache=layout.shape,
        layout=layout,
        memory=memory,
        device=used_device,
        own_device=None if used_device is device else used_device,
        manager=manager,
        worker=worker,
        identity=identity_of(identity, layout.shape),
        clock=clock,
        deadlines=deadlines,
        hub=hub,
        placement=placement,
    )


def build_manager(
    cache: CacheShape,
    block_count: int,
    *,
    policy: str | type[CachePolicy] | CachePolicy,
    placement: Placement,
    store_threshold: int,
    hub: EventHub,
    clock: Clock,
) -> OffloadingManager:
    """Return what decides over `block_count` slots; arguments as in `open_offloader`."""
    manager = CPUOffloadingManager(
        block_count,
        policy=policy,
        groups=cache.groups,
        block_size_factor=cache.block_size_factor,
        blocks_above=cache.block_count if placement == "exclusive" else 0,
        event_sink=hub,
        clock=clock,
    )
    return with_reuse_filter(manager, store_threshold)


def identity_of(given: CacheIdentity, cache: CacheShape) -> CacheIdentity:
    """Return an identity with what follows from the caches filled in."""
    return replace(given, page_bytes=cache.group_page_bytes, block_tokens=cache.offloaded_block_tokens)
