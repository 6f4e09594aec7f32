"""The synchronous heart of an offloader: it joins manager, worker and handles, and moves on with `poll()`.

Nothing in here waits, except `block_until` and `drain`, which hosts without an event loop and a dying event loop
use. The async offloader awaits this machine, the synchronous one polls it.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from functools import partial
from typing import TypeVar

import numpy as np
from numpy.typing import NDArray

from aiokvoffload.devices.base import Direction, Event
from aiokvoffload.errors import InvalidRequestError, RankLostError, StateError
from aiokvoffload.events import EventSink
from aiokvoffload.keys import (
    CacheIdentity,
    OffloadKey,
    block_hashes,
    offload_keys,
    root_hash,
)
from aiokvoffload.kv_caches import KVGroup
from aiokvoffload.offloader.demotion import choose_sendable
from aiokvoffload.offloader.handles import TransferHandle
from aiokvoffload.offloader.parts import Parts
from aiokvoffload.offloader.shapes import BlockShapes
from aiokvoffload.offloader.statistics import OffloaderStatistics, StatisticsDesk, StatisticsSnapshot, take_statistics
from aiokvoffload.offloader.tickets import LoadTicket
from aiokvoffload.offloader.tracing import NoTracing, Tracing
from aiokvoffload.offloader.waiting import Watchers
from aiokvoffload.ownership import Owner
from aiokvoffload.specs import (
    Completion,
    CPULoadStoreSpec,
    GPULoadStoreSpec,
    PrepareLoadOutput,
    PrepareStoreOutput,
    ReqContext,
    StoreOutcome,
)
from aiokvoffload.transfers.base import After, Transfer
from aiokvoffload.transfers.poller import PollStep

_logger = logging.getLogger(__name__)
_PAUSE_SECONDS = 0.001
Result = TypeVar("Result")


class OffloaderMachine:
    """Stores and loads GPU blocks by key; one thread owns it.

    Args:
        parts: What it is made of, and closes in the end.

    Attributes:
        tracing: Watches single calls.
        waiting_name: What it is told that loads wait for.
    """

    def __init__(self, parts: Parts) -> None:
        self.manager = parts.manager
        self.memory = parts.memory
        self.clock = parts.clock
        self.deadlines = parts.deadlines
        self._parts = parts
        self._identity = parts.identity
        self.shapes = BlockShapes(parts.cache)
        self._cache = parts.cache
        self._worker = parts.worker
        self._owner = Owner("offloader")
        self._owner.check_thread()
        self.tracing: Tracing = NoTracing()
        self.waiting_name = "promotion" if parts.manager.tier_statistics() else "pending"
        self._fault: str | None = None
        self._ended: list[TransferHandle] = []
        self._end_watchers = Watchers()
        self._statistics_desk = StatisticsDesk(OffloaderMachine.statistics(self), self.clock.now)

    # Keys

    @property
    def identity(self) -> CacheIdentity:
        """What must agree for blocks to be shared, of the present epoch."""
        return self._identity

    @property
    def block_count(self) -> int:
        """Slots of CPU memory."""
        return self._parts.memory.slot_count

    @property
    def block_size_factor(self) -> int:
        """GPU blocks per offloaded block."""
        return self._cache.block_size_factor

    @property
    def groups(self) -> tuple[KVGroup, ...]:
        """The KV groups, in the order of their index in the keys."""
        return self._cache.groups

    def root(self, *, adapter: str = "", salt: str = "") -> bytes:
        """Return the start of a request's hash chain, of the present epoch."""
        return root_hash(self._identity, adapter=adapter, salt=salt)

    def keys(
        self, token_ids: Sequence[int] | NDArray[np.integer], *, adapter: str = "", salt: str = ""
    ) -> list[OffloadKey]:
        """Return the keys of all full offloaded blocks of a request, KV group after group.

        Args:
            token_ids: From the start of the request.
            adapter: The adapter that shapes the KV, if any.
            salt: Whatever else must keep requests apart.
        """
        root = self.root(adapter=adapter, salt=salt)
        found: list[OffloadKey] = []
        for index, group in enumerate(self._cache.groups):
            hashes = block_hashes(root, token_ids, group.block_tokens)
            found += offload_keys(hashes, block_size_factor=self.block_size_factor, group_index=index)
        return found

    # Storing

    def store_soon(
        self,
        keys: Sequence[OffloadKey],
        gpu_blocks: Sequence[int],
        ctx: ReqContext | None = None,
        *,
        filtered: bool = True,
        first_block: int = 0,
        after: After = None,
    ) -> TransferHandle:
        """Start to store GPU blocks and return at once; of what does not fit, the leading part is taken.

        Args:
            keys: One for each offloaded block, KV group after group.
            gpu_blocks: `block_size_factor` GPU blocks for each key, in the same order.
            ctx: The request.
            filtered: Whether blocks that are not reused may be left out; False for blocks that must be kept.
            first_block: Position of the first key within the request, in offloaded blocks.
            after: What the copies wait for instead of the compute stream.

        Raises:
            InvalidRequestError: Keys and GPU blocks do not fit; nothing was stored.
        """
        self._check()
        sizes = self.shapes.group_sizes(keys)
        blocks = self.shapes.check_blocks(gpu_blocks, len(keys) * self.block_size_factor)
        if self._fault is not None:
            return TransferHandle(self, outcomes=(StoreOutcome.REFUSED,) * len(keys)).finish_empty()
        event = self._worker.event_after(after)
        ticket = self.manager.prepare_store_nowait(
            keys,
            ctx,
            when_full="leading",
            depths=self.shapes.depths(sizes, first_block),
            filtered=filtered,
        )
        return self._launch_store(keys, blocks, ticket, ticket.outcomes(keys), event)

    def _launch_store(
        self,
        keys: Sequence[OffloadKey],
        gpu_blocks: Sequence[int],
        ticket: PrepareStoreOutput,
        outcomes: tuple[StoreOutcome, ...],
        event: Event | None,
        *,
        is_sent_now: bool = False,
    ) -> TransferHandle:
        """Start to copy what a ticket has accepted."""
        if not ticket.slots:
            self.manager.complete_store_nowait(ticket)
            return TransferHandle(self, outcomes=outcomes).finish_empty()
        stored, counts = self.shapes.blocks_to_store(keys, gpu_blocks, ticket.keys_to_store)
        gpu_spec = GPULoadStoreSpec(stored, counts, [0] * len(counts))
        handle = TransferHandle(self, stored, outcomes)
        self._launch(handle, Direction.STORE, gpu_spec, ticket, event, is_sent_now=is_sent_now)
        return handle

    # Placement

    def demote_soon(
        self,
        keys: Sequence[OffloadKey],
        gpu_blocks: Sequence[int],
        ctx: ReqContext | None = None,
        *,
        filtered: bool = True,
        after: After = None,
    ) -> TransferHandle:
        """Store blocks that the GPU gives up, without queueing: the copies are sent before this returns, or refused.

        So `handle.fence()` can follow, and then the GPU blocks can be used again. It is no access of any request.
        Blocks that are stored already are not copied, and stay where they are as if they were stored now. Refused is
        what finds no room, what the byte budget has no room for, and what a load that is still queued will fill.

        Args:
            keys: In bulk, of any requests, KV group after group; each after its prefix, as the last one leaves CPU
                memory first. Turn the order round in which a prefix cache gives blocks up.
            gpu_blocks: `block_size_factor` GPU blocks for each key, in the same order.
            ctx: The request, if the blocks are all one's and were computed in its epoch.
            filtered: Whether blocks that are not reused may be left out.
            after: What the copies wait for instead of the compute stream.

        Raises:
            InvalidRequestError: Keys and GPU blocks do not fit; nothing was stored.
        """
        self._check()
        sizes = self.shapes.group_sizes(keys)
        blocks = self.shapes.check_blocks(gpu_blocks, len(keys) * self.block_size_factor)
        if self._fault is not None:
            return TransferHandle(self, outcomes=(StoreOutcome.REFUSED,) * len(keys)).finish_empty()
        event = self._worker.event_after(after)
        results = self.manager.lookup_nowait(keys)
        chosen = choose_sendable(keys, blocks, results, self._cache, self._worker)
        depths = self.shapes.depths(sizes)
        ticket = self.manager.prepare_demotion_nowait(
            [keys[position] for position in chosen],
            ctx,
            depths=[depths[position] for position in chosen],
            filtered=filtered,
        )
        offered = {keys[position] for position in chosen}
        outcomes = tuple(
            outcome if key in offered else StoreOutcome.REFUSED
            for key, outcome in zip(keys, ticket.outcomes(keys), strict=True)
        )
        return self._launch_store(keys, blocks, ticket, outcomes, event, is_sent_now=True)

    def hint(
        self, keys: Sequence[OffloadKey], *, session_ended: bool = False, keep_seconds: float | None = None
    ) -> int:
        """Advise on stored blocks, and return for how many of them the advice was taken.

        Args:
            keys: All blocks of a request from its start, KV group after group.
            session_ended: No further turn will come. Blocks that requests of that session alone have used, and that
                nobody uses now, are first in line for reuse. Sessions are told apart by `ReqContext.session_id`.
            keep_seconds: Evict none of the blocks before that time has passed; at most half of CPU memory is kept,
                what comes after that is refused. 0 ends the keeping.

        Raises:
            InvalidRequestError: Not exactly one of the two, or a negative time.
        """
        self._check()
        depths = self.shapes.depths(self.shapes.group_sizes(keys))
        return self.manager.hint(keys, session_ended=session_ended, keep_seconds=keep_seconds, depths=depths)

    # Loading

    def prepare_load(
        self, keys: Sequence[OffloadKey], ctx: ReqContext | None = None, *, resident_tokens: int = 0
    ) -> LoadTicket:
        """Match the longest prefix and pin it, before GPU blocks are allocated; counts the request's access.

        Args:
            keys: All blocks of the request from its start, KV group after group.
            ctx: The request.
            resident_tokens: Tokens from the start that the GPU holds already, in whole GPU blocks.

        Raises:
            InvalidRequestError: The keys are not of this cache, or `resident_tokens` is no whole number of blocks.
        """
        self._check()
        sizes = self.shapes.group_sizes(keys)
        self.shapes.check_distinct_keys(keys)
        self.shapes.check_resident_tokens(resident_tokens)
        if self._fault is not None:
            ticket = PrepareLoadOutput(self.manager, self.manager.epoch, 0)
            return LoadTicket(self, ticket, sizes, resident_tokens, ctx)
        self.manager.touch(keys, ctx, depths=self.shapes.depths(sizes))
        ticket = self.manager.prepare_load_nowait(
            keys, ctx, take="leading", group_sizes=sizes, resident_tokens=resident_tokens
        )
        return LoadTicket(self, ticket, sizes, resident_tokens, ctx)

    def launch_load(
        self,
        ticket: PrepareLoadOutput,
        group_sizes: Sequence[int],
        block_indices: Sequence[int],
        gpu_blocks: Sequence[int],
        after: After,
        token_count: int,
        *,
        take_along: bool | None = None,
    ) -> TransferHandle:
        """Start to load what a settled ticket has pinned; for `LoadTicket.start`."""
        self._check()
        if take_along and self.block_size_factor > 1:
            raise InvalidRequestError(
                f"take_along needs a block_size_factor of 1, not {self.block_size_factor}: "
                "a load may leave a part of an offloaded block behind"
            )
        if take_along is None:
            take_along = self._parts.placement == "exclusive"
        blocks = self.shapes.check_blocks(gpu_blocks, sum(group_sizes))
        self.shapes.check_distinct_blocks(blocks, group_sizes)
        event = self._worker.event_after(after)
        if not ticket.slots:
            self.manager.complete_load_nowait(ticket)
            return TransferHandle(self, token_count=token_count).finish_empty(("CPU", "GPU"))
        gpu_spec = GPULoadStoreSpec(blocks, group_sizes, block_indices)
        handle = TransferHandle(self, blocks, token_count=token_count)
        self._launch(handle, Direction.LOAD, gpu_spec, ticket, event, take_along=take_along)
        return handle

    # Moving on

    def poll(self) -> list[TransferHandle]:
        """Commit what has landed, send what is queued, and return the handles that ended since the last poll."""
        self._owner.check_thread()
        self.step()
        ended, self._ended = self._ended, []
        return ended

    def step(self) -> PollStep:
        """Poll once and say when to poll next; never raises."""
        self.guarded(self._worker.poll)
        self.guarded(self.manager.poll_nowait)
        if self._statistics_desk.is_asked:
            self.guarded(self._answer_threads)
        return PollStep(bool(self._ended), self._worker.seconds_to_landing(), self._seconds_to_deadline())

    def _seconds_to_deadline(self) -> float | None:
        seconds, due = self._worker.seconds_to_deadline(), self.manager.next_deadline
        if due is None:
            return seconds
        to_manager = due - self.clock.now()
        return to_manager if seconds is None else min(seconds, to_manager)

    def take_jobs(self) -> bytes:
        """Return all transfers and fences since the last call, for the ranks of an engine of several processes.

        They travel inside the engine's own step message, and `WorkerPort.submit` takes them on every rank before that
        step's kernels. Until then what they ask for is queued. Empty if there is nothing to do: then they may be left
        out. Otherwise none may be lost.

        Raises:
            StateError: This offloader moves the bytes itself.
        """
        self._check()
        return self._worker.take_jobs()

    def check_sends_by_itself(self) -> None:
        """Refuse to block for what only the caller can send.

        Raises:
            StateError: The worker sends nothing by itself.
        """
        if not self._worker.sends_by_itself:
            raise StateError(
                "the ranks get their work from take_jobs(), so this call would block for ever: start it with "
                "prepare_load() or store_soon(), send take_jobs() to the ranks, and then wait for the handle"
            )

    def block_until(self, is_over: Callable[[], bool], timeout_seconds: float) -> None:
        """Poll, blocking the thread in between, until `is_over` or the timeout."""
        self._owner.check_thread()
        deadline = self.clock.now() + timeout_seconds
        self.step()
        while not is_over() and (left := deadline - self.clock.now()) > 0:
            ended_count, before = len(self._ended), self.clock.now()
            seconds = min(left, self._worker.seconds_to_deadline() or left)
            self.guarded(partial(self._worker.wait_for_news, seconds))
            has_waited = self.clock.now() - before >= min(seconds, _PAUSE_SECONDS)
            self.step()
            if not has_waited and len(self._ended) == ended_count and not is_over():
                # Nothing to wait for on the device, or it cannot say: do not spin.
                self.clock.pause(min(left, _PAUSE_SECONDS))

    def drain(self, timeout_seconds: float) -> None:
        """Take back what is not sent, and block the thread until the rest has landed or the time is up.

        What is still under way then is overdue.
        """
        self.guarded(self._worker.withdraw_all)
        deadline = self.clock.now() + timeout_seconds
        self.step()
        count = self._worker.sent_count + 1
        while 0 < self._worker.sent_count < count and self.clock.now() < deadline:
            count = self._worker.sent_count
            for transfer in self._worker.under_way():
                self.guarded(partial(self._worker.wait_for, transfer, max(0.0, deadline - self.clock.now())))
            self.step()
        self.guarded(self._worker.expire_all)

    def fence(self, transfer: Transfer) -> None:
        """Let the compute stream wait for a transfer; for `TransferHandle.fence`."""
        self._owner.check_thread()
        self._worker.fence(transfer)

    def withdraw(self, transfer: Transfer) -> bool:
        """Take back a transfer that is not sent; for `TransferHandle.cancel`."""
        self._owner.check_thread()
        return self._worker.withdraw(transfer)

    def note_end(self, handle: TransferHandle) -> None:
        """Remember a handle that has ended; for `TransferHandle`."""
        self._ended.append(handle)
        self._end_watchers.notify()

    # The whole

    def add_event_sink(self, sink: EventSink) -> Callable[[], None]:
        """Let a sink take what is stored, removed and cleared from now on; return what takes it away.

        It is called in the step itself, so it must return at once and must not call the offloader; see `EventSink`. One
        that raises is detached and counted.
        """
        self._check()
        return self._parts.hub.add_sink(sink)

    def reset_nowait(self) -> None:
        """Forget all blocks in CPU memory: stores under way will not count, loads under way finish."""
        self._check()
        self.manager.reset_nowait()

    def bump_epoch_nowait(self) -> None:
        """Forget all blocks after a weight update: loads under way fail, older requests miss and are refused."""
        self._check()
        self.manager.bump_epoch_nowait()
        self._identity = self._identity.next_epoch()

    def statistics(self) -> OffloaderStatistics:
        """Return the counts of this moment.

        Raises:
            WrongThreadError: Another thread asks; see `read_statistics`.
        """
        self._owner.check_thread()
        return take_statistics(self._parts, self._fault)

    def read_statistics(self, *, timeout_seconds: float = 1.0) -> StatisticsSnapshot:
        """Return the counts, from whatever thread: the owner takes them at its next poll.

        If that does not come within `timeout_seconds`, or never will, they are those that were taken last. The owner
        itself gets those of this moment.

        Raises:
            WrongThreadError: The call comes from a process forked after the offloader was opened.
        """
        if self._owner.is_caller:
            self._answer_threads()
        elif self._answers_threads():
            self._statistics_desk.ask(self._ring, timeout_seconds)
        return self._statistics_desk.last()

    def _answers_threads(self) -> bool:
        """Return whether there will be another poll; from any thread."""
        return not self._owner.is_closed

    def _answer_threads(self) -> None:
        self._statistics_desk.answer(self.statistics())

    def _ring(self) -> None:
        """Let the owner poll soon, where it can be told; from any thread."""

    def close_parts(self) -> None:
        """Close everything, once nothing more can be waited for; idempotent.

        Memory that a stuck copy may still touch stays mapped until that copy lets go of it.
        """
        if self._owner.is_closed:
            return
        self._owner.is_closed = True
        self.guarded(self.manager.close_nowait)
        for tier in self._parts.tiers:
            self.guarded(partial(tier.close, drain_seconds=0.0))
        self._parts.hub.close()
        self.guarded(self._answer_threads)
        self._parts.close(has_copies_under_way=bool(self._worker.sent_count))

    def check_waiter(self) -> None:
        """Refuse whoever would never be woken: a caller in another thread, or in another event loop.

        Raises:
            WrongThreadError: It is one.
        """
        self._owner.check_thread()

    def gpu_blocks_in_flight(self) -> frozenset[int]:
        """Return the GPU blocks of all transfers that were sent and have not landed."""
        return frozenset(
            block for transfer in self._worker.under_way() for block in transfer.gpu_spec.block_ids.tolist()
        )

    def _check(self) -> None:
        self._owner.check()
        self._worker.check()

    def _launch(
        self,
        handle: TransferHandle,
        direction: Direction,
        gpu_spec: GPULoadStoreSpec,
        ticket: PrepareStoreOutput | PrepareLoadOutput,
        event: Event | None,
        *,
        is_sent_now: bool = False,
        take_along: bool = False,
    ) -> None:
        """Hand a transfer to the worker; if that fails, the ticket is closed."""

        def close(success: bool) -> bool:
            if isinstance(ticket, PrepareStoreOutput):
                completion = self.guarded(lambda: self.manager.complete_store_nowait(ticket, success))
            elif success and take_along:
                completion = self.guarded(lambda: self.manager.complete_load_nowait(ticket, take_along=True))
            else:
                completion = self.guarded(lambda: self.manager.complete_load_nowait(ticket))
            return completion is Completion.APPLIED

        lease = ticket.lease()
        try:
            cpu_spec = CPULoadStoreSpec(ticket.slots)
            transfer = handle.launch(direction, gpu_spec, cpu_spec, event, lease, close)
            (self._worker.submit_now if is_sent_now else self._worker.submit)(transfer)
        except BaseException:
            close(False)
            lease.release()
            raise

    def guarded(self, action: Callable[[], Result]) -> Result | None:
        """Return what `action` returns; an exception becomes the offloader's fault, and None."""
        try:
            return action()
        except Exception as exc:  # noqa: BLE001  logged, and told by statistics()
            self._note_fault(exc)
            return None

    def _note_fault(self, exc: Exception) -> None:
        if isinstance(exc, RankLostError):
            _logger.warning("%s; from now on the offloader misses and refuses", exc)
        else:
            _logger.error("a fault inside the offloader; from now on it misses and refuses", exc_info=exc)
        if self._fault is None:
            self._fault = f"{type(exc).__name__}: {exc}"
