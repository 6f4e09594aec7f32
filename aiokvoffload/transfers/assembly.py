"""Puts handlers and worker together."""

from __future__ import annotations

from aiokvoffload.clock import Clock
from aiokvoffload.devices.base import Device, Direction, Stream
from aiokvoffload.memory.base import HostMemory
from aiokvoffload.transfers.device_host import SingleDirectionOffloadingHandler
from aiokvoffload.transfers.pointers import SlotLayout
from aiokvoffload.transfers.worker import IN_FLIGHT_BYTES, LANDING_SECONDS, STREAMS_PER_DIRECTION, OffloadingWorker


def build_worker(
    layout: SlotLayout,
    memory: HostMemory,
    device: Device,
    clock: Clock,
    *,
    compute_stream: Stream | None = None,
    landing_seconds: float = LANDING_SECONDS,
    streams_per_direction: int = STREAMS_PER_DIRECTION,
    in_flight_bytes: int = IN_FLIGHT_BYTES,
) -> OffloadingWorker:
    """Return the worker that fills and empties slots."""
    handlers = {
        direction: SingleDirectionOffloadingHandler(direction, layout, memory, device) for direction in Direction
    }
    return OffloadingWorker(
        device,
        layout,
        handlers,
        clock,
        compute_stream=compute_stream,
        streams_per_direction=streams_per_direction,
        in_flight_bytes=in_flight_bytes,
        landing_seconds=landing_seconds,
    )
