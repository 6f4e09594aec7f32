"""Populates mapped memory and registers it with the device."""

from __future__ import annotations

import errno
import logging
import math
import os
import weakref
from collections.abc import Callable, Generator, Iterable, Iterator
from concurrent.futures import FIRST_COMPLETED, Future, ThreadPoolExecutor, as_completed, wait
from contextlib import closing
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from aiokvoffload.devices.base import Device
from aiokvoffload.errors import ClosedError, ConfigurationError, DeviceError, StateError
from aiokvoffload.memory.base import PreparationProgress, PreparationStep, Report
from aiokvoffload.memory.page_calls import PAGE_BYTES, PageCalls
from aiokvoffload.memory.room import available_bytes

_logger = logging.getLogger(__name__)

_CHUNK_BYTES = 128 << 20
"""What a thread populates between two reports."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PreparationOptions:
    """How memory is prepared.

    Attributes:
        piece_bytes: How much is registered at a time. Drivers refuse several hundred GB in one piece, and need about
            0.1 s per GB, after which it can be reported on and ended.
        thread_count: Threads that populate.
        numa_node: Where pages are taken from first; see `numa_node_of_pci_device`.
        page_calls: Asks the kernel.
        available_bytes: Says how much memory there is to have, or None.
    """

    piece_bytes: int = 4 << 30
    thread_count: int = field(default_factory=lambda: min(8, len(os.sched_getaffinity(0))))
    numa_node: int | None = None
    page_calls: PageCalls = field(default_factory=PageCalls)
    available_bytes: Callable[[], int | None] = available_bytes

    def __post_init__(self) -> None:
        if self.piece_bytes < 1 or self.thread_count < 1:
            raise ConfigurationError(
                f"piece_bytes is {self.piece_bytes} and thread_count {self.thread_count}; both must be at least 1"
            )
        if self.numa_node is not None and self.numa_node < 0:
            raise ConfigurationError(f"numa_node is {self.numa_node}; nodes count from 0, None leaves it to the kernel")

    def check_room(self, byte_count: int) -> None:
        """Refuse to take more memory than there is, which would end in somebody being killed.

        Raises:
            ConfigurationError: There is less.
        """
        available = self.available_bytes()
        if available is not None and available < byte_count:
            raise ConfigurationError(
                f"this machine, or its container, has {available} bytes of memory available, but {byte_count} are "
                "needed; use less CPU memory"
            )


class Preparation:
    """Populates and registers ranges of one mapping; all ranges are bytes from its start.

    What is registered is given back by `unregister`, or else when nobody holds the mapping any more.

    Args:
        mapped: The whole mapping; it is unmapped when this array and all views of it are gone.
        options: How.
    """

    def __init__(self, mapped: NDArray[np.uint8], options: PreparationOptions) -> None:
        # A reference to the array itself would keep it from going.
        self._mapped = weakref.ref(mapped)
        self._address = mapped.ctypes.data
        self._options = options
        self._is_populated = False
        self._registration: weakref.finalize[[Device, list[int], int], NDArray[np.uint8]] | None = None

    @property
    def is_registered(self) -> bool:
        """Whether a registration was made and not taken back."""
        return self._registration is not None and self._registration.alive

    def place(self, ranges: Iterable[range]) -> None:
        """Choose the NUMA node of ranges of whole pages, if the options ask for one.

        Raises:
            ConfigurationError: There is no such node.
        """
        node = self._options.numa_node
        if node is None:
            return
        try:
            for part in ranges:
                self._options.page_calls.prefer_node(self._address + part.start, len(part), node)
        except OSError as exc:
            if exc.errno == errno.EINVAL:
                raise ConfigurationError(
                    f"this process can have no memory of NUMA node {node}; see /sys/devices/system/node"
                ) from exc
            _logger.warning("CPU memory is not bound to NUMA node %d: %s", node, exc)

    def populate(
        self,
        ranges: Iterable[range],
        total_bytes: int,
        report: Report,
        reserve: Callable[[range], object] = lambda _: None,
    ) -> None:
        """Back ranges of whole pages with memory, in several threads; nobody else may write to them meanwhile.

        Args:
            ranges: What to populate.
            total_bytes: Bytes of all ranges together.
            report: Hears of every chunk.
            reserve: Makes room for a range in a file, so that writing to it cannot end in SIGBUS.

        Raises:
            ConfigurationError: The machine has no room.
            StateError: It was done before; once more could overwrite what the memory holds by now.
        """
        if self._is_populated:
            raise StateError("this memory was prepared before; that is done once")
        self._is_populated = True
        mapped = self._still_mapped()

        def populate_batch(batch: list[range]) -> int:
            for part in batch:
                if not self._options.page_calls.populate(self._address + part.start, len(part)):
                    reserve(part)
                    mapped[part.start : part.stop : PAGE_BYTES] = 0
            return sum(map(len, batch))

        done_bytes = 0
        thread_count = self._options.thread_count if total_bytes > _CHUNK_BYTES else 1
        report(PreparationProgress(PreparationStep.POPULATING, 0, total_bytes))
        try:
            with closing(_in_threads(thread_count, populate_batch, _batches(ranges))) as byte_counts:
                for byte_count in byte_counts:
                    done_bytes += byte_count
                    report(PreparationProgress(PreparationStep.POPULATING, done_bytes, total_bytes))
        except OSError as exc:
            raise ConfigurationError(
                f"cannot populate {total_bytes} bytes of CPU memory: {exc}, after {done_bytes}; use fewer"
            ) from exc

    def register(self, device: Device, ranges: Iterable[range], total_bytes: int, report: Report) -> None:
        """Register ranges with a device: all of them, or none if it raises.

        Raises:
            DeviceError: One of them was refused.
        """
        mapped = self._still_mapped()
        addresses: list[int] = []
        self._registration = weakref.finalize(mapped, _unpin, device, addresses, os.getpid())
        done_bytes = 0
        try:
            report(PreparationProgress(PreparationStep.REGISTERING, 0, total_bytes))
            for part in ranges:
                device.pin(self._address + part.start, len(part))
                addresses.append(self._address + part.start)
                done_bytes += len(part)
                report(PreparationProgress(PreparationStep.REGISTERING, done_bytes, total_bytes))
        except BaseException:
            self.unregister()
            raise

    def unregister(self) -> None:
        """Take back what was registered; idempotent."""
        if self._registration is not None:
            self._registration()

    def _still_mapped(self) -> NDArray[np.uint8]:
        mapped = self._mapped()
        if mapped is None:
            raise ClosedError("this memory is closed; make a new one")
        return mapped


def rows_per_piece(row_bytes: int, piece_bytes: int) -> int:
    """Return how many rows are registered at a time: `piece_bytes` at most, but one.

    As drivers register whole pages, and no page twice, pieces end with a page where rows do.
    """
    count = max(1, piece_bytes // row_bytes)
    count_to_page_end = PAGE_BYTES // math.gcd(row_bytes, PAGE_BYTES)
    return count - count % count_to_page_end if count > count_to_page_end else count


def row_aligned_pieces(row_count: int, row_bytes: int, piece_bytes: int) -> Iterator[range]:
    """Cut rows into pieces; see `rows_per_piece`."""
    step = rows_per_piece(row_bytes, piece_bytes)
    for first in range(0, row_count, step):
        yield range(first * row_bytes, min(first + step, row_count) * row_bytes)


def _batches(ranges: Iterable[range]) -> Iterator[list[range]]:
    """Put ranges together, or cut them, to batches of about `_CHUNK_BYTES`."""
    batch: list[range] = []
    room = _CHUNK_BYTES
    for whole in ranges:
        part = whole
        while part:
            batch.append(part[:room])
            room -= len(batch[-1])
            part = part[len(batch[-1]) :]
            if not room:
                yield batch
                batch, room = [], _CHUNK_BYTES
    if batch:
        yield batch


def _in_threads(
    thread_count: int, work: Callable[[list[range]], int], batches: Iterable[list[range]]
) -> Generator[int, None, None]:
    """Yield what `work` returns for each batch, in any order; no work goes on once the generator is closed."""
    if thread_count == 1:
        yield from map(work, batches)
        return
    pending: set[Future[int]] = set()
    with ThreadPoolExecutor(thread_count, "aiokvoffload-populate") as threads:
        for batch in batches:
            pending.add(threads.submit(work, batch))
            if len(pending) >= thread_count:
                done, pending = wait(pending, return_when=FIRST_COMPLETED)
                yield from (future.result() for future in done)
        for future in as_completed(pending):
            yield future.result()


def _unpin(device: Device, addresses: list[int], process: int) -> None:
    """Take back registrations, last first; in whatever thread lets go of the memory."""
    if os.getpid() != process:
        return  # forked: the registrations are the parent's
    while addresses:
        try:
            device.unpin(addresses.pop())
        except ClosedError:
            addresses.clear()  # what the device had registered went with it
        except DeviceError as exc:
            _logger.warning("CPU memory could not be unregistered: %s", exc)
