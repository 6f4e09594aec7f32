"""Which session alone has used a slot, so that its end says something about the block."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from aiokvoffload.key_index import NOT_FOUND, NumberArray
from aiokvoffload.specs import ReqContext

_SEVERAL = 0
"""Used by several sessions, or by requests that name none."""


class SlotSessions:
    """Remembers one session per slot; costs nothing until a request names one.

    Args:
        slot_count: Number of slots.
    """

    def __init__(self, slot_count: int) -> None:
        self._slot_count = slot_count
        self._session_of: NDArray[np.int64] | None = None

    def start(self, slots: Sequence[int], ctx: ReqContext | None) -> None:
        """Note that new blocks in some slots are a request's."""
        session = self._number(ctx)
        if self._session_of is not None and len(slots):
            self._session_of[np.array(slots)] = session

    def use(self, found: NumberArray, ctx: ReqContext | None) -> None:
        """Note that a request uses the blocks in some slots."""
        session = self._number(ctx)
        if self._session_of is not None:
            slots = found[found != NOT_FOUND]
            self._session_of[slots[self._session_of[slots] != session]] = _SEVERAL

    def unshared(self, slots: Sequence[int]) -> list[int]:
        """Return those of `slots` that only one session has ever used."""
        if self._session_of is None:
            return []
        return [slot for slot in slots if self._session_of[slot] != _SEVERAL]

    def _number(self, ctx: ReqContext | None) -> int:
        if ctx is None or ctx.session_id is None:
            return _SEVERAL
        if self._session_of is None:
            self._session_of = np.zeros(self._slot_count, dtype=np.int64)
        return hash(ctx.session_id) or 1
