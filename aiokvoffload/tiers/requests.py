"""The tick of a request's one use, whichever of its calls comes first."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Hashable

_REMEMBERED_REQUESTS = 1024


class RequestTicks:
    """Remembers the ticks of the last requests; ticks only grow.

    Args:
        make_tick: Returns the tick of a new use, given the last one; what it returns is made larger if need be.
    """

    def __init__(self, make_tick: Callable[[int], int]) -> None:
        self._make_tick = make_tick
        self._last_tick = 0
        self._tick_of: OrderedDict[Hashable, int] = OrderedDict()

    def tick(self, request: Hashable) -> int:
        """Return the tick of a request."""
        tick = self._tick_of.get(request)
        if tick is not None:
            self._tick_of.move_to_end(request)
            return tick
        self._last_tick = tick = max(self._make_tick(self._last_tick), self._last_tick + 1)
        self._tick_of[request] = tick
        if len(self._tick_of) > _REMEMBERED_REQUESTS:
            self._tick_of.popitem(last=False)
        return tick
