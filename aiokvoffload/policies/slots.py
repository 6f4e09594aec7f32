"""Batches of slot numbers: plain sequences where parts meet, arrays where one operation handles them all."""

from __future__ import annotations

from collections.abc import Collection

import numpy as np
import numpy.typing as npt

SlotArray = npt.NDArray[np.int64]


def slot_array(slots: Collection[int] | SlotArray) -> SlotArray:
    """Return slots as an array; an array is returned as it is."""
    if isinstance(slots, np.ndarray):
        return slots
    return np.fromiter(slots, np.int64, len(slots))
