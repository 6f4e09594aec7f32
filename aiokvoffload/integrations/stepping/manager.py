"""Decides for an engine's scheduler, call by call, in its own thread; nothing in here waits."""

from __future__ import annotations

from collections.abc import Collection, Sequence

from aiokvoffload.integrations.stepping.requests import Answer, EngineRequest, LoadDecision, OpenTicket, StoreDecision
from aiokvoffload.integrations.stepping.tiers import StepReader
from aiokvoffload.keys import OffloadKey
from aiokvoffload.managers.base import ManagerStatistics, OffloadingManager, WhenFull
from aiokvoffload.managers.cpu import CPUOffloadingManager
from aiokvoffload.managers.tiered import TieredOffloadingManager
from aiokvoffload.specs import LookupResult, PrepareLoadOutput, PrepareStoreOutput, ReqContext, TierFilter
from aiokvoffload.tiers.base import Tier

HOLD_SECONDS = 30.0
_PAUSE_SECONDS = 0.002
_NOTHING = StoreDecision()
_MISS, _HIT = LookupResult.MISS, LookupResult.HIT


class StepManager:
    """Tickets for an engine that completes by keys, and answers for one that asks block by block.

    Args:
        cpu: Says what CPU memory has.
        manager: Decides: `cpu`, or what is built on it.
        tiered: The manager with tiers among these, if there is one.
        hold_seconds: See `StepReader`.

    Attributes:
        lookup_in_memory: What CPU memory says of one block; with no tiers below, that is all there is to know for a
            request that may load. None with tiers.
    """

    def __init__(
        self,
        cpu: CPUOffloadingManager,
        manager: OffloadingManager,
        tiered: TieredOffloadingManager | None = None,
        *,
        hold_seconds: float = HOLD_SECONDS,
    ) -> None:
        self._lookup = cpu.lookup_one_nowait
        self.lookup_in_memory = None if tiered is not None else cpu.lookup_one_nowait
        self._manager = manager
        self._reader = None if tiered is None else StepReader(tiered, hold_seconds)
        self._cpu = cpu if manager is cpu else None
        self._block_count = cpu.statistics().total
        self._requests: dict[EngineRequest, None] = {}
        self._open: dict[int, OpenTicket] = {}
        self._stores: dict[frozenset[OffloadKey], OpenTicket] = {}
        self._overtaken: list[OpenTicket] = []
        self._request_count = 0
        self._last_number = 0

    # Requests

    def open_request(self, req_id: str, *, may_read_below: bool = True, may_load: bool = True) -> EngineRequest:
        """Begin a request.

        Args:
            req_id: What the engine calls it; it may have called another one so before.
            may_read_below: Whether it may use tiers below CPU memory.
            may_load: Whether it may load at all.
        """
        self._request_count += 1
        tiers = TierFilter.ALL if may_read_below else TierFilter.CPU
        request = EngineRequest(ReqContext(f"{self._request_count} {req_id}", tier_filter=tiers), may_load=may_load)
        self._requests[request] = None
        return request

    def close_request(self, request: EngineRequest) -> None:
        """End a request: it asks and offers no more; what it has under way goes on."""
        self._requests.pop(request, None)
        self._let_go(request)

    # Looking and loading

    def lookup(self, request: EngineRequest, key: OffloadKey) -> Answer:
        """Return what there is to know of a block; asked again and again while a request waits, it counts nothing."""
        if not request.may_load:
            return Answer.MISS
        result = self._lookup(key)
        if self._reader is not None:
            return self._reader.answer(request, key, result)
        if result is _MISS:
            return Answer.MISS
        return Answer.HIT if result is _HIT else Answer.PENDING

    def prepare_load(
        self, request: EngineRequest, keys: Sequence[OffloadKey], depths: Sequence[int] | None = None
    ) -> LoadDecision:
        """Pin blocks that lookups of this step have hit, until `complete_load`; counts the request's access.

        If one of them has gone even so, nothing is pinned, and the request loads no more.
        """
        request.has_access = True
        if self._cpu is not None:
            ticket = self._cpu.prepare_use_nowait(keys, request.ctx, depths=depths)
        else:
            self._manager.touch(keys, request.ctx, depths=depths)
            ticket = self._manager.prepare_load_nowait(keys, request.ctx, take="all")
        self._let_go(request)
        self._last_number += 1
        if ticket.is_waiting or not ticket.keys:
            self._manager.complete_load_nowait(ticket)
            request.may_load = False
            return LoadDecision(self._last_number, None)
        request.load = self._open_ticket(ticket, request)
        return LoadDecision(self._last_number, ticket.slots)

    def complete_load(self, request: EngineRequest) -> None:
        """Unpin the load of a request: no worker reads its slots any more."""
        if request.load is not None:
            self._close(request.load)
            request.load = None

    # Storing

    def prepare_store(
        self, request: EngineRequest, keys: Sequence[OffloadKey], depths: Sequence[int] | None = None
    ) -> StoreDecision | None:
        """Reserve slots for what is missing of an offer, until `complete_store`; counts the request's access.

        Returns:
            What is to be stored; None if there is no room now, so that offering it again makes sense.
        """
        if not request.may_store:
            return _NOTHING
        when_full: WhenFull = "leading" if len(keys) >= self._block_count else "refuse"
        if self._cpu is not None:
            ticket = self._cpu.prepare_store_nowait(
                keys, request.ctx, when_full=when_full, depths=depths, is_access=True
            )
        else:
            if request.has_access or self._reader is not None:
                self._manager.touch(keys, request.ctx, depths=depths)
            request.has_access = True  # the first offer counts it by itself, but only in CPU memory
            ticket = self._manager.prepare_store_nowait(keys, request.ctx, when_full=when_full, depths=depths)
        if not ticket.slots:
            self._manager.complete_store_nowait(ticket)
            return None if ticket.is_refused else _NOTHING
        self._last_number += 1
        self._stores[frozenset(ticket.keys_to_store)] = self._open_ticket(ticket, request)
        return StoreDecision(self._last_number, ticket.keys_to_store, ticket.slots, ticket.evicted_keys)

    def complete_store(self, keys: Collection[OffloadKey], *, success: bool = True) -> None:
        """Commit a store, or drop it if it, or one worker's part, has failed: no worker writes its slots any more."""
        opened = self._stores.pop(frozenset(keys), None)
        if opened is not None:
            self._close(opened, success=success)

    def note_failure(self, number: int) -> None:
        """Note that a worker could not copy; the request of a failed load loads no more, so that it is recomputed."""
        opened = self._open.get(number)
        if opened is not None:
            opened.has_failed = True
            if isinstance(opened.ticket, PrepareLoadOutput):
                opened.request.may_load = False

    def source_of(self, request: EngineRequest, key: OffloadKey) -> Tier | None:
        """Return the tier that a request has had a block read from; None for what CPU memory had."""
        planned = request.found.get(key)
        return None if planned is None else planned.tier

    # Steps

    def end_step(self) -> None:
        """Go on with tiers: collect their answers, and hand them what this step asks for."""
        if self._reader is not None:
            self._reader.end_step()

    @property
    def has_work_below(self) -> bool:
        """Blocks are still being written down to tiers, or wait for it."""
        return self._reader is not None and not self._manager.is_at_rest

    # The whole

    @property
    def has_overtaken(self) -> bool:
        """Workers may still touch slots of before a reset."""
        return bool(self._overtaken)

    def reset(self, *, starts_epoch: bool) -> list[int]:
        """Forget all blocks; slots that workers may still touch are used again only after `note_flushed`.

        Args:
            starts_epoch: The weights have changed: what tiers have is out of reach from now on, and requests of before
                store and load no more.

        Returns:
            The numbers of the loads under way that must not count any more.
        """
        void = []
        if starts_epoch:
            void = [number for number, one in self._open.items() if isinstance(one.ticket, PrepareLoadOutput)]
            for request in self._requests:
                request.may_load = request.may_store = False
        for request in self._requests:
            self._let_go(request)
        for opened in self._open.values():
            opened.request.load = None
        self._overtaken += self._open.values()
        self._open.clear()
        self._stores.clear()
        if starts_epoch:
            self._manager.bump_epoch_nowait()
        else:
            self._manager.reset_nowait()
        return void

    def note_flushed(self) -> None:
        """Note that no worker touches slots of before the last reset any more."""
        overtaken, self._overtaken = self._overtaken, []
        for opened in overtaken:
            self._complete(opened, success=False)

    def statistics(self) -> ManagerStatistics:
        """Return the manager's counts."""
        return self._manager.statistics()

    def drain(self, timeout_seconds: float) -> None:
        """Block the thread until all is written down to tiers, or the timeout."""
        clock = self._manager.clock
        deadline = clock.now() + timeout_seconds
        self._manager.poll_nowait()
        while self.has_work_below and clock.now() < deadline:
            clock.pause(_PAUSE_SECONDS)
            self._manager.poll_nowait()

    def close(self) -> None:
        """Answer no more; completions still count."""
        self._manager.close_nowait()

    # Inside

    def _open_ticket(self, ticket: PrepareLoadOutput | PrepareStoreOutput, request: EngineRequest) -> OpenTicket:
        opened = OpenTicket(self._last_number, ticket, request)
        self._open[self._last_number] = opened
        return opened

    def _close(self, opened: OpenTicket, *, success: bool = True) -> None:
        del self._open[opened.number]
        self._complete(opened, success=success and not opened.has_failed)

    def _complete(self, opened: OpenTicket, *, success: bool) -> None:
        if isinstance(opened.ticket, PrepareLoadOutput):
            self._manager.complete_load_nowait(opened.ticket)
        else:
            self._manager.complete_store_nowait(opened.ticket, success)

    def _let_go(self, request: EngineRequest) -> None:
        if self._reader is not None:
            self._reader.let_go(request)
