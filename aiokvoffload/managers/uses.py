"""How many requests have used a block."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass

from aiokvoffload.keys import OffloadKey


@dataclass(slots=True)
class _Uses:
    count: int
    tick: int


class UseCounter:
    """Counts the uses of blocks, once per request, of the blocks used latest.

    Args:
        max_size: How many blocks are remembered. Those of one request never push each other out: what finds no room is
            not counted.
    """

    def __init__(self, max_size: int) -> None:
        self._max_size = max_size
        self._uses: OrderedDict[OffloadKey, _Uses] = OrderedDict()

    def __len__(self) -> int:
        return len(self._uses)

    def of(self, key: OffloadKey) -> int:
        """Return how many requests have used a block, as far as it is remembered."""
        uses = self._uses.get(key)
        return 0 if uses is None else uses.count

    def count(self, keys: Sequence[OffloadKey], tick: int) -> list[int]:
        """Count the use of blocks by the request that has this tick; return the positions of those counted only now."""
        counted = []
        for position, key in enumerate(keys):
            uses = self._uses.get(key)
            if uses is None:
                if len(self._uses) >= self._max_size:
                    oldest = next(iter(self._uses))
                    if self._uses[oldest].tick >= tick:
                        continue
                    del self._uses[oldest]
                self._uses[key] = _Uses(1, tick)
            elif uses.tick < tick:
                uses.count += 1
                uses.tick = tick
                self._uses.move_to_end(key)
            else:
                continue
            counted.append(position)
        return counted
