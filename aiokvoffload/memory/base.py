"""Host memory in equal slots."""

from __future__ import annotations

from abc import ABC, abstractmethod

import numpy as np
from numpy.typing import NDArray


class HostMemory(ABC):
    """Slots of host memory, zeroed when made.

    Args:
        slot_count: Number of slots.
        slot_bytes: Bytes of each.
    """

    def __init__(self, slot_count: int, slot_bytes: int) -> None:
        self.slot_count = slot_count
        self.slot_bytes = slot_bytes

    @property
    def slot_stride_bytes(self) -> int:
        """Bytes from the start of one slot to the start of the next."""
        return self.slot_bytes

    @property
    @abstractmethod
    def address(self) -> int:
        """Where slot 0 begins."""

    @property
    @abstractmethod
    def buffer(self) -> NDArray[np.uint8]:
        """All bytes; they stay mapped as long as anyone holds this array, as every copy does."""

    @abstractmethod
    def close(self) -> None:
        """Give the memory back once no copy holds it any more; idempotent."""
