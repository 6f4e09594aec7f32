"""`offloader.events()`: what is stored, removed and cleared, for tasks of the same process."""

from __future__ import annotations

import anyio
import pytest
from offloader_rig import Rig, keys_of, on_both_loops, settle

from aiokvoffload import EventKind, InvalidRequestError, OffloadingEvent
from aiokvoffload.testing.asserts import assert_idle

pytestmark = pytest.mark.timeout(30)


@on_both_loops
async def test_events_come_in_order_and_closing_ends_them() -> None:
    rig = Rig(cpu_blocks=2)
    seen: list[OffloadingEvent] = []
    async with anyio.create_task_group() as tasks, rig.open() as offloader:
        stream = offloader.events()

        async def read() -> None:
            seen.extend([event async for event in stream])

        tasks.start_soon(read)
        keys = keys_of(offloader, 2)
        offloader.store_soon(keys, [0, 1])
        await settle()
        assert seen == []
        await rig.land()
        others = keys_of(offloader, 1, salt="other")
        offloader.store_soon(others, [2])
        await rig.land()
        await offloader.reset()
        # The list is filled once the stream has ended.
    assert [(event.kind, len(event.keys), event.sequence) for event in seen] == [
        (EventKind.STORED, 2, 0),
        (EventKind.REMOVED, 1, 1),
        (EventKind.STORED, 1, 2),
        (EventKind.CLEARED, 0, 3),
    ]
    assert {event.medium for event in seen} == {"CPU"}
    assert set(seen[1].keys) < set(keys)
    assert list(seen[2].keys) == others
    assert_idle(offloader)


@on_both_loops
async def test_a_slow_reader_loses_the_oldest_and_sees_the_gap() -> None:
    rig = Rig()
    async with rig.open() as offloader:
        slow, fast = offloader.events(buffer_size=2), offloader.events()
        for number in range(4):
            offloader.store_soon(keys_of(offloader, 1, salt=str(number)), [number])
            await rig.land()
    assert [event.sequence async for event in fast] == [0, 1, 2, 3]
    assert [event.sequence async for event in slow] == [2, 3]


@on_both_loops
async def test_events_of_a_failed_store_do_not_exist() -> None:
    rig = Rig()
    async with rig.open() as offloader:
        stream = offloader.events()
        rig.manual_device.refuse_next("no")
        offloader.store_soon(keys_of(offloader, 1), [0])
        await rig.land()
    assert [event async for event in stream] == []


@on_both_loops
async def test_a_closed_stream_gets_no_more_and_leaves_others_alone() -> None:
    rig = Rig()
    async with rig.open() as offloader:
        closed, other = offloader.events(), offloader.events()
        offloader.store_soon(keys_of(offloader, 1), [0])
        await rig.land()
        closed.close()
        offloader.store_soon(keys_of(offloader, 1, salt="other"), [1])
        await rig.land()
        assert [event.sequence async for event in closed] == [0]
    assert [event.sequence async for event in other] == [0, 1]


@on_both_loops
async def test_a_cancelled_reader_loses_nothing() -> None:
    rig = Rig()
    async with rig.open() as offloader:
        stream = offloader.events()
        with anyio.move_on_after(0) as scope:
            await anext(stream)
        assert scope.cancelled_caught
        offloader.store_soon(keys_of(offloader, 1), [0])
        await rig.land()
        assert (await anext(stream)).kind is EventKind.STORED


@on_both_loops
async def test_a_stream_without_a_buffer_is_refused() -> None:
    async with Rig().open() as offloader:
        for buffer_size in (0, -1):
            with pytest.raises(InvalidRequestError, match="buffer_size"):
                offloader.events(buffer_size=buffer_size)


def test_a_sink_takes_events_until_it_is_taken_away() -> None:
    rig = Rig()
    with rig.open() as offloader:
        first: list[OffloadingEvent] = []
        second: list[OffloadingEvent] = []
        remove_first = offloader.add_event_sink(first.append)
        offloader.add_event_sink(second.append)
        offloader.store(keys_of(offloader, 1), [0])
        remove_first()
        remove_first()
        offloader.reset()
    assert [event.kind for event in first] == [EventKind.STORED]
    assert [event.kind for event in second] == [EventKind.STORED, EventKind.CLEARED]


@on_both_loops
async def test_a_sink_that_raises_is_detached_alone(caplog: pytest.LogCaptureFixture) -> None:
    rig = Rig()
    async with rig.open() as offloader:
        stream, taken = offloader.events(), list[OffloadingEvent]()

        def fail(event: OffloadingEvent) -> None:
            raise ZeroDivisionError

        offloader.add_event_sink(fail)
        offloader.add_event_sink(taken.append)
        for salt in "ab":
            offloader.store_soon(keys_of(offloader, 1, salt=salt), [0])
            await rig.land()
        assert offloader.statistics().manager.detached_sinks == 1
        assert offloader.statistics().fault is None
    assert [event.sequence async for event in stream] == [event.sequence for event in taken] == [0, 1]
    assert [record.message for record in caplog.records] == [
        "an event sink raised and is detached: it gets no further events"
    ]
