from __future__ import annotations

import itertools
from collections.abc import Callable

import anyio
import pytest

from aiokvoffload.managers.cpu import CPUOffloadingManager
from aiokvoffload.specs import Completion, LookupResult, PrepareLoadOutput, PrepareStoreOutput, ReqContext
from aiokvoffload.testing.clock import ManualClock
from aiokvoffload.testing.manager_contract import BACKENDS, assert_adds_up, assert_at_rest, some_turns
from aiokvoffload.testing.strategies import make_keys

MISS, HIT, PENDING = LookupResult.MISS, LookupResult.HIT, LookupResult.PENDING

backends = pytest.mark.parametrize("backend", BACKENDS)


def store(manager: CPUOffloadingManager, *numbers: int) -> None:
    manager.complete_store_nowait(manager.prepare_store_nowait(make_keys(*numbers)))


# Loads


def test_a_load_of_pending_blocks_waits_for_the_last_of_its_writes() -> None:
    manager = CPUOffloadingManager(4)
    store(manager, 1)
    writes = [manager.prepare_store_nowait(make_keys(2)), manager.prepare_store_nowait(make_keys(3))]
    load = manager.prepare_load_nowait(make_keys(1, 2, 3))
    settled: list[str] = []
    load.on_settled(lambda: settled.append("load"))
    assert load.result is PENDING
    assert manager.statistics().waiting_loads == 1
    assert manager.statistics().pinned == 1
    manager.complete_store_nowait(writes[1])
    assert load.is_waiting
    assert not settled
    manager.complete_store_nowait(writes[0])
    assert load.result is HIT
    assert settled == ["load"]
    load.on_settled(lambda: settled.append("at once"))
    assert settled == ["load", "at once"]
    assert manager.statistics().pinned == 3
    manager.complete_load_nowait(load)
    assert_at_rest(manager)


def test_what_is_handed_over_cannot_be_evicted_in_the_same_step() -> None:
    manager = CPUOffloadingManager(2)
    writing = manager.prepare_store_nowait(make_keys(1, 2))
    load = manager.prepare_load_nowait(make_keys(1))
    waiting = manager.prepare_store_nowait(make_keys(3, 4), when_full="wait")
    one = []
    load.on_settled(lambda: one.append(manager.prepare_store_nowait(make_keys(5), when_full="leading")))
    manager.complete_store_nowait(writing)
    assert load.keys == make_keys(1)
    assert manager.lookup_nowait(make_keys(1)) == [HIT]
    assert waiting.is_waiting
    assert one[0].is_refused
    manager.complete_load_nowait(load)
    assert waiting.evicted_keys == make_keys(1, 2)


@pytest.mark.parametrize("take", ["all", "leading"])
def test_a_failed_write_is_one_miss_for_all(take: str) -> None:
    manager = CPUOffloadingManager(4)
    writing = manager.prepare_store_nowait(make_keys(1))
    loads = [manager.prepare_load_nowait(make_keys(1), take="all" if take == "all" else "leading") for _ in range(50)]
    manager.complete_store_nowait(writing, success=False)
    assert {load.result for load in loads} == {MISS}
    assert manager.statistics().free == 4
    # It is written again meanwhile: that is none of theirs.
    again = manager.prepare_store_nowait(make_keys(1))
    assert not any(load.is_waiting for load in loads)
    manager.complete_store_nowait(again)
    for load in loads:
        assert manager.complete_load_nowait(load) is Completion.APPLIED
    assert_at_rest(manager)


def test_a_failed_write_does_not_free_a_slot_before_its_waiters_let_go() -> None:
    manager = CPUOffloadingManager(2)
    first, second = manager.prepare_store_nowait(make_keys(1)), manager.prepare_store_nowait(make_keys(2))
    leading = manager.prepare_load_nowait(make_keys(1, 2), take="leading")
    manager.complete_store_nowait(second, success=False)
    assert leading.is_waiting
    assert manager.statistics().leased_without_key == 1
    assert manager.prepare_store_nowait(make_keys(3)).is_refused
    manager.complete_store_nowait(first)
    assert leading.keys == make_keys(1)
    assert leading.token_count == 1
    assert manager.statistics().free == 1
    manager.complete_load_nowait(leading)
    assert_at_rest(manager)


def test_a_block_written_again_while_others_are_awaited_is_still_a_miss() -> None:
    manager = CPUOffloadingManager(4)
    first, second = manager.prepare_store_nowait(make_keys(1)), manager.prepare_store_nowait(make_keys(2))
    leading = manager.prepare_load_nowait(make_keys(1, 2), take="leading")
    manager.complete_store_nowait(second, success=False)
    again = manager.prepare_store_nowait(make_keys(2))
    assert again.slots != second.slots
    manager.complete_store_nowait(first)
    assert leading.keys == make_keys(1)
    manager.complete_load_nowait(leading)
    manager.complete_store_nowait(again)
    assert_at_rest(manager)


def test_a_leading_load_shrinks_to_what_was_written() -> None:
    manager = CPUOffloadingManager(6)
    store(manager, 1)
    writes = [manager.prepare_store_nowait(make_keys(number)) for number in (2, 3, 4)]
    leading = manager.prepare_load_nowait(make_keys(1, 2, 3, 4, 5), take="leading")
    whole = manager.prepare_load_nowait(make_keys(1, 2, 3, 4))
    assert (leading.token_count, whole.token_count) == (4, 4)
    manager.complete_store_nowait(writes[1], success=False)
    assert whole.result is MISS
    assert whole.token_count == 0
    manager.complete_store_nowait(writes[0])
    assert leading.is_waiting
    manager.complete_store_nowait(writes[2])
    assert leading.keys == make_keys(1, 2)
    assert leading.token_count == 2
    assert leading.group_sizes == (2,)
    assert manager.statistics().pinned == 2
    manager.complete_load_nowait(leading)
    manager.complete_load_nowait(whole)
    assert_at_rest(manager)


def test_a_waiting_load_can_be_settled_or_given_up_at_any_time() -> None:
    manager = CPUOffloadingManager(4)
    store(manager, 1)
    writing = manager.prepare_store_nowait(make_keys(2))
    leading = manager.prepare_load_nowait(make_keys(1, 2), take="leading")
    given_up = manager.prepare_load_nowait(make_keys(1, 2))
    settled: list[str] = []
    given_up.on_settled(lambda: settled.append("given up"))
    manager.settle_nowait(leading)
    assert leading.keys == make_keys(1)
    assert manager.complete_load_nowait(given_up) is Completion.APPLIED
    assert given_up.result is MISS
    assert settled == ["given up"]
    assert manager.complete_load_nowait(given_up) is Completion.REPEATED
    assert manager.statistics().waiting_loads == 0
    manager.complete_store_nowait(writing)
    assert leading.keys == make_keys(1)
    manager.complete_load_nowait(leading)
    assert_at_rest(manager)


def test_settling_what_does_not_wait_changes_nothing() -> None:
    manager, other = CPUOffloadingManager(4), CPUOffloadingManager(4)
    ticket = manager.prepare_store_nowait(make_keys(1))
    load = manager.prepare_load_nowait(make_keys(1))
    other.settle_nowait(load)
    assert load.is_waiting
    manager.settle_nowait(ticket)
    assert manager.lookup_nowait(make_keys(1)) == [PENDING]
    manager.complete_store_nowait(ticket)
    manager.settle_nowait(load)
    assert load.result is HIT
    manager.complete_load_nowait(load)
    assert_at_rest(manager)


def test_callbacks_may_call_the_manager() -> None:
    manager = CPUOffloadingManager(4)
    writing = manager.prepare_store_nowait(make_keys(1, 2))
    loads = [manager.prepare_load_nowait(make_keys(1, 2)) for _ in range(5)]
    completions: list[Completion] = []
    for load in loads:
        load.on_settled(lambda load=load: completions.append(manager.complete_load_nowait(load)))  # type: ignore[misc]
    manager.complete_store_nowait(writing)
    assert completions == [Completion.APPLIED] * 5
    assert_at_rest(manager)


@backends
def test_waiting_for_blocks_pins_nothing(backend: str) -> None:
    async def main() -> None:
        manager = CPUOffloadingManager(2)
        writes = [manager.prepare_store_nowait(make_keys(number)) for number in (1, 2)]
        found: list[list[LookupResult]] = []

        async def wait() -> None:
            found.append(await manager.wait_ready(make_keys(1, 2, 3)))

        async with anyio.create_task_group() as group:
            group.start_soon(wait)
            await some_turns()
            manager.complete_store_nowait(writes[0])
            await some_turns()
            assert manager.statistics().pinned == 0
            assert not found
            manager.complete_store_nowait(writes[1], success=False)
        assert found == [[HIT, MISS, MISS]]
        assert await manager.wait_ready(make_keys(1)) == [HIT]
        assert_at_rest(manager)

    anyio.run(main, backend=backend)


# Offers


def test_offers_get_their_room_first_come_first_served() -> None:
    manager = CPUOffloadingManager(3)
    writing = manager.prepare_store_nowait(make_keys(1, 2, 3))
    offers = [
        manager.prepare_store_nowait(make_keys(*numbers), when_full="wait") for numbers in ((4,), (5, 6), (7,), (8, 9))
    ]
    order: list[int] = []
    for index, offer in enumerate(offers):
        offer.on_settled(lambda index=index: order.append(index))  # type: ignore[misc]
    assert manager.statistics().waiting_stores == 4
    assert not any(offer.slots or offer.keys_to_store for offer in offers)
    manager.complete_store_nowait(writing)
    assert order == [0, 1]
    for offer in offers:
        manager.complete_store_nowait(offer)
        assert_adds_up(manager)
    assert order == [0, 1, 2, 3]
    assert manager.lookup_nowait(make_keys(4, 5, 6, 7, 8, 9)).count(HIT) == 3
    assert_at_rest(manager)


def test_a_large_offer_is_not_overtaken() -> None:
    manager = CPUOffloadingManager(4)
    store(manager, 1, 2)
    pinned = manager.prepare_load_nowait(make_keys(1, 2))
    large = manager.prepare_store_nowait(make_keys(11, 12, 13, 14), when_full="wait")
    small = manager.prepare_store_nowait(make_keys(21), when_full="wait")
    for when_full in ("refuse", "leading"):
        impatient = manager.prepare_store_nowait(
            make_keys(1, 31), when_full="refuse" if when_full == "refuse" else "leading"
        )
        assert impatient.refused_keys == make_keys(31)
        assert impatient.resident_keys == make_keys(1)
    assert small.is_waiting
    # What needs no room need not stand in line.
    assert not manager.prepare_store_nowait(make_keys(1, 2), when_full="wait").is_waiting
    manager.complete_load_nowait(pinned)
    assert large.keys_to_store == make_keys(11, 12, 13, 14)
    assert small.is_waiting
    manager.complete_store_nowait(large)
    assert small.keys_to_store == make_keys(21)


def test_an_offer_that_withdraws_lets_the_next_one_pass() -> None:
    manager = CPUOffloadingManager(2)
    store(manager, 1)
    pinned = manager.prepare_load_nowait(make_keys(1))
    large = manager.prepare_store_nowait(make_keys(2, 3), when_full="wait")
    small = manager.prepare_store_nowait(make_keys(4), when_full="wait")
    last = manager.prepare_store_nowait(make_keys(5, 6), when_full="wait")
    assert manager.complete_store_nowait(large, success=True) is Completion.APPLIED
    assert large.refused_keys == make_keys(2, 3)
    assert not large.keys_to_store
    assert small.slots
    manager.settle_nowait(last)
    assert last.refused_keys == make_keys(5, 6)
    assert manager.statistics().waiting_stores == 0
    assert manager.complete_store_nowait(last) is Completion.APPLIED
    manager.complete_load_nowait(pinned)
    manager.complete_store_nowait(small)
    assert_at_rest(manager)


def test_an_offer_in_line_sees_what_others_have_stored_meanwhile() -> None:
    manager = CPUOffloadingManager(3)
    writing = manager.prepare_store_nowait(make_keys(1, 2, 3))
    first = manager.prepare_store_nowait(make_keys(4, 5), when_full="wait")
    second = manager.prepare_store_nowait(make_keys(1, 4, 5), when_full="wait")
    manager.complete_store_nowait(writing)
    assert first.keys_to_store == make_keys(4, 5)
    assert first.evicted_keys == make_keys(2, 3)
    assert not second.is_waiting
    assert not second.keys_to_store
    assert second.resident_keys == make_keys(1)
    assert second.pending_keys == make_keys(4, 5)
    manager.complete_store_nowait(first)
    manager.complete_store_nowait(second)
    assert manager.lookup_nowait(make_keys(1, 4, 5)) == [HIT, HIT, HIT]
    assert_at_rest(manager)


def test_what_an_offer_says_is_true_when_it_settles() -> None:
    manager = CPUOffloadingManager(2)
    store(manager, 1)
    pinned = manager.prepare_load_nowait(make_keys(1))
    offer = manager.prepare_store_nowait(make_keys(1, 2), when_full="wait")
    assert not offer.is_waiting
    manager.complete_store_nowait(offer)
    both = manager.prepare_load_nowait(make_keys(1, 2))
    waiting = manager.prepare_store_nowait(make_keys(1, 3), when_full="wait")
    assert waiting.is_waiting
    manager.reset_nowait()
    # Nothing of it is stored any more, and nothing is free: its slots are still read.
    assert waiting.is_waiting
    manager.complete_load_nowait(both)
    manager.complete_load_nowait(pinned)
    assert waiting.keys_to_store == make_keys(1, 3)
    assert not waiting.resident_keys
    assert manager.complete_store_nowait(waiting) is Completion.APPLIED
    assert manager.lookup_nowait(make_keys(1, 3)) == [HIT, HIT]
    assert_at_rest(manager)


def test_an_offer_in_line_keeps_its_place_through_a_reset_but_not_through_an_epoch() -> None:
    manager = CPUOffloadingManager(1)
    writing = manager.prepare_store_nowait(make_keys(1))
    offer = manager.prepare_store_nowait(make_keys(2), ReqContext("request"), when_full="wait")
    manager.reset_nowait()
    assert offer.is_waiting
    manager.bump_epoch_nowait()
    assert not offer.is_waiting
    assert offer.refused_keys == make_keys(2)
    assert manager.complete_store_nowait(writing) is Completion.STALE
    assert_at_rest(manager)


@backends
def test_offers_and_loads_that_time_out(backend: str) -> None:
    async def main() -> None:
        clock = ManualClock(100.0)
        manager = CPUOffloadingManager(2, clock=clock)
        writing = manager.prepare_store_nowait(make_keys(1, 2))
        done: list[tuple[str, object]] = []

        async def offer(seconds: float | None, *numbers: int) -> None:
            ticket = await manager.prepare_store(make_keys(*numbers), when_full="wait", timeout_seconds=seconds)
            done.append(("store", ticket.is_refused))
            manager.complete_store_nowait(ticket)

        async def load(seconds: float | None) -> None:
            ticket = await manager.prepare_load(make_keys(1), timeout_seconds=seconds)
            done.append(("load", ticket.result))
            manager.complete_load_nowait(ticket)

        async with anyio.create_task_group() as group:
            for call, arguments in ((offer, (3.0, 3, 4)), (offer, (None, 5)), (load, (2.0,)), (load, (None,))):
                group.start_soon(call, *arguments)
                await some_turns()
            assert clock.next_deadline == 102.0
            clock.advance(2.0)
            await some_turns()
            assert done == [("load", MISS)]
            assert clock.next_deadline == 103.0
            clock.advance(1.0)
            await some_turns()
            assert done == [("load", MISS), ("store", True)]
            assert clock.next_deadline is None
            clock.advance(1e9)
            await some_turns()
            assert len(done) == 2
            manager.complete_store_nowait(writing)
        assert sorted(done[2:], key=repr) == [("load", HIT), ("store", False)]
        assert_at_rest(manager)

    anyio.run(main, backend=backend)


@backends
def test_a_deadline_of_now_does_not_wait(backend: str) -> None:
    async def main() -> None:
        clock = ManualClock()
        manager = CPUOffloadingManager(1, clock=clock)
        writing = manager.prepare_store_nowait(make_keys(1))
        assert (await manager.prepare_load(make_keys(1), timeout_seconds=0)).result is MISS
        assert (await manager.prepare_store(make_keys(2), when_full="wait", timeout_seconds=0)).is_refused
        assert await manager.wait_ready(make_keys(1), timeout_seconds=0) == [PENDING]
        manager.complete_store_nowait(writing)
        assert (await manager.prepare_load(make_keys(1), timeout_seconds=0)).result is HIT

    anyio.run(main, backend=backend)


@backends
def test_waiters_use_the_system_clock_by_default(backend: str) -> None:
    async def main() -> None:
        manager = CPUOffloadingManager(1)
        writing = manager.prepare_store_nowait(make_keys(1))
        assert (await manager.prepare_load(make_keys(1), timeout_seconds=0.001)).result is MISS
        manager.complete_store_nowait(writing)
        assert_at_rest(manager)

    anyio.run(main, backend=backend)


@backends
def test_cancelled_waiters_leave_the_line_in_any_order(backend: str) -> None:
    async def run(order: tuple[int, ...]) -> None:
        manager = CPUOffloadingManager(2)
        writing = manager.prepare_store_nowait(make_keys(1, 2))
        scopes = [anyio.CancelScope() for _ in range(4)]
        calls: list[Callable[[], object]] = []

        async def wait(index: int) -> None:
            with scopes[index]:
                ticket: PrepareStoreOutput | PrepareLoadOutput
                if index % 2:
                    ticket = await manager.prepare_load(make_keys(1, 2))
                else:
                    ticket = await manager.prepare_store(make_keys(10 + index), when_full="wait")
                calls.append(lambda: ticket)

        async with anyio.create_task_group() as group:
            for index in range(4):
                group.start_soon(wait, index)
            await some_turns()
            for index in order:
                scopes[index].cancel()
                await some_turns()
                assert_adds_up(manager)
        assert not calls
        manager.complete_store_nowait(writing)
        assert_at_rest(manager)

    async def main() -> None:
        for order in itertools.permutations(range(4)):
            await run(order)

    anyio.run(main, backend=backend)
