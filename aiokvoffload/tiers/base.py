"""The contract of a tier: blocks by key, in batches, every byte checked and every wait bounded.

A call is posted by a `start_*` method, which never waits, and collected by `poll()`; the coroutines of the same names
are written once, here, on top of that. Every call has a deadline. At the deadline its unanswered blocks are misses (of
a `put`: refusals), whatever the tier is doing; a result of a tier is never an exception.

A buffer handed to a tier belongs to it until the block is *over*, which may be after its deadline, after the call was
cancelled, and after the tier was closed. `on_release(index)` is called then, exactly once for each block, in the thread
that polls. Meanwhile the call keeps the buffer alive.

One thread owns a tier, usually that of an event loop. Errors of the storage count against the tier's breaker; while it
is open, calls are answered at once.
"""

from __future__ import annotations

import logging
from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Self

import anyio
from anyio.lowlevel import checkpoint_if_cancelled

from aiokvoffload.clock import Clock, SystemClock
from aiokvoffload.errors import ConfigurationError
from aiokvoffload.event_loops import caller_from_threads, running_loop
from aiokvoffload.keys import CacheIdentity
from aiokvoffload.ownership import Owner
from aiokvoffload.registry import Registry
from aiokvoffload.tiers.administration import TierAdministration
from aiokvoffload.tiers.arguments import Buffer, Keys, check_keys, use_of, views_of
from aiokvoffload.tiers.breaker import Breaker, BreakerLimits
from aiokvoffload.tiers.calls import Operation, Release, TierCall, Use
from aiokvoffload.tiers.desk import CallDesk
from aiokvoffload.tiers.doorbell import Ring
from aiokvoffload.tiers.outcomes import BlockOutcome, BlockResult, Reason
from aiokvoffload.tiers.statistics import Holdings, TierStatistics
from aiokvoffload.tiers.url import OptionReader, TierUrl

_logger = logging.getLogger(__name__)

DEFAULT_TIMEOUT_SECONDS = 10.0
DEFAULT_DRAIN_SECONDS = 5.0
_LAST_CALL_SECONDS = 2.0
_PAUSE_SECONDS = 0.0005
_NO_USE = Use(None)


@dataclass(frozen=True, slots=True, kw_only=True)
class TierSettings:
    """What every tier is told when it is opened.

    Attributes:
        identity: Whose blocks; two identities never see each other's.
        block_bytes: The sizes that blocks have.
        clock: Where deadlines are read.
    """

    identity: CacheIdentity
    block_bytes: tuple[int, ...]
    clock: Clock


class Tier(ABC):
    """Storage below CPU memory.

    Args:
        url: Where it is, without credentials; for statistics and messages.
        clock: Where deadlines are read.
        timeout_seconds: Longest that a call may take, whatever its deadline says. A block on which the work itself
            has taken so long opens the breaker.
        limits: When the breaker opens otherwise.
    """

    def __init__(
        self,
        url: str,
        *,
        clock: Clock | None = None,
        timeout_seconds: float = DEFAULT_TIMEOUT_SECONDS,
        limits: BreakerLimits | None = None,
    ) -> None:
        self.url = url
        self.clock: Clock = clock or SystemClock()
        self.timeout_seconds = timeout_seconds
        self.breaker = Breaker(self.clock, limits)
        self._owner = Owner("tier")
        self._desk = CallDesk(self, self.breaker, self.clock, timeout_seconds)
        self._loop: object = None
        self._silence: Callable[[], None] | None = None

    @property
    def is_closed(self) -> bool:
        """It takes no more calls."""
        return self._owner.is_closed

    @property
    def is_ready(self) -> bool:
        """It stores what it is given. While it finds out what it holds it is not; the doorbell rings when it is."""
        return True

    # For those who write tiers

    @classmethod
    @abstractmethod
    def from_url(cls, url: TierUrl, settings: TierSettings) -> Self:
        """Open the tier that a URL names.

        Raises:
            ConfigurationError: The URL, its options or what it leads to cannot work.
        """

    @classmethod
    def administer(cls, url: TierUrl) -> TierAdministration:
        """Return what looks at the storage from outside, for all identities.

        Raises:
            ConfigurationError: This kind of tier cannot be looked at from outside.
        """
        raise ConfigurationError(f"{url.redacted}: a {url.scheme!r} tier cannot be looked at from outside")

    @abstractmethod
    def begin(self, call: TierCall) -> None:
        """Set to work on the unanswered blocks of a call; must not wait, and must not raise.

        Each block is reported once through `_land`, from whatever thread. Work that belongs to a block notes its
        beginning in `call.began`. A call of `Operation.CLOSE` is the last one: give back what the tier holds.
        """

    @abstractmethod
    def take_back(self, call: TierCall) -> Sequence[int]:
        """Give back those blocks of a call on which work has not begun, and never will; return their positions."""

    def abandon(self, call: TierCall) -> None:
        """Note that a call is past its deadline and not over; a tier with threads replaces them."""

    def _stop(self) -> None:
        """Let threads and clients end without waiting for them; after the call of `Operation.CLOSE`."""

    def _holdings(self) -> Holdings:
        """Return what the tier holds, where it knows without asking."""
        return Holdings()

    def _removed_by_reason(self) -> Counter[str]:
        """Return how many blocks were removed because something was wrong with them."""
        return Counter()

    def _stuck_count(self) -> int:
        """Return how many threads have not come back."""
        return 0

    def _land(self, call: TierCall, indices: Sequence[int], results: Sequence[BlockResult]) -> None:
        """Report blocks that nobody touches any more, and what became of them; from any thread."""
        self._note(call, indices, results)
        self._ring()

    def _note(self, call: TierCall, indices: Sequence[int], results: Sequence[BlockResult]) -> None:
        """Report as `_land` does, but wake nobody; `_ring` must follow."""
        self._desk.note(call, indices, results)

    def _ring(self) -> None:
        """Wake whoever waits for what was reported; from any thread."""
        self._desk.doorbell.ring()

    # Without an event loop

    def start_contains(self, keys: Keys, *, deadline: float | None = None) -> TierCall:
        """Ask which blocks are there; promises nothing."""
        return self._start(Operation.CONTAINS, keys, (), _NO_USE, deadline, None)

    def start_put(
        self,
        keys: Keys,
        buffers: Sequence[Buffer],
        *,
        deadline: float | None = None,
        request_id: str | None = None,
        depths: Sequence[int] | None = None,
        on_release: Release | None = None,
    ) -> TierCall:
        """Store blocks; the bytes must not change before they are released.

        Args:
            keys: The blocks.
            buffers: The bytes of each.
            deadline: On the tier's clock.
            request_id: The request that uses them; its calls count as one use. None: this call is a use of its own.
            depths: Token position of each block's end.
            on_release: Called with the position of each block whose buffer is the caller's again.

        Raises:
            InvalidRequestError: Keys, buffers and depths do not fit, or a buffer cannot be used.
        """
        views = views_of(keys, buffers, is_written=False)
        return self._start(Operation.PUT, keys, views, use_of(keys, request_id, depths), deadline, on_release)

    def start_get_into(
        self,
        keys: Keys,
        buffers: Sequence[Buffer],
        *,
        deadline: float | None = None,
        on_release: Release | None = None,
    ) -> TierCall:
        """Read blocks into buffers of exactly their size; what is read is checked before it is a hit.

        The arguments are those of `start_put`.

        Raises:
            InvalidRequestError: Keys and buffers do not fit, or a buffer cannot be written.
        """
        views = views_of(keys, buffers, is_written=True)
        return self._start(Operation.GET_INTO, keys, views, _NO_USE, deadline, on_release)

    def start_delete(self, keys: Keys, *, deadline: float | None = None) -> TierCall:
        """Remove blocks."""
        return self._start(Operation.DELETE, keys, (), _NO_USE, deadline, None)

    def start_touch(
        self,
        keys: Keys,
        *,
        deadline: float | None = None,
        request_id: str | None = None,
        depths: Sequence[int] | None = None,
    ) -> TierCall:
        """Note a use of blocks, so that they stay longer. `contains` and `get_into` are no use."""
        return self._start(Operation.TOUCH, keys, (), use_of(keys, request_id, depths), deadline, None)

    def poll(self) -> None:
        """Collect what has landed, end what is past its deadline, and call back; never waits.

        Still collects late landings after the tier was closed.
        """
        self._owner.check_thread()
        self._desk.poll()

    def wait(self, call: TierCall) -> tuple[BlockResult, ...]:
        """Block until a call is answered, at its deadline at the latest; for hosts without an event loop."""
        self.poll()
        while not call.is_answered:
            self.clock.pause(_PAUSE_SECONDS)
            self.poll()
        return call.results

    @property
    def next_deadline(self) -> float | None:
        """When `poll()` has something to end, if nothing lands before."""
        return self._desk.next_deadline

    def add_doorbell(self, ring: Ring) -> Callable[[], None]:
        """Let `ring` be called, from any thread, when there is something to collect; return what takes it away."""
        return self._desk.doorbell.add(ring)

    def statistics(self) -> TierStatistics:
        """Return the counts of this moment."""
        counts = self._desk.counts
        return TierStatistics(
            url=self.url,
            lookups=counts.total(Operation.CONTAINS),
            hits=counts.blocks[Operation.CONTAINS, BlockOutcome.HIT],
            loads=counts.total(Operation.GET_INTO),
            loaded_blocks=counts.blocks[Operation.GET_INTO, BlockOutcome.HIT],
            stores=counts.total(Operation.PUT),
            stored_blocks=counts.blocks[Operation.PUT, BlockOutcome.STORED],
            bytes_read=counts.bytes[Operation.GET_INTO],
            bytes_written=counts.bytes[Operation.PUT],
            misses_by_reason=dict(counts.misses),
            refusals_by_reason=dict(counts.refusals),
            removed_by_reason=dict(self._removed_by_reason()),
            breaker=self.breaker.state,
            breaker_reason=self.breaker.reason,
            breaker_openings=self.breaker.opened_count,
            calls_in_flight=len(self._desk.calls),
            stuck_threads=self._stuck_count(),
            late_blocks=counts.late_blocks,
            lookup_seconds=counts.seconds[Operation.CONTAINS],
            read_seconds=counts.seconds[Operation.GET_INTO],
            write_seconds=counts.seconds[Operation.PUT],
            p50_ms=counts.percentile_ms(0.50),
            p99_ms=counts.percentile_ms(0.99),
            holdings=self._holdings(),
        )

    def close(self, *, drain_seconds: float = DEFAULT_DRAIN_SECONDS) -> None:
        """Refuse new calls, wait for what has begun, and close; bounded, blocking and idempotent."""
        if self._start_closing():
            drained_at = self.clock.now() + drain_seconds
            while self._desk.calls and self.clock.now() < drained_at:
                self.clock.pause(_PAUSE_SECONDS)
                self.poll()
            self.wait(self._post_last_call())

    # In an event loop

    async def contains(self, keys: Keys, *, deadline: float | None = None) -> tuple[BlockResult, ...]:
        """See `start_contains`."""
        await checkpoint_if_cancelled()
        return await self._answer_to(self.start_contains(keys, deadline=deadline))

    async def put(
        self,
        keys: Keys,
        buffers: Sequence[Buffer],
        *,
        deadline: float | None = None,
        request_id: str | None = None,
        depths: Sequence[int] | None = None,
        on_release: Release | None = None,
    ) -> tuple[BlockResult, ...]:
        """See `start_put`; cancelling it takes back what has not begun."""
        await checkpoint_if_cancelled()
        return await self._answer_to(
            self.start_put(
                keys, buffers, deadline=deadline, request_id=request_id, depths=depths, on_release=on_release
            )
        )

    async def get_into(
        self,
        keys: Keys,
        buffers: Sequence[Buffer],
        *,
        deadline: float | None = None,
        on_release: Release | None = None,
    ) -> tuple[BlockResult, ...]:
        """See `start_get_into`; cancelling it takes back what has not begun."""
        await checkpoint_if_cancelled()
        return await self._answer_to(self.start_get_into(keys, buffers, deadline=deadline, on_release=on_release))

    async def delete(self, keys: Keys, *, deadline: float | None = None) -> tuple[BlockResult, ...]:
        """See `start_delete`."""
        await checkpoint_if_cancelled()
        return await self._answer_to(self.start_delete(keys, deadline=deadline))

    async def touch(
        self,
        keys: Keys,
        *,
        deadline: float | None = None,
        request_id: str | None = None,
        depths: Sequence[int] | None = None,
    ) -> tuple[BlockResult, ...]:
        """See `start_touch`."""
        await checkpoint_if_cancelled()
        return await self._answer_to(self.start_touch(keys, deadline=deadline, request_id=request_id, depths=depths))

    async def aclose(self, *, drain_seconds: float = DEFAULT_DRAIN_SECONDS) -> None:
        """See `close`; a cancelled close waits no longer, but closes all the same."""
        if self._start_closing():
            self._hear_doorbell()
            try:
                with self.clock.cancel_at(self.clock.now() + drain_seconds):
                    for call in self._desk.calls:
                        await _until(call.on_over)
            finally:
                last_call = self._post_last_call()
            with self.clock.cancel_at(last_call.deadline):
                await _until(last_call.on_answered)
            self.poll()

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.aclose()

    # Inside

    def _start(
        self,
        operation: Operation,
        keys: Keys,
        views: Sequence[memoryview],
        use: Use,
        deadline: float | None,
        on_release: Release | None,
    ) -> TierCall:
        self._owner.check()
        check_keys(keys)
        self.poll()
        call = self._make_call(operation, keys, views, use, deadline, on_release)
        self._desk.post(call)
        return call

    def _make_call(
        self,
        operation: Operation,
        keys: Keys,
        views: Sequence[memoryview],
        use: Use,
        deadline: float | None,
        on_release: Release | None,
    ) -> TierCall:
        now = self.clock.now()
        latest = now + self.timeout_seconds
        return TierCall(
            operation,
            keys,
            views,
            use,
            started=now,
            deadline=latest if deadline is None else min(deadline, latest),
            withdraw=self._withdraw,
            on_release=on_release,
        )

    def _withdraw(self, call: TierCall, reason: Reason) -> None:
        self._owner.check_thread()
        self._desk.withdraw(call, reason)

    def _start_closing(self) -> bool:
        self._owner.check_thread()
        if self._owner.is_closed:
            return False
        self._owner.is_closed = True
        self.poll()
        for call in self._desk.calls:
            self._desk.take_back(call, Reason.CLOSED)
        return True

    def _post_last_call(self) -> TierCall:
        """Give up what is still under way, and let the tier give back what it holds."""
        if in_flight := self._desk.calls:
            _logger.warning("%s is closed with %d calls in flight", self.url, len(in_flight))
        for call in in_flight:
            self._desk.withdraw(call, Reason.CLOSED)
            self.abandon(call)
        deadline = self.clock.now() + _LAST_CALL_SECONDS
        last_call = self._make_call(Operation.CLOSE, (), (), _NO_USE, deadline, None)
        self._desk.post(last_call)
        self._stop()
        return last_call

    async def _answer_to(self, call: TierCall) -> tuple[BlockResult, ...]:
        """Wait until a call is answered, at its deadline at the latest."""
        if not call.is_answered:
            self._hear_doorbell()
        while not call.is_answered:
            try:
                with self.clock.cancel_at(call.deadline):
                    await _until(call.on_answered)
            except BaseException:
                call.cancel()
                raise
            # The timer of an event loop may be a moment early; then there is another, shorter wait.
            self.poll()
        return call.results

    def _hear_doorbell(self) -> None:
        """Let this event loop poll when something lands, from now on: also what nobody waits for is given back."""
        loop = running_loop()
        if loop != self._loop:
            self._loop = loop
            if self._silence is not None:
                self._silence()
            self._silence = self._desk.doorbell.add(partial(caller_from_threads(), self.poll))


TIERS: Registry[Tier] = Registry(
    "tier",
    Tier,
    {
        "memory": "aiokvoffload.tiers.memory:MemoryTier",
        "file": "aiokvoffload.tiers.fs.tier:FileTier",
        **dict.fromkeys(("s3", "gs", "az", "object+file"), "aiokvoffload.tiers.object:ObjectTier"),
        **dict.fromkeys(("valkey", "valkeys", "redis", "rediss"), "aiokvoffload.tiers.valkey:ValkeyTier"),
        "mooncake": "aiokvoffload.tiers.mooncake:MooncakeTier",
    },
    "aiokvoffload.tiers",
)
"""By the scheme of their URLs."""


def common_options(options: OptionReader) -> tuple[float, BreakerLimits]:
    """Read the options that every tier has: the longest time of a call, and when the breaker opens."""
    usual = BreakerLimits()
    return options.seconds("timeout", DEFAULT_TIMEOUT_SECONDS), BreakerLimits(
        failures=options.integer("breaker_failures", usual.failures),
        pause_seconds=options.seconds("breaker_pause", usual.pause_seconds),
        latency_seconds=options.seconds("breaker_latency", 0.0) or None,
    )


async def _until(subscribe: Callable[[Callable[[], None]], None]) -> None:
    event = anyio.Event()
    subscribe(event.set)
    await event.wait()
