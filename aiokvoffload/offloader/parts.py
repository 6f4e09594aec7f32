"""The parts of an offloader, built from plain arguments."""

from __future__ import annotations

from contextlib import ExitStack
from dataclasses import dataclass, field, replace

from aiokvoffload.clock import Clock
from aiokvoffload.devices.base import DEVICES, Device, Stream, device_for_tensors
from aiokvoffload.errors import ConfigurationError
from aiokvoffload.keys import CacheIdentity
from aiokvoffload.kv_caches import CanonicalKVCaches
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
from aiokvoffload.transfers.pointers import SlotLayout
from aiokvoffload.transfers.worker import IN_FLIGHT_BYTES, STREAMS_PER_DIRECTION, OffloadingWorker


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

    def discard(self) -> None:
        """Give everything back before an offloader was made of it."""
        self.memory.close()
        if self.is_own_device:
            self.device.close()


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
    manager = with_reuse_filter(
        CPUOffloadingManager(
            block_count,
            policy=policy,
            groups=kv_caches.groups,
            block_size_factor=block_size_factor,
            blocks_above=kv_caches.block_count if placement == "exclusive" else 0,
            event_sink=hub,
            clock=clock,
        ),
        store_threshold,
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
            landing_seconds=deadlines.landing_seconds,
            streams_per_direction=streams_per_direction,
            in_flight_bytes=in_flight_bytes,
        )
        stack.pop_all()
    return Parts(
        layout=layout,
        memory=memory,
        device=used_device,
        is_own_device=used_device is not device,
        manager=manager,
        worker=worker,
        identity=replace(
            identity,
            page_bytes=kv_caches.group_page_bytes,
            block_tokens=tuple(group.block_tokens * block_size_factor for group in kv_caches.groups),
        ),
        compute_stream=stream,
        clock=clock,
        deadlines=deadlines,
        hub=hub,
        placement=placement,
    )
