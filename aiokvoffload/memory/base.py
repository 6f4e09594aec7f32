"""Host memory in equal slots."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass
from enum import Enum

import numpy as np
from numpy.typing import NDArray


class PreparationStep(Enum):
    """What is being prepared, or waited for."""

    CALIBRATING = "trying ways of copying"
    POPULATING = "populating"
    REGISTERING = "registering"
    WAITING = "waiting for other processes"


@dataclass(frozen=True, slots=True)
class PreparationProgress:
    """How far the preparation of memory and device has come.

    Attributes:
        step: What is being done.
        done_bytes: For how many bytes it is done; while an engine begins, how many of its ranks have come.
        total_bytes: For how many it will be.
    """

    step: PreparationStep
    done_bytes: int
    total_bytes: int


Report = Callable[[PreparationProgress], object]
"""Hears of progress, in the thread that prepares; what it raises ends the preparation."""


def ignore_progress(_progress: PreparationProgress) -> None:
    """Do nothing."""


class HostMemory(ABC):
    """Slots of host memory, zeroed when made; slot i begins at `address + i * slot_stride_bytes`.

    Usable as soon as it is made; `prepare` makes it fast.

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
    def slots_per_piece(self) -> int:
        """Slots that are registered together, counted from slot 0: no copy may go from one piece into the next."""
        return self.slot_count

    @property
    @abstractmethod
    def address(self) -> int:
        """Where slot 0 begins."""

    @property
    @abstractmethod
    def buffer(self) -> NDArray[np.uint8]:
        """All bytes from slot 0 on; they stay mapped as long as anyone holds this array, as every copy does."""

    @property
    def is_pinned(self) -> bool:
        """Whether the device copies it at full speed."""
        return False

    @property
    def prepares_at_once(self) -> bool:
        """Whether `prepare` waits for nobody, and takes no longer than to start a thread for it."""
        return False

    def prepare(self, report: Report = ignore_progress) -> None:
        """Make the memory fast, which may take seconds per 10 GB; called once, from any thread, before any copy.

        Whatever it raises, the memory is pinned nowhere then and can only be closed.

        Args:
            report: Called often; see `Report`.

        Raises:
            ConfigurationError: The machine cannot give that much memory.
        """

    @abstractmethod
    def close(self) -> None:
        """Give the memory back once no copy holds it any more; idempotent."""
