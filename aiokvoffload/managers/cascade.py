"""Writes blocks of CPU memory down to tiers, in the background and within bounds."""

from __future__ import annotations

from bisect import bisect_right
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from itertools import accumulate

import numpy as np

from aiokvoffload.keys import OffloadKey, offload_group_index
from aiokvoffload.managers.cpu import CPUOffloadingManager
from aiokvoffload.managers.promotions import SlotBytes
from aiokvoffload.managers.tier_plan import PlannedTier
from aiokvoffload.managers.uses import UseCounter
from aiokvoffload.policies.slots import slot_array
from aiokvoffload.specs import Lease, PrepareStoreOutput
from aiokvoffload.tiers.calls import TierCall
from aiokvoffload.tiers.outcomes import Reason

_BATCH_BLOCKS = 16
_REMEMBERED_USES = 64_000
_LOOKS_PER_COLD_END = 8
"""How often the cold end is looked at while as many slots as it has are taken."""
_MAX_SHARE_IN_WRITING = 0.25
"""A slot that is being written down cannot be evicted; more of them would starve stores."""


@dataclass(slots=True)
class _Write:
    """Blocks of one request that wait to be written, perhaps for the second time."""

    keys: list[OffloadKey]
    depths: list[int]
    request_id: str | None
    is_repeated: bool = False

    def take(self, positions: Sequence[int]) -> _Write:
        """Return some of the blocks."""
        return replace(
            self,
            keys=[self.keys[position] for position in positions],
            depths=[self.depths[position] for position in positions],
        )


class Cascade:
    """What one tier is written.

    Args:
        planned: The tier.
        backing: Where the blocks are.
        slot_bytes: Where its slots are.
        tier_key: What a block is called in the tiers.
        now: The time.
    """

    def __init__(
        self,
        planned: PlannedTier,
        backing: CPUOffloadingManager,
        slot_bytes: SlotBytes,
        tier_key: Callable[[OffloadKey], OffloadKey],
        now: Callable[[], float],
    ) -> None:
        self._planned = planned
        self._backing = backing
        self._slot_bytes = slot_bytes
        self._tier_key = tier_key
        self._now = now
        self._queue: deque[_Write] = deque()
        self._uses = UseCounter(_REMEMBERED_USES)
        slot_count = backing.statistics().total
        self._is_filled = np.zeros(slot_count, dtype=np.bool_)
        self._is_written = np.zeros(slot_count, dtype=np.bool_)
        self._cold_count = max(1, int(planned.plan.clean_share * slot_count))
        self._taken_count = 0
        self._slots_in_writing = 0
        self._max_slots_in_writing = max(1, int(_MAX_SHARE_IN_WRITING * slot_count))

    def count_uses(self, keys: Sequence[OffloadKey], tick: int, depths: Sequence[int], request_id: str | None) -> None:
        """Count the use of blocks by the request that has this tick; those stored already may be worth writing now."""
        plan = self._planned.plan
        if plan.cascade != "reused":
            return
        counted = self._uses.count(keys, tick)
        worth = [position for position in counted if self._uses.of(keys[position]) == plan.min_uses]
        slots = self._backing.stored_slots([keys[position] for position in worth])
        stored = [position for position, slot in zip(worth, slots, strict=True) if slot is not None]
        self._offer([keys[position] for position in stored], [depths[position] for position in stored], request_id)

    def note_taken(self, ticket: PrepareStoreOutput) -> None:
        """Note that slots have got new blocks, which are not written."""
        slots = slot_array(ticket.slots)
        if self._planned.plan.cascade == "ahead":
            # Of slots that are taken, only those of evicted blocks are filled.
            dirty = self._is_filled[slots] & ~self._is_written[slots]
            self._planned.tally.dirty_evictions += int(np.count_nonzero(dirty))
        self._is_filled[slots] = False
        self._is_written[slots] = False
        self._taken_count += len(slots)

    def note_stored(
        self, keys: Sequence[OffloadKey], slots: Sequence[int], depths: Sequence[int], request_id: str | None
    ) -> None:
        """Note blocks that were stored, and write them if the plan says so."""
        self._is_filled[slot_array(slots)] = True
        plan = self._planned.plan
        if plan.cascade == "write-through":
            self._offer(keys, depths, request_id)
        elif plan.cascade == "reused":
            worth = [position for position, key in enumerate(keys) if self._uses.of(key) >= plan.min_uses]
            self._offer([keys[position] for position in worth], [depths[position] for position in worth], request_id)

    def note_lost(self, count: int) -> None:
        """Note blocks that left in the very step that stored them."""
        if self._planned.plan.cascade == "ahead":
            self._planned.tally.dirty_evictions += count
        elif self._planned.plan.cascade == "write-through":
            self._planned.tally.dropped_writes += count

    def note_written(self, slots: Sequence[int]) -> None:
        """Note blocks that the tier has."""
        self._is_filled[slot_array(slots)] = True
        self._is_written[slot_array(slots)] = True

    def clear(self) -> None:
        """Forget what waits to be written, and what CPU memory held."""
        self._queue.clear()
        self._planned.waiting_bytes = 0
        self._is_filled[:] = False
        self._is_written[:] = False

    def pump(self) -> None:
        """Start writes, as far as the budget goes; a tier that is not ready gets them later, a closed one never."""
        planned = self._planned
        if planned.tier.is_closed:
            self.clear()
            return
        if planned.plan.cascade == "ahead" and self._taken_count * _LOOKS_PER_COLD_END >= self._cold_count:
            self._taken_count = 0
            self._offer_cold_end()
        while (
            self._queue
            and planned.tier.is_ready
            and planned.writing_bytes < planned.plan.write_bytes
            and (room := self._max_slots_in_writing - self._slots_in_writing) > 0
        ):
            write = self._queue[0]
            count = min(room, _BATCH_BLOCKS)
            taken = write.take(range(min(count, len(write.keys))))
            del write.keys[:count], write.depths[:count]
            if not write.keys:
                self._queue.popleft()
            planned.waiting_bytes -= self._byte_count(taken.keys)
            self._write(taken)

    def _offer(self, keys: Sequence[OffloadKey], depths: Sequence[int], request_id: str | None) -> None:
        """Let blocks wait to be written."""
        write = self._what_may_wait(_Write(list(keys), list(depths), request_id))
        if write.keys:
            self._queue.append(write)

    def _what_may_wait(self, write: _Write) -> _Write:
        """Return the blocks that there is room for in the queue, which they take; the leading ones."""
        planned = self._planned
        ends = list(accumulate(self._byte_count([key]) for key in write.keys))
        count = bisect_right(ends, planned.plan.queue_bytes - planned.waiting_bytes)
        planned.tally.dropped_writes += len(write.keys) - count
        planned.waiting_bytes += ends[count - 1] if count else 0
        return write.take(range(count))

    def _offer_cold_end(self) -> None:
        waiting = {key for write in self._queue for key in write.keys}
        cold = [
            key
            for key, slot in self._backing.coldest(self._cold_count)
            if not self._is_written[slot] and key not in waiting
        ]
        self._offer(cold, [0] * len(cold), None)

    def _write(self, write: _Write) -> None:
        planned = self._planned
        slots: list[int] = []
        present: list[int] = []
        for position, slot in enumerate(self._backing.stored_slots(write.keys)):
            if slot is None:
                planned.tally.dropped_writes += 1
            elif not self._is_written[slot]:
                slots.append(slot)
                present.append(position)
        if not present:
            return
        write = write.take(present)
        views = [
            self._slot_bytes.view(slot, offload_group_index(key)) for key, slot in zip(write.keys, slots, strict=True)
        ]
        byte_count = sum(view.nbytes for view in views)
        lease = Lease(self._backing, slots)
        planned.writing_bytes += byte_count
        self._slots_in_writing += len(slots)
        call = planned.tier.start_put(
            [self._tier_key(key) for key in write.keys],
            views,
            deadline=self._now() + planned.plan.write_seconds,
            request_id=write.request_id,
            depths=write.depths,
        )
        call.on_answered(lambda: self._note_answer(write, slots, call))
        call.on_over(lambda: self._give_back(byte_count, lease))

    def _note_answer(self, write: _Write, slots: list[int], call: TierCall) -> None:
        """Note what was written; a slot that has lost its block meanwhile is taken only when the tier lets go."""
        good = [slot for slot, result in zip(slots, call.results, strict=True) if result.is_good]
        # The tier has begun to find out what it holds after it had the blocks. It is asked once more, not for ever.
        early = [
            position
            for position, result in enumerate(call.results)
            if result.reason is Reason.NOT_READY and not write.is_repeated
        ]
        self._planned.tally.written += len(good)
        self._planned.tally.refused_writes += len(slots) - len(good) - len(early)
        self.note_written(good)
        again = self._what_may_wait(replace(write.take(early), is_repeated=True))
        if again.keys:
            self._queue.appendleft(again)

    def _give_back(self, byte_count: int, lease: Lease) -> None:
        self._planned.writing_bytes -= byte_count
        self._slots_in_writing -= len(lease.slots)
        lease.release()

    def _byte_count(self, keys: Sequence[OffloadKey]) -> int:
        return sum(self._slot_bytes.group_bytes(offload_group_index(key)) for key in keys)
