"""What a step finds missing is asked of tiers, and read from them, as one batch at its end; a later step collects it.

A request is served in two turns: first tiers are asked for all it misses, then what it still wants, now that it knows
what there is, is read. So an engine that needs a window's last blocks only, or a prefix up to the first gap, has just
these read, and this module need not know which they are.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial

from aiokvoffload.integrations.stepping.requests import Answer, Below, EngineRequest, Hold
from aiokvoffload.keys import OffloadKey, offload_group_index
from aiokvoffload.managers.tier_lookups import TierSearch
from aiokvoffload.managers.tiered import TieredOffloadingManager
from aiokvoffload.specs import LookupResult, PrepareLoadOutput


class StepReader:
    """Asks tiers and reads from them for the requests of an engine.

    Args:
        manager: Has the tiers.
        hold_seconds: How long blocks stay pinned for a request that does not load them, and how long it waits for
            those that are read.
    """

    def __init__(self, manager: TieredOffloadingManager, hold_seconds: float) -> None:
        self._manager = manager
        self._hold_seconds = hold_seconds
        self._looking: list[EngineRequest] = []
        self._holders: dict[EngineRequest, None] = {}

    def answer(self, request: EngineRequest, key: OffloadKey, result: LookupResult) -> Answer:
        """Return what the engine is told about a block, and note what is to be done about it at the end of the step.

        Args:
            request: Who asks.
            key: The block.
            result: What CPU memory says.
        """
        if not request.is_looking:
            request.is_looking = True
            self._looking.append(request)
        if result is not LookupResult.MISS:
            request.wanted[key] = None
            return Answer.HIT if result is LookupResult.HIT else Answer.PENDING
        below = request.below.get(key)
        if below is None:
            request.below[key] = Below.ASKED
            request.to_ask.append(key)
            return Answer.UNKNOWN
        if below is Below.ASKED:
            return Answer.UNKNOWN
        if below is Below.PRESENT or below is Below.READING:
            request.wanted[key] = None
            request.has_to_read |= below is Below.PRESENT
            return Answer.PENDING
        return Answer.MISS

    def end_step(self) -> None:
        """Collect what tiers have answered, then ask and read for this step."""
        self._manager.poll_nowait()
        looking, self._looking = self._looking, []
        for request in looking:
            to_ask, wanted = request.to_ask, list(request.wanted)
            request.to_ask, request.wanted, request.is_looking = [], {}, False
            if to_ask:
                self._manager.search_nowait(to_ask, request.ctx, partial(_note_found, request, to_ask))
            if request.has_to_read:
                request.has_to_read = False
                self._read(request, wanted)
        self._give_up_overdue()

    def let_go(self, request: EngineRequest) -> None:
        """Unpin what was found for a request, which loads it now, or has no more use for it."""
        if request.holds:
            holds, request.holds = request.holds, []
            del self._holders[request]
            for hold in holds:
                self._manager.complete_load_nowait(hold.ticket)

    def _read(self, request: EngineRequest, wanted: Sequence[OffloadKey]) -> None:
        """Read what is wanted, and pin it together with what is there already, for each KV group by itself."""
        by_group: dict[int, list[OffloadKey]] = {}
        for key in wanted:
            by_group.setdefault(offload_group_index(key), []).append(key)
        deadline = self._manager.clock.now() + self._hold_seconds
        self._holders[request] = None
        for keys in by_group.values():
            for key in keys:
                if request.below.get(key) is Below.PRESENT:
                    request.below[key] = Below.READING
            ticket = self._manager.prepare_found_load_nowait(keys, request.ctx, request.found)
            request.holds.append(Hold(ticket, deadline))
            ticket.on_settled(partial(_note_read, request, keys, ticket))

    def _give_up_overdue(self) -> None:
        now = self._manager.clock.now()
        for request in list(self._holders):
            if any(hold.deadline <= now for hold in request.holds):
                self.let_go(request)


def _note_found(request: EngineRequest, keys: Sequence[OffloadKey], search: TierSearch) -> None:
    request.found.update(search.sources)
    for key in keys:
        request.below[key] = Below.PRESENT if key in search.sources else Below.ABSENT


def _note_read(request: EngineRequest, keys: Sequence[OffloadKey], ticket: PrepareLoadOutput) -> None:
    """Note what has been read; it may be read again, should it have left CPU memory before it was loaded."""
    pinned = set(ticket.keys)
    for key in keys:
        if request.below.get(key) is Below.READING:
            request.below[key] = Below.PRESENT if key in pinned else Below.LOST
