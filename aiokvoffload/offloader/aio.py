"""The async front door."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import anyio
from anyio.lowlevel import checkpoint_if_cancelled

from aiokvoffload.clock import deadline_after
from aiokvoffload.errors import BlocksInFlightError, ClosedError, StateError, WrongThreadError
from aiokvoffload.keys import OffloadKey
from aiokvoffload.offloader.handles import TransferHandle
from aiokvoffload.offloader.machine import OffloaderMachine
from aiokvoffload.offloader.parts import Parts
from aiokvoffload.offloader.statistics import OffloaderStatistics
from aiokvoffload.offloader.subscriptions import DEFAULT_EVENT_BUFFER, EventStream
from aiokvoffload.offloader.tickets import LoadTicket
from aiokvoffload.offloader.waiting import Watchers
from aiokvoffload.specs import LookupResult, ReqContext, StoreOutcome, TransferResult
from aiokvoffload.transfers.base import ALREADY_DONE, After
from aiokvoffload.transfers.poller import Poller, PollStep


class Offloader(OffloaderMachine):
    """Stores GPU blocks in CPU memory and brings them back; lives in one event loop, asyncio or trio.

    An `await store(...)` or `await load(...)` ends, also by cancellation or error, only when no copy touches its
    GPU blocks any more: copies that are not sent are taken back, sent ones are waited for, at most
    `Deadlines.landing_seconds`. Made by `open_offloader`.

    A task in the background polls. Code that blocks the loop for long may call `poll()` in between, which returns the
    handles that it found ended itself.
    """

    def __init__(self, parts: Parts) -> None:
        super().__init__(parts)
        self._is_closing = False
        self._step_watchers = Watchers()
        self._poller = Poller(
            self._step_for_poller,
            lambda: self.drain(self.deadlines.landing_seconds),
            parts.worker,
            parts.clock,
            add_doorbell=self.manager.add_doorbell,
        )
        self._poller.start()

    @property
    def poll_count(self) -> int:
        """How often the background task has polled."""
        return self._poller.poll_count

    async def lookup_prefix(
        self, keys: Sequence[OffloadKey], ctx: ReqContext | None = None, *, timeout_seconds: float | None = None
    ) -> int:
        """Return how many tokens of the prefix could be loaded; pins nothing, so it is a hint.

        Tiers below are asked for what CPU memory lacks, at most `timeout_seconds`; what they have by then counts.
        """
        await checkpoint_if_cancelled()
        self._check()
        if self._fault is not None:
            return 0
        with self.tracing.span("lookup", len(keys), ctx) as span:
            tokens = await self.manager.lookup_prefix(
                keys, ctx, group_sizes=self.shapes.group_sizes(keys), timeout_seconds=timeout_seconds
            )
            span.note(tokens=tokens)
            return tokens

    async def load(
        self,
        keys: Sequence[OffloadKey],
        gpu_blocks: Sequence[int],
        ctx: ReqContext | None = None,
        *,
        timeout_seconds: float | None = None,
        after: After = None,
        take_along: bool | None = None,
    ) -> int:
        """Load the longest prefix and return how many tokens of it have arrived; 0 for a miss or a failure.

        After a failed load the contents of all of `gpu_blocks` are undefined.

        Args:
            keys: All blocks of the request from its start, KV group after group.
            gpu_blocks: `block_size_factor` GPU blocks for each key, in the same order; those of blocks that are
                not loaded stay as they are.
            ctx: The request.
            timeout_seconds: How long to wait for blocks that are still being written; by default
                `Deadlines.pending_seconds`.
            after: What the copies wait for instead of the compute stream.
            take_along: Whether the blocks need not stay in CPU memory; see `LoadTicket.start`.

        Raises:
            InvalidRequestError: Keys and GPU blocks do not fit.
            BlocksInFlightError: A copy has not landed by its deadline.
        """
        await checkpoint_if_cancelled()
        self._check()
        blocks = self.shapes.check_blocks(gpu_blocks, len(keys) * self.block_size_factor)
        after = self._worker.event_after(after) or ALREADY_DONE  # as of now, not of the end of the wait
        with self.tracing.span("load", len(keys), ctx) as span:
            with self.prepare_load(keys, ctx) as ticket:
                if await ticket.ready(timeout_seconds=timeout_seconds) is LookupResult.MISS:
                    span.note(tokens=0)
                    return 0
                handle = ticket.start(ticket.choose(blocks), after=after, take_along=take_along)
            tokens = (await self._finish(handle)).token_count
            span.note(tokens=tokens)
            return tokens

    async def store(
        self,
        keys: Sequence[OffloadKey],
        gpu_blocks: Sequence[int],
        ctx: ReqContext | None = None,
        *,
        filtered: bool = True,
        first_block: int = 0,
        after: After = None,
    ) -> tuple[StoreOutcome, ...]:
        """Store GPU blocks and return what became of each; lack of room and a failed copy are outcomes, not errors.

        Arguments as in `store_soon`.

        Raises:
            InvalidRequestError: Keys and GPU blocks do not fit.
            BlocksInFlightError: A copy has not landed by its deadline.
        """
        await checkpoint_if_cancelled()
        with self.tracing.span("store", len(keys), ctx) as span:
            handle = self.store_soon(keys, gpu_blocks, ctx, filtered=filtered, first_block=first_block, after=after)
            await self._finish(handle)
            span.note(stored_blocks=handle.outcomes.count(StoreOutcome.ACCEPTED))
            return handle.outcomes

    async def demote(
        self,
        keys: Sequence[OffloadKey],
        gpu_blocks: Sequence[int],
        ctx: ReqContext | None = None,
        *,
        filtered: bool = True,
        after: After = None,
    ) -> tuple[StoreOutcome, ...]:
        """Store blocks that the GPU gives up, and return what became of each once all GPU blocks are idle.

        Arguments as in `demote_soon`.

        Raises:
            InvalidRequestError: Keys and GPU blocks do not fit.
            BlocksInFlightError: A copy has not landed by its deadline.
        """
        await checkpoint_if_cancelled()
        with self.tracing.span("demotion", len(keys), ctx) as span:
            handle = self.demote_soon(keys, gpu_blocks, ctx, filtered=filtered, after=after)
            await self._finish(handle)
            span.note(stored_blocks=handle.outcomes.count(StoreOutcome.ACCEPTED))
            return handle.outcomes

    def events(self, *, buffer_size: int = DEFAULT_EVENT_BUFFER) -> EventStream:
        """Return an async iterator over what is stored, removed and cleared from now on."""
        self._check()
        return self._parts.hub.subscribe(buffer_size)

    async def reset(self) -> None:
        """See `reset_nowait`."""
        self.reset_nowait()

    async def bump_epoch(self) -> None:
        """See `bump_epoch_nowait`."""
        self.bump_epoch_nowait()

    async def wait_written(self, *, timeout_seconds: float | None = None) -> bool:
        """Wait until nothing waits to be written to a tier, and return whether that is so; cancelling changes nothing.

        Args:
            timeout_seconds: How long; without it, as long as it takes. Each write has a deadline of its own.
        """
        self._check()
        with self.clock.cancel_at(deadline_after(self.clock, timeout_seconds)):
            await self._step_watchers.wait_until(lambda: self.manager.is_at_rest)
        return self.manager.is_at_rest

    async def aclose(self, *, drain_seconds: float | None = None) -> None:
        """Refuse new calls, wait for what is under way, and close; idempotent.

        A cancelled close waits all the same, bounded by `drain_seconds`, and is then cancelled.

        Args:
            drain_seconds: By default `Deadlines.drain_seconds`. What is queued is still sent within that time.

        Raises:
            BlocksInFlightError: Copies are under way even so; their memory stays mapped until they land.
        """
        self._owner.check_thread()
        self._check_loop()
        if self._is_closing:
            return
        self._is_closing = True
        seconds = self.deadlines.drain_seconds if drain_seconds is None else drain_seconds
        if not self._worker.sends_by_itself:
            self.guarded(self._worker.withdraw_all)
        try:
            if self._poller.is_running:
                await self._end_watchers.wait_out(self._is_at_rest, self.clock, self.clock.now() + seconds)
        finally:
            self.drain(0.0)
            try:
                await self._poller.stop()
            finally:
                stuck = self.gpu_blocks_in_flight()
                self.guarded(self.manager.close_nowait)
                try:
                    for tier in self._parts.tiers:
                        await tier.aclose(drain_seconds=seconds)
                finally:
                    self.close_parts()
        if stuck:
            raise BlocksInFlightError(stuck, seconds)

    def statistics(self) -> OffloaderStatistics:
        """See `OffloaderMachine.statistics`."""
        lateness = self._poller.lateness
        return replace(
            super().statistics(),
            poll_count=self._poller.poll_count,
            loop_stall_seconds=lateness.total_seconds,
            longest_loop_stall_seconds=lateness.longest_seconds,
        )

    def _answers_threads(self) -> bool:
        return self._poller.is_running and super()._answers_threads()

    def _ring(self) -> None:
        self._poller.ring()

    def _check(self) -> None:
        super()._check()
        if self._is_closing:
            raise ClosedError("this offloader is being closed; open a new one")
        if not self._poller.is_running:
            raise StateError("the event loop this offloader was opened in has ended; open a new one in this one")
        self._check_loop()

    def check_waiter(self) -> None:
        """See `OffloaderMachine.check_waiter`."""
        super().check_waiter()
        self._check_loop()

    def _check_loop(self) -> None:
        if self._poller.is_elsewhere:
            raise WrongThreadError("this offloader belongs to another event loop; open one in each")

    def prepare_load(
        self, keys: Sequence[OffloadKey], ctx: ReqContext | None = None, *, resident_tokens: int = 0
    ) -> LoadTicket:
        """See `OffloaderMachine.prepare_load`."""
        ticket = super().prepare_load(keys, ctx, resident_tokens=resident_tokens)
        if ticket.result is LookupResult.PENDING:
            self._poller.wake()  # a tier that is asked has a deadline
        return ticket

    def _launch(self, *args: Any, **kwargs: Any) -> None:
        super()._launch(*args, **kwargs)
        self._poller.wake()

    def _is_at_rest(self) -> bool:
        return not self._worker.sent_count and not self._worker.queued_count and self.manager.is_at_rest

    def _step_for_poller(self) -> PollStep:
        step = self.step()
        self._ended.clear()
        self._step_watchers.notify()
        if self._is_closing:
            self._end_watchers.notify()
        return step

    async def _finish(self, handle: TransferHandle) -> TransferResult:
        """Wait until a handle's blocks are idle; a cancelled waiter takes back what it can and waits for the rest."""
        try:
            return await handle
        except anyio.get_cancelled_exc_class() as exc:
            cancellation = exc
        handle.cancel()
        try:
            await handle.wait_out()
        except anyio.get_cancelled_exc_class() as exc:
            cancellation = exc
        handle.check_idle()
        raise cancellation
