"""Slots in a mapping of our own, registered with the device so that it can copy at full speed."""

from __future__ import annotations

import logging
import mmap

import numpy as np
from numpy.typing import NDArray

from aiokvoffload.devices.base import Device
from aiokvoffload.errors import ClosedError, ConfigurationError, DeviceError
from aiokvoffload.memory.base import HostMemory, Report, ignore_progress
from aiokvoffload.memory.page_calls import whole_pages
from aiokvoffload.memory.preparation import Preparation, PreparationOptions, row_aligned_pieces, rows_per_piece

_logger = logging.getLogger(__name__)

_SMALL_BYTES = 1 << 20
"""Takes a fraction of a millisecond."""


class PinnedMemory(HostMemory):
    """Anonymous memory of this process, pinned by `prepare` where the device allows it.

    A refused registration means pageable memory: slower, not wrong. It is said once, in the log. A forked process
    sees zeros in its place.

    Args:
        slot_count: Number of slots.
        slot_bytes: Bytes of each.
        device: Registers the memory.
        options: How it is prepared.

    Raises:
        ConfigurationError: The machine cannot give that much memory, or has no such NUMA node.
    """

    def __init__(
        self, slot_count: int, slot_bytes: int, device: Device, *, options: PreparationOptions | None = None
    ) -> None:
        super().__init__(slot_count, slot_bytes)
        self._device = device
        self._options = options or PreparationOptions()
        self._byte_count = slot_count * slot_bytes
        mapped_bytes = whole_pages(self._byte_count)
        try:
            mapping = mmap.mmap(-1, mapped_bytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        except (OSError, ValueError, OverflowError) as exc:
            raise ConfigurationError(f"cannot map {self._byte_count} bytes of CPU memory: {exc}; use fewer") from exc
        self._options.check_room(self._byte_count)
        # The arrays alone keep the mapping: it goes with the last of them.
        mapped: NDArray[np.uint8] = np.frombuffer(mapping, dtype=np.uint8)
        self._pages = range(mapped_bytes)
        self._buffer: NDArray[np.uint8] | None = mapped[: self._byte_count]
        self._address = mapped.ctypes.data
        self._preparation = Preparation(mapped, self._options)
        self._options.page_calls.prefer_huge_pages(self._address, mapped_bytes)
        self._options.page_calls.wipe_on_fork(self._address, mapped_bytes)
        self._preparation.place([self._pages])

    def __repr__(self) -> str:
        state = "closed" if self._buffer is None else "pinned" if self.is_pinned else "pageable"
        return f"<PinnedMemory {self.slot_count} x {self.slot_bytes} bytes, {state}>"

    @property
    def slots_per_piece(self) -> int:
        """Slots that are registered together."""
        return rows_per_piece(self.slot_bytes, self._options.piece_bytes)

    @property
    def address(self) -> int:
        """Where slot 0 begins."""
        return self._address

    @property
    def buffer(self) -> NDArray[np.uint8]:
        """All bytes.

        Raises:
            ClosedError: The memory is closed.
        """
        if self._buffer is None:
            raise ClosedError(f"{self!r} has no bytes any more; make a new one")
        return self._buffer

    @property
    def is_pinned(self) -> bool:
        """Whether the device copies it at full speed."""
        return self._preparation.is_registered

    @property
    def prepares_at_once(self) -> bool:
        """Whether there is so little memory that `prepare` takes no time."""
        return self._byte_count <= _SMALL_BYTES

    def prepare(self, report: Report = ignore_progress) -> None:
        """Populate the memory and register it with the device; see `HostMemory.prepare`.

        Raises:
            ConfigurationError: The machine cannot give that much memory.
        """
        self._preparation.populate([self._pages], len(self._pages), report)
        pieces = row_aligned_pieces(self.slot_count, self.slot_bytes, self._options.piece_bytes)
        try:
            self._preparation.register(self._device, pieces, self._byte_count, report)
        except DeviceError as exc:
            _logger.warning("CPU memory stays pageable, copies will be slower: %s", exc)

    def close(self) -> None:
        """Unregister the memory; it is unmapped when the last copy lets go of it."""
        self._preparation.unregister()
        self._buffer = None
