"""Puts handlers and worker together."""

from __future__ import annotations

from contextlib import ExitStack

from aiokvoffload.clock import Clock
from aiokvoffload.devices.base import DEVICES, Device, Direction, Stream, check_copies, device_for_tensors
from aiokvoffload.errors import ConfigurationError
from aiokvoffload.kv_caches import CanonicalKVCaches
from aiokvoffload.memory.base import HostMemory, PreparationProgress, PreparationStep, Report, ignore_progress
from aiokvoffload.transfers.device_host import SingleDirectionOffloadingHandler
from aiokvoffload.transfers.pointers import SlotLayout
from aiokvoffload.transfers.worker import IN_FLIGHT_BYTES, LANDING_SECONDS, STREAMS_PER_DIRECTION, OffloadingWorker


def open_device(
    kv_caches: CanonicalKVCaches, device: Device | str | None, compute_stream: object | None, stack: ExitStack
) -> tuple[Device, Stream | None]:
    """Return the device for the engine's blocks, and its compute stream.

    Args:
        kv_caches: The engine's blocks.
        device: Name or instance; by default the one that they are on.
        compute_stream: The engine's.
        stack: Closes the device, unless an instance was given.

    Raises:
        ConfigurationError: No device is known for them, or the given one is for others, or they need a stream.
    """
    if not isinstance(device, Device):
        tensors = kv_caches.device
        device = (
            device_for_tensors(tensors.type, tensors.index)
            if device is None
            else DEVICES.resolve(device).for_tensors(tensors.index)
        )
        stack.callback(device.close)
    check_copies(device, kv_caches.device)
    if compute_stream is None and kv_caches.device.type != "cpu":
        raise ConfigurationError(
            f"KV caches on {kv_caches.device} need compute_stream, such as torch.cuda.current_stream(): without it "
            "copies would not wait for the engine's kernels"
        )
    return device, None if compute_stream is None else device.adopt_stream(compute_stream)


def prepares_at_once(layout: SlotLayout, device: Device) -> bool:
    """Return whether `prepare_device` takes no time."""
    return device.prepares_at_once(_page_bytes(layout))


def prepare_device(layout: SlotLayout, device: Device, report: Report = ignore_progress) -> None:
    """Get a device ready for the copies of a layout, which may take seconds; once, from any thread.

    Raises:
        DeviceError: The device cannot be used any more.
    """
    device.prepare(
        _page_bytes(layout),
        lambda done_bytes, total_bytes: report(
            PreparationProgress(PreparationStep.CALIBRATING, done_bytes, total_bytes)
        ),
    )


def _page_bytes(layout: SlotLayout) -> set[int]:
    return {ref.page_bytes for refs in layout.kv_caches.group_refs for ref in refs}


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
    """Return the worker that fills and empties slots; memory and device are yet to be prepared."""
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
