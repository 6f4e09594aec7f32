"""Builds an offloader from plain arguments, and closes it again."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence
from types import TracebackType
from typing import TYPE_CHECKING, Any

from aiokvoffload.clock import Clock, SystemClock
from aiokvoffload.devices.base import Device
from aiokvoffload.errors import BlocksInFlightError, StateError
from aiokvoffload.keys import CacheIdentity
from aiokvoffload.kv_caches import CanonicalKVCaches
from aiokvoffload.memory.base import Report, ignore_progress
from aiokvoffload.memory.threads import prepare_in_thread
from aiokvoffload.offloader.aio import Offloader
from aiokvoffload.offloader.deadlines import Deadlines
from aiokvoffload.offloader.parts import Parts, build_parts
from aiokvoffload.offloader.sync import SyncOffloader
from aiokvoffload.policies.base import CachePolicy
from aiokvoffload.specs import Placement
from aiokvoffload.transfers.worker import IN_FLIGHT_BYTES, STREAMS_PER_DIRECTION

if TYPE_CHECKING:
    import torch

_logger = logging.getLogger(__name__)


class OffloaderContext:
    """Opens an offloader on entry and closes it on exit: `async with` the async one, `with` the synchronous one.

    On asyncio it may be entered in one task and left in another, as test fixtures are.
    """

    def __init__(self, make_parts: Callable[[], Parts], *, on_progress: Report = ignore_progress) -> None:
        self._make_parts: Callable[[], Parts] | None = make_parts
        self._on_progress = on_progress
        self._offloader: Offloader | None = None
        self._sync_offloader: SyncOffloader | None = None

    async def __aenter__(self) -> Offloader:
        """Open in the running event loop; the memory is prepared in a thread.

        Cancelled, it stops that soon, and leaves nothing mapped or registered.

        Raises:
            StateError: It was entered before.
        """
        parts = self._parts()
        try:
            await prepare_in_thread(parts.memory, self._on_progress)
            self._offloader = Offloader(parts)
        except BaseException:
            parts.close()
            raise
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
        parts = self._parts()
        try:
            parts.memory.prepare(self._on_progress)
            self._sync_offloader = SyncOffloader(parts)
        except BaseException:
            parts.close()
            raise
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

    def _parts(self) -> Parts:
        if self._make_parts is None:
            raise StateError("this offloader was opened before; call open_offloader() again")
        make_parts, self._make_parts = self._make_parts, None
        return make_parts()


def open_offloader(
    kv_caches: CanonicalKVCaches | Sequence[torch.Tensor] | Mapping[Any, torch.Tensor],
    *,
    cpu_bytes: int,
    block_tokens: int = 16,
    block_size_factor: int = 1,
    identity: CacheIdentity | None = None,
    policy: str | type[CachePolicy] | CachePolicy = "lru",
    placement: Placement = "inclusive",
    store_threshold: int = 0,
    device: Device | str | None = None,
    compute_stream: object | None = None,
    streams_per_direction: int = STREAMS_PER_DIRECTION,
    in_flight_bytes: int = IN_FLIGHT_BYTES,
    numa_node: int | None = None,
    deadlines: Deadlines | None = None,
    on_progress: Report = ignore_progress,
    clock: Clock | None = None,
) -> OffloaderContext:
    """Return a context manager that opens an offloader.

    `async with open_offloader(...) as offloader` opens the async one in the running event loop, asyncio or trio;
    `with` instead of `async with` opens a `SyncOffloader`.

    Args:
        kv_caches: The engine's blocks; plain tensors are one layer each, blocks first.
        cpu_bytes: CPU memory to use.
        block_tokens: Tokens of a GPU block, where `kv_caches` is plain tensors.
        block_size_factor: GPU blocks per offloaded block.
        identity: Model and revision; pages and block sizes are filled in from the caches.
        policy: Name, class or instance of the eviction policy.
        placement: `"inclusive"`: CPU memory keeps what it has loaded. `"exclusive"`: a block is in one level; it is
            stored when the GPU gives it up (`demote_soon`), and a load takes it along. Needs a block_size_factor of 1.
        store_threshold: From 2 on, a block is stored only once that many requests have used it.
        device: Name or instance; by default the one that the tensors are on. A given instance is not closed.
        compute_stream: The engine's: transfers wait for what is on it when they are asked for, and `fence` holds it
            back. Without one the engine's work counts as done when it calls, as it is on a CPU.
        streams_per_direction: Streams that copies of one direction are spread over.
        in_flight_bytes: How much may be with the device at a time; what is over that waits in the queue.
        numa_node: Where CPU memory is taken from first; see `numa_node_of_pci_device`.
        deadlines: How long anything may take.
        on_progress: Hears how far the CPU memory is, in the thread that prepares it; what it raises ends the opening.
        clock: Where deadlines are read.

    Raises:
        ConfigurationError: On entry: a value cannot work, such as memory too small for one block.
        LayoutError: On entry: the tensors cannot be viewed as blocks.
    """
    return OffloaderContext(
        lambda: build_parts(
            kv_caches
            if isinstance(kv_caches, CanonicalKVCaches)
            else CanonicalKVCaches.from_layers(kv_caches, block_tokens=block_tokens),
            cpu_bytes=cpu_bytes,
            block_size_factor=block_size_factor,
            identity=identity or CacheIdentity(),
            policy=policy,
            placement=placement,
            store_threshold=store_threshold,
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


def _raise_unless(error: BaseException | None, exc: BlocksInFlightError) -> None:
    """Raise `exc`, or only log it where the body of the context has an error of its own."""
    if error is None:
        raise exc
    _logger.warning("closed after an error: %s", exc)
