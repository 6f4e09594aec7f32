"""The manager contract: which key lives in which slot, and who may have it.

Every operation is decided in one synchronous step, the `_nowait` twin, that changes everything or nothing; the
coroutine of the same name only adds waiting. Coroutines named `prepare_*`, `lookup*` and `wait_*` check for
cancellation first; `complete_*` never suspend and never check, so they run to their end in a cancelled task.
Cancelling a waiting coroutine takes its place in line, its pins and its reservations back.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import AsyncIterator, Callable, Collection, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Literal, TypeVar

import anyio
from anyio.lowlevel import checkpoint_if_cancelled

from aiokvoffload.clock import Clock, SystemClock, deadline_after
from aiokvoffload.keys import OffloadKey
from aiokvoffload.managers.tier_plan import TierUseStatistics
from aiokvoffload.managers.waits import Take
from aiokvoffload.specs import (
    Completion,
    LookupResult,
    PrepareLoadOutput,
    PrepareStoreOutput,
    ReqContext,
    Ticket,
)

Keys = Sequence[OffloadKey]
WhenFull = Literal["refuse", "leading", "wait"]
TicketType = TypeVar("TicketType", bound=Ticket)


@dataclass(frozen=True, slots=True)
class ManagerStatistics:
    """Where the slots are, and what has happened so far.

    `free + ready + writing + promoting + leased_without_key = total`, always.

    Attributes:
        total: Slots.
        free: Slots without a block.
        ready: Slots whose block can be loaded.
        writing: Slots being written from the GPU.
        promoting: Slots being filled from a tier.
        leased_without_key: Slots whose block is gone but whose bytes somebody may still touch.
        pinned: Ready slots that somebody uses.
        kept: Ready slots that a hint keeps; one whose time is over counts until a call needs room.
        waiting_stores: Offers standing in line for room.
        waiting_loads: Loads waiting for blocks being written.
        waited_stores: Offers that have stood in line.
        waited_loads: Loads that have waited.
        store_wait_seconds: How long those offers stood there, together.
        load_wait_seconds: How long those loads waited, together.
        stored_blocks: Blocks committed.
        evicted_blocks: Blocks that left for others.
        refused_blocks: Blocks offered that found no room.
        failed_blocks: Blocks whose write failed or was aborted.
        hit_blocks: Blocks pinned for loading.
        misses_by_reason: Blocks that loads asked for, and that come after the prefix which was found: "absent", it or
            one before it was not there; "stale", the request is of an older epoch; "failed", it was pinned while it was
            being written, so that it is among the hits too, and that has failed.
        taken_along_blocks: Blocks put first in line because a load has taken them along.
        rescued_blocks: Blocks that were given up by the GPU while they were stored.
        rejected_completions: Completions that came late, twice, or with another manager's ticket.
        detached_sinks: Event sinks that raised and were detached.
    """

    total: int = 0
    free: int = 0
    ready: int = 0
    writing: int = 0
    promoting: int = 0
    leased_without_key: int = 0
    pinned: int = 0
    kept: int = 0
    waiting_stores: int = 0
    waiting_loads: int = 0
    waited_stores: int = 0
    waited_loads: int = 0
    store_wait_seconds: float = 0.0
    load_wait_seconds: float = 0.0
    stored_blocks: int = 0
    evicted_blocks: int = 0
    refused_blocks: int = 0
    failed_blocks: int = 0
    hit_blocks: int = 0
    misses_by_reason: Mapping[str, int] = field(default_factory=dict)
    taken_along_blocks: int = 0
    rescued_blocks: int = 0
    rejected_completions: int = 0
    detached_sinks: int = 0


class OffloadingManager(ABC):
    """Decides where offloaded blocks live.

    Keys of one call are in token order, KV group after group (`group_sizes` says how many of each); a key given
    twice counts once. `depths` are the token positions of the blocks' ends; without them the order of the keys
    decides which of equals leaves first.

    Args:
        clock: Where deadlines are read.
    """

    def __init__(self, clock: Clock | None = None) -> None:
        self.clock: Clock = clock or SystemClock()

    @property
    @abstractmethod
    def epoch(self) -> int:
        """How often `bump_epoch_nowait` was called."""

    def tier_statistics(self) -> tuple[TierUseStatistics, ...]:
        """Return the counts of each tier below; none by default."""
        return ()

    def poll_nowait(self) -> None:
        """Move on with what goes on in the background, such as reads from tiers; never waits."""
        return

    @property
    def next_deadline(self) -> float | None:
        """When `poll_nowait` has something to do, if no doorbell rings before."""
        return None

    @property
    def is_at_rest(self) -> bool:
        """Nothing goes on in the background that closing should wait for."""
        return True

    def add_doorbell(self, ring: Callable[[], None]) -> Callable[[], None]:
        """Let `ring` be called, from any thread, when `poll_nowait` has something to do; return what takes it away."""
        return lambda: None

    @abstractmethod
    def lookup_nowait(self, keys: Keys, ctx: ReqContext | None = None) -> list[LookupResult]:
        """Return what could be loaded now; promises nothing and counts as no access."""

    @abstractmethod
    def lookup_prefix_nowait(
        self,
        keys: Keys,
        ctx: ReqContext | None = None,
        *,
        group_sizes: Sequence[int] | None = None,
        resident_tokens: int = 0,
    ) -> int:
        """Return the tokens of the longest prefix that every KV group can go on from; pending blocks count.

        Args:
            keys: Of each group, all blocks from the start of the request.
            ctx: The request.
            group_sizes: How many keys belong to each group.
            resident_tokens: Tokens that the GPU holds already, for which nothing is needed.
        """

    @abstractmethod
    def touch(self, keys: Keys, ctx: ReqContext | None = None, *, depths: Sequence[int] | None = None) -> None:
        """Count the request's one access, to all its blocks, resident or not; never suspends.

        Once per request and block; comes before the request's first `prepare_store`, which otherwise counts it.
        """

    @abstractmethod
    def prepare_load_nowait(
        self,
        keys: Keys,
        ctx: ReqContext | None = None,
        *,
        take: Take = "all",
        group_sizes: Sequence[int] | None = None,
        resident_tokens: int = 0,
    ) -> PrepareLoadOutput:
        """Look up and pin in one step: all of `keys` or none, or what the longest prefix needs.

        The ticket waits while some of its blocks are being written; see `PrepareLoadOutput`.
        """

    @abstractmethod
    def watch_nowait(self, keys: Keys) -> PrepareLoadOutput:
        """Return a ticket that pins nothing and waits while any of `keys` is being written."""

    @abstractmethod
    def complete_load_nowait(self, ticket: PrepareLoadOutput, *, take_along: bool = False) -> Completion:
        """Unpin what a ticket pinned; also gives a ticket up, waiting or not.

        Args:
            ticket: What was loaded, or will not be.
            take_along: The blocks have arrived in the GPU and need not stay: those that nobody else uses, or waits
                for, are first in line for reuse. They stay hits until they are evicted.
        """

    @abstractmethod
    def prepare_store_nowait(
        self,
        keys: Keys,
        ctx: ReqContext | None = None,
        *,
        when_full: WhenFull = "refuse",
        depths: Sequence[int] | None = None,
        filtered: bool = True,
    ) -> PrepareStoreOutput:
        """Reserve slots for those of `keys` that are missing, evicting if need be.

        Args:
            keys: The offer. None of them is evicted for it.
            ctx: The request.
            when_full: Without room for all: refuse all, take the leading ones, or stand in line. An offer that
                never fits is refused at once.
            depths: Token position of each block's end.
            filtered: Whether a filter, or the policy, may leave blocks out; False for blocks that must be kept
                (preemption).
        """

    @abstractmethod
    def prepare_demotion_nowait(
        self,
        keys: Keys,
        ctx: ReqContext | None = None,
        *,
        depths: Sequence[int] | None = None,
        filtered: bool = True,
    ) -> PrepareStoreOutput:
        """Reserve slots for blocks that the GPU gives up; completed like a store.

        No access: they enter at a tick of their own, and nothing counts as used. Blocks that are stored already need no
        copy; if they had been put first in line, they are back among the others. Of what does not fit, the leading
        part is taken.

        Args:
            keys: The blocks, each after its prefix. None of them is evicted for the others.
            ctx: The request, if they are all one's; its epoch must be the present one.
            depths: Token position of each block's end; by default the last one is the deepest.
            filtered: Whether a filter may leave blocks out.
        """

    @abstractmethod
    def hint(
        self,
        keys: Keys,
        *,
        session_ended: bool = False,
        keep_seconds: float | None = None,
        depths: Sequence[int] | None = None,
    ) -> int:
        """Take advice about stored blocks, and return for how many of them it was taken; never suspends.

        Args:
            keys: All blocks of a request from its start.
            session_ended: No further turn will come. Blocks that requests of that session alone have used, and that
                nobody uses now, are first in line, the deepest first. Sessions are told apart by
                `ReqContext.session_id`; what a request without one has used counts as shared.
            keep_seconds: Evict none of the blocks before that time has passed. At most half of all slots are kept;
                what comes after is refused. A later hint about a block replaces an earlier one; 0 ends the keeping.
            depths: Token position of each block's end; by default the last one is the deepest.

        Raises:
            InvalidRequestError: Not exactly one of the two hints, or a negative time.
        """

    @abstractmethod
    def complete_store_nowait(
        self, ticket: PrepareStoreOutput, success: bool = True, *, failed_keys: Collection[OffloadKey] = ()
    ) -> Completion:
        """Commit what a ticket reserved, or drop it; also gives a ticket up, waiting or not.

        Args:
            ticket: What was written, or will not be.
            success: Whether it was written.
            failed_keys: Blocks of a successful write that are dropped even so.
        """

    @abstractmethod
    def hold(self, slots: Sequence[int]) -> None:
        """Count one more user of slots that are in use already; for leases."""

    @abstractmethod
    def release(self, slots: Sequence[int]) -> None:
        """Count one user less of slots; for leases."""

    @abstractmethod
    def settle_nowait(self, ticket: Ticket) -> None:
        """End the wait of a ticket with what there is now: a shorter prefix, a miss, a refusal."""

    @abstractmethod
    def reset_nowait(self) -> None:
        """Forget all blocks; open store tickets become stale, loads in flight finish, waiting loads miss."""

    @abstractmethod
    def bump_epoch_nowait(self) -> None:
        """Reset after a weight update: requests and tickets from before are refused, miss, or fail."""

    @abstractmethod
    def statistics(self) -> ManagerStatistics:
        """Return the counts of this moment."""

    @abstractmethod
    def close_nowait(self) -> None:
        """Refuse all further calls except completions; waiting tickets miss or are refused. Idempotent."""

    async def lookup(
        self, keys: Keys, ctx: ReqContext | None = None, *, timeout_seconds: float | None = None
    ) -> list[LookupResult]:
        """Like `lookup_nowait`, and ask the tiers below, at most `timeout_seconds`; what only they have is PENDING."""
        await checkpoint_if_cancelled()
        return self.lookup_nowait(keys, ctx)

    async def lookup_prefix(
        self,
        keys: Keys,
        ctx: ReqContext | None = None,
        *,
        group_sizes: Sequence[int] | None = None,
        resident_tokens: int = 0,
        timeout_seconds: float | None = None,
    ) -> int:
        """Like `lookup_prefix_nowait`, and ask the tiers below, at most `timeout_seconds`; what they have counts."""
        await checkpoint_if_cancelled()
        return self.lookup_prefix_nowait(keys, ctx, group_sizes=group_sizes, resident_tokens=resident_tokens)

    async def prepare_load(
        self,
        keys: Keys,
        ctx: ReqContext | None = None,
        *,
        take: Take = "all",
        group_sizes: Sequence[int] | None = None,
        resident_tokens: int = 0,
        timeout_seconds: float | None = None,
    ) -> PrepareLoadOutput:
        """Like `prepare_load_nowait`, and wait for blocks being written, at most `timeout_seconds`."""
        await checkpoint_if_cancelled()
        ticket = self.prepare_load_nowait(
            keys, ctx, take=take, group_sizes=group_sizes, resident_tokens=resident_tokens
        )
        return await self.wait_settled(ticket, timeout_seconds)

    async def complete_load(self, ticket: PrepareLoadOutput, *, take_along: bool = False) -> Completion:
        """See `complete_load_nowait`; never suspends."""
        return self.complete_load_nowait(ticket, take_along=take_along)

    async def prepare_store(
        self,
        keys: Keys,
        ctx: ReqContext | None = None,
        *,
        when_full: WhenFull = "refuse",
        depths: Sequence[int] | None = None,
        filtered: bool = True,
        timeout_seconds: float | None = None,
    ) -> PrepareStoreOutput:
        """Like `prepare_store_nowait`, and with `when_full="wait"` wait for room, at most `timeout_seconds`."""
        await checkpoint_if_cancelled()
        ticket = self.prepare_store_nowait(keys, ctx, when_full=when_full, depths=depths, filtered=filtered)
        return await self.wait_settled(ticket, timeout_seconds)

    async def prepare_demotion(
        self,
        keys: Keys,
        ctx: ReqContext | None = None,
        *,
        depths: Sequence[int] | None = None,
        filtered: bool = True,
    ) -> PrepareStoreOutput:
        """See `prepare_demotion_nowait`; waits for nothing."""
        await checkpoint_if_cancelled()
        return self.prepare_demotion_nowait(keys, ctx, depths=depths, filtered=filtered)

    async def complete_store(
        self, ticket: PrepareStoreOutput, success: bool = True, *, failed_keys: Collection[OffloadKey] = ()
    ) -> Completion:
        """See `complete_store_nowait`; never suspends."""
        return self.complete_store_nowait(ticket, success, failed_keys=failed_keys)

    async def wait_ready(
        self, keys: Keys, ctx: ReqContext | None = None, *, timeout_seconds: float | None = None
    ) -> list[LookupResult]:
        """Wait until none of `keys` is being written, and return what could be loaded then; pins nothing.

        At the timeout, what is still being written is PENDING.
        """
        await checkpoint_if_cancelled()
        ticket = self.watch_nowait(keys)
        try:
            await self._wait_for(ticket, deadline_after(self.clock, timeout_seconds))
        finally:
            self.complete_load_nowait(ticket)
        return self.lookup_nowait(keys, ctx)

    async def wait_settled(self, ticket: TicketType, timeout_seconds: float | None = None) -> TicketType:
        """Wait until `ticket` is settled, at the timeout with what there is; a cancelled wait gives it up."""
        if ticket.is_waiting:
            try:
                await self._wait_for(ticket, deadline_after(self.clock, timeout_seconds))
            except BaseException:
                self._give_up(ticket)
                raise
            if ticket.is_waiting:
                self.settle_nowait(ticket)
        return ticket

    async def reset(self) -> None:
        """See `reset_nowait`."""
        self.reset_nowait()

    async def bump_epoch(self) -> None:
        """See `bump_epoch_nowait`."""
        self.bump_epoch_nowait()

    async def aclose(self) -> None:
        """See `close_nowait`."""
        self.close_nowait()

    @asynccontextmanager
    async def loading(
        self,
        keys: Keys,
        ctx: ReqContext | None = None,
        *,
        take: Take = "all",
        group_sizes: Sequence[int] | None = None,
        resident_tokens: int = 0,
        timeout_seconds: float | None = None,
        take_along: bool = False,
    ) -> AsyncIterator[PrepareLoadOutput]:
        """Pin blocks for the body; its exit, whichever way, unpins them and never suspends.

        With `take_along`, a clean exit takes the blocks along; see `complete_load_nowait`.
        """
        ticket = await self.prepare_load(
            keys,
            ctx,
            take=take,
            group_sizes=group_sizes,
            resident_tokens=resident_tokens,
            timeout_seconds=timeout_seconds,
        )
        try:
            yield ticket
        except BaseException:
            self.complete_load_nowait(ticket)
            raise
        self.complete_load_nowait(ticket, take_along=take_along)

    @asynccontextmanager
    async def storing(
        self,
        keys: Keys,
        ctx: ReqContext | None = None,
        *,
        when_full: WhenFull = "refuse",
        depths: Sequence[int] | None = None,
        filtered: bool = True,
        timeout_seconds: float | None = None,
    ) -> AsyncIterator[PrepareStoreOutput]:
        """Reserve slots for the body; a clean exit commits, any other drops. The exit never suspends."""
        ticket = await self.prepare_store(
            keys, ctx, when_full=when_full, depths=depths, filtered=filtered, timeout_seconds=timeout_seconds
        )
        try:
            yield ticket
        except BaseException:
            self.complete_store_nowait(ticket, success=False)
            raise
        self.complete_store_nowait(ticket)

    async def _wait_for(self, ticket: Ticket, deadline: float | None) -> None:
        """Wait until a ticket is settled or the deadline has come, and move on with the manager meanwhile."""
        self.hear()
        settled = anyio.Event()
        ticket.on_settled(settled.set)
        while ticket.is_waiting and not _has_come(deadline, self.clock):
            due = self.next_deadline
            with self.clock.cancel_at(deadline if due is None else due if deadline is None else min(due, deadline)):
                await settled.wait()
            self.poll_nowait()

    def hear(self) -> None:
        """Let the running event loop poll when something needs it; for managers that work in the background."""
        return

    def _give_up(self, ticket: Ticket) -> None:
        if isinstance(ticket, PrepareStoreOutput):
            self.complete_store_nowait(ticket, success=False)
        elif isinstance(ticket, PrepareLoadOutput):
            self.complete_load_nowait(ticket)


def _has_come(deadline: float | None, clock: Clock) -> bool:
    return deadline is not None and deadline <= clock.now()
