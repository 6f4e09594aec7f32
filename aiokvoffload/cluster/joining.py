"""How a rank joins an engine."""

from __future__ import annotations

import logging
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from functools import partial
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Any

from aiokvoffload.clock import Clock, SystemClock
from aiokvoffload.cluster.admission import Admission
from aiokvoffload.cluster.messages import join_of
from aiokvoffload.cluster.places import boot_id
from aiokvoffload.cluster.port import WorkerPort
from aiokvoffload.devices.base import Device
from aiokvoffload.errors import BlocksInFlightError
from aiokvoffload.kv_caches import CanonicalKVCaches
from aiokvoffload.memory.base import Report, ignore_progress
from aiokvoffload.memory.preparation import PreparationOptions
from aiokvoffload.memory.region_shape import RegionShape
from aiokvoffload.memory.shared import SharedOffloadRegion
from aiokvoffload.transfers.assembly import build_worker, open_device, prepare_device
from aiokvoffload.transfers.pointers import SlotLayout
from aiokvoffload.transfers.worker import IN_FLIGHT_BYTES, STREAMS_PER_DIRECTION

if TYPE_CHECKING:
    import torch

_logger = logging.getLogger(__name__)


@contextmanager
def join_offloader(
    kv_caches: CanonicalKVCaches | Sequence[torch.Tensor] | Mapping[Any, torch.Tensor],
    *,
    engine_id: str,
    rank: int,
    world_size: int | None = None,
    compute_stream: object | None = None,
    device: Device | str | None = None,
    block_tokens: int = 16,
    block_size_factor: int = 1,
    dtype: str = "",
    layout: str = "",
    streams_per_direction: int = STREAMS_PER_DIRECTION,
    in_flight_bytes: int = IN_FLIGHT_BYTES,
    numa_node: int | None = None,
    timeout_seconds: float = 30.0,
    prepare_seconds: float = 600.0,
    drain_seconds: float = 5.0,
    on_progress: Report = ignore_progress,
    directory: Path | None = None,
    clock: Clock | None = None,
) -> Iterator[WorkerPort]:
    """Join an engine as one of its ranks, and leave it on exit; blocks until all ranks are there.

    Args:
        kv_caches: This rank's blocks; plain tensors are one layer each, blocks first.
        engine_id: As given to `open_offloader`.
        rank: Which one this is, from 0.
        world_size: How many ranks there are, to be compared; the scheduler knows it.
        compute_stream: The engine's: transfers wait for what is on it when their jobs are submitted, and fences hold
            it back. Required on a GPU; on a CPU, without one the engine's work counts as done when it calls.
        device: Name or instance; by default the one that the tensors are on. A given instance is not closed.
        block_tokens: Tokens of a GPU block, where `kv_caches` is plain tensors.
        block_size_factor: GPU blocks per offloaded block, the same on all ranks.
        dtype: Element type of the KV cache as the engine names it, to be compared.
        layout: How a page is laid out in the engine's words, to be compared.
        streams_per_direction: Streams that copies of one direction are spread over.
        in_flight_bytes: How much may be with the device at a time; what is over that waits in the queue.
        numa_node: Where CPU memory is taken from first.
        timeout_seconds: How long to wait for the scheduler and the other ranks.
        prepare_seconds: How long to wait then until all have prepared their part of the memory.
        drain_seconds: How long leaving waits for copies under way.
        on_progress: Called while the engine begins, and hears how far device and memory are; what it raises ends that.
        directory: Where sockets are, the same for all processes.
        clock: Where deadlines are read.

    Yields:
        What takes the jobs.

    Raises:
        ConfigurationError: This rank does not fit the engine; the message names both values.
        StateError: The scheduler or a rank has not come in time, or has gone again.
        LayoutError: The tensors cannot be viewed as blocks.
        DeviceError: The device cannot be used any more.
        BlocksInFlightError: On exit: copies are still under way.
    """
    clock = clock or SystemClock()
    caches = (
        kv_caches
        if isinstance(kv_caches, CanonicalKVCaches)
        else CanonicalKVCaches.from_layers(kv_caches, block_tokens=block_tokens)
    )
    slots = SlotLayout(caches, block_size_factor)
    with ExitStack() as stack:
        used_device, stream = open_device(caches, device, compute_stream, stack)
        admission = Admission(engine_id, rank, clock, timeout_seconds, directory, on_progress)
        with ExitStack() as unfinished:
            unfinished.push(partial(_give_up, admission))
            welcome = admission.ask(
                join_of(
                    slots.shape,
                    rank,
                    world_size=world_size,
                    dtype=dtype,
                    layout=layout,
                    has_compute_stream=stream is not None,
                    boot_id=boot_id(),
                )
            )
            report = admission.guard(on_progress)
            prepare_device(slots, used_device, report)
            memory = SharedOffloadRegion(
                welcome.engine,
                RegionShape(
                    block_count=welcome.slot_count,
                    slice_bytes=slots.slot_bytes,
                    world_size=welcome.world_size,
                    is_replicated=welcome.is_replicated,
                    has_scheduler=True,
                ),
                rank,
                used_device,
                options=PreparationOptions(numa_node=numa_node),
                join_seconds=timeout_seconds,
                prepare_seconds=prepare_seconds,
                clock=clock,
            )
            unfinished.callback(memory.close)
            worker = build_worker(
                slots,
                memory,
                used_device,
                clock,
                compute_stream=stream,
                landing_seconds=welcome.landing_seconds,
                streams_per_direction=streams_per_direction,
                in_flight_bytes=in_flight_bytes,
            )
            memory.prepare(report)
            port = WorkerPort(
                admission.scheduler,
                welcome.engine,
                rank,
                worker,
                memory,
                clock,
                stores=rank == 0 or not welcome.is_replicated,
                drain_seconds=drain_seconds,
            )
            unfinished.pop_all()
        try:
            yield port
        except BaseException:
            try:
                port.close()
            except BlocksInFlightError as exc:
                _logger.warning("left the engine after an error: %s", exc)
            raise
        port.close()


def _give_up(
    admission: Admission,
    kind: type[BaseException] | None,
    error: BaseException | None,
    _traceback: TracebackType | None,
) -> None:
    if error is not None:
        admission.give_up(error)
