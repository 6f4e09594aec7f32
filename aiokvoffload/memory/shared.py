"""Slots in one mapping that all processes of an engine share."""

from __future__ import annotations

import logging
import mmap
import os
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from aiokvoffload.clock import Clock, SystemClock
from aiokvoffload.devices.base import Device
from aiokvoffload.errors import (
    ClosedError,
    ConfigurationError,
    DeviceError,
    InvalidRequestError,
    StateError,
    WrongThreadError,
)
from aiokvoffload.memory.base import HostMemory, Report, ignore_progress
from aiokvoffload.memory.page_calls import PAGE_BYTES
from aiokvoffload.memory.preparation import Preparation, PreparationOptions, row_aligned_pieces, rows_per_piece
from aiokvoffload.memory.region_file import region_path
from aiokvoffload.memory.region_group import RegionGroup
from aiokvoffload.memory.region_shape import RegionShape
from aiokvoffload.memory.room import free_bytes_of

_logger = logging.getLogger(__name__)

SHARED_MEMORY = Path("/dev/shm")  # noqa: S108  this is where shared memory is


class SharedOffloadRegion(HostMemory):
    """The slots of all workers of a host, in rows; a worker's slots are its slices, the scheduler's the whole rows.

    All processes make it with the same arguments, in any order: the first creates the file, the others join. Then
    all of them call `prepare`: it waits for the last, takes the file's name away, so that a kill leaves nothing
    behind, and lets each process populate its share. If one of them cannot register the memory, it is pageable in all.

    Belongs to one process, not to a thread: calls may come from any, one at a time. A forked process shares the
    bytes, and its calls are refused.

    Args:
        engine_id: Names the region while it is joined.
        shape: How slots lie in it; the same for all.
        rank: This worker's; None for the scheduler.
        device: Registers the memory; None if this process copies nothing.
        options: How the memory is prepared.
        registers_slices: Register each slice of this worker, instead of all rows: sooner where there are many workers.
        join_seconds: How long to wait until all processes have joined.
        prepare_seconds: How long to wait then until all have prepared their share.
        clock: Where deadlines are read.
        directory: A tmpfs.
        free_bytes: Says how much room that has.

    Raises:
        ConfigurationError: There is no room, the processes disagree about the shape, or something else of that name
            is in the way.
        StateError: The rank stays taken, or the file of a dead engine in the way.
    """

    def __init__(
        self,
        engine_id: str,
        shape: RegionShape,
        rank: int | None,
        device: Device | None,
        *,
        options: PreparationOptions | None = None,
        registers_slices: bool = False,
        join_seconds: float = 30.0,
        prepare_seconds: float = 600.0,
        clock: Clock | None = None,
        directory: Path = SHARED_MEMORY,
        free_bytes: Callable[[Path], int] = free_bytes_of,
    ) -> None:
        super().__init__(shape.block_count, shape.slot_bytes(rank))
        self.engine_id = engine_id
        self.shape = shape
        self.rank = rank
        self._device = device
        self._options = options or PreparationOptions()
        self._process = os.getpid()
        self._is_pinned = False
        self._first_byte = self._next_view = shape.slot_offset(rank)
        if registers_slices and (rank is None or shape.row_bytes - shape.slice_bytes < PAGE_BYTES):
            # Drivers register whole pages, and none of them twice.
            raise ConfigurationError("registers_slices needs a worker, and at least a page between two of its slices")
        self._registers_slices = registers_slices
        self._options.check_room(shape.byte_count)
        self._group = RegionGroup(
            region_path(directory, engine_id),
            shape,
            rank,
            join_seconds=join_seconds,
            prepare_seconds=prepare_seconds,
            clock=clock or SystemClock(),
            free_bytes=free_bytes,
        )
        try:
            mapping = mmap.mmap(self._group.descriptor, shape.board_offset)
        except (OSError, ValueError, OverflowError) as exc:
            self._group.fail()
            raise ConfigurationError(f"cannot map {shape.byte_count} bytes of CPU memory: {exc}; use fewer") from exc
        # The arrays alone keep the mapping: it goes with the last of them.
        mapped: NDArray[np.uint8] = np.frombuffer(mapping, dtype=np.uint8)
        self._address = mapped.ctypes.data + self._first_byte
        self._bytes: NDArray[np.uint8] | None = mapped[: shape.byte_count]
        self._preparation = Preparation(mapped, self._options)
        self._options.page_calls.prefer_huge_pages(mapped.ctypes.data, len(mapped))
        self._group.say_mapped()

    def __repr__(self) -> str:
        state = "closed" if self._bytes is None else "pinned" if self.is_pinned else "pageable"
        return f"<SharedOffloadRegion {self.engine_id!r}, rank {self.rank} of {self.shape}, {state}>"

    @property
    def slot_stride_bytes(self) -> int:
        """Bytes of a row."""
        return self.shape.row_bytes

    @property
    def slots_per_piece(self) -> int:
        """Slots that are registered together."""
        return 1 if self._registers_slices else rows_per_piece(self.shape.row_bytes, self._options.piece_bytes)

    @property
    def address(self) -> int:
        """Where slot 0 of this process begins."""
        return self._address

    @property
    def buffer(self) -> NDArray[np.uint8]:
        """All bytes from this process's slot 0 to the end of its last slot.

        Raises:
            ClosedError: The region is closed in this process.
        """
        byte_count = (self.slot_count - 1) * self.slot_stride_bytes + self.slot_bytes
        return self._open_bytes()[self._first_byte : self._first_byte + byte_count]

    @property
    def rows(self) -> NDArray[np.uint8]:
        """All bytes of all workers, as `(block_count, row_bytes)`.

        Raises:
            ClosedError: The region is closed in this process.
        """
        return self._open_bytes().reshape(self.shape.block_count, self.shape.row_bytes)

    @property
    def is_pinned(self) -> bool:
        """Whether all processes copy it at full speed."""
        return self._is_pinned

    @property
    def unviewed_bytes(self) -> int:
        """Bytes of a slot that `create_next_view` has not given out; 0 once the layers fill it exactly."""
        return self._first_byte + self.slot_bytes - self._next_view

    def create_next_view(self, page_bytes: int) -> NDArray[np.uint8]:
        """Return the next `page_bytes` of every slot, as `(block_count, page_bytes)`; layer follows layer.

        Raises:
            InvalidRequestError: Less is left of a slot; then nothing has changed.
            ClosedError: The region is closed in this process.
        """
        if not 0 < page_bytes <= self.unviewed_bytes:
            raise InvalidRequestError(
                f"a view of {page_bytes} bytes does not fit: {self.unviewed_bytes} of a slot's {self.slot_bytes} bytes "
                "are left"
            )
        view = self.rows[:, self._next_view : self._next_view + page_bytes]
        self._next_view += page_bytes
        return view

    def prepare(self, report: Report = ignore_progress) -> None:
        """Wait until all processes have joined, then populate and register this one's share, and wait again.

        Blocks until all are ready; `report` is also called while it waits. If it fails in one process, it fails in
        all.

        Raises:
            ConfigurationError: The machine has no room.
            StateError: A process has not come in time, has failed or has died.
            WrongThreadError: This process was forked from the one that the region belongs to.
        """
        if os.getpid() != self._process:
            raise WrongThreadError(f"{self!r} belongs to the parent process; make one in each process")
        if not self._group.is_waiting:
            raise StateError(f"{self!r} was closed or prepared before; make a new one")
        try:
            self._group.gather(report)
            refusal = self._prepare_share(report)
            self._group.say_ready(is_pinned=refusal is None)
            self._is_pinned = self._group.agree(report)
            if not self._is_pinned:
                self._preparation.unregister()
            if self._group.speaks_for_refusal:
                _logger.warning("CPU memory stays pageable in all processes, copies will be slower: %s", refusal)
        except BaseException:
            self._is_pinned = False
            self._preparation.unregister()
            self._group.fail()
            raise
        self._group.leave()

    def close(self) -> None:
        """Leave the region: unregister it, and let go of its bytes; they stay mapped until the last view is gone."""
        self._preparation.unregister()
        self._group.leave()
        self._is_pinned = False
        self._bytes = None

    def _prepare_share(self, report: Report) -> DeviceError | None:
        """Populate the pages of this process and register its memory; return why that was refused."""
        share = partial(self.shape.share, self.rank)
        self._preparation.place(share())
        self._preparation.populate(share(), sum(map(len, share())), report, self._group.reserve)
        if self._device is not None:
            pieces = list(self._pieces())
            try:
                self._preparation.register(self._device, pieces, sum(map(len, pieces)), report)
            except DeviceError as exc:
                return exc
        return None

    def _pieces(self) -> Iterator[range]:
        """Return what is registered at a time: rows, or the slices of this worker."""
        shape = self.shape
        if not self._registers_slices:
            return row_aligned_pieces(shape.block_count, shape.row_bytes, self._options.piece_bytes)
        starts = range(self._first_byte, shape.byte_count, shape.row_bytes)
        return (range(start, start + shape.slice_bytes) for start in starts)

    def _open_bytes(self) -> NDArray[np.uint8]:
        if self._bytes is None:
            raise ClosedError(f"{self!r} has no bytes any more; make a new one")
        return self._bytes
