"""Builds an offloader from plain arguments, and closes it again."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Any, Protocol

from aiokvoffload.clock import Clock, SystemClock
from aiokvoffload.devices.base import Device
from aiokvoffload.errors import BlocksInFlightError, ConfigurationError, StateError
from aiokvoffload.keys import CacheIdentity
from aiokvoffload.kv_caches import CanonicalKVCaches
from aiokvoffload.memory.base import Report, ignore_progress
from aiokvoffload.memory.threads import Preparable, prepare_in_thread
from aiokvoffload.offloader.aio import Offloader
from aiokvoffload.offloader.deadlines import Deadlines
from aiokvoffload.offloader.parts import Parts, TierChoice, build_parts
from aiokvoffload.offloader.sync import SyncOffloader
from aiokvoffload.policies.base import CachePolicy
from aiokvoffload.specs import Placement
from aiokvoffload.transfers.worker import IN_FLIGHT_BYTES, STREAMS_PER_DIRECTION

if TYPE_CHECKING:
    import torch

    from aiokvoffload.cluster.scheduler import OnLostRank

    GivenCaches = CanonicalKVCaches | Sequence[torch.Tensor] | Mapping[Any, torch.Tensor]

_logger = logging.getLogger(__name__)


class Gathering(Preparable, Protocol):
    """What comes before the parts of an offloader can be made: other processes are waited for."""

    def guard(self, report: Report) -> Report:
        """Return a report that also ends the preparation of the memory when one of them has gone."""

    def close(self) -> None:
        """Send them away; idempotent."""


class OffloaderContext:
    """Opens an offloader on entry and closes it on exit: `async with` the async one, `with` the synchronous one.

    On asyncio it may be entered in one task and left in another, as test fixtures are.
    """

    def __init__(
        self,
        make_parts: Callable[[], Parts],
        *,
        on_progress: Report = ignore_progress,
        gathering: Gathering | None = None,
    ) -> None:
        self._make_parts: Callable[[], Parts] | None = make_parts
        self._on_progress = on_progress
        self._gathering = gathering
        self._offloader: Offloader | None = None
        self._sync_offloader: SyncOffloader | None = None

    async def __aenter__(self) -> Offloader:
        """Open in the running event loop; memory and device are prepared in a thread, and ranks waited for in one.

        Cancelled, it stops that soon, and leaves nothing mapped or registered.

        Raises:
            StateError: It was entered before.
        """
        make_parts, report = self._take_make_parts(), self._on_progress
        with ExitStack() as unfinished:
            if self._gathering is not None:
                unfinished.callback(self._gathering.close)
                await prepare_in_thread(self._gathering, report)
                report = self._gathering.guard(report)
            parts = make_parts()
            unfinished.callback(parts.close)
            await prepare_in_thread(parts, report)
            self._offloader = Offloader(parts)
            unfinished.pop_all()
        return self._offloader

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        """Close; an error of the body is never replaced.

        Raises:
            BlocksInFlightError: Copies are still under way.
        """
        if self._offloader is not None:
            try:
                await self._offloader.aclose()
            except BlocksInFlightError as exc:
                _raise_unless(error, exc)

    def __enter__(self) -> SyncOffloader:
        """Open for the calling thread.

        Raises:
            StateError: It was entered before.
        """
        make_parts, report = self._take_make_parts(), self._on_progress
        with ExitStack() as unfinished:
            if self._gathering is not None:
                unfinished.callback(self._gathering.close)
                self._gathering.prepare(report)
                report = self._gathering.guard(report)
            parts = make_parts()
            unfinished.callback(parts.close)
            parts.prepare(report)
            self._sync_offloader = SyncOffloader(parts)
            unfinished.pop_all()
        return self._sync_offloader

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        """Close; an error of the body is never replaced.

        Raises:
            BlocksInFlightError: Copies are still under way.
        """
        if self._sync_offloader is not None:
            try:
                self._sync_offloader.close()
            except BlocksInFlightError as exc:
                _raise_unless(error, exc)

    def _take_make_parts(self) -> Callable[[], Parts]:
        if self._make_parts is None:
            raise StateError("this offloader was opened before; call open_offloader() again")
        make_parts, self._make_parts = self._make_parts, None
        return make_parts


def open_offloader(
    kv_caches: GivenCaches | None,
    *,
    cpu_bytes: int,
    block_tokens: int = 16,
    block_size_factor: int = 1,
    identity: CacheIdentity | None = None,
    policy: str | type[CachePolicy] | CachePolicy = "adaptive",
    placement: Placement = "inclusive",
    store_threshold: int = 0,
    tiers: Sequence[TierChoice] = (),
    recompute_tokens_per_second: float | None = None,
    device: Device | str | None = None,
    compute_stream: object | None = None,
    streams_per_direction: int = STREAMS_PER_DIRECTION,
    in_flight_bytes: int = IN_FLIGHT_BYTES,
    numa_node: int | None = None,
    deadlines: Deadlines | None = None,
    on_progress: Report = ignore_progress,
    clock: Clock | None = None,
    engine_id: str | None = None,
    world_size: int = 1,
    replicated: bool = False,
    on_lost_rank: OnLostRank = "miss",
    directory: Path | None = None,
) -> OffloaderContext:
    """Return a context manager that opens an offloader.

    `async with open_offloader(...) as offloader` opens the async one in the running event loop, asyncio or trio;
    `with` instead of `async with` opens a `SyncOffloader`.

    Args:
        kv_caches: The engine's blocks; plain tensors are one layer each, blocks first. None with an `engine_id`: what
            the ranks join with counts; tensors that are given even so are only compared with it.
        cpu_bytes: CPU memory to use, of all ranks together.
        block_tokens: Tokens of a GPU block, where `kv_caches` is plain tensors.
        block_size_factor: GPU blocks per offloaded block.
        identity: Model and revision; pages and block sizes are filled in from the caches.
        policy: Name, class or instance of the eviction policy. `adaptive` is never far from the best of the others, and
            costs the most memory and time; `lru` the least.
        placement: `"inclusive"`: CPU memory keeps what it has loaded. `"exclusive"`: a block is in one level; it is
            stored when the GPU gives it up (`demote_soon`), and a load takes it along. Needs a block_size_factor of 1.
        store_threshold: From 2 on, a block is stored only once that many requests have used it.
        tiers: Below CPU memory, the fastest first: URLs such as `file:///var/cache/kv?capacity=200GiB`, or open tiers,
            which are not closed; each alone or with a `TierPlan`.
        recompute_tokens_per_second: How fast the engine computes what is not loaded; a tier that is slower is not read.
        device: Name or instance; by default the one that the tensors are on. A given instance is not closed.
        compute_stream: The engine's: transfers wait for what is on it when they are asked for, and `fence` holds it
            back. Required on a GPU; on a CPU, without one the engine's work counts as done when it calls.
        streams_per_direction: Streams that copies of one direction are spread over.
        in_flight_bytes: How much may be with the device at a time; what is over that waits in the queue.
        numa_node: Where CPU memory is taken from first; see `numa_node_of_pci_device`.
        deadlines: How long anything may take.
        on_progress: Hears how far CPU memory and device are, in the thread that prepares them; what it raises ends the
            opening.
        clock: Where deadlines are read.
        engine_id: Opens the scheduler of an engine whose bytes are moved by its ranks: processes that name the same
            engine in `join_offloader`, where they also name device and streams. Entering waits for all of them.
        world_size: How many ranks there are.
        replicated: All ranks hold the same bytes: one copy is kept for all, rank 0 stores it and all load it.
        on_lost_rank: What becomes of the offloader when a rank leaves or dies: `"miss"`, it misses and refuses, and
            says why in `statistics()`; `"close"`, the next call raises a `ClosedError`.
        directory: Where sockets are, the same for all processes.

    Raises:
        ConfigurationError: A value cannot work, such as memory too small for one block, or ranks do not agree; mostly
            on entry.
        LayoutError: The tensors cannot be viewed as blocks; mostly on entry.
        DeviceError: On entry: the device cannot be used any more.
        StateError: On entry: a rank has not joined in time, or has gone again.
    """
    if engine_id is None:
        _check_unused(
            "is for an engine of several processes; give engine_id too",
            world_size=(world_size, 1),
            replicated=(replicated, False),
            on_lost_rank=(on_lost_rank, "miss"),
            directory=(directory, None),
        )
        return OffloaderContext(
            lambda: build_parts(
                _canonical(kv_caches, block_tokens),
                cpu_bytes=cpu_bytes,
                block_size_factor=block_size_factor,
                identity=identity or CacheIdentity(),
                policy=policy,
                placement=placement,
                store_threshold=store_threshold,
                tiers=tiers,
                recompute_tokens_per_second=recompute_tokens_per_second,
                device=device,
                compute_stream=compute_stream,
                streams_per_direction=streams_per_direction,
                in_flight_bytes=in_flight_bytes,
                numa_node=numa_node,
                deadlines=deadlines or Deadlines(),
                clock=clock or SystemClock(),
            ),
            on_progress=on_progress,
        )
    _check_unused(
        "is for the ranks to name, in join_offloader",
        device=(device, None),
        compute_stream=(compute_stream, None),
        streams_per_direction=(streams_per_direction, STREAMS_PER_DIRECTION),
        in_flight_bytes=(in_flight_bytes, IN_FLIGHT_BYTES),
        numa_node=(numa_node, None),
        block_size_factor=(block_size_factor, 1 if kv_caches is None else block_size_factor),
    )
    from aiokvoffload.offloader.clustered import ClusterOpening, ClusterOptions

    opening = ClusterOpening(
        ClusterOptions(
            engine_id=engine_id,
            world_size=world_size,
            cache=None if kv_caches is None else _canonical(kv_caches, block_tokens).shape(block_size_factor),
            cpu_bytes=cpu_bytes,
            identity=identity or CacheIdentity(),
            policy=policy,
            placement=placement,
            store_threshold=store_threshold,
            is_replicated=replicated,
            on_lost_rank=on_lost_rank,
            tiers=tiers,
            recompute_tokens_per_second=recompute_tokens_per_second,
            deadlines=deadlines or Deadlines(),
            clock=clock or SystemClock(),
            directory=directory,
        )
    )
    return OffloaderContext(opening.build, on_progress=on_progress, gathering=opening)


def _canonical(kv_caches: GivenCaches | None, block_tokens: int) -> CanonicalKVCaches:
    if kv_caches is None:
        raise ConfigurationError("kv_caches is None; only an offloader with an engine_id takes them from its ranks")
    if isinstance(kv_caches, CanonicalKVCaches):
        return kv_caches
    return CanonicalKVCaches.from_layers(kv_caches, block_tokens=block_tokens)


def _check_unused(reason: str, **given: tuple[object, object]) -> None:
    """Refuse options, each given as its value and its default, that mean nothing here."""
    for name, (value, default) in given.items():
        if value != default:
            raise ConfigurationError(f"{name} is {value!r}, but {name} {reason}")


def _raise_unless(error: BaseException | None, exc: BlocksInFlightError) -> None:
    """Raise `exc`, or only log it where the body of the context has an error of its own."""
    if error is None:
        raise exc
    _logger.warning("closed after an error: %s", exc)
