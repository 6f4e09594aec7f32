"""Builds both ends of an engine: what decides, in the scheduler's process, and what moves, in each worker's.

They agree on slots by numbers that both know. Only with tiers do they share memory, as the scheduler's process reads
and writes it for them; then each worker waits in a thread for the scheduler, which engines make after the workers.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass

from aiokvoffload.clock import Clock, SystemClock
from aiokvoffload.devices.base import Device
from aiokvoffload.errors import ConfigurationError
from aiokvoffload.events import EventSink
from aiokvoffload.integrations.stepping.jobs import JobMover
from aiokvoffload.integrations.stepping.manager import StepManager
from aiokvoffload.integrations.stepping.settings import StepSettings
from aiokvoffload.keys import CacheIdentity
from aiokvoffload.kv_caches import CanonicalKVCaches
from aiokvoffload.managers.base import OffloadingManager
from aiokvoffload.managers.cpu import CPUOffloadingManager
from aiokvoffload.managers.reuse import with_reuse_filter
from aiokvoffload.managers.tiered import TieredOffloadingManager
from aiokvoffload.memory.base import HostMemory
from aiokvoffload.memory.pinned import PinnedMemory
from aiokvoffload.memory.region_shape import RegionShape
from aiokvoffload.memory.shared import SharedOffloadRegion
from aiokvoffload.offloader.parts import SlotViews, TierChoice, with_tiers
from aiokvoffload.transfers.assembly import build_worker, open_device
from aiokvoffload.transfers.pointers import SlotLayout


@dataclass(frozen=True, slots=True, kw_only=True)
class StepEngine:
    """What scheduler and workers both know of an engine.

    Attributes:
        engine_id: Names its shared memory.
        world_size: Workers.
        slot_bytes: Bytes of an offloaded block on one worker.
        group_count: One more than the highest number of a KV group.
        identity: What must agree for blocks to be shared.

    Raises:
        ConfigurationError: A number is not positive.
    """

    engine_id: str
    world_size: int
    slot_bytes: int
    group_count: int
    identity: CacheIdentity

    def __post_init__(self) -> None:
        if min(self.world_size, self.slot_bytes, self.group_count) < 1:
            raise ConfigurationError(
                f"an engine of {self.world_size} workers, {self.slot_bytes} bytes a block and {self.group_count} KV "
                "groups has nothing to offload"
            )

    def block_count(self, settings: StepSettings) -> int:
        """Return how many offloaded blocks CPU memory holds.

        Raises:
            ConfigurationError: Not one.
        """
        row_bytes = self.slot_bytes * self.world_size
        if settings.cpu_bytes_to_use < row_bytes:
            raise ConfigurationError(
                f"cpu_bytes_to_use is {settings.cpu_bytes_to_use}, too little for one block of {row_bytes} bytes on "
                f"{self.world_size} ranks together"
            )
        return settings.cpu_bytes_to_use // row_bytes

    def open_region(self, settings: StepSettings, rank: int | None, device: Device | None) -> SharedOffloadRegion:
        """Return the memory that scheduler (no rank) and workers share; not prepared."""
        shape = RegionShape(
            block_count=self.block_count(settings),
            slice_bytes=self.slot_bytes,
            world_size=self.world_size,
            has_scheduler=True,
        )
        return SharedOffloadRegion(self.engine_id, shape, rank, device, join_seconds=settings.join_seconds)


@dataclass(frozen=True, slots=True)
class SchedulerEnd:
    """What decides, and how it ends.

    Attributes:
        manager: Decides.
        close: Writes down what waits for tiers, and gives everything back.
    """

    manager: StepManager
    close: Callable[[], None]


def build_scheduler_end(
    settings: StepSettings,
    engine: StepEngine,
    *,
    tiers: Sequence[TierChoice] | None = None,
    event_sink: EventSink | None = None,
    clock: Clock | None = None,
) -> SchedulerEnd:
    """Build what decides; with tiers, blocks until all workers share the memory.

    Args:
        settings: The engine's.
        engine: What the workers know too.
        tiers: Instead of those of the settings, which must name some even so, for the workers go by them.
        event_sink: Takes the manager's events.
        clock: Where deadlines are read.

    Raises:
        ConfigurationError: The settings cannot work, or a tier cannot be opened.
        StateError: A worker has not come in time.
    """
    clock = clock or SystemClock()
    cpu = CPUOffloadingManager(
        engine.block_count(settings), policy=settings.eviction_policy, event_sink=event_sink, clock=clock
    )
    with ExitStack() as stack:
        top: OffloadingManager = cpu
        tiered = None
        if settings.tiers:
            memory = engine.open_region(settings, None, None)
            stack.callback(memory.close)
            memory.prepare()
            below, own_tiers = with_tiers(
                cpu,
                settings.tiers if tiers is None else tiers,
                SlotViews(memory, (memory.slot_bytes,) * engine.group_count),
                identity=engine.identity,
                recompute_tokens_per_second=settings.recompute_tokens_per_second,
                clock=clock,
            )
            for tier in own_tiers:
                stack.callback(tier.close, drain_seconds=settings.drain_seconds)
            tiered = below if isinstance(below, TieredOffloadingManager) else None
            top = below
        top = with_reuse_filter(top, settings.store_threshold, settings.max_tracker_size)
        manager = StepManager(cpu, top, tiered, hold_seconds=settings.hold_seconds)
        stack.callback(manager.close)
        stack.callback(manager.drain, settings.drain_seconds)
        return SchedulerEnd(manager, stack.pop_all().close)


class WorkerEnd:
    """What moves the bytes of one worker process.

    Args:
        settings: The engine's.
        engine: What the scheduler knows too.
        rank: This worker.
        kv_caches: Its KV cache.
        block_size_factor: GPU blocks per offloaded block.
        current_stream: See `JobMover`.
        device: Does the copying; by default what the KV cache lies on.
        clock: Where deadlines are read.

    Raises:
        ConfigurationError: The KV cache does not fit what the scheduler counts with.
    """

    def __init__(
        self,
        settings: StepSettings,
        engine: StepEngine,
        rank: int,
        kv_caches: CanonicalKVCaches,
        block_size_factor: int,
        *,
        current_stream: Callable[[], object | None],
        device: Device | None = None,
        clock: Clock | None = None,
    ) -> None:
        clock = clock or SystemClock()
        layout = SlotLayout(kv_caches, block_size_factor)
        if layout.slot_bytes > engine.slot_bytes:
            raise ConfigurationError(
                f"a block of this worker's KV cache takes {layout.slot_bytes} bytes, but the scheduler counts with "
                f"{engine.slot_bytes}"
            )
        with ExitStack() as stack:
            used_device, stream = open_device(kv_caches, device, current_stream(), stack)
            self.memory: HostMemory
            if settings.tiers:
                self.memory = engine.open_region(settings, rank, used_device)
            else:
                self.memory = PinnedMemory(engine.block_count(settings), layout.slot_bytes, used_device)
            stack.callback(self.memory.close)
            worker = build_worker(
                layout, self.memory, used_device, clock, compute_stream=stream, landing_seconds=settings.landing_seconds
            )
            self._mover = JobMover(
                worker, clock, current_stream=current_stream, landing_seconds=settings.landing_seconds
            )
            self._error: BaseException | None = None
            self._preparation = threading.Thread(target=self._prepare, name="aiokvoffload-memory", daemon=True)
            if settings.tiers:
                self._preparation.start()  # the scheduler comes after this has returned
            else:
                self.memory.prepare()
            self._parts = stack.pop_all()
        self._drain_seconds = settings.drain_seconds

    @property
    def mover(self) -> JobMover:
        """What moves jobs, once the memory is prepared; engines ask for it with the first job.

        Raises:
            StateError: A process that shares the memory has not come, or has gone.
            ConfigurationError: The machine has no room.
        """
        if self._preparation.ident is not None:
            self._preparation.join()
        if self._error is not None:
            raise self._error
        return self._mover

    def close(self) -> None:
        """Wait for copies under way, bounded, and give everything back; memory that they still touch stays."""
        if self._mover.close(self._drain_seconds):
            self._parts.close()

    def _prepare(self) -> None:
        try:
            self.memory.prepare()
        except BaseException as exc:  # noqa: BLE001  raised by whoever needs the memory
            self._error = exc
