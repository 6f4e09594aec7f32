"""Reads blocks from tiers straight into the slots that will hold them.

A promotion is a write into CPU memory like any other: its blocks are pending for everybody until it commits, and loads
that wait for them are pinned in the step that commits. It belongs to nobody who waits.
"""

from __future__ import annotations

from collections import OrderedDict, deque
from collections.abc import Callable, Mapping, Sequence
from typing import Protocol

from aiokvoffload.clock import Clock
from aiokvoffload.keys import OffloadKey, offload_group_index
from aiokvoffload.managers.cpu import CPUOffloadingManager
from aiokvoffload.managers.tier_plan import PlannedTier
from aiokvoffload.specs import Completion, Lease, PrepareStoreOutput, ReqContext
from aiokvoffload.tiers.calls import TierCall

_REMEMBERED_FAILURES = 65_536
_RATE_WEIGHT = 0.2


class SlotBytes(Protocol):
    """Where the bytes of slots are."""

    def group_bytes(self, group: int) -> int:
        """Return the size of a block of a KV group."""

    def view(self, slot: int, group: int) -> memoryview:
        """Return the bytes of a slot that a block of a KV group fills, writable."""


class Promotions:
    """Starts reads within the byte budget of each tier, first come first served.

    Args:
        backing: Where the blocks go.
        slot_bytes: Where its slots are.
        tier_key: What a block is called in the tiers.
        on_taken: Told of the slots that blocks will be read into.
        on_stored: Told of blocks that were read: the blocks, their slots, and the tier that they came from.
        clock: Where deadlines are read.
    """

    def __init__(
        self,
        backing: CPUOffloadingManager,
        slot_bytes: SlotBytes,
        tier_key: Callable[[OffloadKey], OffloadKey],
        on_taken: Callable[[PrepareStoreOutput], None],
        on_stored: Callable[[Sequence[OffloadKey], Sequence[int], PlannedTier], None],
        clock: Clock,
    ) -> None:
        self._backing = backing
        self._slot_bytes = slot_bytes
        self._tier_key = tier_key
        self._on_taken = on_taken
        self._on_stored = on_stored
        self._clock = clock
        self._line: deque[Callable[[], bool]] = deque()
        self._is_pumping = False
        self._retry_at: OrderedDict[OffloadKey, float] = OrderedDict()
        self._tickets: dict[PrepareStoreOutput, None] = {}

    @property
    def slot_count(self) -> int:
        """Slots that are being filled."""
        generation = self._backing.generation
        return sum(len(ticket.slots) for ticket in self._tickets if ticket.generation == generation)

    def may_ask(self, key: OffloadKey) -> bool:
        """Return whether a block may be looked for in tiers; not soon after it could not be read."""
        retry_at = self._retry_at.get(key)
        if retry_at is None:
            return True
        if retry_at > self._clock.now():
            return False
        del self._retry_at[key]
        return True

    def enqueue(self, start: Callable[[], bool]) -> None:
        """Call `start` in its turn, now or in a later `pump`; again, as long as it returns False."""
        self._line.append(start)
        self.pump()

    def pump(self) -> None:
        """Start what stands in line, as far as the budgets go; what a start calls this for is done after it."""
        if self._is_pumping:
            return
        self._is_pumping = True
        try:
            while self._line and self._line[0]():
                self._line.popleft()
        finally:
            self._is_pumping = False

    def has_room(self, sources: Mapping[OffloadKey, PlannedTier]) -> bool:
        """Return whether the budgets allow to read blocks now; one load always may."""
        wanted: dict[PlannedTier, int] = {}
        for key, planned in sources.items():
            wanted[planned] = wanted.get(planned, 0) + self._byte_count(key)
        return all(
            not planned.reading_bytes or planned.reading_bytes + byte_count <= planned.plan.read_bytes
            for planned, byte_count in wanted.items()
        )

    def start(
        self, sources: Mapping[OffloadKey, PlannedTier], depth_of: Mapping[OffloadKey, int], ctx: ReqContext | None
    ) -> None:
        """Read blocks, in order, as far as CPU memory has room; no access, but they enter at that of the request."""
        by_tier: dict[PlannedTier, list[OffloadKey]] = {}
        for key, planned in sources.items():
            by_tier.setdefault(planned, []).append(key)
        for planned, keys in by_tier.items():
            if planned.tier.is_closed:
                continue
            ticket = self._backing.prepare_promotion_nowait(keys, ctx, depths=[depth_of[key] for key in keys])
            if ticket.slots:
                self._on_taken(ticket)
                self._read(planned, ticket)

    def _read(self, planned: PlannedTier, ticket: PrepareStoreOutput) -> None:
        keys = list(ticket.keys_to_store)
        views = [
            self._slot_bytes.view(slot, offload_group_index(key)) for key, slot in zip(keys, ticket.slots, strict=True)
        ]
        byte_count = sum(view.nbytes for view in views)
        lease = Lease(self._backing, ticket.slots)
        self._tickets[ticket] = None
        planned.reading_bytes += byte_count
        started = self._clock.now()
        call = planned.tier.start_get_into(
            [self._tier_key(key) for key in keys], views, deadline=started + planned.plan.read_seconds
        )
        # The buffers are the tier's until the call is over, which may be long after it was answered.
        call.on_over(lambda: self._give_back(planned, byte_count, lease))
        call.on_answered(lambda: self._commit(planned, ticket, keys, call, started))

    def _commit(
        self, planned: PlannedTier, ticket: PrepareStoreOutput, keys: list[OffloadKey], call: TierCall, started: float
    ) -> None:
        failed = [key for key, result in zip(keys, call.results, strict=True) if not result.is_good]
        del self._tickets[ticket]
        planned.tally.failed_promotions += len(failed)
        planned.tally.promoted += len(keys) - len(failed)
        now = self._clock.now()
        for key in failed:
            self._retry_at[key] = now + planned.plan.retry_seconds
            self._retry_at.move_to_end(key)
            if len(self._retry_at) > _REMEMBERED_FAILURES:
                self._retry_at.popitem(last=False)
        read = [key for key, result in zip(keys, call.results, strict=True) if result.is_good]
        if read:
            seconds_per_byte = (now - started) / sum(map(self._byte_count, read))
            rate = planned.seconds_per_byte
            planned.seconds_per_byte = rate + _RATE_WEIGHT * (seconds_per_byte - rate) if rate else seconds_per_byte
            planned.measured_at = now
        slot_of = dict(zip(keys, ticket.slots, strict=True))
        completion = self._backing.complete_store_nowait(ticket, bool(read), failed_keys=failed)
        if read and completion is Completion.APPLIED:
            self._on_stored(read, [slot_of[key] for key in read], planned)

    def _give_back(self, planned: PlannedTier, byte_count: int, lease: Lease) -> None:
        planned.reading_bytes -= byte_count
        lease.release()

    def _byte_count(self, key: OffloadKey) -> int:
        return self._slot_bytes.group_bytes(offload_group_index(key))
