"""Blocks of a prefix, matched and pinned before GPU blocks are allocated for them."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractContextManager
from types import TracebackType
from typing import TYPE_CHECKING, Self

import anyio

from aiokvoffload.clock import deadline_after
from aiokvoffload.errors import StateError
from aiokvoffload.offloader.handles import TransferHandle
from aiokvoffload.offloader.tracing import CallSpan
from aiokvoffload.specs import LookupResult, PrepareLoadOutput, ReqContext

if TYPE_CHECKING:
    from aiokvoffload.offloader.machine import OffloaderMachine
    from aiokvoffload.transfers.base import After


class LoadTicket:
    """A matched prefix, pinned until `start` or `abort`; leaving a `with` block aborts.

    While `result` is PENDING, some blocks are still being written, or looked for in tiers and read from there: wait
    with `ready()`, or ask again later. Sizes may change until then.
    """

    def __init__(
        self,
        machine: OffloaderMachine,
        ticket: PrepareLoadOutput,
        key_counts: Sequence[int],
        resident_tokens: int,
        ctx: ReqContext | None = None,
    ) -> None:
        self._machine = machine
        self._ctx = ctx
        self._key_counts = key_counts
        self._ticket = ticket
        self._resident_tokens = resident_tokens
        self._is_used = False

    @property
    def result(self) -> LookupResult:
        """HIT, PENDING, or MISS if there is nothing to load."""
        return self._ticket.result

    @property
    def token_count(self) -> int:
        """Tokens from the start of the request that are there once the load has landed, resident ones included."""
        return max(self._ticket.token_count, self._resident_tokens)

    @property
    def group_sizes(self) -> tuple[int, ...]:
        """GPU blocks to allocate for each KV group."""
        return self._shape()[0]

    @property
    def block_indices(self) -> tuple[int, ...]:
        """For each KV group, the logical index of its first GPU block to load."""
        return self._shape()[1]

    async def ready(self, *, timeout_seconds: float | None = None) -> LookupResult:
        """Wait until no block is being written or read from a tier; at the timeout, go on with what is there.

        A cancelled wait leaves the ticket pinned: start or abort it.

        Args:
            timeout_seconds: Defaults to `Deadlines.pending_seconds`.

        Raises:
            WrongThreadError: The caller is in another thread or event loop, where it would never be woken.
        """
        self._machine.check_waiter()
        if self._ticket.is_waiting:
            clock = self._machine.clock
            seconds = self._machine.deadlines.pending_seconds if timeout_seconds is None else timeout_seconds
            settled = anyio.Event()
            self._ticket.on_settled(settled.set)
            with self.waiting_span() as span:
                with clock.cancel_at(deadline_after(clock, seconds)):
                    await settled.wait()
                self.settle()
                span.note(tokens=self.token_count)
        return self.result

    def waiting_span(self) -> AbstractContextManager[CallSpan]:
        """Return what watches the wait for blocks."""
        return self._machine.tracing.span(self._machine.waiting_name, sum(self._key_counts), self._ctx)

    def settle(self) -> None:
        """End the wait with what is there now, if it has not ended."""
        if self._ticket.is_waiting:
            self._machine.manager.settle_nowait(self._ticket)

    def start(
        self, gpu_blocks: Sequence[int], *, after: After = None, take_along: bool | None = None
    ) -> TransferHandle:
        """Load into `gpu_blocks`, which come group after group, `group_sizes` of each.

        Args:
            gpu_blocks: Where to; theirs is undefined content until the handle's result is good.
            after: What the copies wait for instead of the compute stream.
            take_along: Whether blocks that have landed, and that nobody else uses, are first in line for reuse in CPU
                memory. By default they are under exclusive placement. False where the engine will not demote them.

        Raises:
            StateError: The ticket was started or aborted before, or is PENDING.
            InvalidRequestError: The blocks do not fit; the ticket stays good.
        """
        if self._is_used:
            raise StateError("this ticket was started or aborted before; prepare a new load")
        if self._ticket.is_waiting:
            raise StateError("blocks of this load are still on their way; await ticket.ready() first")
        handle = self._machine.launch_load(
            self._ticket, *self._shape(), gpu_blocks, after, self.token_count, take_along=take_along
        )
        self._is_used = True
        return handle

    def choose(self, gpu_blocks: Sequence[int]) -> list[int]:
        """Return which of the GPU blocks for all keys asked for this load fills."""
        return self._machine.shapes.blocks_to_fill(self._key_counts, gpu_blocks, self._shape())

    def abort(self) -> None:
        """Unpin; nothing happens if the load was started."""
        if not self._is_used:
            self._machine.manager.complete_load_nowait(self._ticket)
            self._is_used = True

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.abort()

    def _shape(self) -> tuple[tuple[int, ...], tuple[int, ...]]:
        return self._machine.shapes.load_shape(self._ticket, self._resident_tokens)
