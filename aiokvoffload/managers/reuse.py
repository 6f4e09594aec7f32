"""A filter over any manager: a block is stored only once it has been used often enough."""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence

from aiokvoffload.errors import ConfigurationError, InvalidRequestError
from aiokvoffload.keys import OffloadKey
from aiokvoffload.managers.base import Keys, ManagerStatistics, OffloadingManager, WhenFull
from aiokvoffload.managers.requests import RequestTable
from aiokvoffload.managers.tier_plan import TierUseStatistics
from aiokvoffload.managers.uses import UseCounter
from aiokvoffload.managers.waits import Take
from aiokvoffload.specs import (
    Completion,
    LookupResult,
    PrepareLoadOutput,
    PrepareStoreOutput,
    ReqContext,
    Ticket,
)

MAX_TRACKER_SIZE = 64_000


class FilterReusedOffloadingManager(OffloadingManager):
    """Leaves blocks out of an offer that were used by fewer than `store_threshold` requests.

    A use is counted once per request and block, by `touch`, or by the request's first `prepare_store` if it never
    touched; so blocks that the GPU served count too, and lookups, retries and demotions do not.

    Args:
        backing: The manager that stores.
        store_threshold: Uses that make a block worth storing, at least 2.
        max_tracker_size: Blocks whose uses are remembered, the latest used. Blocks of one call never push each
            other out: those that find no room are not counted.

    Raises:
        ConfigurationError: The threshold or the size filters nothing, or everything.
    """

    def __init__(
        self, backing: OffloadingManager, *, store_threshold: int = 2, max_tracker_size: int = MAX_TRACKER_SIZE
    ) -> None:
        super().__init__(backing.clock)
        if store_threshold < 2:
            raise ConfigurationError(
                f"store_threshold is {store_threshold}; give at least 2, or use the manager without this filter"
            )
        if max_tracker_size < 1:
            raise ConfigurationError(f"max_tracker_size is {max_tracker_size}; it must be at least 1")
        self._backing = backing
        self._store_threshold = store_threshold
        self._uses = UseCounter(max_tracker_size)
        self._requests = RequestTable()

    @property
    def epoch(self) -> int:
        """The backing manager's epoch."""
        return self._backing.epoch

    def tier_statistics(self) -> tuple[TierUseStatistics, ...]:
        """The backing manager's."""
        return self._backing.tier_statistics()

    def poll_nowait(self) -> None:
        """Let the backing manager move on."""
        self._backing.poll_nowait()

    @property
    def next_deadline(self) -> float | None:
        """The backing manager's."""
        return self._backing.next_deadline

    @property
    def is_at_rest(self) -> bool:
        """Whether the backing manager is."""
        return self._backing.is_at_rest

    def add_doorbell(self, ring: Callable[[], None]) -> Callable[[], None]:
        """Let the backing manager ring."""
        return self._backing.add_doorbell(ring)

    def hear(self) -> None:
        """Let the running event loop poll the backing manager."""
        self._backing.hear()

    @property
    def tracked_count(self) -> int:
        """How many blocks' uses are remembered."""
        return len(self._uses)

    def touch(self, keys: Keys, ctx: ReqContext | None = None, *, depths: Sequence[int] | None = None) -> None:
        """Count the request's use of its blocks, then let the backing manager count its access."""
        self._backing.touch(keys, ctx, depths=depths)
        binding = self._requests.bind(ctx, self.epoch)
        self._requests.open_access(binding)
        self._uses.count(keys, binding.tick)

    def prepare_store_nowait(
        self,
        keys: Keys,
        ctx: ReqContext | None = None,
        *,
        when_full: WhenFull = "refuse",
        depths: Sequence[int] | None = None,
        filtered: bool = True,
    ) -> PrepareStoreOutput:
        """Offer those blocks that have been used often enough, or are stored already."""
        _check_depths(keys, depths)
        ctx = ctx or ReqContext("")
        if not self._requests.bind(ctx, self.epoch).tick:
            self.touch(keys, ctx, depths=depths)
        passed, passed_depths = self._pass(keys, depths) if filtered else (keys, depths)
        ticket = self._backing.prepare_store_nowait(
            passed, ctx, when_full=when_full, depths=passed_depths, filtered=filtered
        )
        return _note_filtered(ticket, keys, passed)

    def prepare_demotion_nowait(
        self,
        keys: Keys,
        ctx: ReqContext | None = None,
        *,
        depths: Sequence[int] | None = None,
        filtered: bool = True,
    ) -> PrepareStoreOutput:
        """Let those blocks go down that have been used often enough, or are stored already; counts no use."""
        _check_depths(keys, depths)
        passed, passed_depths = self._pass(keys, depths) if filtered else (keys, depths)
        ticket = self._backing.prepare_demotion_nowait(passed, ctx, depths=passed_depths, filtered=filtered)
        return _note_filtered(ticket, keys, passed)

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

    def lookup_nowait(self, keys: Keys, ctx: ReqContext | None = None) -> list[LookupResult]:
        """Ask the backing manager."""
        return self._backing.lookup_nowait(keys, ctx)

    def lookup_prefix_nowait(
        self,
        keys: Keys,
        ctx: ReqContext | None = None,
        *,
        group_sizes: Sequence[int] | None = None,
        resident_tokens: int = 0,
    ) -> int:
        """Ask the backing manager."""
        return self._backing.lookup_prefix_nowait(keys, ctx, group_sizes=group_sizes, resident_tokens=resident_tokens)

    async def lookup(
        self, keys: Keys, ctx: ReqContext | None = None, *, timeout_seconds: float | None = None
    ) -> list[LookupResult]:
        """Ask the backing manager."""
        return await self._backing.lookup(keys, ctx, timeout_seconds=timeout_seconds)

    async def lookup_prefix(
        self,
        keys: Keys,
        ctx: ReqContext | None = None,
        *,
        group_sizes: Sequence[int] | None = None,
        resident_tokens: int = 0,
        timeout_seconds: float | None = None,
    ) -> int:
        """Ask the backing manager."""
        return await self._backing.lookup_prefix(
            keys, ctx, group_sizes=group_sizes, resident_tokens=resident_tokens, timeout_seconds=timeout_seconds
        )

    def prepare_load_nowait(
        self,
        keys: Keys,
        ctx: ReqContext | None = None,
        *,
        take: Take = "all",
        group_sizes: Sequence[int] | None = None,
        resident_tokens: int = 0,
    ) -> PrepareLoadOutput:
        """Pin in the backing manager."""
        return self._backing.prepare_load_nowait(
            keys, ctx, take=take, group_sizes=group_sizes, resident_tokens=resident_tokens
        )

    def watch_nowait(self, keys: Keys) -> PrepareLoadOutput:
        """Watch in the backing manager."""
        return self._backing.watch_nowait(keys)

    def complete_load_nowait(self, ticket: PrepareLoadOutput, *, take_along: bool = False) -> Completion:
        """Unpin in the backing manager."""
        return self._backing.complete_load_nowait(ticket, take_along=take_along)

    def complete_store_nowait(
        self, ticket: PrepareStoreOutput, success: bool = True, *, failed_keys: Collection[OffloadKey] = ()
    ) -> Completion:
        """Commit or drop in the backing manager."""
        return self._backing.complete_store_nowait(ticket, success, failed_keys=failed_keys)

    def hold(self, slots: Sequence[int]) -> None:
        """Hold slots of the backing manager."""
        self._backing.hold(slots)

    def release(self, slots: Sequence[int]) -> None:
        """Release slots of the backing manager."""
        self._backing.release(slots)

    def settle_nowait(self, ticket: Ticket) -> None:
        """End a wait in the backing manager."""
        self._backing.settle_nowait(ticket)

    def reset_nowait(self) -> None:
        """Reset the backing manager; uses stay counted, for they say nothing about what is stored."""
        self._backing.reset_nowait()

    def bump_epoch_nowait(self) -> None:
        """Bump the epoch of the backing manager."""
        self._backing.bump_epoch_nowait()

    def statistics(self) -> ManagerStatistics:
        """Return the backing manager's counts."""
        return self._backing.statistics()

    def close_nowait(self) -> None:
        """Close the backing manager."""
        self._backing.close_nowait()

    def _pass(self, keys: Keys, depths: Sequence[int] | None) -> tuple[Keys, Sequence[int] | None]:
        """Return the keys that are worth storing, with their depths."""
        passed = [index for index, key in enumerate(keys) if self._is_worth_storing(key)]
        return [keys[index] for index in passed], None if depths is None else [depths[index] for index in passed]

    def _is_worth_storing(self, key: OffloadKey) -> bool:
        if self._uses.of(key) >= self._store_threshold:
            return True
        return self._backing.lookup_nowait([key])[0] is not LookupResult.MISS


def with_reuse_filter(
    manager: OffloadingManager, store_threshold: int, max_tracker_size: int = MAX_TRACKER_SIZE
) -> OffloadingManager:
    """Return `manager` behind a filter, or just `manager` for a threshold of 0 or 1, which filters nothing."""
    if store_threshold in (0, 1):
        return manager
    return FilterReusedOffloadingManager(manager, store_threshold=store_threshold, max_tracker_size=max_tracker_size)


def _check_depths(keys: Keys, depths: Sequence[int] | None) -> None:
    if depths is not None and len(depths) != len(keys):
        raise InvalidRequestError(f"{len(keys)} keys need as many depths, not {len(depths)}")


def _note_filtered(ticket: PrepareStoreOutput, keys: Keys, passed: Keys) -> PrepareStoreOutput:
    if len(passed) < len(keys):
        known = set(passed)
        ticket.filtered_keys = [*ticket.filtered_keys, *(key for key in dict.fromkeys(keys) if key not in known)]
    return ticket
