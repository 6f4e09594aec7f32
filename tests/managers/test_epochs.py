from __future__ import annotations

import anyio
import pytest

from aiokvoffload.events import EventKind, OffloadingEvent
from aiokvoffload.managers.base import OffloadingManager
from aiokvoffload.managers.cpu import CPUOffloadingManager
from aiokvoffload.managers.reuse import FilterReusedOffloadingManager
from aiokvoffload.specs import Completion, LookupResult, ReqContext, StoreOutcome
from aiokvoffload.testing.manager_contract import BACKENDS, assert_at_rest
from aiokvoffload.testing.strategies import make_keys

MISS, HIT, PENDING = LookupResult.MISS, LookupResult.HIT, LookupResult.PENDING


def store(manager: OffloadingManager, *numbers: int) -> None:
    manager.complete_store_nowait(manager.prepare_store_nowait(make_keys(*numbers), filtered=False))


def test_a_request_belongs_to_the_epoch_of_its_first_call() -> None:
    manager = CPUOffloadingManager(4)
    made_before, used_before = ReqContext("made before"), ReqContext("used before")
    store(manager, 1)
    assert manager.lookup_nowait(make_keys(1), used_before) == [HIT]
    manager.bump_epoch_nowait()
    store(manager, 1)
    assert manager.lookup_nowait(make_keys(1), made_before) == [HIT]
    assert manager.lookup_nowait(make_keys(1), used_before) == [MISS]
    # Contexts made anew do not make it younger.
    assert manager.lookup_nowait(make_keys(1), ReqContext("used before")) == [MISS]


@pytest.mark.parametrize("first_call", ["lookup", "lookup_prefix", "touch", "load", "store"])
def test_any_call_binds_a_request(first_call: str) -> None:
    manager = CPUOffloadingManager(4)
    ctx = ReqContext("request")
    match first_call:
        case "lookup":
            manager.lookup_nowait(make_keys(1), ctx)
        case "lookup_prefix":
            manager.lookup_prefix_nowait(make_keys(1), ctx)
        case "touch":
            manager.touch(make_keys(1), ctx)
        case "load":
            manager.prepare_load_nowait(make_keys(1), ctx)
        case _:
            manager.complete_store_nowait(manager.prepare_store_nowait(make_keys(1), ctx))
    manager.bump_epoch_nowait()
    assert manager.prepare_store_nowait(make_keys(1), ctx).is_refused


def test_an_old_request_misses_everywhere_and_its_loads_look_like_other_misses() -> None:
    manager = CPUOffloadingManager(4)
    ctx = ReqContext("old")
    manager.touch(make_keys(1), ctx)
    manager.bump_epoch_nowait()
    store(manager, 1, 2)
    assert manager.lookup_prefix_nowait(make_keys(1, 2), ctx, resident_tokens=1) == 1
    for take, token_count in (("all", 0), ("leading", 1)):
        old = manager.prepare_load_nowait(
            make_keys(1, 2), ctx, take="all" if take == "all" else "leading", resident_tokens=1
        )
        assert old.result is MISS
        assert old.token_count == token_count
        assert old.group_sizes == (0,)
        assert manager.complete_load_nowait(old) is Completion.APPLIED
    refused = manager.prepare_store_nowait(make_keys(1, 3), ctx, when_full="wait")
    assert not refused.is_waiting
    assert refused.outcomes(make_keys(1, 3)) == (StoreOutcome.REFUSED, StoreOutcome.REFUSED)
    # It does not change who leaves first either.
    manager.touch(make_keys(1), ctx)
    assert manager.prepare_store_nowait(make_keys(4, 5, 6)).evicted_keys == make_keys(1)


def test_loads_in_flight_finish_after_a_reset_and_fail_after_an_epoch() -> None:
    manager = CPUOffloadingManager(4)
    store(manager, 1)
    load = manager.prepare_load_nowait(make_keys(1))
    manager.reset_nowait()
    assert manager.complete_load_nowait(load) is Completion.APPLIED
    store(manager, 1)
    load = manager.prepare_load_nowait(make_keys(1))
    lease = load.lease()
    manager.bump_epoch_nowait()
    assert manager.complete_load_nowait(load) is Completion.STALE
    assert manager.statistics().leased_without_key == 1
    lease.release()
    assert manager.statistics().free == 4
    assert_at_rest(manager)


def test_stores_of_before_are_stale_and_give_their_slots_back() -> None:
    manager = CPUOffloadingManager(3)
    tickets = [manager.prepare_store_nowait(make_keys(number)) for number in (1, 2, 3)]
    lease = tickets[2].lease()
    manager.reset_nowait()
    manager.bump_epoch_nowait()
    assert manager.statistics().leased_without_key == 3
    assert manager.complete_store_nowait(tickets[0]) is Completion.STALE
    assert manager.complete_store_nowait(tickets[1], success=False) is Completion.STALE
    assert manager.complete_store_nowait(tickets[2]) is Completion.STALE
    assert manager.complete_store_nowait(tickets[0]) is Completion.REPEATED
    assert manager.statistics().free == 2
    lease.release()
    assert manager.statistics().free == 3
    assert manager.lookup_nowait(make_keys(1, 2, 3)) == [MISS] * 3


def test_waiting_loads_miss_and_the_blocks_written_later_are_others() -> None:
    manager = CPUOffloadingManager(4)
    old = manager.prepare_store_nowait(make_keys(1))
    load = manager.prepare_load_nowait(make_keys(1))
    watch = manager.watch_nowait(make_keys(1))
    manager.bump_epoch_nowait()
    assert load.result is MISS
    assert not watch.is_waiting
    new = manager.prepare_store_nowait(make_keys(1))
    manager.complete_store_nowait(old)
    assert manager.complete_load_nowait(load) is Completion.STALE
    manager.complete_load_nowait(watch)
    manager.complete_store_nowait(new)
    assert manager.lookup_nowait(make_keys(1)) == [HIT]
    assert_at_rest(manager)


def test_cleared_comes_before_anything_of_the_new_epoch() -> None:
    events: list[OffloadingEvent] = []
    manager = CPUOffloadingManager(1, event_sink=events.append)
    store(manager, 1)
    load = manager.prepare_load_nowait(make_keys(1))
    waiting = manager.prepare_store_nowait(make_keys(2), when_full="wait")
    manager.reset_nowait()
    manager.complete_load_nowait(load)
    manager.complete_store_nowait(waiting)
    manager.bump_epoch_nowait()
    assert [event.kind for event in events] == [
        EventKind.STORED,
        EventKind.CLEARED,
        EventKind.STORED,
        EventKind.CLEARED,
    ]
    assert events[2].keys == tuple(make_keys(2))


def test_the_filter_counts_on_over_epochs_and_resets() -> None:
    manager = FilterReusedOffloadingManager(CPUOffloadingManager(4))
    manager.touch(make_keys(1), ReqContext("a"))
    manager.reset_nowait()
    manager.bump_epoch_nowait()
    assert manager.epoch == 1
    assert manager.prepare_store_nowait(make_keys(1), ReqContext("b")).keys_to_store == make_keys(1)


@pytest.mark.parametrize("backend", BACKENDS)
def test_reset_and_epoch_never_suspend(backend: str) -> None:
    async def main() -> None:
        manager = CPUOffloadingManager(4)
        store(manager, 1)
        with anyio.CancelScope() as scope:
            scope.cancel()
            await manager.bump_epoch()
            await manager.reset()
            await manager.aclose()
        assert manager.epoch == 1
        assert manager.statistics().free == 4

    anyio.run(main, backend=backend)
