"""The front door for hosts without an event loop."""

from __future__ import annotations

from collections.abc import Sequence

from aiokvoffload.errors import BlocksInFlightError
from aiokvoffload.keys import OffloadKey
from aiokvoffload.offloader.machine import OffloaderMachine
from aiokvoffload.offloader.tickets import LoadTicket
from aiokvoffload.specs import LookupResult, ReqContext, StoreOutcome
from aiokvoffload.transfers.base import ALREADY_DONE, After


class SyncOffloader(OffloaderMachine):
    """Stores GPU blocks in CPU memory and brings them back, for a host that calls `poll()` in each of its steps.

    The same plain calls as the async offloader, from one owning thread; `load` and `store` block. Made by
    `with open_offloader(...) as offloader`.
    """

    def lookup_prefix(self, keys: Sequence[OffloadKey], ctx: ReqContext | None = None) -> int:
        """Return how many tokens of the prefix CPU memory has; asks no tier, pins nothing, so it is a hint."""
        self._check()
        if self._fault is not None:
            return 0
        with self.tracing.span("lookup", len(keys), ctx) as span:
            tokens = self.manager.lookup_prefix_nowait(keys, ctx, group_sizes=self.shapes.group_sizes(keys))
            span.note(tokens=tokens)
            return tokens

    def load(
        self,
        keys: Sequence[OffloadKey],
        gpu_blocks: Sequence[int],
        ctx: ReqContext | None = None,
        *,
        timeout_seconds: float | None = None,
        after: After = None,
        take_along: bool | None = None,
    ) -> int:
        """Load the longest prefix, blocking, and return how many tokens of it have arrived.

        Arguments as in `Offloader.load`.

        Raises:
            InvalidRequestError: Keys and GPU blocks do not fit.
            BlocksInFlightError: A copy has not landed by its deadline.
        """
        self._check()
        self.check_sends_by_itself()
        blocks = self.shapes.check_blocks(gpu_blocks, len(keys) * self.block_size_factor)
        seconds = self.deadlines.pending_seconds if timeout_seconds is None else timeout_seconds
        after = self._worker.event_after(after) or ALREADY_DONE  # as of now, not of the end of the wait
        with self.tracing.span("load", len(keys), ctx) as span:
            with self.prepare_load(keys, ctx) as ticket:
                if self._wait_ready(ticket, seconds) is LookupResult.MISS:
                    span.note(tokens=0)
                    return 0
                handle = ticket.start(ticket.choose(blocks), after=after, take_along=take_along)
            tokens = handle.wait(timeout_seconds=self.deadlines.landing_seconds).token_count
            span.note(tokens=tokens)
            return tokens

    def store(
        self,
        keys: Sequence[OffloadKey],
        gpu_blocks: Sequence[int],
        ctx: ReqContext | None = None,
        *,
        filtered: bool = True,
        first_block: int = 0,
        after: After = None,
    ) -> tuple[StoreOutcome, ...]:
        """Store GPU blocks, blocking, and return what became of each.

        Arguments as in `store_soon`.

        Raises:
            InvalidRequestError: Keys and GPU blocks do not fit.
            BlocksInFlightError: A copy has not landed by its deadline.
        """
        self.check_sends_by_itself()
        with self.tracing.span("store", len(keys), ctx) as span:
            handle = self.store_soon(keys, gpu_blocks, ctx, filtered=filtered, first_block=first_block, after=after)
            handle.wait(timeout_seconds=self.deadlines.landing_seconds)
            span.note(stored_blocks=handle.outcomes.count(StoreOutcome.ACCEPTED))
            return handle.outcomes

    def demote(
        self,
        keys: Sequence[OffloadKey],
        gpu_blocks: Sequence[int],
        ctx: ReqContext | None = None,
        *,
        filtered: bool = True,
        after: After = None,
    ) -> tuple[StoreOutcome, ...]:
        """Store blocks that the GPU gives up, blocking, and return what became of each.

        Arguments as in `demote_soon`.

        Raises:
            InvalidRequestError: Keys and GPU blocks do not fit.
            BlocksInFlightError: A copy has not landed by its deadline.
        """
        self.check_sends_by_itself()
        with self.tracing.span("demotion", len(keys), ctx) as span:
            handle = self.demote_soon(keys, gpu_blocks, ctx, filtered=filtered, after=after)
            handle.wait(timeout_seconds=self.deadlines.landing_seconds)
            span.note(stored_blocks=handle.outcomes.count(StoreOutcome.ACCEPTED))
            return handle.outcomes

    def reset(self) -> None:
        """See `reset_nowait`."""
        self.reset_nowait()

    def bump_epoch(self) -> None:
        """See `bump_epoch_nowait`."""
        self.bump_epoch_nowait()

    def close(self, *, drain_seconds: float | None = None) -> None:
        """Wait, blocking, for what is under way, and close; idempotent.

        Raises:
            BlocksInFlightError: Copies are under way even so; their memory stays mapped until they land.
        """
        if self._owner.is_closed:
            return
        self._owner.check_thread()
        seconds = self.deadlines.drain_seconds if drain_seconds is None else drain_seconds
        deadline = self.clock.now() + seconds
        self.drain(seconds)
        self.block_until(lambda: self.manager.is_at_rest, max(0.0, deadline - self.clock.now()))
        stuck = self.gpu_blocks_in_flight()
        self.close_parts()
        if stuck:
            raise BlocksInFlightError(stuck, seconds)

    def _wait_ready(self, ticket: LoadTicket, timeout_seconds: float) -> LookupResult:
        """Wait, blocking, until no block is being written or read from a tier; at the timeout, go on with the rest."""
        if ticket.result is LookupResult.PENDING:
            with ticket.waiting_span() as span:
                self.block_until(lambda: ticket.result is not LookupResult.PENDING, timeout_seconds)
                ticket.settle()
                span.note(tokens=ticket.token_count)
        return ticket.result
