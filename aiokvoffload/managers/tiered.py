"""CPU memory with tiers below it: blocks are written down as they come and read back when they are asked for."""

from __future__ import annotations

import hashlib
import os
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import compress
from operator import not_

from anyio.lowlevel import checkpoint_if_cancelled

from aiokvoffload.clock import deadline_after
from aiokvoffload.errors import ConfigurationError
from aiokvoffload.event_loops import caller_from_threads, running_loop
from aiokvoffload.keys import GROUP_INDEX_BYTES, OffloadKey
from aiokvoffload.managers.base import Keys, ManagerStatistics, OffloadingManager, WhenFull
from aiokvoffload.managers.cascade import Cascade
from aiokvoffload.managers.cpu import CPUOffloadingManager
from aiokvoffload.managers.promotions import Promotions, SlotBytes
from aiokvoffload.managers.requests import RequestTable
from aiokvoffload.managers.tally import Tally, WaitTally, blocks_beyond
from aiokvoffload.managers.tier_loads import LoadArguments, TierLoad, adopt
from aiokvoffload.managers.tier_lookups import TierLookups, TierSearch
from aiokvoffload.managers.tier_plan import PlannedTier, TierPlan, TierUseStatistics
from aiokvoffload.managers.waits import Take
from aiokvoffload.specs import (
    Completion,
    LookupResult,
    PrepareLoadOutput,
    PrepareStoreOutput,
    ReqContext,
    Ticket,
    TierFilter,
)
from aiokvoffload.tiers.base import Tier


@dataclass(slots=True)
class _Offered:
    """Who has offered the blocks of a store, and where they are in the request."""

    request_id: str | None
    depth_of: dict[OffloadKey, int]


class TieredOffloadingManager(OffloadingManager):
    """A manager of CPU memory whose loads look into tiers, and whose blocks are written down to them.

    `prepare_load_nowait` answers at once with what CPU memory has; if tiers may have more, the ticket waits while they
    are asked, and while what they have is read into slots. `poll_nowait` moves on; in an event loop, whoever awaits a
    ticket lets the loop poll. The tiers are the caller's, who closes them after the manager.

    Args:
        backing: The manager of CPU memory.
        tiers: The tiers, the fastest first, and how each is used.
        slot_bytes: Where the bytes of the slots are.
        recompute_tokens_per_second: How fast the engine computes what is not loaded. A tier that would be slower is
            not read; without it, none is.

    Raises:
        ConfigurationError: A tier is given twice, or the speed is not positive.
    """

    def __init__(
        self,
        backing: CPUOffloadingManager,
        tiers: Sequence[tuple[Tier, TierPlan]],
        slot_bytes: SlotBytes,
        *,
        recompute_tokens_per_second: float | None = None,
    ) -> None:
        super().__init__(backing.clock)
        if len({id(tier) for tier, _ in tiers}) < len(tiers):
            raise ConfigurationError("a tier is given twice; open one for each place")
        if recompute_tokens_per_second is not None and not recompute_tokens_per_second > 0:
            raise ConfigurationError(
                f"recompute_tokens_per_second is {recompute_tokens_per_second}; it must be above 0"
            )
        self._backing = backing
        self._planned = [PlannedTier(tier, plan, number) for number, (tier, plan) in enumerate(tiers)]
        self._slot_bytes = slot_bytes
        self._recompute_tokens_per_second = recompute_tokens_per_second
        self._namespace = b""
        self._lookups = TierLookups(self.clock.now, self._tier_key)
        self._promotions = Promotions(
            backing, slot_bytes, self._tier_key, self._note_taken, self._note_promoted, self.clock
        )
        self._cascades = [
            Cascade(planned, backing, slot_bytes, self._tier_key, self.clock.now) for planned in self._planned
        ]
        self._offered: dict[PrepareStoreOutput, _Offered] = {}
        self._loads: dict[PrepareLoadOutput, TierLoad] = {}
        self._requests = RequestTable()
        self._tally = Tally()
        self._waits = WaitTally(self.clock.now)
        self._loop: object = None
        self._silence: list[Callable[[], None]] = []

    @property
    def epoch(self) -> int:
        """The backing manager's epoch."""
        return self._backing.epoch

    # Moving on

    def poll_nowait(self) -> None:
        """Collect what tiers have answered, and start what may start."""
        for planned in self._planned:
            planned.tier.poll()
        self._promotions.pump()
        for cascade in self._cascades:
            cascade.pump()

    @property
    def next_deadline(self) -> float | None:
        """When a tier's answer is overdue."""
        deadlines = [planned.tier.next_deadline for planned in self._planned]
        return min((deadline for deadline in deadlines if deadline is not None), default=None)

    @property
    def is_at_rest(self) -> bool:
        """Nothing is being written to tiers, or waits for it."""
        return not any(planned.waiting_bytes or planned.writing_bytes for planned in self._planned)

    def add_doorbell(self, ring: Callable[[], None]) -> Callable[[], None]:
        """Let every tier ring."""
        silences = [planned.tier.add_doorbell(ring) for planned in self._planned]

        def silence_all() -> None:
            for silence in silences:
                silence()

        return silence_all

    def tier_statistics(self) -> tuple[TierUseStatistics, ...]:
        """Return the counts of each tier."""
        return tuple(planned.statistics() for planned in self._planned)

    # Looking

    def lookup_nowait(self, keys: Keys, ctx: ReqContext | None = None) -> list[LookupResult]:
        """Say what CPU memory has; what is being read from a tier is PENDING."""
        return self._backing.lookup_nowait(keys, ctx)

    def lookup_prefix_nowait(
        self,
        keys: Keys,
        ctx: ReqContext | None = None,
        *,
        group_sizes: Sequence[int] | None = None,
        resident_tokens: int = 0,
    ) -> int:
        """Say what CPU memory has."""
        return self._backing.lookup_prefix_nowait(keys, ctx, group_sizes=group_sizes, resident_tokens=resident_tokens)

    async def lookup(
        self, keys: Keys, ctx: ReqContext | None = None, *, timeout_seconds: float | None = None
    ) -> list[LookupResult]:
        """Say what CPU memory has, and ask for what tiers have; that is PENDING, since a load waits for it."""
        await checkpoint_if_cancelled()
        found = await self._find_in_tiers(self._askable(keys), ctx, timeout_seconds)
        return [
            LookupResult.PENDING if result is LookupResult.MISS and key in found else result
            for key, result in zip(keys, self.lookup_nowait(keys, ctx), strict=True)
        ]

    async def lookup_prefix(
        self,
        keys: Keys,
        ctx: ReqContext | None = None,
        *,
        group_sizes: Sequence[int] | None = None,
        resident_tokens: int = 0,
        timeout_seconds: float | None = None,
    ) -> int:
        """Say what CPU memory and, after asking them, tiers have."""
        await checkpoint_if_cancelled()
        self.lookup_prefix_nowait(keys, ctx, group_sizes=group_sizes, resident_tokens=resident_tokens)
        missing = self._missing(keys, group_sizes, resident_tokens)
        found = await self._find_in_tiers(missing, ctx, timeout_seconds)
        if not found:
            return self.lookup_prefix_nowait(keys, ctx, group_sizes=group_sizes, resident_tokens=resident_tokens)
        return self._backing.prefix.boundary(
            self._backing.prefix.split(keys, group_sizes),
            lambda asked: self._backing.are_known(asked, found),
            resident_tokens,
        )

    def search_nowait(self, keys: Keys, ctx: ReqContext | None, on_over: Callable[[TierSearch], None]) -> TierSearch:
        """Ask the tiers which of some blocks they have, and read none; `poll_nowait` goes on with it.

        Blocks that CPU memory has, and those that could not be read lately, are not asked for, so they are not found.

        Args:
            keys: The blocks.
            ctx: The request.
            on_over: Called with the search once all is answered, or overdue; before this returns, if nobody is asked.
        """
        search = TierSearch(
            self._lookups, self._askable(keys), self._tiers_for(ctx, len(keys)), on_found=lambda: on_over(search)
        )
        search.advance()
        return search

    def touch(self, keys: Keys, ctx: ReqContext | None = None, *, depths: Sequence[int] | None = None) -> None:
        """Count the request's access in CPU memory and in the tiers."""
        self._backing.touch(keys, ctx, depths=depths)
        if not keys:
            return
        self._count_uses(keys, ctx, depths)
        request_id = _request_id(ctx)
        tier_keys = list(map(self._tier_key, keys))
        for planned in self._planned:
            if not planned.tier.is_closed:
                deadline = self.clock.now() + planned.plan.write_seconds  # nobody waits for it
                planned.tier.start_touch(tier_keys, deadline=deadline, request_id=request_id, depths=depths)

    # Loading

    def prepare_load_nowait(
        self,
        keys: Keys,
        ctx: ReqContext | None = None,
        *,
        take: Take = "all",
        group_sizes: Sequence[int] | None = None,
        resident_tokens: int = 0,
    ) -> PrepareLoadOutput:
        """Pin what CPU memory has, and wait for what tiers have."""
        load = self._begin_load(
            LoadArguments(
                keys=list(keys),
                ctx=ctx,
                is_current=self._backing.is_current(ctx),
                take=take,
                group_sizes=group_sizes,
                resident_tokens=resident_tokens,
            )
        )
        missing = self._missing(keys, group_sizes, resident_tokens)
        tiers = self._tiers_for(ctx, len(missing))
        if missing and tiers:
            load.look_for(missing, self._lookups, tiers)
        else:
            load.wait_for_held()
        self._waits.begin(load.ticket)
        return load.ticket

    def prepare_found_load_nowait(
        self, keys: Keys, ctx: ReqContext | None, found: Mapping[OffloadKey, PlannedTier]
    ) -> PrepareLoadOutput:
        """Pin the leading run of `keys` that CPU memory has or a search has found, and read the latter.

        For a manager of one KV group, or of none that it knows of.

        Args:
            keys: The blocks, the most needed first.
            ctx: The request.
            found: Which tier has which of them, see `search_nowait`.
        """
        load = self._begin_load(
            LoadArguments(
                keys=list(keys),
                ctx=ctx,
                is_current=self._backing.is_current(ctx),
                take="leading",
                group_sizes=None,
                resident_tokens=0,
            )
        )
        load.read_from(found)
        self._waits.begin(load.ticket)
        return load.ticket

    def watch_nowait(self, keys: Keys) -> PrepareLoadOutput:
        """Watch in the backing manager."""
        return self._backing.watch_nowait(keys)

    def complete_load_nowait(self, ticket: PrepareLoadOutput, *, take_along: bool = False) -> Completion:
        """Unpin, or give the wait up."""
        if ticket.holder is not self:
            return self._backing.complete_load_nowait(ticket, take_along=take_along)
        if not ticket.is_open:
            self._tally.rejected += 1
            return Completion.REPEATED
        load = self._loads.get(ticket)
        if load is None:
            ticket.is_open = False
            return Completion.APPLIED if ticket.epoch == self.epoch else Completion.STALE
        del self._loads[ticket]
        ticket.is_open = False
        if not ticket.is_waiting:
            return self._backing.complete_load_nowait(load.held, take_along=take_along)
        load.give_up()
        self._waits.end(ticket)
        completion = self._backing.complete_load_nowait(load.held)
        ticket.keys = ()
        ticket.settle()
        return completion

    # Storing

    def prepare_store_nowait(
        self,
        keys: Keys,
        ctx: ReqContext | None = None,
        *,
        when_full: WhenFull = "refuse",
        depths: Sequence[int] | None = None,
        filtered: bool = True,
    ) -> PrepareStoreOutput:
        """Reserve in CPU memory."""
        if not self._requests.bind(ctx, self.epoch).tick:
            self._count_uses(keys, ctx, depths)
        ticket = self._backing.prepare_store_nowait(keys, ctx, when_full=when_full, depths=depths, filtered=filtered)
        return self._note_offer(ticket, keys, ctx, depths)

    def prepare_demotion_nowait(
        self,
        keys: Keys,
        ctx: ReqContext | None = None,
        *,
        depths: Sequence[int] | None = None,
        filtered: bool = True,
    ) -> PrepareStoreOutput:
        """Reserve in CPU memory for what the GPU gives up."""
        ticket = self._backing.prepare_demotion_nowait(keys, ctx, depths=depths, filtered=filtered)
        return self._note_offer(ticket, keys, ctx, depths)

    def complete_store_nowait(
        self, ticket: PrepareStoreOutput, success: bool = True, *, failed_keys: Collection[OffloadKey] = ()
    ) -> Completion:
        """Commit or drop in CPU memory, and write down what was committed, as the plans say."""
        offered = self._offered.pop(ticket, None)
        completion = self._backing.complete_store_nowait(ticket, success, failed_keys=failed_keys)
        if completion is Completion.APPLIED and success and offered is not None:
            failed = set(failed_keys)
            written = [
                (key, slot) for key, slot in zip(ticket.keys_to_store, ticket.slots, strict=True) if key not in failed
            ]
            self._write_down([key for key, _ in written], [slot for _, slot in written], offered, self._cascades)
        return completion

    def hint(
        self,
        keys: Keys,
        *,
        session_ended: bool = False,
        keep_seconds: float | None = None,
        depths: Sequence[int] | None = None,
    ) -> int:
        """Hand the hint to the backing manager."""
        return self._backing.hint(keys, session_ended=session_ended, keep_seconds=keep_seconds, depths=depths)

    # The whole

    def settle_nowait(self, ticket: Ticket) -> None:
        """End the wait of a ticket with what CPU memory has now."""
        load = self._loads.get(ticket) if isinstance(ticket, PrepareLoadOutput) else None
        if load is None:
            self._backing.settle_nowait(ticket)
        elif ticket.is_waiting:
            load.settle_now()

    def hold(self, slots: Sequence[int]) -> None:
        """Count in the backing manager."""
        self._backing.hold(slots)

    def release(self, slots: Sequence[int]) -> None:
        """Count in the backing manager."""
        self._backing.release(slots)

    def reset_nowait(self) -> None:
        """Forget what is in CPU memory; tiers keep what they have."""
        self._backing.reset_nowait()
        self._let_go()

    def bump_epoch_nowait(self) -> None:
        """Start a new epoch: what is in CPU memory is forgotten, and what is in tiers cannot be reached any more."""
        self._backing.bump_epoch_nowait()
        # Another process may count the same epochs for other weights.
        self._namespace = os.urandom(16)
        self._let_go()

    def statistics(self) -> ManagerStatistics:
        """Return the counts of this moment."""
        statistics = self._backing.statistics()
        promoting = self._promotions.slot_count
        return replace(
            statistics,
            writing=statistics.writing - promoting,
            promoting=promoting,
            waiting_loads=statistics.waiting_loads
            + sum(ticket.is_waiting and not load.held.is_waiting for ticket, load in self._loads.items()),
            waited_loads=self._waits.loads,
            load_wait_seconds=self._waits.load_seconds,
            hit_blocks=self._tally.hits,
            misses_by_reason=dict(self._tally.missed),
            rejected_completions=statistics.rejected_completions + self._tally.rejected,
        )

    def close_nowait(self) -> None:
        """Refuse all further calls except completions; what waits to be written is dropped."""
        self._backing.close_nowait()
        self._let_go()
        for silence in self._silence:
            silence()
        self._silence = []

    # Inside

    def hear(self) -> None:
        """Let the running event loop poll when a tier rings."""
        loop = running_loop()
        if loop is not None and loop != self._loop:
            self._loop = loop
            for silence in self._silence:
                silence()
            self._silence = [self.add_doorbell(partial(caller_from_threads(), self.poll_nowait))]

    def _begin_load(self, arguments: LoadArguments) -> TierLoad:
        """Pin what CPU memory has, for a load whose ticket waits."""
        held = arguments.pin(self._backing)
        ticket = PrepareLoadOutput(self, held.epoch, held.generation)
        adopt(ticket, held)
        load = TierLoad(ticket, arguments, held, self._backing, self._promotions, self._end_load)
        self._loads[ticket] = load
        ticket.is_waiting = True
        return load

    def _tier_key(self, key: OffloadKey) -> OffloadKey:
        """Return what a block is called in the tiers: its key, or after a weight update a name of this epoch."""
        if not self._namespace:
            return key
        digest = hashlib.blake2b(key, digest_size=32, key=self._namespace).digest()
        return OffloadKey(digest + key[-GROUP_INDEX_BYTES:])

    def _missing(self, keys: Keys, group_sizes: Sequence[int] | None, resident_tokens: int) -> list[OffloadKey]:
        """Return the blocks that neither GPU nor CPU memory has, but for those that could not be read lately."""
        parts = self._backing.prefix.split(keys, group_sizes)
        wanted = (
            key
            for part, tokens in zip(parts, self._backing.block_tokens, strict=True)
            for key in part[resident_tokens // tokens :]
        )
        return self._askable(wanted)

    def _askable(self, keys: Iterable[OffloadKey]) -> list[OffloadKey]:
        wanted = list(dict.fromkeys(keys))
        known = self._backing.are_known(wanted)
        return [key for key in compress(wanted, map(not_, known)) if self._promotions.may_ask(key)]

    async def _find_in_tiers(
        self, keys: Keys, ctx: ReqContext | None, timeout_seconds: float | None
    ) -> Collection[OffloadKey]:
        """Return which of `keys` tiers have; at the timeout, what is known by then. Cancelling it disturbs no other."""
        tiers = self._tiers_for(ctx)
        if not keys or not tiers:
            return ()
        epoch = self.epoch
        ticket = PrepareLoadOutput(self, epoch, 0)
        ticket.is_waiting = True
        search = TierSearch(self._lookups, keys, tiers, ticket.settle)
        search.advance()
        await self._wait_for(ticket, deadline_after(self.clock, timeout_seconds))
        return search.sources if self.epoch == epoch else ()

    def _count_uses(self, keys: Keys, ctx: ReqContext | None, depths: Sequence[int] | None) -> None:
        """Count a request's use of blocks, for tiers that are written only what comes back."""
        binding = self._requests.bind(ctx, self.epoch)
        self._requests.open_access(binding)
        for cascade in self._cascades:
            cascade.count_uses(keys, binding.tick, depths or [0] * len(keys), _request_id(ctx))
            cascade.pump()

    def _tiers_for(self, ctx: ReqContext | None, to_read: int = 0) -> list[PlannedTier]:
        """Return the tiers that a request may ask, and that are not slower than computing again.

        Args:
            ctx: The request.
            to_read: How many blocks it would read; 0 if it only asks.
        """
        if not self._backing.is_current(ctx) or (ctx is not None and not ctx.tier_filter & TierFilter.BELOW):
            return []
        now = self.clock.now()
        chosen = []
        for planned in self._planned:
            if planned.tier.is_closed:
                continue
            if self._is_slower_than_computing(planned):
                if now < planned.measured_at + planned.plan.retry_seconds:
                    planned.tally.too_slow += to_read
                    continue
                if to_read:
                    planned.measured_at = now  # one load finds out whether it still is
            chosen.append(planned)
        return chosen

    def _is_slower_than_computing(self, planned: PlannedTier) -> bool:
        speed = self._recompute_tokens_per_second
        if speed is None or not planned.seconds_per_byte:
            return False
        seconds_per_token = min(
            self._slot_bytes.group_bytes(group) * planned.seconds_per_byte / tokens
            for group, tokens in enumerate(self._backing.block_tokens)
        )
        return seconds_per_token > 1 / speed

    def _note_offer(
        self, ticket: PrepareStoreOutput, keys: Keys, ctx: ReqContext | None, depths: Sequence[int] | None
    ) -> PrepareStoreOutput:
        """Remember who has offered blocks until they are committed."""
        if not ticket.slots and not ticket.is_waiting:
            return ticket
        depth_of = dict(zip(reversed(keys), reversed(depths or range(len(keys))), strict=True))
        self._offered[ticket] = _Offered(_request_id(ctx), depth_of)
        ticket.on_settled(lambda: self._note_taken(ticket))
        return ticket

    def _note_taken(self, ticket: PrepareStoreOutput) -> None:
        if not ticket.slots:
            self._offered.pop(ticket, None)
            return
        for cascade in self._cascades:
            cascade.note_taken(ticket)

    def _note_promoted(self, keys: Sequence[OffloadKey], slots: Sequence[int], source: PlannedTier) -> None:
        """Write what was read from a tier to those above it."""
        self._cascades[source.number].note_written(self._still_stored(keys, slots))
        self._write_down(keys, slots, _Offered(None, dict.fromkeys(keys, 0)), self._cascades[: source.number])

    def _write_down(
        self, keys: Sequence[OffloadKey], slots: Sequence[int], offered: _Offered, cascades: Sequence[Cascade]
    ) -> None:
        """Let cascades know of blocks that were committed."""
        stored = set(self._still_stored(keys, slots))
        blocks = [(key, slot) for key, slot in zip(keys, slots, strict=True) if slot in stored]
        depths = [offered.depth_of[key] for key, _ in blocks]
        for cascade in cascades:
            cascade.note_lost(len(keys) - len(blocks))
            cascade.note_stored([key for key, _ in blocks], [slot for _, slot in blocks], depths, offered.request_id)
            cascade.pump()

    def _still_stored(self, keys: Sequence[OffloadKey], slots: Sequence[int]) -> list[int]:
        """Return the slots that have their blocks; an offer in line may have taken some in the step of the commit."""
        return [slot for slot, found in zip(slots, self._backing.stored_slots(keys), strict=True) if slot == found]

    def _end_load(self, load: TierLoad) -> None:
        ticket = load.ticket
        self._waits.end(ticket)
        self._tally.hits += len(ticket.keys)
        is_current = load.arguments.is_current and ticket.epoch == self.epoch
        self._tally.note_misses(self._missed_count(load), "absent" if is_current else "stale")
        if not ticket.keys:
            # A miss need not be completed, so nothing may be kept for it.
            self._backing.complete_load_nowait(load.held)
            del self._loads[ticket]
        ticket.settle()

    def _missed_count(self, load: TierLoad) -> int:
        """Return how many of the blocks asked for a load that is over does not get."""
        arguments = load.arguments
        parts = self._backing.prefix.split(arguments.keys, arguments.group_sizes)
        if arguments.take == "leading":
            return blocks_beyond(parts, self._backing.block_tokens, load.ticket.token_count)
        return 0 if load.ticket.keys else sum(map(len, parts))

    def _let_go(self) -> None:
        """Miss for all loads that wait, and forget what waits to be written."""
        for cascade in self._cascades:
            cascade.clear()
        for ticket, load in list(self._loads.items()):
            if ticket.is_waiting:
                load.miss()


def _request_id(ctx: ReqContext | None) -> str | None:
    return ctx.req_id or None if ctx is not None else None
