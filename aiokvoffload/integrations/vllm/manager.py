"""The manager as vLLM's scheduler calls it: key by key, from its own thread, in each of its steps."""

from __future__ import annotations

import logging
from collections.abc import Callable, Collection, Iterable

from vllm.v1.kv_offload.base import (
    Locality,
    LookupResult,
    Medium,
    OffloadingEvent,
    OffloadingManager,
    PrepareStoreOutput,
    ReqContext,
    RequestOffloadingContext,
    ScheduleEndContext,
    TierFilter,
)
from vllm.v1.metrics.cache_hit_source import CacheHitSource

from aiokvoffload import events, specs
from aiokvoffload.errors import StateError
from aiokvoffload.integrations.stepping.manager import StepManager
from aiokvoffload.integrations.stepping.requests import Answer, EngineRequest
from aiokvoffload.integrations.vllm.slots import SlotSpec
from aiokvoffload.keys import OffloadKey

_logger = logging.getLogger(__name__)
# Asked for every block of every waiting request in every step; an enum's member is slow to hash, and to get at.
_MISS, _HIT, _PENDING = Answer.MISS, Answer.HIT, Answer.PENDING
_MISS_IN_MEMORY, _HIT_IN_MEMORY = specs.LookupResult.MISS, specs.LookupResult.HIT
_THEIR_MISS, _THEIR_HIT, _THEIR_PENDING = LookupResult.MISS, LookupResult.HIT, LookupResult.HIT_PENDING
_FROM_MEMORY = CacheHitSource.HOST
_NO_EVENTS: tuple[OffloadingEvent, ...] = ()
_TELLS_OF_FLUSHES = hasattr(OffloadingManager, "on_reset_flushed")


class StepEvents:
    """Keeps the manager's events until vLLM takes them."""

    def __init__(self) -> None:
        self._waiting: list[OffloadingEvent] = []

    def note(self, event: events.OffloadingEvent) -> None:
        """Note one event; that all was cleared vLLM knows, for it has asked for it."""
        if event.kind is not events.EventKind.CLEARED:
            is_removed = event.kind is events.EventKind.REMOVED
            self._waiting.append(OffloadingEvent(list(event.keys), Medium.CPU, is_removed, Locality.LOCAL))

    def take(self) -> list[OffloadingEvent]:
        """Return what has happened since the last call."""
        taken, self._waiting = self._waiting, []
        return taken


class AioKVOffloadManager(OffloadingManager):
    """Translates; `StepManager` decides.

    Args:
        manager: Decides.
        close: Gives everything back.
        step_events: Where its events are kept, if vLLM wants them.
        starts_epoch: Whether a reset means that the weights have changed.
        steps_under_way: How many steps vLLM may have handed to the workers before it hears of the first.

    Attributes:
        recomputes: Whether the connector turns failed loads into recomputations; else a load whose blocks have gone
            is an error.
        void_tickets: Loads that must count as failed, which the connector has yet to tell the workers.
    """

    def __init__(
        self,
        manager: StepManager,
        close: Callable[[], None],
        *,
        step_events: StepEvents | None = None,
        starts_epoch: bool = True,
        steps_under_way: int = 2,
    ) -> None:
        self.steps = manager
        self.recomputes = False
        self.void_tickets: set[int] = set()
        self._close = close
        self._events = step_events
        self._starts_epoch = starts_epoch
        self._steps_under_way = steps_under_way
        self._steps_to_flush = 0
        self._lookup = manager.lookup
        self._lookup_in_memory = manager.lookup_in_memory
        self._last_context: ReqContext | None = None
        self._last_request: EngineRequest | None = None

    # Requests

    def on_new_request(self, req_context: ReqContext) -> RequestOffloadingContext:
        """Begin a request."""
        self._begin(req_context)
        return RequestOffloadingContext()

    def on_request_finished(self, req_context: ReqContext) -> None:
        """End a request; copies of it may still be under way."""
        self.steps.close_request(self._request(req_context))

    # Blocks

    def lookup(self, key: OffloadKey, req_context: ReqContext) -> LookupResult:
        """Say whether a block can be loaded."""
        request = self._last_request
        if request is None or self._last_context is not req_context:
            request = self._last_request = self._request(req_context)
            self._last_context = req_context
        if self._lookup_in_memory is not None and request.may_load:
            result = self._lookup_in_memory(key)
            if result is _HIT_IN_MEMORY:
                return _THEIR_HIT
            return _THEIR_MISS if result is _MISS_IN_MEMORY else _THEIR_PENDING
        answer = self._lookup(request, key)
        if answer is _HIT:
            return _THEIR_HIT
        if answer is _MISS:
            return _THEIR_MISS
        return _THEIR_PENDING if answer is _PENDING else LookupResult.RETRY

    def get_load_source(self, key: OffloadKey, req_context: ReqContext) -> CacheHitSource:
        """Say where a block came from: CPU memory, or the tier that it was read from for this request."""
        if self._lookup_in_memory is not None:
            return _FROM_MEMORY
        tier = self.steps.source_of(self._request(req_context), key)
        if tier is None:
            return _FROM_MEMORY
        return CacheHitSource.DISK if tier.url.startswith("file:") else CacheHitSource.EXTERNAL_UNSPECIFIED

    def prepare_load(self, keys: Collection[OffloadKey], req_context: ReqContext) -> SlotSpec:
        """Pin blocks.

        Raises:
            StateError: One has gone, and nobody would recompute it.
        """
        wanted = list(keys)
        decision = self.steps.prepare_load(self._request(req_context), wanted, _depths(wanted, req_context))
        if decision.slots is None and not self.recomputes:
            raise StateError(
                "a block that was there has gone before it was loaded; use AioKVOffloadConnector with "
                'kv_load_failure_policy="recompute", which recomputes it'
            )
        return SlotSpec(decision.number, decision.slots)

    def complete_load(self, keys: Collection[OffloadKey], req_context: ReqContext) -> None:
        """Unpin blocks."""
        self.steps.complete_load(self._request(req_context))

    def prepare_store(self, keys: Collection[OffloadKey], req_context: ReqContext) -> PrepareStoreOutput | None:
        """Reserve slots; None if there is no room now."""
        offered = list(keys)
        decision = self.steps.prepare_store(self._request(req_context), offered, _depths(offered, req_context))
        if decision is None:
            return None
        return PrepareStoreOutput(
            keys_to_store=list(decision.keys),
            store_spec=SlotSpec(decision.number, decision.slots),
            evicted_keys=list(decision.evicted_keys),
        )

    def complete_store(self, keys: Collection[OffloadKey], req_context: ReqContext, success: bool = True) -> None:
        """Commit blocks, or drop them."""
        self.steps.complete_store(keys, success=success)

    # Steps

    def on_schedule_end(self, context: ScheduleEndContext) -> None:
        """Hand tiers what this step asks for, and collect what they have answered."""
        if self._lookup_in_memory is None:
            self.steps.end_step()
        if self._steps_to_flush:
            self._steps_to_flush -= 1
            if not self._steps_to_flush:
                self.steps.note_flushed()

    def has_pending_work(self) -> bool:
        """Say whether vLLM has to go on with its steps although no request needs them."""
        return bool(self._steps_to_flush) or self.steps.has_work_below

    def take_events(self) -> Iterable[OffloadingEvent]:
        """Return what has happened to blocks since the last call."""
        return _NO_EVENTS if self._events is None else self._events.take()

    # The whole

    def reset_cache(self) -> None:
        """Forget all blocks; those that workers may still touch are waited for."""
        self.void_tickets.update(self.steps.reset(starts_epoch=self._starts_epoch))
        if self.steps.has_overtaken and not _TELLS_OF_FLUSHES:
            # The next step's message makes the workers wait for them. Messages are executed, and heard of, in their
            # order, so that has happened once more steps are handed out than can be under way beside it.
            self._steps_to_flush = self._steps_under_way + 2

    def on_reset_flushed(self) -> None:
        """Hear that no worker touches slots of before the last reset any more; vLLM 0.33 and later say so."""
        self.steps.note_flushed()

    def shutdown(self) -> None:
        """Write down what waits for tiers, bounded, and give everything back; idempotent."""
        close, self._close = self._close, _do_nothing
        close()

    def _begin(self, req_context: ReqContext) -> EngineRequest:
        allowed = req_context.load_tier_filter
        if allowed is TierFilter.ALL:
            request = self.steps.open_request(req_context.req_id)
        else:
            request = self.steps.open_request(
                req_context.req_id,
                may_load=allowed.allows(Medium.CPU, Locality.LOCAL),
                may_read_below=allowed.allows(Medium.STORAGE, None),
            )
        req_context.set_state(request)
        return request

    def _request(self, req_context: ReqContext) -> EngineRequest:
        request: EngineRequest | None = req_context.get_state(EngineRequest)
        return self._begin(req_context) if request is None else request


def _depths(keys: Collection[OffloadKey], req_context: ReqContext) -> list[int] | None:
    """Return the token position of each block's end, if vLLM knows it of all."""
    depths = list(map(req_context.get_offload_key_position, keys))
    return None if None in depths else depths


def _do_nothing() -> None:
    """Give nothing back a second time."""
