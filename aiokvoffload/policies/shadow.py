"""A small cache without bytes that shows how another rank would have done."""

from __future__ import annotations

from collections.abc import Sequence

from aiokvoffload.keys import OffloadKey
from aiokvoffload.policies.sorted_slots import SortedSlots

_FIELD_BITS = 40

SHADOW_SLOT_BYTES = 256
"""Upper bound of what one slot of a shadow takes; a test holds it to that."""


class ShadowCache:
    """Keeps the keys of a sample of the blocks, ranked by numbers that it is handed.

    Args:
        capacity: How many keys it holds.
    """

    def __init__(self, capacity: int) -> None:
        self._slot_of: dict[OffloadKey, int] = {}
        self._key_of: list[OffloadKey] = [OffloadKey(b"")] * capacity
        self._rank_of = [0] * capacity
        self._ranked_count = 0
        self._line = SortedSlots(self._rank_of)
        self._free = list(range(capacity - 1, -1, -1))

    def __len__(self) -> int:
        return len(self._slot_of)

    def request(
        self, keys: Sequence[OffloadKey], bases: Sequence[int], depths: Sequence[int], is_worth: Sequence[bool] | None
    ) -> tuple[int, int]:
        """Return how many of a request's blocks lead and hit, and how many it stores.

        Args:
            keys: The sampled blocks of the request, in order.
            bases: The rank of each after this use.
            depths: The token position of each.
            is_worth: Whether each is stored where it is missing; None for all of them.
        """
        slots = [self._slot_of.get(key, -1) for key in keys]
        hit_count = slots.index(-1) if -1 in slots else len(slots)
        resident = [position for position, slot in enumerate(slots) if slot >= 0]
        held = [slots[position] for position in resident]
        self._line.discard(held)
        missing = [
            position for position, slot in enumerate(slots) if slot < 0 and (is_worth is None or is_worth[position])
        ][: len(self._key_of) - len(held)]
        gone = self._line.pop_coldest(max(0, len(missing) - len(self._free)))
        for slot in gone:
            del self._slot_of[self._key_of[slot]]
        self._free += gone
        for position in missing:
            slot = slots[position] = self._free.pop()
            self._slot_of[keys[position]] = slot
            self._key_of[slot] = keys[position]
        chosen = sorted([*resident, *missing])
        for order, position in enumerate(chosen, self._ranked_count):
            # As in `ranking`: by base, then deepest first, then in order.
            rank = (bases[position] << _FIELD_BITS) - depths[position]
            self._rank_of[slots[position]] = (rank << _FIELD_BITS) + order
        self._ranked_count += len(chosen)
        self._line.add([slots[position] for position in chosen])
        return hit_count, len(missing)

    def clear(self) -> None:
        """Drop all keys."""
        self._slot_of.clear()
        self._line.clear()
        self._free = list(range(len(self._key_of) - 1, -1, -1))
