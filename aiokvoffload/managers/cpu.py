"""The manager of CPU memory: one slot per block, an eviction policy, tickets and leases."""

from __future__ import annotations

from collections.abc import Collection, Container, Sequence
from dataclasses import replace
from typing import get_args

from aiokvoffload.clock import Clock
from aiokvoffload.errors import ConfigurationError, InvalidRequestError, StateError
from aiokvoffload.events import EventKind, EventSink
from aiokvoffload.keys import OffloadKey
from aiokvoffload.kv_caches import KVGroup
from aiokvoffload.managers.announcer import Announcer
from aiokvoffload.managers.base import Keys, ManagerStatistics, OffloadingManager, WhenFull
from aiokvoffload.managers.blocks import BlockTable, Found, SlotState
from aiokvoffload.managers.loads import Loads
from aiokvoffload.managers.offers import Offer, Offers
from aiokvoffload.managers.placement import SlotPlacement
from aiokvoffload.managers.prefix import PrefixMatcher
from aiokvoffload.managers.requests import RequestTable
from aiokvoffload.managers.tally import SettledTickets, Tally, WaitTally, blocks_beyond
from aiokvoffload.managers.waits import LoadRequest, Take
from aiokvoffload.ownership import Owner
from aiokvoffload.policies.base import POLICIES, Access, CachePolicy
from aiokvoffload.specs import (
    Completion,
    CPULoadStoreSpec,
    LookupResult,
    PrepareLoadOutput,
    PrepareStoreOutput,
    ReqContext,
    RequestBinding,
    Ticket,
)

_TAKES: tuple[str, ...] = get_args(Take)
_WHEN_FULL: tuple[str, ...] = get_args(WhenFull)


class CPUOffloadingManager(OffloadingManager):
    """Keeps blocks in equal slots of CPU memory.

    Args:
        block_count: Number of slots.
        policy: Name, class or instance of the eviction policy; an instance must have this capacity.
        groups: The KV groups; without any, prefixes are counted in blocks.
        block_size_factor: GPU blocks per slot.
        blocks_above: Blocks that the GPU holds apart from those in here, under exclusive placement; policies that
            count in capacities count both levels.
        event_sink: Takes the events; see `EventSink`.
        clock: Where deadlines are read.

    Raises:
        ConfigurationError: No slots, an unknown policy, or a policy of another capacity.
    """

    def __init__(
        self,
        block_count: int,
        *,
        policy: str | type[CachePolicy] | CachePolicy = "lru",
        groups: Sequence[KVGroup] = (),
        block_size_factor: int = 1,
        blocks_above: int = 0,
        event_sink: EventSink | None = None,
        clock: Clock | None = None,
    ) -> None:
        super().__init__(clock)
        if block_count < 1:
            raise ConfigurationError(f"a manager of {block_count} blocks can hold nothing; give it at least 1")
        if not isinstance(policy, CachePolicy):
            policy = POLICIES.resolve(policy)(block_count)
        if policy.capacity != block_count:
            raise ConfigurationError(
                f"the policy ranks {policy.capacity} slots, but the manager has {block_count}; make them equal"
            )
        if blocks_above < 0:
            raise ConfigurationError(f"blocks_above is {blocks_above}; it must be at least 0")
        if blocks_above:
            policy.widen(blocks_above)
        self._blocks = BlockTable(block_count, policy)
        self.lookup_one_nowait = self._blocks.result_of
        """Return MISS, HIT or PENDING for one block, for engines that ask block by block, and know the epoch."""
        self._placement = SlotPlacement(self._blocks, policy)
        self._prefix = PrefixMatcher(groups, block_size_factor)
        self._announcer = Announcer(event_sink, CPULoadStoreSpec.medium())
        self._requests = RequestTable()
        self._owner = Owner("manager")
        self._epoch = 0
        self._generation = 0
        self._tally = Tally()
        self._waits = WaitTally(self.clock.now)
        self._settled = SettledTickets(self._waits)
        self._loads = Loads(self._blocks, self._prefix, self._settled, self._tally)
        self._offers = Offers(
            self._blocks, policy, self._placement, self._announcer, self._tally, self._settled, self.clock
        )

    @property
    def epoch(self) -> int:
        """How often `bump_epoch_nowait` was called."""
        return self._epoch

    @property
    def generation(self) -> int:
        """How often `reset_nowait` was called, by `bump_epoch_nowait` too."""
        return self._generation

    @property
    def block_tokens(self) -> tuple[int, ...]:
        """Tokens of an offloaded block, per KV group."""
        return self._prefix.block_tokens

    @property
    def prefix(self) -> PrefixMatcher:
        """Where prefixes of the KV groups can end."""
        return self._prefix

    # For managers above

    def are_known(self, keys: Keys, others: Container[OffloadKey] = ()) -> list[bool]:
        """Return for each block whether it is stored, being written, or one of `others`."""
        known = self._blocks.are_known(keys)
        return [is_known or key in others for key, is_known in zip(keys, known, strict=True)] if others else known

    def stored_slots(self, keys: Keys) -> list[int | None]:
        """Return the slots of those of `keys` that are stored, None for the others."""
        found = self._blocks.find(keys)
        slots: list[int | None] = [None] * len(keys)
        for position in self._blocks.stored_among(found).tolist():
            slots[position] = found.item(position)
        return slots

    def is_current(self, ctx: ReqContext | None) -> bool:
        """Return whether a request is of the present epoch."""
        return self._bind(ctx).epoch == self._epoch

    def prepare_promotion_nowait(
        self, keys: Keys, ctx: ReqContext | None, *, depths: Sequence[int]
    ) -> PrepareStoreOutput:
        """Reserve slots for blocks that come up from below, the leading ones if not all fit; completed like a store.

        No access: nothing counts as used. They enter at the tick of the request's access, or at one of their own if it
        has had none.
        """
        binding = self._bind(ctx)
        ticket = PrepareStoreOutput(self, self._epoch, self._generation)
        if binding.epoch != self._epoch:
            return self._refuse_all(ticket, keys)
        access = self._access(binding, ctx, depths)
        if not binding.tick:
            access = replace(access, tick=self._requests.next_tick())
        self._offers.make(
            Offer(ticket, list(keys), access, binding, ctx, is_filtered=False),
            self._blocks.find(keys),
            is_leading_enough=True,
        )
        self._end_step()
        return ticket

    def coldest(self, count: int) -> list[tuple[OffloadKey, int]]:
        """Return up to `count` blocks that would leave first, in that order, each with its slot."""
        return self._blocks.coldest(count)

    # Looking

    def lookup_nowait(self, keys: Keys, ctx: ReqContext | None = None) -> list[LookupResult]:
        """Return MISS, HIT or PENDING for each key."""
        if self._bind(ctx).epoch != self._epoch:
            return [LookupResult.MISS] * len(keys)
        return self._blocks.results(self._blocks.find(keys))

    def lookup_prefix_nowait(
        self,
        keys: Keys,
        ctx: ReqContext | None = None,
        *,
        group_sizes: Sequence[int] | None = None,
        resident_tokens: int = 0,
    ) -> int:
        """Return the tokens of the longest prefix that every KV group can go on from."""
        binding = self._bind(ctx)
        parts = self._prefix.split(keys, group_sizes)
        if binding.epoch != self._epoch:
            return resident_tokens
        return self._prefix.boundary(parts, self._blocks.are_known, resident_tokens)

    def touch(self, keys: Keys, ctx: ReqContext | None = None, *, depths: Sequence[int] | None = None) -> None:
        """Count the request's access to its blocks; the policy sees resident and missing ones."""
        binding = self._bind(ctx)
        keys, depths = _without_repeats(keys, depths)
        if binding.epoch == self._epoch:
            self._use(keys, binding, ctx, depths)

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
        """Look up and pin in one step."""
        if take not in _TAKES:
            raise InvalidRequestError(f"take is {take!r}, it must be one of {', '.join(_TAKES)}")
        binding = self._bind(ctx)
        ticket = PrepareLoadOutput(self, self._epoch, self._generation)
        request = LoadRequest(self._prefix.split(keys, group_sizes), take, resident_tokens)
        is_current = binding.epoch == self._epoch
        self._loads.start(ticket, request, "known" if is_current else "none")
        self._waits.begin(ticket)
        self._tally.hits += len(ticket.keys)
        self._tally.note_misses(self._missed_count(ticket, request), "absent" if is_current else "stale")
        return ticket

    def prepare_use_nowait(
        self, keys: Keys, ctx: ReqContext | None = None, *, depths: Sequence[int] | None = None
    ) -> PrepareLoadOutput:
        """Count the request's access and pin all of `keys` or none: `touch` and `prepare_load_nowait` in one step.

        For managers of a single KV group.
        """
        binding = self._bind(ctx)
        keys, depths = _without_repeats(keys, depths)
        ticket = PrepareLoadOutput(self, self._epoch, self._generation)
        is_current = binding.epoch == self._epoch
        if is_current:
            self._loads.start_all(ticket, keys, self._use(keys, binding, ctx, depths))
            self._waits.begin(ticket)
        self._tally.hits += len(ticket.keys)
        self._tally.note_misses(len(keys) - len(ticket.keys), "absent" if is_current else "stale")
        return ticket

    def watch_nowait(self, keys: Keys) -> PrepareLoadOutput:
        """Return a ticket that pins nothing and waits while any of `keys` is being written."""
        self._check()
        ticket = PrepareLoadOutput(self, self._epoch, self._generation)
        self._loads.watch(ticket, keys)
        return ticket

    def complete_load_nowait(self, ticket: PrepareLoadOutput, *, take_along: bool = False) -> Completion:
        """Unpin what the ticket pinned, and put it first in line if it is taken along."""
        if rejected := self._reject(ticket):
            return rejected
        ticket.is_open = False
        if ticket.is_waiting:
            self._loads.give_up(ticket)
        self._blocks.release(ticket.slots, are_distinct=len(ticket.group_sizes) == 1)
        if take_along and ticket.keys:
            self._tally.taken_along += self._placement.take_along(ticket, self.block_tokens)
        self._end_step()
        return Completion.STALE if ticket.epoch != self._epoch else Completion.APPLIED

    # Storing

    def prepare_store_nowait(
        self,
        keys: Keys,
        ctx: ReqContext | None = None,
        *,
        when_full: WhenFull = "refuse",
        depths: Sequence[int] | None = None,
        filtered: bool = True,
        is_access: bool = False,
    ) -> PrepareStoreOutput:
        """Reserve slots for the missing keys of an offer; with `is_access`, `touch` all of them in the same step."""
        if when_full not in _WHEN_FULL:
            raise InvalidRequestError(f"when_full is {when_full!r}, it must be one of {', '.join(_WHEN_FULL)}")
        binding = self._bind(ctx)
        keys, depths = _without_repeats(keys, depths)
        ticket = PrepareStoreOutput(self, self._epoch, self._generation)
        if binding.epoch != self._epoch:
            return self._refuse_all(ticket, keys)
        is_new = self._requests.open_access(binding)
        found = self._blocks.find(keys)
        self._placement.sessions.use(found, ctx)
        offer = Offer(ticket, list(keys), self._access(binding, ctx, depths), binding, ctx, filtered)
        if is_new or is_access:
            self._blocks.touch(keys, found, offer.access)
        self._offers.make(offer, found, is_leading_enough=when_full == "leading", may_wait=when_full == "wait")
        self._waits.begin(ticket)
        self._end_step()
        return ticket

    def prepare_demotion_nowait(
        self,
        keys: Keys,
        ctx: ReqContext | None = None,
        *,
        depths: Sequence[int] | None = None,
        filtered: bool = True,
    ) -> PrepareStoreOutput:
        """Reserve slots for the missing keys that the GPU gives up, and rescue the others."""
        binding = self._bind(ctx)
        keys, depths = _without_repeats(keys, range(len(keys)) if depths is None else depths)
        ticket = PrepareStoreOutput(self, self._epoch, self._generation)
        if binding.epoch != self._epoch:
            return self._refuse_all(ticket, keys)
        access = replace(self._access(binding, ctx, depths), tick=self._requests.next_tick())
        found = self._blocks.find(keys)
        self._tally.rescued += self._placement.rescue(found, access)
        self._offers.make(Offer(ticket, list(keys), access, binding, ctx, filtered), found, is_leading_enough=True)
        self._end_step()
        return ticket

    def complete_store_nowait(
        self, ticket: PrepareStoreOutput, success: bool = True, *, failed_keys: Collection[OffloadKey] = ()
    ) -> Completion:
        """Commit what the ticket reserved, or drop just that."""
        if rejected := self._reject(ticket):
            return rejected
        ticket.is_open = False
        if ticket.is_waiting:
            self._offers.withdraw(ticket)
            self._end_step()
            return Completion.APPLIED
        if ticket.generation != self._generation:
            self._blocks.release(ticket.slots)
            self._tally.rejected += 1
            self._end_step()
            return Completion.STALE
        keys, written, failed = _split_written(ticket, failed_keys if success else ticket.keys_to_store)
        self._blocks.end_write(ticket, written, failed)
        self._tally.stored += len(written)
        self._tally.failed += len(failed)
        self._announcer.note(EventKind.STORED, keys)
        self._loads.end_write(ticket, success=not failed)
        self._blocks.release(ticket.slots, are_distinct=True)
        self._end_step()
        return Completion.APPLIED

    # Hints

    def hint(
        self,
        keys: Keys,
        *,
        session_ended: bool = False,
        keep_seconds: float | None = None,
        depths: Sequence[int] | None = None,
    ) -> int:
        """Put blocks first in line, or keep them for a while."""
        self._check()
        if session_ended == (keep_seconds is not None):
            raise InvalidRequestError("a hint is either session_ended=True or keep_seconds=...; give one of them")
        if keep_seconds is not None and not keep_seconds >= 0:
            raise InvalidRequestError(f"keep_seconds is {keep_seconds}; it must be at least 0, which ends the keeping")
        keys, depths = _without_repeats(keys, range(len(keys)) if depths is None else depths)
        now = self.clock.now()
        self._placement.expire(now, len(keys))
        found = self._blocks.find(keys)
        positions = self._blocks.stored_among(found)
        stored: list[int] = found[positions].tolist()
        if keep_seconds is None:
            stored_depths = [depths[position] for position in positions.tolist()] if depths else []
            count = self._placement.end_session(stored, stored_depths)
        elif keep_seconds:
            count = self._placement.keep(stored, now + keep_seconds)
        else:
            self._placement.let_go(stored)
            count = 0
        self._end_step()
        return count

    # Waiting

    def settle_nowait(self, ticket: Ticket) -> None:
        """End the wait of a ticket with what there is now."""
        self._check()
        if not ticket.is_waiting or ticket.holder is not self:
            return
        if isinstance(ticket, PrepareLoadOutput):
            self._loads.settle(ticket)
        elif isinstance(ticket, PrepareStoreOutput):
            self._offers.withdraw(ticket)
        self._end_step()

    def hold(self, slots: Sequence[int]) -> None:
        """Count one more user of slots; for leases."""
        self._owner.check_thread()
        self._blocks.hold(slots)

    def release(self, slots: Sequence[int]) -> None:
        """Count one user less of slots; for leases."""
        self._owner.check_thread()
        self._blocks.release(slots)
        self._end_step()

    def reset_nowait(self) -> None:
        """Forget all blocks; what is in use is given back by its users."""
        self._check()
        self._generation += 1
        self._placement.clear()
        self._blocks.clear()
        self._announcer.note(EventKind.CLEARED)
        self._loads.settle_all()
        self._end_step()

    def bump_epoch_nowait(self) -> None:
        """Start a new epoch with no blocks."""
        self._check()
        self._epoch += 1
        self.reset_nowait()

    def statistics(self) -> ManagerStatistics:
        """Return the counts of this moment."""
        count, tally = self._blocks.count, self._tally
        return ManagerStatistics(
            total=self._blocks.slot_count,
            free=count(SlotState.FREE),
            ready=count(SlotState.READY),
            writing=count(SlotState.WRITING),
            leased_without_key=count(SlotState.KEYLESS),
            pinned=self._placement.pinned_count,
            kept=self._placement.kept_count,
            waiting_stores=len(self._offers),
            waiting_loads=len(self._loads.waiting_tickets),
            waited_stores=self._waits.stores,
            waited_loads=self._waits.loads,
            store_wait_seconds=self._waits.store_seconds,
            load_wait_seconds=self._waits.load_seconds,
            stored_blocks=tally.stored,
            evicted_blocks=tally.evicted,
            refused_blocks=tally.refused,
            failed_blocks=tally.failed,
            hit_blocks=tally.hits,
            misses_by_reason=dict(tally.missed),
            taken_along_blocks=tally.taken_along,
            rescued_blocks=tally.rescued,
            rejected_completions=tally.rejected,
            detached_sinks=self._announcer.detached_count,
        )

    def close_nowait(self) -> None:
        """Refuse all further calls except completions."""
        if self._owner.is_closed:
            return
        self._check()
        self._owner.is_closed = True
        self._offers.withdraw_all()
        self._loads.settle_all(is_missed=True)
        self._end_step()

    # Steps

    def _check(self) -> None:
        self._owner.check()
        self._check_sink()

    def _check_sink(self) -> None:
        if self._announcer.is_sending:
            raise StateError("an event sink must not call the manager; hand the event over and return")

    def _bind(self, ctx: ReqContext | None) -> RequestBinding:
        self._check()
        return self._requests.bind(ctx, self._epoch)

    def _missed_count(self, ticket: PrepareLoadOutput, request: LoadRequest) -> int:
        """Return how many of the blocks asked for a new load does not get."""
        if request.take == "leading":
            return blocks_beyond(request.parts, self.block_tokens, ticket.token_count)
        return 0 if ticket.keys else sum(map(len, request.parts))

    def _use(self, keys: Keys, binding: RequestBinding, ctx: ReqContext | None, depths: Sequence[int] | None) -> Found:
        """Count a request's access to blocks, and return their slots."""
        self._requests.open_access(binding)
        found = self._blocks.find(keys)
        self._blocks.touch(keys, found, self._access(binding, ctx, depths))
        self._placement.sessions.use(found, ctx)
        return found

    def _access(self, binding: RequestBinding, ctx: ReqContext | None, depths: Sequence[int] | None) -> Access:
        now = self.clock.now()
        if ctx is None:
            return Access(binding.tick, now, depths=depths)
        return Access(binding.tick, now, ctx.turn, ctx.priority, depths)

    def _refuse_all(self, ticket: PrepareStoreOutput, keys: Keys) -> PrepareStoreOutput:
        ticket.refused_keys = keys
        self._tally.refused += len(keys)
        return ticket

    def _end_step(self) -> None:
        """Serve whom the step made room for, then tell: first the sink, then those who waited."""
        if self._offers:
            self._offers.serve(self._epoch, self._generation)
        self._announcer.send()
        self._settled.tell()

    def _reject(self, ticket: Ticket) -> Completion | None:
        """Return why a ticket cannot be completed, or None if it can."""
        self._owner.check_thread()
        self._check_sink()
        if ticket.holder is not self:
            self._tally.rejected += 1
            return Completion.FOREIGN
        if not ticket.is_open:
            self._tally.rejected += 1
            return Completion.REPEATED
        return None


def _split_written(
    ticket: PrepareStoreOutput, failed_keys: Collection[OffloadKey]
) -> tuple[Keys, list[int], list[int]]:
    """Return the written blocks of a ticket, their slots, and those of failed ones."""
    if not failed_keys:
        return ticket.keys_to_store, ticket.slots, []
    failed = set(failed_keys)
    blocks = list(zip(ticket.keys_to_store, ticket.slots, strict=True))
    return (
        [key for key in ticket.keys_to_store if key not in failed],
        [slot for key, slot in blocks if key not in failed],
        [slot for key, slot in blocks if key in failed],
    )


def _without_repeats(keys: Keys, depths: Sequence[int] | None) -> tuple[Keys, Sequence[int] | None]:
    """Return each key once, with its first depth.

    Raises:
        InvalidRequestError: There is not one depth, of at least 0, per key.
    """
    if depths is not None and (len(depths) != len(keys) or _lowest(depths) < 0):
        raise InvalidRequestError(f"{len(keys)} keys need as many depths, each at least 0, not {depths}")
    if len(set(keys)) == len(keys):
        return keys, depths
    unique = list(dict.fromkeys(keys))
    if depths is not None:
        depth_of = dict(zip(reversed(keys), reversed(depths), strict=True))
        depths = [depth_of[key] for key in unique]
    return unique, depths


def _lowest(depths: Sequence[int]) -> int:
    if isinstance(depths, range):
        depths = (*depths[:1], *depths[-1:])
    return min(depths, default=0)
