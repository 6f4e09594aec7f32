"""Slots in a mapping of our own, registered with the device so that it can copy at full speed."""

from __future__ import annotations

import logging
import mmap

import numpy as np
from numpy.typing import NDArray

from aiokvoffload.devices.base import Device
from aiokvoffload.errors import ConfigurationError, DeviceError
from aiokvoffload.memory.base import HostMemory

_logger = logging.getLogger(__name__)


class PinnedMemory(HostMemory):
    """Anonymous memory of this process, pinned where the device allows it.

    A refused registration means pageable memory: slower, not wrong. It is said once, in the log.

    Args:
        slot_count: Number of slots.
        slot_bytes: Bytes of each.
        device: Registers the memory.

    Raises:
        ConfigurationError: The machine cannot give that much memory.
    """

    def __init__(self, slot_count: int, slot_bytes: int, device: Device) -> None:
        super().__init__(slot_count, slot_bytes)
        byte_count = slot_count * slot_bytes
        try:
            self._buffer: NDArray[np.uint8] = np.frombuffer(mmap.mmap(-1, byte_count), dtype=np.uint8)
        except (OSError, ValueError, OverflowError) as exc:
            raise ConfigurationError(f"cannot map {byte_count} bytes of CPU memory: {exc}; use fewer") from exc
        self._address = self._buffer.ctypes.data
        self._device = device
        self.is_pinned = True
        try:
            device.pin(self._address, byte_count)
        except DeviceError as exc:
            self.is_pinned = False
            _logger.warning("CPU memory stays pageable, copies will be slower: %s", exc)

    @property
    def address(self) -> int:
        """Where slot 0 begins."""
        return self._address

    @property
    def buffer(self) -> NDArray[np.uint8]:
        """All bytes."""
        return self._buffer

    def close(self) -> None:
        """Unregister the memory; it is unmapped when the last copy lets go of it."""
        if self.is_pinned:
            self.is_pinned = False
            self._device.unpin(self._address)
