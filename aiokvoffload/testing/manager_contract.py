"""The contract of a manager as tests: subclass `ManagerContract` and say how to make the manager."""

# ruff: noqa: S101 - assertions are what a contract suite consists of

from __future__ import annotations

import asyncio
from abc import ABC, abstractmethod
from collections.abc import Awaitable, Callable, Generator, Sequence
from contextlib import nullcontext, suppress
from typing import Any, Literal

import anyio
import pytest
from anyio.lowlevel import checkpoint

from aiokvoffload.errors import ClosedError, InvalidRequestError, StateError
from aiokvoffload.events import EventKind, OffloadingEvent
from aiokvoffload.keys import OffloadKey
from aiokvoffload.managers.base import OffloadingManager
from aiokvoffload.specs import Completion, LookupResult, PrepareLoadOutput, PrepareStoreOutput, ReqContext, StoreOutcome
from aiokvoffload.testing.clock import ManualClock
from aiokvoffload.testing.strategies import make_keys

MISS, HIT, PENDING = LookupResult.MISS, LookupResult.HIT, LookupResult.PENDING
BACKENDS = ("asyncio", "trio")
TURNS = 20
"""More turns of the event loop than any step between two tasks takes."""


class Interruption:
    """Awaits a coroutine and calls `interrupt` when it suspends for the `step`-th time, from 0.

    Attributes:
        happened: The coroutine got that far.
    """

    def __init__(self, coroutine: Awaitable[object], step: int, interrupt: Callable[[], object]) -> None:
        self._coroutine = coroutine
        self._steps_left = step
        self._interrupt = interrupt
        self.happened = False

    def __await__(self) -> Generator[Any, Any, None]:
        """Pass everything through between the coroutine and the event loop."""
        inner = self._coroutine.__await__()
        advance: Callable[[], Any] = lambda: next(inner)  # noqa: E731
        while True:
            try:
                request = advance()
            except StopIteration:
                return
            if self._steps_left == 0:
                self.happened = True
                self._interrupt()
            self._steps_left -= 1
            try:
                answer = yield request
            except BaseException as error:  # noqa: BLE001 - it is passed on
                advance = lambda error=error: inner.throw(error)  # type: ignore[misc]  # noqa: E731
            else:
                advance = lambda answer=answer: inner.send(answer)  # type: ignore[misc]  # noqa: E731


async def cancelled_at(step: int, coroutine: Awaitable[object], *, natively: bool = False) -> bool:
    """Run a coroutine and cancel it when it suspends for the `step`-th time, or before it starts for -1.

    Args:
        step: When.
        coroutine: What is run.
        natively: With `asyncio.Task.cancel` instead of a cancel scope.

    Returns:
        Whether it got that far.
    """
    with anyio.CancelScope() as scope:
        task = asyncio.current_task() if natively else None
        cancel = scope.cancel if task is None else task.cancel
        interruption = Interruption(coroutine, step, cancel)
        if step < 0:
            cancel()
        with suppress(asyncio.CancelledError) if natively else nullcontext():
            await interruption
        if task is not None:
            task.uncancel()
    return interruption.happened or step < 0


async def some_turns() -> None:
    """Let the other tasks run until they all wait."""
    for _ in range(TURNS):
        await checkpoint()


def assert_adds_up(manager: OffloadingManager) -> None:
    """Assert that every slot is in exactly one place."""
    counts = manager.statistics()
    assert counts.free + counts.ready + counts.writing + counts.promoting + counts.leased_without_key == counts.total, (
        counts
    )
    assert min(counts.free, counts.ready, counts.writing, counts.promoting, counts.leased_without_key) >= 0
    assert 0 <= counts.pinned <= counts.ready
    assert 0 <= counts.kept <= counts.ready
    assert counts.kept <= counts.total // 2


def assert_at_rest(manager: OffloadingManager) -> None:
    """Assert that nobody uses, writes or waits for anything."""
    assert_adds_up(manager)
    counts = manager.statistics()
    assert counts.writing == counts.promoting == counts.leased_without_key == counts.pinned == 0, counts
    assert counts.waiting_loads == counts.waiting_stores == 0, counts


class ManagerContract(ABC):
    """What `aiokvoffload.managers.base` promises of every manager.

    ::

        class TestMyManager(ManagerContract):
            def make_manager(self, block_count: int, **options: Any) -> MyManager:
                return MyManager(block_count, **options)

    The suite offers everything with `filtered=False`, so a filter may stand in front.
    """

    @abstractmethod
    def make_manager(self, block_count: int, **options: Any) -> OffloadingManager:
        """Return a new manager of this many slots; `options` are `groups`, `event_sink` and `clock`."""

    def offer(self, manager: OffloadingManager, *numbers: int, **options: Any) -> PrepareStoreOutput:
        """Offer the keys of these numbers."""
        return manager.prepare_store_nowait(make_keys(*numbers), filtered=False, **options)

    def store(self, manager: OffloadingManager, *numbers: int) -> PrepareStoreOutput:
        """Store the keys of these numbers."""
        ticket = self.offer(manager, *numbers)
        assert not ticket.is_refused
        assert manager.complete_store_nowait(ticket) is Completion.APPLIED
        return ticket

    def load(self, manager: OffloadingManager, *numbers: int, **options: Any) -> PrepareLoadOutput:
        """Pin the keys of these numbers."""
        return manager.prepare_load_nowait(make_keys(*numbers), **options)

    def look(self, manager: OffloadingManager, *numbers: int) -> list[LookupResult]:
        """Look the keys of these numbers up."""
        return manager.lookup_nowait(make_keys(*numbers))

    # Storing

    def test_a_new_manager_is_empty(self) -> None:
        """All slots are free."""
        manager = self.make_manager(4)
        assert manager.statistics().total == manager.statistics().free == 4
        assert self.look(manager, 1, 2) == [MISS, MISS]
        assert manager.epoch == 0
        assert_at_rest(manager)

    def test_a_block_is_pending_until_it_is_committed(self) -> None:
        """Then it is a hit."""
        manager = self.make_manager(4)
        ticket = self.offer(manager, 1, 2)
        assert list(ticket.keys_to_store) == make_keys(1, 2)
        assert len(set(ticket.slots)) == 2
        assert ticket.store_spec.block_ids.tolist() == list(ticket.slots)
        assert ticket.is_open
        assert not ticket.is_waiting
        assert not ticket.is_refused
        assert self.look(manager, 1, 2, 3) == [PENDING, PENDING, MISS]
        assert manager.statistics().writing == 2
        assert_adds_up(manager)
        assert manager.complete_store_nowait(ticket) is Completion.APPLIED
        assert not ticket.is_open
        assert self.look(manager, 1, 2, 3) == [HIT, HIT, MISS]
        assert manager.statistics().stored_blocks == 2
        assert_at_rest(manager)

    def test_a_dropped_block_was_never_there(self) -> None:
        """Its slot is free again, other blocks stay."""
        manager = self.make_manager(4)
        self.store(manager, 1)
        ticket, other = self.offer(manager, 2, 3), self.offer(manager, 4)
        assert manager.complete_store_nowait(ticket, success=False) is Completion.APPLIED
        assert self.look(manager, 1, 2, 3, 4) == [HIT, MISS, MISS, PENDING]
        assert manager.statistics().free == 2
        assert manager.statistics().failed_blocks == 2
        manager.complete_store_nowait(other)
        assert_at_rest(manager)

    def test_what_is_stored_or_being_stored_is_not_stored_again(self) -> None:
        """It is listed, and never waited for."""
        manager = self.make_manager(6)
        self.store(manager, 1)
        writing = self.offer(manager, 2)
        ticket = self.offer(manager, 1, 2, 3)
        assert list(ticket.keys_to_store) == make_keys(3)
        assert list(ticket.resident_keys) == make_keys(1)
        assert list(ticket.pending_keys) == make_keys(2)
        assert ticket.outcomes(make_keys(3, 2, 1)) == (
            StoreOutcome.ACCEPTED,
            StoreOutcome.RESIDENT,
            StoreOutcome.RESIDENT,
        )
        manager.complete_store_nowait(ticket, success=False)
        assert self.look(manager, 1, 2, 3) == [HIT, PENDING, MISS]
        manager.complete_store_nowait(writing)
        assert_at_rest(manager)

    def test_a_key_given_twice_counts_once(self) -> None:
        """In offers, loads and touches."""
        manager = self.make_manager(4)
        ticket = self.offer(manager, 1, 2, 1, 1, 2, depths=[10, 20, 10, 10, 20])
        assert list(ticket.keys_to_store) == make_keys(1, 2)
        assert len(ticket.slots) == 2
        manager.complete_store_nowait(ticket)
        manager.touch(make_keys(2, 2, 1), depths=[20, 20, 10])
        assert manager.lookup_prefix_nowait(make_keys(1, 1, 2)) == 2
        for options in ({}, {"take": "leading"}, {"group_sizes": [3]}):
            load = self.load(manager, 1, 1, 2, **options)
            assert list(load.keys) == make_keys(1, 2)
            assert load.token_count == 2
            assert manager.statistics().pinned == 2
            manager.complete_load_nowait(load)
        assert_at_rest(manager)

    def test_an_empty_call_changes_nothing(self) -> None:
        """It is neither refused nor a hit."""
        manager = self.make_manager(1)
        ticket = self.offer(manager)
        assert not ticket.is_refused
        assert manager.complete_store_nowait(ticket) is Completion.APPLIED
        assert self.load(manager).result is MISS
        assert self.load(manager, take="leading").token_count == 0
        assert self.look(manager) == []
        manager.touch([])
        assert_at_rest(manager)

    def test_an_offer_evicts_others_and_never_its_own(self) -> None:
        """What it evicts is listed, in the order of leaving."""
        manager = self.make_manager(3)
        self.store(manager, 1)
        self.store(manager, 2)
        self.store(manager, 3)
        ticket = self.offer(manager, 1, 4)
        assert list(ticket.evicted_keys) == make_keys(2)
        assert list(ticket.resident_keys) == make_keys(1)
        assert self.look(manager, 1, 2, 3, 4) == [HIT, MISS, HIT, PENDING]
        assert manager.statistics().evicted_blocks == 1
        assert_adds_up(manager)

    def test_a_refused_offer_changes_nothing(self) -> None:
        """All or nothing, and nothing is evicted."""
        manager = self.make_manager(3)
        self.store(manager, 1, 2)
        pinned = self.load(manager, 1)
        writing = self.offer(manager, 3)
        ticket = self.offer(manager, 2, 4, 5)
        assert ticket.is_refused
        assert list(ticket.refused_keys) == make_keys(4, 5)
        assert list(ticket.resident_keys) == make_keys(2)
        assert not ticket.keys_to_store
        assert not ticket.evicted_keys
        assert not ticket.slots
        assert ticket.outcomes(make_keys(4, 2)) == (StoreOutcome.REFUSED, StoreOutcome.RESIDENT)
        assert self.look(manager, 1, 2, 3, 4, 5) == [HIT, HIT, PENDING, MISS, MISS]
        assert manager.statistics().refused_blocks == 2
        assert manager.complete_store_nowait(ticket) is Completion.APPLIED
        assert self.look(manager, 4, 5) == [MISS, MISS]
        manager.complete_load_nowait(pinned)
        manager.complete_store_nowait(writing)
        assert_at_rest(manager)

    def test_the_leading_blocks_of_an_offer_are_taken(self) -> None:
        """As many as there is room for, the rest is refused."""
        manager = self.make_manager(4)
        self.store(manager, 1)
        pinned = self.load(manager, 1)
        ticket = self.offer(manager, 1, 2, 3, 4, 5, 6, when_full="leading")
        assert list(ticket.keys_to_store) == make_keys(2, 3, 4)
        assert list(ticket.refused_keys) == make_keys(5, 6)
        assert list(ticket.resident_keys) == make_keys(1)
        assert ticket.is_refused
        manager.complete_store_nowait(ticket)
        manager.complete_load_nowait(pinned)
        assert self.look(manager, 1, 2, 3, 4, 5) == [HIT, HIT, HIT, HIT, MISS]
        assert_at_rest(manager)

    def test_a_full_manager_takes_no_leading_blocks(self) -> None:
        """Everything is refused."""
        manager = self.make_manager(2)
        writing = self.offer(manager, 1, 2)
        ticket = self.offer(manager, 3, 4, when_full="leading")
        assert not ticket.keys_to_store
        assert list(ticket.refused_keys) == make_keys(3, 4)
        manager.complete_store_nowait(writing)

    @pytest.mark.parametrize("numbers", [(1, 2, 3, 4, 5), (5, 6, 7, 8, 9)])
    def test_an_offer_that_can_never_fit_is_refused_at_once(self, numbers: Sequence[int]) -> None:
        """Also one that does not fit beside what is stored of it: nothing of an offer is evicted for it."""
        manager = self.make_manager(4)
        self.store(manager, 1, 2, 3, 4)
        ticket = self.offer(manager, *numbers, when_full="wait")
        assert not ticket.is_waiting
        assert ticket.is_refused
        assert manager.statistics().waiting_stores == 0
        later = self.offer(manager, 6)
        assert not later.is_refused

    # Completions

    def test_a_completion_counts_once(self) -> None:
        """A repeated one is reported, whichever way it goes."""
        manager = self.make_manager(4)
        ticket = self.store(manager, 1)
        for success in (True, False):
            assert manager.complete_store_nowait(ticket, success) is Completion.REPEATED
        assert self.look(manager, 1) == [HIT]
        load = self.load(manager, 1)
        assert manager.complete_load_nowait(load) is Completion.APPLIED
        assert manager.complete_load_nowait(load) is Completion.REPEATED
        assert manager.statistics().rejected_completions == 3
        assert_at_rest(manager)

    def test_a_foreign_completion_changes_nothing(self) -> None:
        """The ticket stays open for its own manager."""
        manager, other = self.make_manager(4), self.make_manager(4)
        ticket = self.offer(manager, 1)
        self.store(other, 1, 2)
        assert other.complete_store_nowait(ticket, success=False) is Completion.FOREIGN
        assert manager.complete_store_nowait(ticket) is Completion.APPLIED
        load = self.load(manager, 1)
        assert other.complete_load_nowait(load) is Completion.FOREIGN
        assert manager.statistics().pinned == 1
        assert manager.complete_load_nowait(load) is Completion.APPLIED
        assert other.statistics().rejected_completions == 2
        assert manager.statistics().rejected_completions == 0
        assert self.look(other, 1, 2) == [HIT, HIT]

    def test_a_repeated_completion_does_not_reach_the_next_owner(self) -> None:
        """The slot and the key have been given to somebody else meanwhile."""
        manager = self.make_manager(1)
        old = self.offer(manager, 1)
        manager.complete_store_nowait(old, success=False)
        new = self.offer(manager, 1)
        assert new.slots == old.slots
        assert manager.complete_store_nowait(old) is Completion.REPEATED
        assert self.look(manager, 1) == [PENDING]
        manager.complete_store_nowait(new)
        assert_at_rest(manager)

    # Loading

    def test_loading_pins(self) -> None:
        """As often as it is loaded."""
        manager = self.make_manager(2)
        stored = self.store(manager, 1, 2)
        first, second = self.load(manager, 1, 2), self.load(manager, 2)
        assert first.result is HIT
        assert first.slots == stored.slots
        assert first.load_spec.block_ids.tolist() == list(stored.slots)
        assert first.token_count == 2
        assert first.group_sizes == (2,)
        assert manager.statistics().pinned == 2
        manager.complete_load_nowait(first)
        assert manager.statistics().pinned == 1
        assert self.offer(manager, 3, 4).is_refused
        manager.complete_load_nowait(second)
        assert list(self.offer(manager, 3, 4).evicted_keys)
        assert_adds_up(manager)

    def test_a_missing_key_pins_nothing(self) -> None:
        """Wherever it is, and it is a miss for the whole call."""
        manager = self.make_manager(4)
        self.store(manager, 1, 2)
        writing = self.offer(manager, 3)
        for numbers in ((9, 1, 2), (1, 9, 2), (1, 2, 9), (3, 9, 1)):
            load = self.load(manager, *numbers)
            assert load.result is MISS
            assert not load.keys
            assert not load.slots
            assert not load.is_waiting
        assert manager.statistics().pinned == 0
        manager.complete_store_nowait(writing)
        assert_at_rest(manager)

    def test_the_leading_run_is_loaded(self) -> None:
        """Up to the first block that is missing."""
        manager = self.make_manager(4)
        self.store(manager, 1, 2)
        self.store(manager, 4)
        load = self.load(manager, 1, 2, 3, 4, take="leading")
        assert list(load.keys) == make_keys(1, 2)
        assert load.token_count == 2
        assert self.load(manager, 3, 4, take="leading").result is MISS
        manager.complete_load_nowait(load)
        assert_at_rest(manager)

    def test_bad_arguments_change_nothing(self) -> None:
        """One clear error each."""
        manager = self.make_manager(4)
        self.store(manager, 1)
        keys = make_keys(1, 2)
        for call in (
            lambda: manager.prepare_store_nowait(keys, depths=[1], filtered=False),
            lambda: manager.prepare_store_nowait(keys, depths=[1, -1], filtered=False),
            lambda: manager.touch(keys, depths=[1, 2, 3]),
            lambda: manager.prepare_load_nowait(keys, group_sizes=[1]),
            lambda: manager.prepare_load_nowait(keys, group_sizes=[3, -1]),
            lambda: manager.lookup_prefix_nowait(keys, group_sizes=[1, 1]),
            lambda: manager.lookup_prefix_nowait(keys, resident_tokens=-1),
        ):
            with pytest.raises(InvalidRequestError):
                call()
        assert self.look(manager, 1, 2) == [HIT, MISS]
        assert_at_rest(manager)

    # Leases

    def test_a_lease_outlives_an_aborted_store(self) -> None:
        """The slot is free when nobody touches its bytes any more, not before."""
        manager = self.make_manager(1)
        ticket = self.offer(manager, 1)
        first, second = ticket.lease(), ticket.lease()
        manager.complete_store_nowait(ticket, success=False)
        assert self.look(manager, 1) == [MISS]
        assert manager.statistics().leased_without_key == 1
        assert self.offer(manager, 2).is_refused
        first.release()
        first.release()
        assert manager.statistics().leased_without_key == 1
        second.release()
        assert manager.statistics().free == 1
        assert not self.offer(manager, 2).is_refused

    def test_a_lease_keeps_a_ready_block(self) -> None:
        """It is pinned as by a load."""
        manager = self.make_manager(1)
        ticket = self.offer(manager, 1)
        lease = ticket.lease()
        manager.complete_store_nowait(ticket)
        assert self.look(manager, 1) == [HIT]
        assert manager.statistics().pinned == 1
        assert self.offer(manager, 2).is_refused
        lease.release()
        assert list(self.offer(manager, 2).evicted_keys) == make_keys(1)

    def test_a_lease_outlives_a_load_and_a_reset(self) -> None:
        """Bytes being read are not overwritten, whatever happens to their key."""
        manager = self.make_manager(1)
        self.store(manager, 1)
        load = self.load(manager, 1)
        lease = load.lease()
        manager.complete_load_nowait(load)
        manager.reset_nowait()
        assert manager.statistics().leased_without_key == 1
        assert self.offer(manager, 1).is_refused
        lease.release()
        assert manager.statistics().free == 1
        with pytest.raises(StateError):
            load.lease()

    # Placement and hints

    def demote(self, manager: OffloadingManager, *numbers: int) -> PrepareStoreOutput:
        """Demote the keys of these numbers, whole."""
        ticket = manager.prepare_demotion_nowait(make_keys(*numbers), filtered=False)
        assert not ticket.is_waiting
        assert manager.complete_store_nowait(ticket) is Completion.APPLIED
        return ticket

    def test_a_demotion_is_a_store_that_leaves_the_last_block_first(self) -> None:
        """It copies only what is missing, and takes the leading part of what does not fit."""
        manager = self.make_manager(3)
        assert list(self.demote(manager, 1, 2, 3).keys_to_store) == make_keys(1, 2, 3)
        again = self.demote(manager, 2, 1, 1)
        assert not again.slots
        assert sorted(again.resident_keys) == sorted(make_keys(1, 2))
        assert list(self.demote(manager, 4).evicted_keys) == make_keys(3)
        ticket = self.demote(manager, 4, 5, 6, 7, 8)
        assert list(ticket.keys_to_store) == make_keys(5, 6)
        assert list(ticket.refused_keys) == make_keys(7, 8)
        assert_at_rest(manager)

    def test_what_a_load_takes_along_is_evicted_first_unless_it_is_rescued(self) -> None:
        """Until then it is a hit; what others use is not taken along."""
        manager = self.make_manager(4)
        for number in range(4):
            self.store(manager, number)
        other = self.load(manager, 1)
        for number in (3, 2, 1):
            manager.complete_load_nowait(self.load(manager, number), take_along=True)
        manager.complete_load_nowait(other)
        assert self.look(manager, 1, 2, 3) == [HIT] * 3
        self.demote(manager, 3)
        assert list(self.store(manager, 5).evicted_keys) == make_keys(2)
        assert list(self.store(manager, 6).evicted_keys) == make_keys(0)
        assert manager.statistics().taken_along_blocks == 2
        assert manager.statistics().rescued_blocks == 1
        assert_at_rest(manager)

    def test_kept_blocks_stay_until_their_time_has_passed(self) -> None:
        """At most half of the slots; a reset keeps nothing."""
        clock = ManualClock()
        manager = self.make_manager(4, clock=clock)
        self.store(manager, 1, 2, 3, 4)
        assert manager.hint(make_keys(1, 2, 3, 9), keep_seconds=5) == 2
        assert manager.statistics().kept == 2
        assert manager.statistics().pinned == 0
        self.store(manager, 5, 6)
        assert self.look(manager, 1, 2, 3, 4) == [HIT, HIT, MISS, MISS]
        clock.advance(5)
        self.store(manager, 7, 8, 9, 10)
        assert_at_rest(manager)
        manager.hint(make_keys(7), keep_seconds=5)
        manager.reset_nowait()
        assert manager.statistics().kept == 0
        assert manager.statistics().free == 4

    def test_the_end_of_a_session_gives_up_what_it_alone_has_used(self) -> None:
        """What others have used too stays."""
        manager = self.make_manager(4)
        for number, (session, keys) in enumerate([("one", (1, 2, 3)), ("two", (1, 4))]):
            ctx = ReqContext(str(number), session_id=session)
            manager.complete_store_nowait(self.offer(manager, *keys, ctx=ctx))
        assert manager.hint(make_keys(1, 2, 3), session_ended=True) == 2
        assert list(self.store(manager, 5, 6).evicted_keys) == make_keys(3, 2)

    @pytest.mark.parametrize("hint", [{}, {"session_ended": True, "keep_seconds": 1.0}, {"keep_seconds": -1.0}])
    def test_a_hint_that_says_nothing_or_too_much_is_refused(self, hint: dict[str, Any]) -> None:
        """One clear error."""
        with pytest.raises(InvalidRequestError):
            self.make_manager(2).hint(make_keys(1), **hint)

    # Reset and epochs

    def test_a_completion_from_before_a_reset_changes_nothing(self) -> None:
        """Even if the same key is being written again."""
        manager = self.make_manager(2)
        old = self.offer(manager, 1)
        manager.reset_nowait()
        assert self.look(manager, 1) == [MISS]
        assert manager.statistics().leased_without_key == 1
        new = self.offer(manager, 1)
        assert new.slots != old.slots
        assert manager.complete_store_nowait(old) is Completion.STALE
        assert self.look(manager, 1) == [PENDING]
        assert manager.statistics().free == 1
        assert manager.statistics().rejected_completions == 1
        manager.complete_store_nowait(new)
        assert self.look(manager, 1) == [HIT]
        assert_at_rest(manager)

    def test_a_reset_forgets_and_loads_in_flight_finish(self) -> None:
        """Their slots are free when they are done."""
        manager = self.make_manager(4)
        self.store(manager, 1, 2)
        load = self.load(manager, 1)
        manager.reset_nowait()
        assert self.look(manager, 1, 2) == [MISS, MISS]
        assert manager.statistics().free == 3
        assert list(load.keys) == make_keys(1)
        assert manager.complete_load_nowait(load) is Completion.APPLIED
        assert manager.statistics().free == 4
        assert manager.epoch == 0
        assert_at_rest(manager)

    def test_waiting_loads_miss_at_a_reset(self) -> None:
        """In the same step."""
        manager = self.make_manager(4)
        self.store(manager, 1)
        writing = self.offer(manager, 2)
        load = self.load(manager, 1, 2)
        leading = self.load(manager, 1, 2, take="leading")
        assert load.is_waiting
        manager.reset_nowait()
        assert not load.is_waiting
        assert load.result is leading.result is MISS
        manager.complete_store_nowait(writing)
        manager.complete_load_nowait(load)
        manager.complete_load_nowait(leading)
        assert manager.statistics().free == 4
        assert_at_rest(manager)

    def test_an_epoch_refuses_requests_of_before(self) -> None:
        """They neither hit nor store; new ones do."""
        manager = self.make_manager(4)
        ctx = ReqContext("old")
        self.store(manager, 1)
        assert manager.lookup_nowait(make_keys(1), ctx) == [HIT]
        load = self.load(manager, 1)
        manager.bump_epoch_nowait()
        assert manager.epoch == 1
        assert manager.complete_load_nowait(load) is Completion.STALE
        self.store(manager, 1)
        assert manager.lookup_nowait(make_keys(1), ctx) == [MISS]
        assert manager.lookup_prefix_nowait(make_keys(1), ctx) == 0
        assert self.load(manager, 1, ctx=ctx).result is MISS
        refused = self.offer(manager, 2, ctx=ctx)
        assert list(refused.refused_keys) == make_keys(2)
        assert self.look(manager, 1, 2) == [HIT, MISS]
        assert manager.lookup_nowait(make_keys(1), ReqContext("new")) == [HIT]
        assert_at_rest(manager)

    # Events

    def test_events_tell_what_can_be_hit(self) -> None:
        """Stored at commit, removed before the stored of the successor, cleared first; numbered without gaps."""
        events: list[OffloadingEvent] = []
        manager = self.make_manager(2, event_sink=events.append)
        self.store(manager, 1, 2)
        manager.complete_store_nowait(self.offer(manager, 3, 4), success=False)
        self.store(manager, 5)
        manager.reset_nowait()
        self.store(manager, 6)
        assert [(event.kind, list(event.keys)) for event in events] == [
            (EventKind.STORED, make_keys(1, 2)),
            (EventKind.REMOVED, list(self._leaving_order(events))),
            (EventKind.STORED, make_keys(5)),
            (EventKind.CLEARED, []),
            (EventKind.STORED, make_keys(6)),
        ]
        assert [event.sequence for event in events] == list(range(5))
        assert len({event.medium for event in events}) == 1

    def _leaving_order(self, events: Sequence[OffloadingEvent]) -> tuple[OffloadKey, ...]:
        assert sorted(events[1].keys) == sorted(make_keys(1, 2))
        return events[1].keys

    # Closing

    def test_a_closed_manager_takes_completions_only(self) -> None:
        """What is in flight ends in order."""
        manager = self.make_manager(4)
        self.store(manager, 1)
        load, writing = self.load(manager, 1), self.offer(manager, 2)
        lease = writing.lease()
        manager.close_nowait()
        manager.close_nowait()
        for call in (
            lambda: self.look(manager, 1),
            lambda: self.load(manager, 1),
            lambda: self.offer(manager, 3),
            lambda: manager.touch(make_keys(1)),
            manager.reset_nowait,
        ):
            with pytest.raises(ClosedError):
                call()
        assert manager.complete_load_nowait(load) is Completion.APPLIED
        assert manager.complete_store_nowait(writing) is Completion.APPLIED
        lease.release()
        assert_at_rest(manager)

    def test_closing_ends_every_wait(self) -> None:
        """Loads miss, offers are refused, also those that closing makes room for."""
        manager = self.make_manager(3)
        self.store(manager, 1, 2)
        writing = self.offer(manager, 3)
        load = self.load(manager, 1, 2, 3)
        store = self.offer(manager, 4, 5, when_full="wait")
        assert load.is_waiting
        assert store.is_waiting
        manager.close_nowait()
        assert load.result is MISS
        assert list(store.refused_keys) == make_keys(4, 5)
        assert not store.keys_to_store
        assert manager.complete_load_nowait(load) is Completion.APPLIED
        assert manager.complete_store_nowait(store) is Completion.APPLIED
        manager.complete_store_nowait(writing)
        assert_at_rest(manager)

    # The async surface

    @pytest.mark.parametrize("backend", BACKENDS)
    def test_storing_and_loading_are_scopes(self, backend: str) -> None:
        """A clean exit commits and unpins, any other aborts."""

        async def main() -> None:
            manager = self.make_manager(4)
            async with manager.storing(make_keys(1, 2), filtered=False) as ticket:
                assert list(ticket.keys_to_store) == make_keys(1, 2)
                assert await manager.lookup(make_keys(1)) == [PENDING]
            async with manager.loading(make_keys(1, 2)) as load:
                assert load.result is HIT
                assert manager.statistics().pinned == 2
            assert_at_rest(manager)
            with pytest.raises(LookupError):
                async with manager.storing(make_keys(3), filtered=False):
                    raise LookupError
            with pytest.raises(LookupError):
                async with manager.loading(make_keys(1)):
                    raise LookupError
            assert await manager.lookup(make_keys(1, 2, 3)) == [HIT, HIT, MISS]
            async with manager.loading(make_keys(1, 2, 9), take="leading", resident_tokens=1) as load:
                assert list(load.keys) == make_keys(2)
                assert load.token_count == 2
            assert_at_rest(manager)
            await manager.aclose()

        anyio.run(main, backend=backend)

    @pytest.mark.parametrize("backend", BACKENDS)
    def test_the_exits_need_no_permission(self, backend: str) -> None:
        """They neither suspend nor check for cancellation."""

        async def main() -> None:
            manager = self.make_manager(4)
            with anyio.CancelScope() as scope:
                async with manager.storing(make_keys(1), filtered=False):
                    scope.cancel()
            assert self.look(manager, 1) == [HIT]
            with anyio.CancelScope() as scope:
                async with manager.loading(make_keys(1)):
                    scope.cancel()
            assert_at_rest(manager)
            with anyio.CancelScope() as scope:
                async with manager.storing(make_keys(2), filtered=False):
                    scope.cancel()
                    await checkpoint()
            assert self.look(manager, 2) == [MISS]
            with anyio.CancelScope() as scope:
                ticket = self.offer(manager, 3)
                load = self.load(manager, 1)
                scope.cancel()
                assert await manager.complete_store(ticket) is Completion.APPLIED
                assert await manager.complete_load(load) is Completion.APPLIED
                await manager.reset()
            assert self.look(manager, 3) == [MISS]
            assert_at_rest(manager)

        anyio.run(main, backend=backend)

    @pytest.mark.parametrize("backend", BACKENDS)
    def test_a_cancelled_caller_changes_nothing(self, backend: str) -> None:
        """`prepare_*`, `lookup*` and `wait_*` check for cancellation before they decide."""

        async def main() -> None:
            manager = self.make_manager(4)
            self.store(manager, 1)
            before = manager.statistics()
            for call in (
                lambda: manager.prepare_store(make_keys(2), filtered=False),
                lambda: manager.prepare_load(make_keys(1)),
                lambda: manager.lookup(make_keys(1)),
                lambda: manager.lookup_prefix(make_keys(1)),
                lambda: manager.wait_ready(make_keys(1)),
            ):
                with anyio.CancelScope() as scope:
                    scope.cancel()
                    await call()
                assert scope.cancelled_caught
                assert manager.statistics() == before

        anyio.run(main, backend=backend)

    @pytest.mark.parametrize("backend", BACKENDS)
    def test_a_decision_that_need_not_wait_does_not_suspend(self, backend: str) -> None:
        """So nothing can come between the decision and its caller."""

        async def main() -> None:
            manager = self.make_manager(4)

            async def everything() -> None:
                ticket = await manager.prepare_store(make_keys(1), when_full="wait", filtered=False)
                await manager.complete_store(ticket)
                load = await manager.prepare_load(make_keys(1))
                await manager.lookup(make_keys(1))
                await manager.lookup_prefix(make_keys(1))
                await manager.complete_load(load)
                await manager.bump_epoch()

            # trio checks for cancellation by suspending at most when it is cancelled.
            assert not await cancelled_at(0, everything())
            assert_at_rest(manager)

        anyio.run(main, backend=backend)

    @pytest.mark.parametrize("backend", [*BACKENDS, "native"])
    @pytest.mark.parametrize("companion", ["commits", "fails", "resets", "does nothing"])
    @pytest.mark.parametrize("call", ["loading", "leading", "storing", "wait_ready"])
    def test_cancelled_anywhere_nothing_leaks(self, call: str, companion: str, backend: str) -> None:
        """At every await point, before and after what it waits for has happened, also within one turn."""

        async def once(step: int, companion_turns: int) -> bool:
            manager = self.make_manager(3)
            self.store(manager, 1)
            writing = self.offer(manager, 2, 3)

            async def use() -> None:
                if call == "storing":
                    async with manager.storing(make_keys(4, 5), when_full="wait", filtered=False):
                        await checkpoint()
                elif call == "wait_ready":
                    await manager.wait_ready(make_keys(1, 2, 3))
                else:
                    take: Literal["all", "leading"] = "all" if call == "loading" else "leading"
                    async with manager.loading(make_keys(1, 2, 3), take=take):
                        await checkpoint()

            async def accompany() -> None:
                for _ in range(companion_turns):
                    await checkpoint()
                if companion == "resets":
                    manager.reset_nowait()
                    await checkpoint()
                if companion != "does nothing":
                    manager.complete_store_nowait(writing, success=companion == "commits")

            is_endless = companion == "does nothing"
            got_there = False
            async with anyio.create_task_group() as group:
                group.start_soon(accompany)
                with anyio.CancelScope() as patience:
                    if is_endless:
                        # Without a companion the call would wait for ever: give it up after some turns.
                        async def lose_patience() -> None:
                            await some_turns()
                            patience.cancel()

                        group.start_soon(lose_patience)
                    got_there = await cancelled_at(step, use(), natively=backend == "native")
            assert_adds_up(manager)
            if writing.is_open:
                manager.complete_store_nowait(writing)
            assert_at_rest(manager)
            return got_there

        async def main() -> None:
            reached = 0
            for companion_turns in range(4):
                step = -1
                while await once(step, companion_turns):
                    step += 1
                reached = max(reached, step)
            assert reached >= 1

        anyio.run(main, backend="asyncio" if backend == "native" else backend)

    @pytest.mark.parametrize("backend", [*BACKENDS, "native"])
    @pytest.mark.parametrize("order", ["commit first", "cancel first"])
    def test_cancelled_in_the_turn_of_the_commit(self, order: str, backend: str) -> None:
        """The waiter has its ticket, or has given back what the commit handed over; never neither."""

        async def main() -> None:
            manager = self.make_manager(2)
            writing = self.offer(manager, 1)
            cancels: list[Callable[[], object]] = []

            async def wait(*, store: bool) -> None:
                task = asyncio.current_task() if backend == "native" else None
                with anyio.CancelScope() as scope, suppress(asyncio.CancelledError) if task else nullcontext():
                    cancels.append(task.cancel if task else scope.cancel)
                    if store:
                        offer = await manager.prepare_store(make_keys(2, 3), when_full="wait", filtered=False)
                        manager.complete_store_nowait(offer, success=False)
                    else:
                        load = await manager.prepare_load(make_keys(1))
                        manager.complete_load_nowait(load)
                if task:
                    task.uncancel()

            async with anyio.create_task_group() as group:
                for store in (False, True):
                    group.start_soon(lambda store=store: wait(store=store))  # type: ignore[misc]
                await some_turns()
                if order == "commit first":
                    manager.complete_store_nowait(writing)
                for cancel in cancels:
                    cancel()
                if order == "cancel first":
                    manager.complete_store_nowait(writing)
            assert_at_rest(manager)

        anyio.run(main, backend="asyncio" if backend == "native" else backend)

    def test_an_asyncio_timeout_leaks_nothing(self) -> None:
        """Its own cancellation, which knows no scopes."""

        async def main() -> None:
            manager = self.make_manager(2)
            writing = self.offer(manager, 1, 2)
            for call in (
                lambda: manager.prepare_load(make_keys(1)),
                lambda: manager.prepare_store(make_keys(3), when_full="wait", filtered=False),
                lambda: manager.wait_ready(make_keys(1)),
            ):
                with pytest.raises(TimeoutError):
                    async with asyncio.timeout(0):
                        await call()
            counts = manager.statistics()
            assert counts.waiting_loads == counts.waiting_stores == 0
            manager.complete_store_nowait(writing)
            assert_at_rest(manager)

        asyncio.run(main())

    @pytest.mark.parametrize("backend", BACKENDS)
    def test_waits_end_at_their_deadline(self, backend: str) -> None:
        """With what there is then."""

        async def main() -> None:
            clock = ManualClock()
            manager = self.make_manager(3, clock=clock)
            self.store(manager, 1)
            writing = self.offer(manager, 2, 3)
            results: dict[str, object] = {}

            async def wait(name: str, call: Callable[[], Awaitable[object]]) -> None:
                results[name] = await call()

            async with anyio.create_task_group() as group:
                group.start_soon(wait, "all", lambda: manager.prepare_load(make_keys(1, 2), timeout_seconds=5))
                group.start_soon(
                    wait, "leading", lambda: manager.prepare_load(make_keys(1, 2), take="leading", timeout_seconds=5)
                )
                group.start_soon(
                    wait,
                    "store",
                    lambda: manager.prepare_store(make_keys(4, 5), when_full="wait", timeout_seconds=5, filtered=False),
                )
                group.start_soon(wait, "ready", lambda: manager.wait_ready(make_keys(1, 2), timeout_seconds=5))
                await some_turns()
                assert not results
                clock.advance(4.9)
                await some_turns()
                assert not results
                clock.advance(0.1)
            load, leading, store = results["all"], results["leading"], results["store"]
            assert isinstance(load, PrepareLoadOutput)
            assert load.result is MISS
            assert isinstance(leading, PrepareLoadOutput)
            assert list(leading.keys) == make_keys(1)
            assert isinstance(store, PrepareStoreOutput)
            assert list(store.refused_keys) == make_keys(4, 5)
            assert results["ready"] == [HIT, PENDING]
            for ticket in (load, leading):
                assert manager.complete_load_nowait(ticket) is Completion.APPLIED
            manager.complete_store_nowait(writing)
            assert_at_rest(manager)

        anyio.run(main, backend=backend)
