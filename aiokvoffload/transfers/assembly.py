"""Puts memory, handlers and worker together."""

from __future__ import annotations

from contextlib import ExitStack

from aiokvoffload.clock import Clock
from aiokvoffload.devices.base import Device, Direction
from aiokvoffload.memory.base import HostMemory
from aiokvoffload.memory.pinned import PinnedMemory
from aiokvoffload.memory.preparation import PreparationOptions
from aiokvoffload.transfers.device_host import SingleDirectionOffloadingHandler
from aiokvoffload.transfers.pointers import SlotLayout
from aiokvoffload.transfers.worker import IN_FLIGHT_BYTES, LANDING_SECONDS, STREAMS_PER_DIRECTION, OffloadingWorker


def build_worker(
    layout: SlotLayout,
    slot_count: int,
    device: Device,
    clock: Clock,
    *,
    landing_seconds: float = LANDING_SECONDS,
    streams_per_direction: int = STREAMS_PER_DIRECTION,
    in_flight_bytes: int = IN_FLIGHT_BYTES,
    numa_node: int | None = None,
) -> tuple[HostMemory, OffloadingWorker]:
    """Return slots and the worker that fills and empties them; the caller prepares and closes the memory.

    Raises:
        ConfigurationError: The machine cannot give that much memory, or has no such NUMA node.
    """
    with ExitStack() as stack:
        options = PreparationOptions(numa_node=numa_node)
        memory = PinnedMemory(slot_count, layout.slot_bytes, device, options=options)
        stack.callback(memory.close)
        handlers = {
            direction: SingleDirectionOffloadingHandler(direction, layout, memory, device) for direction in Direction
        }
        worker = OffloadingWorker(
            device,
            layout,
            handlers,
            clock,
            streams_per_direction=streams_per_direction,
            in_flight_bytes=in_flight_bytes,
            landing_seconds=landing_seconds,
        )
        stack.pop_all()
    return memory, worker
