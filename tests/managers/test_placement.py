"""Moves between CPU memory and the GPU level, and hints, as a manager decides on them."""

from __future__ import annotations

import math
from collections.abc import Sequence

import anyio
import anyio.lowlevel
import pytest

from aiokvoffload.errors import ClosedError, ConfigurationError, InvalidRequestError
from aiokvoffload.events import EventKind, OffloadingEvent
from aiokvoffload.keys import OffloadKey
from aiokvoffload.managers.base import OffloadingManager
from aiokvoffload.managers.cpu import CPUOffloadingManager
from aiokvoffload.managers.reuse import FilterReusedOffloadingManager
from aiokvoffload.policies.arc import ARCPolicy
from aiokvoffload.policies.base import POLICIES
from aiokvoffload.specs import LookupResult, ReqContext, StoreOutcome
from aiokvoffload.testing.clock import ManualClock
from aiokvoffload.testing.manager_contract import assert_adds_up, assert_at_rest
from aiokvoffload.testing.policy_contract import count_instructions
from aiokvoffload.testing.strategies import make_keys

MISS, HIT, PENDING = LookupResult.MISS, LookupResult.HIT, LookupResult.PENDING
POLICY_NAMES = ["lru", "arc", "arc-reference", "lru2", "lrfu", "s3fifo", "adaptive"]
every_policy = pytest.mark.parametrize("policy", POLICY_NAMES)


def store(manager: OffloadingManager, keys: Sequence[OffloadKey], ctx: ReqContext | None = None) -> list[OffloadKey]:
    """Store blocks and return what had to leave for them."""
    ticket = manager.prepare_store_nowait(keys, ctx, depths=range(1, len(keys) + 1))
    assert not ticket.refused_keys
    manager.complete_store_nowait(ticket)
    return list(ticket.evicted_keys)


def demote(manager: OffloadingManager, keys: Sequence[OffloadKey]) -> list[OffloadKey]:
    """Demote blocks and return what had to leave for them."""
    ticket = manager.prepare_demotion_nowait(keys)
    manager.complete_store_nowait(ticket)
    return list(ticket.evicted_keys)


def take_along(manager: OffloadingManager, keys: Sequence[OffloadKey]) -> None:
    ticket = manager.prepare_load_nowait(keys)
    assert ticket.keys == keys
    manager.complete_load_nowait(ticket, take_along=True)


def filled(policy: str = "lru", block_count: int = 4) -> CPUOffloadingManager:
    """A full manager: one request per block, the first one the oldest."""
    manager = CPUOffloadingManager(block_count, policy=policy)
    for number in range(block_count):
        store(manager, make_keys(number))
    return manager


def test_the_policies_are_all_here() -> None:
    assert sorted(POLICIES.names()) == sorted(POLICY_NAMES)


# Demotion


@every_policy
def test_a_demotion_is_stored_and_its_deepest_block_leaves_first(policy: str) -> None:
    manager = CPUOffloadingManager(3, policy=policy)
    demote(manager, make_keys(1, 2, 3))
    assert manager.lookup_nowait(make_keys(1, 2, 3)) == [HIT] * 3
    assert demote(manager, make_keys(4)) == make_keys(3)
    assert manager.statistics().stored_blocks == 4


def test_a_demotion_has_a_tick_of_its_own() -> None:
    """Later than every access before it, and earlier than those after it."""
    manager = CPUOffloadingManager(5)
    ctx = ReqContext("1")
    store(manager, make_keys(1), ctx)
    demote(manager, make_keys(2))
    demote(manager, make_keys(3, 4))
    store(manager, make_keys(5), ctx)
    assert [store(manager, make_keys(number))[0] for number in range(6, 11)] == make_keys(1, 5, 2, 4, 3)


def test_a_demotion_is_no_access_of_its_request() -> None:
    manager = CPUOffloadingManager(3)
    store(manager, make_keys(1, 2))
    ctx = ReqContext("1")
    manager.complete_store_nowait(manager.prepare_demotion_nowait(make_keys(3), ctx))
    manager.touch(make_keys(1), ctx)  # the request's access is still to come
    assert store(manager, make_keys(4)) == make_keys(2)


def test_a_demotion_teaches_arc_nothing() -> None:
    policy = ARCPolicy(2)
    manager = CPUOffloadingManager(2, policy=policy)
    for number in range(4):
        demote(manager, make_keys(number))
    demote(manager, make_keys(0))
    assert policy.target_recent_count == 0
    manager.touch(make_keys(1))
    assert policy.target_recent_count > 0


@every_policy
def test_demoting_a_stored_block_copies_nothing_and_rescues_it(policy: str) -> None:
    manager = filled(policy)
    take_along(manager, make_keys(2, 3))
    ticket = manager.prepare_demotion_nowait(make_keys(3))
    assert (ticket.slots, ticket.resident_keys) == ([], make_keys(3))
    manager.complete_store_nowait(ticket)
    assert store(manager, make_keys(9)) == make_keys(2)
    assert manager.lookup_nowait(make_keys(3)) == [HIT]
    assert manager.statistics().rescued_blocks == 1


def test_demoting_a_block_that_others_write_does_nothing() -> None:
    manager = CPUOffloadingManager(2)
    writing = manager.prepare_store_nowait(make_keys(1))
    ticket = manager.prepare_demotion_nowait(make_keys(1, 2))
    assert (ticket.pending_keys, ticket.keys_to_store) == (make_keys(1), make_keys(2))
    assert ticket.outcomes(make_keys(1)) == (StoreOutcome.RESIDENT,)
    manager.complete_store_nowait(writing, success=False)
    assert manager.lookup_nowait(make_keys(1, 2)) == [MISS, PENDING]
    manager.complete_store_nowait(ticket)
    assert_at_rest(manager)


def test_of_what_does_not_fit_the_leading_part_is_taken_and_nothing_of_the_call_leaves_for_it() -> None:
    manager = filled()
    load = manager.prepare_load_nowait(make_keys(0, 1))
    ticket = manager.prepare_demotion_nowait(make_keys(3, 5, 6, 7))
    assert ticket.keys_to_store == make_keys(5)
    assert ticket.evicted_keys == make_keys(2)
    assert ticket.refused_keys == make_keys(6, 7)
    manager.complete_store_nowait(ticket)
    manager.complete_load_nowait(load)


def test_a_demotion_does_not_overtake_offers_in_line() -> None:
    manager = filled()
    load = manager.prepare_load_nowait(make_keys(0, 1, 2))
    waiting = manager.prepare_store_nowait(make_keys(5, 6), when_full="wait")
    assert manager.prepare_demotion_nowait(make_keys(7)).refused_keys == make_keys(7)
    assert manager.prepare_demotion_nowait(make_keys(3)).resident_keys == make_keys(3)
    manager.complete_load_nowait(load)
    assert waiting.keys_to_store == make_keys(5, 6)


def test_a_request_of_an_older_epoch_demotes_nothing() -> None:
    manager = CPUOffloadingManager(2)
    ctx = ReqContext("1")
    manager.lookup_nowait([], ctx)
    manager.bump_epoch_nowait()
    assert manager.prepare_demotion_nowait(make_keys(1), ctx).refused_keys == make_keys(1)
    assert manager.statistics().refused_blocks == 1


def test_given_depths_decide_and_bad_ones_are_refused() -> None:
    manager = CPUOffloadingManager(2)
    manager.complete_store_nowait(manager.prepare_demotion_nowait(make_keys(1, 2), depths=[20, 10]))
    assert store(manager, make_keys(3)) == make_keys(1)
    with pytest.raises(InvalidRequestError, match="2 keys need as many depths"):
        manager.prepare_demotion_nowait(make_keys(4, 5), depths=[1])


def test_the_filter_filters_a_demotion_and_counts_none() -> None:
    manager = FilterReusedOffloadingManager(CPUOffloadingManager(8), store_threshold=2)
    for _ in range(3):
        assert manager.prepare_demotion_nowait(make_keys(1)).filtered_keys == make_keys(1)
    manager.touch(make_keys(1, 2))
    manager.touch(make_keys(1))
    ticket = manager.prepare_demotion_nowait(make_keys(1, 2), depths=[1, 2])
    assert (ticket.keys_to_store, ticket.filtered_keys) == (make_keys(1), make_keys(2))
    assert manager.prepare_demotion_nowait(make_keys(2), filtered=False).keys_to_store == make_keys(2)
    with pytest.raises(InvalidRequestError, match="1 keys need as many depths"):
        manager.prepare_demotion_nowait(make_keys(1), depths=[])


@pytest.mark.parametrize("backend", ["asyncio", "trio"])
def test_the_coroutine_checks_for_cancellation_before_it_changes_anything(backend: str) -> None:
    async def main() -> None:
        manager = CPUOffloadingManager(2)
        with anyio.CancelScope() as scope:
            scope.cancel()
            await manager.prepare_demotion(make_keys(1))
        assert scope.cancelled_caught
        assert manager.lookup_nowait(make_keys(1)) == [MISS]
        ticket = await manager.prepare_demotion(make_keys(1))
        await manager.complete_store(ticket)
        assert_at_rest(manager)

    anyio.run(main, backend=backend)


# Taking along


@every_policy
def test_what_was_taken_along_is_a_hit_until_it_is_evicted_first(policy: str) -> None:
    events: list[OffloadingEvent] = []
    manager = CPUOffloadingManager(4, policy=policy, event_sink=events.append)
    for number in range(4):
        store(manager, make_keys(number))
    manager.touch(make_keys(2, 3))
    take_along(manager, make_keys(2, 3))
    assert manager.lookup_nowait(make_keys(2, 3)) == [HIT, HIT]
    assert [event for event in events if event.kind is EventKind.REMOVED] == []
    assert store(manager, make_keys(8)) == make_keys(3)
    assert store(manager, make_keys(9)) == make_keys(2)
    removed = [event.keys for event in events if event.kind is EventKind.REMOVED]
    assert removed == [tuple(make_keys(3)), tuple(make_keys(2))]
    assert manager.statistics().taken_along_blocks == 2
    assert_at_rest(manager)


def test_nobody_else_may_use_the_block() -> None:
    manager = filled()
    other = manager.prepare_load_nowait(make_keys(1))
    take_along(manager, make_keys(1, 2))
    manager.complete_load_nowait(other)
    assert store(manager, make_keys(9)) == make_keys(2)
    assert store(manager, make_keys(8)) == make_keys(0)


def test_a_lease_is_a_user_too() -> None:
    manager = filled()
    ticket = manager.prepare_load_nowait(make_keys(2))
    lease = ticket.lease()
    manager.complete_load_nowait(ticket, take_along=True)
    lease.release()
    assert manager.statistics().taken_along_blocks == 0


def test_a_waiting_load_takes_nothing_along() -> None:
    manager = filled()
    writing = manager.prepare_store_nowait(make_keys(9))
    load = manager.prepare_load_nowait(make_keys(3, 9))
    manager.complete_load_nowait(load, take_along=True)
    assert manager.statistics().taken_along_blocks == 0
    manager.complete_store_nowait(writing)


@pytest.mark.parametrize("happens", ["reset_nowait", "bump_epoch_nowait"])
def test_nothing_is_taken_along_after_a_reset(happens: str) -> None:
    manager = filled()
    load = manager.prepare_load_nowait(make_keys(3))
    getattr(manager, happens)()
    store(manager, make_keys(3))
    manager.complete_load_nowait(load, take_along=True)
    assert manager.statistics().taken_along_blocks == 0
    assert_at_rest(manager)


@pytest.mark.parametrize("backend", ["asyncio", "trio"])
def test_only_a_clean_exit_takes_along(backend: str) -> None:
    async def main() -> None:
        manager = filled()
        with pytest.raises(ValueError, match="on purpose"):
            async with manager.loading(make_keys(2), take_along=True):
                raise ValueError("on purpose")
        with anyio.CancelScope() as scope:
            async with manager.loading(make_keys(2), take_along=True):
                scope.cancel()
                await anyio.lowlevel.checkpoint()
        assert manager.statistics().taken_along_blocks == 0
        async with manager.loading(make_keys(2), take_along=True):
            pass
        assert manager.statistics().taken_along_blocks == 1
        ticket = await manager.prepare_load(make_keys(1))
        await manager.complete_load(ticket, take_along=True)
        assert manager.statistics().taken_along_blocks == 2

    anyio.run(main, backend=backend)


def test_a_negative_level_above_is_refused() -> None:
    with pytest.raises(ConfigurationError, match="blocks_above is -1"):
        CPUOffloadingManager(1, blocks_above=-1)


# The end of a session


def session(number: int, session_id: str | None = "one") -> ReqContext:
    return ReqContext(f"{session_id} {number}", session_id=session_id, turn=number)


@every_policy
def test_the_end_of_a_session_puts_its_own_blocks_first_in_line(policy: str) -> None:
    manager = CPUOffloadingManager(6, policy=policy)
    store(manager, make_keys(0, 1), session(1, "other"))
    store(manager, make_keys(0, 1, 2, 3), session(1))
    store(manager, make_keys(0, 1, 2, 3, 4), session(2))
    assert manager.hint(make_keys(0, 1, 2, 3, 4, 5), session_ended=True) == 3
    assert [store(manager, make_keys(number)) for number in (10, 11, 12, 13)] == [[], *map(make_keys, (4, 3, 2))]
    assert manager.lookup_nowait(make_keys(0, 1)) == [HIT, HIT]


@pytest.mark.parametrize("other", ["two", None])
@pytest.mark.parametrize("is_before", [False, True])
def test_shared_blocks_stay_whoever_used_them_last(other: str | None, is_before: bool) -> None:
    manager = CPUOffloadingManager(4)
    contexts = [session(1), session(1, other)]
    for ctx in reversed(contexts) if is_before else contexts:
        manager.touch(make_keys(0), ctx)
        store(manager, make_keys(0), ctx)
    store(manager, make_keys(0, 1), session(2))
    assert manager.hint(make_keys(0, 1), session_ended=True) == 1


def test_a_block_that_is_used_now_stays_where_it_is() -> None:
    manager = CPUOffloadingManager(4)
    store(manager, make_keys(0, 1), session(1))
    load = manager.prepare_load_nowait(make_keys(1))
    assert manager.hint(make_keys(0, 1), session_ended=True) == 1
    manager.complete_load_nowait(load)


def test_blocks_of_requests_without_a_session_count_as_shared() -> None:
    manager = filled()
    assert manager.hint(make_keys(0, 1), session_ended=True) == 0
    store(manager, make_keys(0, 1), session(1))
    assert manager.hint(make_keys(0, 1), session_ended=True) == 0


def test_the_slot_of_a_shared_block_can_be_a_sessions_own_later() -> None:
    manager = CPUOffloadingManager(1)
    store(manager, make_keys(0), session(1, None))
    store(manager, make_keys(1), session(1))
    assert manager.hint(make_keys(1), session_ended=True) == 1


# Keeping


def timed(block_count: int = 6, policy: str = "lru") -> tuple[CPUOffloadingManager, ManualClock]:
    clock = ManualClock()
    manager = CPUOffloadingManager(block_count, policy=policy, clock=clock)
    store(manager, make_keys(*range(block_count)))
    return manager, clock


@every_policy
def test_kept_blocks_stay_until_their_time_has_passed(policy: str) -> None:
    manager, clock = timed(policy=policy)
    assert manager.hint(make_keys(4, 5), keep_seconds=10) == 2
    assert manager.statistics().kept == 2
    assert manager.statistics().pinned == 0
    assert [store(manager, make_keys(number))[0] for number in range(10, 14)] == make_keys(3, 2, 1, 0)
    clock.advance(9.9)
    assert manager.prepare_store_nowait(make_keys(*range(20, 25))).is_refused
    clock.advance(0.1)
    ticket = manager.prepare_store_nowait(make_keys(*range(20, 26)))
    assert not ticket.is_refused
    assert set(make_keys(4, 5)) < set(ticket.evicted_keys)
    assert manager.statistics().kept == 0
    assert_adds_up(manager)


def test_at_most_half_of_all_is_kept_the_leading_part_of_what_is_asked_for() -> None:
    manager, clock = timed()
    assert manager.hint(make_keys(0, 1, 2, 3, 4, 99), keep_seconds=10) == 3
    assert manager.hint(make_keys(4), keep_seconds=10) == 0
    assert manager.hint(make_keys(0), keep_seconds=0) == 0
    assert manager.hint(make_keys(4, 1, 3), keep_seconds=5) == 2
    assert store(manager, make_keys(*range(10, 13))) == make_keys(5, 3, 0)
    clock.advance(5)
    assert manager.hint(make_keys(10, 11, 12), keep_seconds=1) == 2  # 4 and 1 are over, 2 is kept on
    assert CPUOffloadingManager(1).hint(make_keys(1), keep_seconds=1) == 0


def test_kept_blocks_can_be_loaded_and_counted_apart_from_pinned_ones() -> None:
    manager, clock = timed()
    manager.hint(make_keys(0, 1), keep_seconds=10)
    load = manager.prepare_load_nowait(make_keys(1, 2))
    counts = manager.statistics()
    assert (counts.kept, counts.pinned, counts.ready) == (2, 2, 6)
    assert_adds_up(manager)
    clock.advance(10)
    assert manager.prepare_store_nowait(make_keys(10, 11, 12, 13)).evicted_keys == make_keys(5, 4, 3, 0)
    manager.complete_load_nowait(load, take_along=True)
    assert store(manager, make_keys(14)) == make_keys(2)
    assert store(manager, make_keys(15)) == make_keys(1)


def test_keeping_outlives_a_load_that_takes_along_and_a_demotion() -> None:
    manager, _ = timed()
    manager.hint(make_keys(5), keep_seconds=10)
    take_along(manager, make_keys(5))
    demote(manager, make_keys(5))
    assert store(manager, make_keys(10)) == make_keys(4)
    assert manager.lookup_nowait(make_keys(5)) == [HIT]
    assert manager.statistics().taken_along_blocks == 0


def test_the_end_of_a_session_ends_the_keeping_of_its_blocks() -> None:
    manager = CPUOffloadingManager(4)
    store(manager, make_keys(0, 1), session(1))
    assert manager.hint(make_keys(0, 1), keep_seconds=math.inf) == 2
    assert manager.hint(make_keys(0, 1), session_ended=True) == 2
    assert manager.statistics().kept == 0


def test_what_is_being_written_is_not_kept() -> None:
    manager = CPUOffloadingManager(4)
    ticket = manager.prepare_store_nowait(make_keys(1))
    assert manager.hint(make_keys(1), keep_seconds=5) == 0
    manager.complete_store_nowait(ticket, success=False)
    assert_at_rest(manager)


@pytest.mark.parametrize("happens", ["reset_nowait", "bump_epoch_nowait"])
def test_a_reset_keeps_nothing(happens: str) -> None:
    manager, clock = timed()
    manager.hint(make_keys(0, 1, 2), keep_seconds=10)
    load = manager.prepare_load_nowait(make_keys(2, 3))
    getattr(manager, happens)()
    counts = manager.statistics()
    assert (counts.kept, counts.free, counts.leased_without_key) == (0, 4, 2)
    manager.complete_load_nowait(load)
    clock.advance(100)
    store(manager, make_keys(*range(20, 26)))
    assert manager.hint(make_keys(20, 21, 22), keep_seconds=10) == 3
    assert_at_rest(manager)


def test_an_offer_that_waits_gets_room_when_the_keeping_ends() -> None:
    manager, clock = timed(2)
    manager.hint(make_keys(1), keep_seconds=10)
    load = manager.prepare_load_nowait(make_keys(0))
    waiting = manager.prepare_store_nowait(make_keys(7, 8), when_full="wait")
    manager.complete_load_nowait(load)
    assert waiting.is_waiting
    clock.advance(10)
    manager.hint([], keep_seconds=1)  # any step looks at the line
    assert waiting.keys_to_store == make_keys(7, 8)


def test_many_kept_blocks_expire_in_slices_but_an_offer_gets_what_it_needs() -> None:
    manager, clock = timed(4000)
    manager.hint(make_keys(*range(2000)), keep_seconds=10)
    clock.advance(10)
    store(manager, make_keys(*range(5000, 5010)))
    assert 0 < manager.statistics().kept < 2000
    ticket = manager.prepare_store_nowait(make_keys(*range(6000, 10_000)))
    assert not ticket.is_refused
    assert manager.statistics().kept == 0


def test_a_hint_costs_what_it_names() -> None:
    def cost(block_count: int) -> int:
        manager, _ = timed(block_count)
        manager.hint(make_keys(*range(block_count // 4)), keep_seconds=10)
        return count_instructions(lambda: manager.hint(make_keys(*range(50)), keep_seconds=20))

    assert cost(8_000) <= 1.5 * cost(800)


@pytest.mark.parametrize(
    ("hint", "message"),
    [
        ({}, "give one of them"),
        ({"session_ended": True, "keep_seconds": 1.0}, "give one of them"),
        ({"keep_seconds": -1.0}, "keep_seconds is -1.0; it must be at least 0"),
        ({"keep_seconds": math.nan}, "keep_seconds is nan"),
    ],
)
@pytest.mark.parametrize("threshold", [0, 2])
def test_a_hint_that_says_nothing_or_too_much_is_refused(hint: dict[str, float], message: str, threshold: int) -> None:
    manager: OffloadingManager = filled()
    if threshold:
        manager = FilterReusedOffloadingManager(manager, store_threshold=threshold)
    with pytest.raises(InvalidRequestError, match=message):
        manager.hint(make_keys(1), **hint)  # type: ignore[arg-type]


def test_a_closed_manager_takes_no_hint_and_no_demotion() -> None:
    manager = filled()
    manager.close_nowait()
    with pytest.raises(ClosedError):
        manager.hint(make_keys(1), keep_seconds=1)
    with pytest.raises(ClosedError):
        manager.prepare_demotion_nowait(make_keys(1))
