from __future__ import annotations

import logging
from collections.abc import Callable

import pytest

from aiokvoffload.errors import StateError
from aiokvoffload.events import EventKind, OffloadingEvent
from aiokvoffload.managers.announcer import Announcer
from aiokvoffload.managers.cpu import CPUOffloadingManager
from aiokvoffload.specs import Completion, LookupResult
from aiokvoffload.testing.manager_contract import assert_at_rest
from aiokvoffload.testing.strategies import make_keys

STORED, REMOVED, CLEARED = EventKind.STORED, EventKind.REMOVED, EventKind.CLEARED


def watched(block_count: int) -> tuple[CPUOffloadingManager, list[OffloadingEvent]]:
    events: list[OffloadingEvent] = []
    return CPUOffloadingManager(block_count, event_sink=events.append), events


def store(manager: CPUOffloadingManager, *numbers: int) -> None:
    manager.complete_store_nowait(manager.prepare_store_nowait(make_keys(*numbers)))


def test_a_block_is_stored_at_its_commit_and_removed_before_its_successor_is_stored() -> None:
    manager, events = watched(2)
    ticket = manager.prepare_store_nowait(make_keys(1, 2))
    assert not events
    manager.complete_store_nowait(ticket)
    assert events == [OffloadingEvent(STORED, tuple(make_keys(1, 2)), "CPU", 0)]
    ticket = manager.prepare_store_nowait(make_keys(3))
    assert events[1:] == [OffloadingEvent(REMOVED, tuple(make_keys(1)), "CPU", 1)]
    manager.complete_store_nowait(ticket)
    assert events[2:] == [OffloadingEvent(STORED, tuple(make_keys(3)), "CPU", 2)]


def test_what_was_never_announced_is_never_removed() -> None:
    manager, events = watched(2)
    manager.complete_store_nowait(manager.prepare_store_nowait(make_keys(1, 2)), success=False)
    manager.prepare_store_nowait([])
    manager.prepare_store_nowait(make_keys(1, 2, 3))
    assert not events
    stale = manager.prepare_store_nowait(make_keys(4))
    manager.reset_nowait()
    manager.complete_store_nowait(stale)
    assert [(event.kind, event.keys) for event in events] == [(CLEARED, ())]


def test_replaying_the_events_tells_what_can_be_hit() -> None:
    manager, events = watched(3)
    for number in range(40):
        ticket = manager.prepare_store_nowait(make_keys(number % 7, number % 5 + 10), when_full="leading")
        manager.complete_store_nowait(ticket, success=number % 4 != 3)
        if number % 17 == 16:
            manager.reset_nowait()
        held: set[bytes] = set()
        for event in events:
            if event.kind is STORED:
                assert held.isdisjoint(event.keys)
                held |= {*event.keys}
            elif event.kind is REMOVED:
                assert held.issuperset(event.keys)
                held -= {*event.keys}
            else:
                held.clear()
        keys = make_keys(*range(20))
        hits = manager.lookup_nowait(keys)
        assert held == {key for key, hit in zip(keys, hits, strict=True) if hit is LookupResult.HIT}
    assert [event.sequence for event in events] == list(range(len(events)))


def test_the_sink_sees_a_consistent_state_and_comes_before_the_waiters() -> None:
    order: list[str] = []
    manager = CPUOffloadingManager(2, event_sink=lambda event: order.append(event.kind.value))
    writing = manager.prepare_store_nowait(make_keys(1))
    load = manager.prepare_load_nowait(make_keys(1))
    load.on_settled(lambda: order.append("waiter"))
    manager.complete_store_nowait(writing)
    assert order == ["stored", "waiter"]


def test_a_sink_that_raises_is_detached_and_counted(caplog: pytest.LogCaptureFixture) -> None:
    seen: list[OffloadingEvent] = []

    def sink(event: OffloadingEvent) -> None:
        seen.append(event)
        if len(seen) == 2:
            raise ZeroDivisionError

    manager = CPUOffloadingManager(1, event_sink=sink)
    store(manager, 1)
    assert manager.statistics().detached_sinks == 0
    with caplog.at_level(logging.ERROR):
        store(manager, 2)
    assert manager.lookup_nowait(make_keys(1, 2)) == [LookupResult.MISS, LookupResult.HIT]
    manager.reset_nowait()
    store(manager, 3)
    assert len(seen) == 2
    assert manager.statistics().detached_sinks == 1
    assert [record.message for record in caplog.records] == [
        "an event sink raised and is detached: it gets no further events"
    ]
    assert_at_rest(manager)


@pytest.mark.parametrize(
    "call",
    [
        lambda manager, ticket, load: manager.lookup_nowait(make_keys(1)),
        lambda manager, ticket, load: manager.touch(make_keys(1)),
        lambda manager, ticket, load: manager.prepare_store_nowait(make_keys(2)),
        lambda manager, ticket, load: manager.prepare_load_nowait(make_keys(1)),
        lambda manager, ticket, load: manager.watch_nowait(make_keys(1)),
        lambda manager, ticket, load: manager.complete_store_nowait(ticket),
        lambda manager, ticket, load: manager.complete_load_nowait(load),
        lambda manager, ticket, load: manager.settle_nowait(load),
        lambda manager, ticket, load: manager.reset_nowait(),
        lambda manager, ticket, load: manager.bump_epoch_nowait(),
        lambda manager, ticket, load: manager.close_nowait(),
    ],
    ids=[
        *("lookup", "touch", "prepare_store", "prepare_load", "watch", "complete_store", "complete_load"),
        *("settle", "reset", "bump_epoch", "close"),
    ],
)
def test_a_sink_that_calls_the_manager_is_refused(call: Callable[..., object]) -> None:
    refusals: list[StateError] = []

    def sink(event: OffloadingEvent) -> None:
        try:
            call(manager, other, load)
        except StateError as error:
            refusals.append(error)

    manager = CPUOffloadingManager(4, event_sink=sink)
    writing, other = manager.prepare_store_nowait(make_keys(1)), manager.prepare_store_nowait(make_keys(3))
    load = manager.prepare_load_nowait(make_keys(3))
    before = manager.statistics()
    manager.complete_store_nowait(writing)
    assert "an event sink must not call the manager" in str(refusals[0])
    assert manager.epoch == 0
    assert manager.statistics().waiting_loads == before.waiting_loads
    assert manager.complete_load_nowait(load) is Completion.APPLIED
    assert manager.complete_store_nowait(other) is Completion.APPLIED
    assert manager.lookup_nowait(make_keys(1, 2, 3)) == [LookupResult.HIT, LookupResult.MISS, LookupResult.HIT]
    assert_at_rest(manager)


def test_a_lease_given_back_by_the_sink_keeps_the_order_of_events() -> None:
    events: list[OffloadingEvent] = []

    def sink(event: OffloadingEvent) -> None:
        events.append(event)
        lease.release()

    manager = CPUOffloadingManager(2, event_sink=sink)
    ticket = manager.prepare_store_nowait(make_keys(1))
    lease = manager.prepare_store_nowait(make_keys(9)).lease()
    manager.complete_store_nowait(ticket)
    lease = manager.prepare_load_nowait(make_keys(1)).lease()
    assert [event.sequence for event in events] == [0]


def test_an_announcer_sends_what_was_noted_once_and_in_order() -> None:
    events: list[OffloadingEvent] = []

    def sink(event: OffloadingEvent) -> None:
        events.append(event)
        if event.sequence == 0:
            # As a step within the sink would do.
            announcer.note(STORED, make_keys(3))
            announcer.send()

    announcer = Announcer(sink, "CPU")
    announcer.send()
    announcer.note(STORED, make_keys(1))
    announcer.note(STORED, [])
    announcer.note(REMOVED, [])
    announcer.note(CLEARED)
    assert not events
    announcer.send()
    assert [(event.kind, event.sequence) for event in events] == [(STORED, 0), (CLEARED, 1), (STORED, 2)]
    announcer.send()
    assert len(events) == 3


def test_without_a_sink_nothing_is_kept() -> None:
    announcer = Announcer(None, "CPU")
    announcer.note(STORED, make_keys(1))
    announcer.send()
    assert not announcer._waiting
