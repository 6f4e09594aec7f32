"""Who leaves CPU memory first, or stays, for reasons that no access gives: moves to the GPU level and hints."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from aiokvoffload.managers.blocks import BlockTable, Found
from aiokvoffload.managers.keeping import KeptSlots
from aiokvoffload.managers.sessions import SlotSessions
from aiokvoffload.policies.base import Access, CachePolicy
from aiokvoffload.specs import PrepareLoadOutput

_EXPIRED_AT_ONCE = 256


class SlotPlacement:
    """Demotes, rescues and keeps slots. Keeping one is using it, as far as the block table can see.

    Args:
        blocks: Knows who uses which slot.
        policy: Ranks them.
    """

    def __init__(self, blocks: BlockTable, policy: CachePolicy) -> None:
        self._blocks = blocks
        self._policy = policy
        self._kept = KeptSlots(blocks.slot_count)
        self.sessions = SlotSessions(blocks.slot_count)

    @property
    def kept_count(self) -> int:
        """How many slots are kept."""
        return self._kept.count

    @property
    def pinned_count(self) -> int:
        """How many ready slots have users, keeping aside."""
        count = self._blocks.pinned_count
        return count - self._blocks.count_used_once(self._kept.mask) if self._kept.count else count

    def take_along(self, ticket: PrepareLoadOutput, block_tokens: Sequence[int]) -> int:
        """Put what a closed ticket has loaded first in line, where nobody else uses it, and return how many."""
        depths = [
            (first + index) * tokens
            for size, first, tokens in zip(ticket.group_sizes, ticket.first_indices, block_tokens, strict=True)
            for index in range(1, size + 1)
        ]
        slots = self._blocks.idle(_deepest_first(ticket.slots, depths))
        self._policy.take_along(slots)
        return len(slots)

    def rescue(self, found: Found, access: Access) -> int:
        """Put the ready ones of demoted blocks back among the others, and return how many there are."""
        positions = self._blocks.stored_among(found)
        if len(positions):
            self._policy.rescue(found[positions].tolist(), access.select(positions.tolist()))
        return len(positions)

    def end_session(self, slots: Sequence[int], depths: Sequence[int]) -> int:
        """Put those of `slots` first in line that only one session has used and nobody uses now; return how many."""
        slots = self.sessions.unshared(_deepest_first(slots, depths))
        self.let_go(slots)
        idle = self._blocks.idle(slots)
        self._policy.end_session(idle)
        return len(idle)

    def keep(self, slots: Sequence[int], deadline: float) -> int:
        """Keep ready slots from being evicted until a time, as far as may be, and return how many of them are kept."""
        self._blocks.hold(self._kept.keep(slots, deadline))
        return sum(slot in self._kept for slot in slots)

    def let_go(self, slots: Sequence[int]) -> None:
        """Keep slots no longer."""
        self._blocks.release(self._kept.let_go(slots))

    def expire(self, now: float, wanted: int) -> None:
        """Let go of slots whose time has come: some, and more if so many as `wanted` have not become idle."""
        while slots := self._kept.expire(now, max(wanted, _EXPIRED_AT_ONCE)):
            self._blocks.release(slots)
            wanted -= len(self._blocks.idle(slots))
            if wanted <= 0:
                return

    def clear(self) -> None:
        """Keep nothing, just before the block table forgets all blocks."""
        if self._kept.count:
            self._blocks.drop_one_user(self._kept.mask)
            self._kept.clear()


def _deepest_first(slots: Sequence[int], depths: Sequence[int]) -> list[int]:
    order = np.argsort(np.negative(depths), kind="stable").tolist() if len(slots) else []
    return [slots[position] for position in order]
