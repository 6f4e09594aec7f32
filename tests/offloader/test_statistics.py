"""What `statistics()` says, to the owner and to other threads."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable
from typing import TypeVar

import anyio
import anyio.to_thread
import pytest
from offloader_rig import BLOCK_BYTES, Rig, keys_of, on_both_loops, settle, states

from aiokvoffload import Deadlines, LookupResult, ReqContext, WrongThreadError
from aiokvoffload.devices.base import Direction
from aiokvoffload.offloader.statistics import StatisticsSnapshot
from aiokvoffload.testing.clock import ManualClock
from aiokvoffload.testing.manual_tier import ManualTier
from aiokvoffload.testing.strategies import make_keys
from aiokvoffload.testing.tier_contract import IDENTITY
from aiokvoffload.tiers.calls import TierCall
from aiokvoffload.transfers.poller import Lateness

pytestmark = pytest.mark.timeout(60)
PATIENCE_SECONDS = 30.0
Result = TypeVar("Result")


def in_a_thread(call: Callable[[], Result]) -> Callable[[], Result]:
    """Start a call in another thread, and return what waits for its result."""
    results: list[Result] = []
    thread = threading.Thread(target=lambda: results.append(call()))
    thread.start()

    def join() -> Result:
        thread.join(PATIENCE_SECONDS)
        return results[0]

    return join


# What is counted


def test_misses_are_counted_by_reason() -> None:
    rig = Rig()
    with rig.open() as offloader:
        old = ReqContext("old")
        keys = keys_of(offloader, 6)
        offloader.store(keys[:2], [0, 1])
        offloader.store(keys[3:4], [3], first_block=3)
        assert offloader.load(keys, range(6), old) == 8
        assert offloader.statistics().manager.misses_by_reason == {"absent": 4}
        assert offloader.statistics().manager.hit_blocks == 2
        offloader.bump_epoch()
        assert offloader.load(keys, range(6), old) == 0
        assert offloader.statistics().manager.misses_by_reason == {"absent": 4, "stale": 6}


def test_a_write_that_fails_under_a_load_is_a_hit_and_a_miss() -> None:
    rig = Rig()
    with rig.open() as offloader:
        keys = keys_of(offloader, 2)
        rig.manual_device.fail_next_copy(Direction.STORE, "broken")
        handle = offloader.store_soon(keys, [0, 1])
        ticket = offloader.prepare_load(keys)
        assert states(offloader, keys) == ["PENDING"] * 2
        rig.manual_clock.advance(2)
        rig.manual_device.land_all()
        offloader.poll()
        assert handle.is_idle
        assert ticket.result is LookupResult.MISS
        manager = offloader.statistics().manager
        assert (manager.hit_blocks, manager.misses_by_reason) == (2, {"failed": 2})
        assert (manager.waited_loads, manager.load_wait_seconds) == (1, 2)


def test_offers_that_wait_are_counted_with_their_time() -> None:
    rig = Rig(cpu_blocks=1)
    with rig.open() as offloader:
        writing = offloader.manager.prepare_store_nowait(make_keys(1))
        waiting = offloader.manager.prepare_store_nowait(make_keys(2), when_full="wait")
        assert waiting.is_waiting
        rig.manual_clock.advance(3)
        offloader.manager.complete_store_nowait(writing)
        offloader.manager.complete_store_nowait(waiting)
        manager = offloader.statistics().manager
        assert (manager.waited_stores, manager.store_wait_seconds, manager.waited_loads) == (1, 3, 0)


def test_transfers_are_counted_with_their_time_in_the_queue() -> None:
    rig = Rig(in_flight_bytes=1)
    with rig.open() as offloader:
        offloader.store_soon(keys_of(offloader, 1), [0])
        offloader.store_soon(keys_of(offloader, 1, salt="other"), [1])
        statistics = offloader.statistics()
        assert (statistics.queued_transfers, statistics.sent_transfers, statistics.landed_stores) == (1, 1, 0)
        rig.manual_clock.advance(0.25)
        for _ in range(2):
            rig.manual_device.land_all()
            offloader.poll()
        offloader.load(keys_of(offloader, 1), [4])
        statistics = offloader.statistics()
        assert (statistics.landed_stores, statistics.landed_loads) == (2, 1)
        assert (statistics.store_queue_seconds, statistics.load_queue_seconds) == (0.25, 0)


def test_a_tier_counts_the_seconds_of_its_calls() -> None:
    clock = ManualClock()
    tier = ManualTier(IDENTITY, block_bytes=BLOCK_BYTES, capacity_bytes=1 << 16, clock=clock)
    keys = make_keys(1)
    calls: list[tuple[int, Callable[[], TierCall]]] = [
        (1, lambda: tier.start_put(keys, [bytes(BLOCK_BYTES)])),
        (2, lambda: tier.start_contains(keys)),
        (4, lambda: tier.start_get_into(keys, [bytearray(BLOCK_BYTES)])),
        (1, lambda: tier.start_delete(keys)),
    ]
    for seconds, start in calls:
        start()
        clock.advance(seconds)
        tier.land()
    statistics = tier.statistics()
    assert (statistics.write_seconds, statistics.lookup_seconds, statistics.read_seconds) == (1, 2, 4)
    tier.close()


def test_a_poller_that_is_late_says_by_how_much() -> None:
    clock = ManualClock()
    lateness = Lateness(clock.now)
    lateness.note_turn(None)
    lateness.note_ring()
    clock.advance(2)
    lateness.note_ring()  # it was to have its turn already
    clock.advance(1)
    lateness.note_turn(clock.now() + 10)
    assert (lateness.total_seconds, lateness.longest_seconds) == (3, 3)
    due = clock.now() + 1
    clock.advance(1.5)
    lateness.note_turn(due)
    lateness.note_turn(clock.now() + 1)
    assert (lateness.total_seconds, lateness.longest_seconds) == (3.5, 3)


@on_both_loops
async def test_a_loop_that_is_held_up_is_told() -> None:
    rig = Rig()
    async with rig.open() as offloader:
        await settle()
        assert offloader.statistics().longest_loop_stall_seconds == 0
        handle = offloader.store_soon(keys_of(offloader, 1), [0])
        rig.manual_clock.advance(0.5)  # as long as some other callback runs
        await settle()
        await rig.land()
        assert handle.is_idle
        statistics = offloader.statistics()
        assert statistics.longest_loop_stall_seconds == 0.5
        assert statistics.loop_stall_seconds >= 0.5
        assert statistics.poll_count == offloader.poll_count > 0


# Who may ask


@on_both_loops
async def test_another_thread_gets_what_the_owner_takes_for_it() -> None:
    rig = Rig()
    async with rig.open() as offloader:
        await settle()
        offloader.store_soon(keys_of(offloader, 2), [0, 1])
        await rig.land()

        def ask() -> StatisticsSnapshot:
            with pytest.raises(WrongThreadError, match="this offloader belongs to another thread"):
                offloader.statistics()
            return offloader.read_statistics(timeout_seconds=PATIENCE_SECONDS)

        snapshot = await anyio.to_thread.run_sync(ask)
        assert snapshot.statistics.manager.ready == 2
        assert snapshot.age_seconds == 0
        assert offloader.read_statistics().statistics == offloader.statistics()
    snapshot = await anyio.to_thread.run_sync(ask)
    assert snapshot.statistics.manager.stored_blocks == 2


def test_a_synchronous_owner_answers_in_its_next_poll() -> None:
    rig = Rig()
    with rig.open() as offloader:
        offloader.store(keys_of(offloader, 2), [0, 1])
        join = in_a_thread(lambda: offloader.read_statistics(timeout_seconds=PATIENCE_SECONDS))
        while not offloader._statistics_desk.is_asked:
            os.sched_yield()
        rig.manual_clock.advance(1)
        offloader.poll()
        snapshot = join()
        assert (snapshot.statistics.manager.ready, snapshot.age_seconds) == (2, 0)
        assert not offloader._statistics_desk.is_asked


def test_an_owner_that_does_not_poll_leaves_the_last_ones() -> None:
    rig = Rig()
    with rig.open() as offloader:
        offloader.store(keys_of(offloader, 2), [0, 1])
        rig.manual_clock.advance(7)
        snapshot = in_a_thread(lambda: offloader.read_statistics(timeout_seconds=0))()
        assert snapshot.statistics.manager.ready == 0
        assert snapshot.age_seconds == pytest.approx(7, abs=0.1)
        offloader.poll()
        assert in_a_thread(lambda: offloader.read_statistics(timeout_seconds=0))().statistics.manager.ready == 2


def test_askers_that_gave_up_do_not_pile_up() -> None:
    with Rig().open() as offloader:

        def ask_in_vain() -> None:
            for _ in range(100):
                offloader.read_statistics(timeout_seconds=0)

        in_a_thread(ask_in_vain)()
        assert len(offloader._statistics_desk._askers) == 64
        offloader.poll()
        assert not offloader._statistics_desk.is_asked


@pytest.mark.parametrize("backend", ["asyncio", "trio"])
def test_after_the_loop_has_ended_nobody_is_waited_for(backend: str) -> None:
    rig = Rig(deadlines=Deadlines(landing_seconds=1))

    async def main() -> Callable[[], StatisticsSnapshot]:
        offloader = await rig.open().__aenter__()
        await settle()
        return offloader.read_statistics

    read = anyio.run(main, backend=backend)
    assert in_a_thread(read)().statistics.manager.total == 8


def test_a_forked_process_is_refused() -> None:
    rig = Rig()
    with rig.open() as offloader:
        reader, writer = os.pipe()
        child = os.fork()
        if not child:
            try:
                offloader.read_statistics()
            except WrongThreadError as exc:
                os.write(writer, str(exc).encode())
            finally:
                os._exit(0)
        os.close(writer)
        with os.fdopen(reader) as said:
            assert "parent process; open a new one after the fork" in said.read()
        os.waitpid(child, 0)
