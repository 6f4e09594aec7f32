"""Handles: what they say, whom they wake, and what they hold back on the device."""

from __future__ import annotations

from collections.abc import Callable

import anyio
import pytest
from offloader_rig import Rig, keys_of, on_both_loops, settle, states

from aiokvoffload import (
    ALREADY_DONE,
    BlocksInFlightError,
    Deadlines,
    LookupResult,
    StateError,
    StoreOutcome,
    TransferHandle,
    TransferResult,
)
from aiokvoffload.devices.base import Direction, Stream
from aiokvoffload.testing.asserts import assert_idle
from aiokvoffload.testing.device import ManualDevice

pytestmark = pytest.mark.timeout(30)


@on_both_loops
async def test_a_store_tells_what_became_of_each_block() -> None:
    rig = Rig(cpu_blocks=3)
    async with rig.open() as offloader:
        keys = keys_of(offloader, 5)
        first = offloader.store_soon(keys[:1], [9])
        assert first.outcomes == (StoreOutcome.ACCEPTED,)
        assert first.gpu_blocks == {9}
        second = offloader.store_soon(keys, [0, 1, 2, 3, 4])
        refused, accepted, resident = StoreOutcome.REFUSED, StoreOutcome.ACCEPTED, StoreOutcome.RESIDENT
        assert second.outcomes == (resident, accepted, accepted, refused, refused)
        # Only what was accepted is in use by the copy.
        assert second.gpu_blocks == {1, 2}
        await rig.land()
        assert second.result == TransferResult(
            2, True, ("GPU", "CPU"), byte_count=32, seconds=second.result.seconds if second.result else 0
        )
        assert second.result is not None
        assert second.result.seconds > 0


@on_both_loops
async def test_a_filtered_block_is_accepted_when_it_must_be_kept() -> None:
    rig = Rig(store_threshold=2)
    async with rig.open() as offloader:
        keys = keys_of(offloader, 1)
        filtered = offloader.store_soon(keys, [0])
        assert filtered.outcomes == (StoreOutcome.FILTERED,)
        assert filtered.is_idle
        assert filtered.is_sent
        assert (await filtered).success
        kept = offloader.store_soon(keys, [0], filtered=False)
        assert kept.outcomes == (StoreOutcome.ACCEPTED,)
        await rig.land()
        assert_idle(offloader)


@on_both_loops
async def test_accepted_blocks_of_a_failed_copy_are_refused_in_the_end() -> None:
    rig = Rig()
    async with rig.open() as offloader:
        keys = keys_of(offloader, 2)
        rig.manual_device.fail_next_copy(Direction.STORE, "link lost")
        handle = offloader.store_soon(keys, [0, 1])
        await rig.land()
        result = await handle
        assert not result.success
        assert result.byte_count == 0
        assert "link lost" in str(result.error)
        assert handle.outcomes == (StoreOutcome.REFUSED,) * 2
        assert states(offloader, keys) == ["MISS", "MISS"]
        assert offloader.statistics().fault is None
        assert_idle(offloader)


@on_both_loops
async def test_a_failed_load_is_a_miss_and_leaves_the_blocks_stored() -> None:
    rig = Rig()
    async with rig.open() as offloader, anyio.create_task_group() as tasks:
        keys = keys_of(offloader, 2)
        offloader.store_soon(keys, [0, 1])
        await rig.land()
        rig.manual_device.fail_next_copy(Direction.LOAD, "link lost", moved_copies=1)
        tokens: list[int] = []

        async def load() -> None:
            tokens.append(await offloader.load(keys, [5, 6]))

        tasks.start_soon(load)
        await settle()
        await rig.land()
        assert tokens == [0]
        assert states(offloader, keys) == ["HIT", "HIT"]
        assert_idle(offloader)


@on_both_loops
async def test_a_refused_submission_is_a_refused_store() -> None:
    rig = Rig()
    async with rig.open() as offloader:
        rig.manual_device.refuse_next("no memory")
        assert await offloader.store(keys_of(offloader, 2), [0, 1]) == (StoreOutcome.REFUSED,) * 2
        assert_idle(offloader)
        assert offloader.statistics().manager.free == rig.cpu_blocks


@on_both_loops
async def test_a_handle_wakes_all_its_waiters_and_cancelling_one_changes_nothing() -> None:
    rig = Rig()
    async with rig.open() as offloader, anyio.create_task_group() as tasks:
        handle = offloader.store_soon(keys_of(offloader, 1), [0])
        results: list[TransferResult] = []
        scope = anyio.CancelScope()

        async def wait() -> None:
            results.append(await handle)

        async def wait_cancelled() -> None:
            with scope:
                await wait()

        for waiter in (wait, wait_cancelled, wait):
            tasks.start_soon(waiter)
        await settle()
        scope.cancel()
        await settle()
        # Cancelling a waiter of a handle ends the wait at once; the transfer goes on.
        assert scope.cancelled_caught
        assert not handle.is_idle
        await rig.land()
        assert len(results) == 2
        assert results[0] is results[1] is handle.result
        assert await handle is handle.result
        assert_idle(offloader)


@on_both_loops
async def test_sent_waits_for_the_device_and_fence_needs_it() -> None:
    rig = Rig(in_flight_bytes=1, compute_stream=True)
    async with rig.open() as offloader, anyio.create_task_group() as tasks:
        offloader.store_soon(keys_of(offloader, 1), [0])
        queued = offloader.store_soon(keys_of(offloader, 1, salt="queued"), [1])
        assert not queued.is_sent
        with pytest.raises(StateError, match=r"await handle\.sent\(\) before fence"):
            queued.fence()
        sent = anyio.Event()

        async def wait() -> None:
            await queued.sent()
            sent.set()

        tasks.start_soon(wait)
        await settle()
        assert not sent.is_set()
        rig.manual_device.land_next()
        await settle()
        assert sent.is_set()
        assert queued.is_sent
        assert not queued.is_idle
        queued.fence()
        await rig.land()
        queued.fence()  # nothing to hold back any more
        await queued.sent()


@on_both_loops
async def test_what_is_launched_after_a_fence_runs_after_the_copy() -> None:
    rig = Rig(compute_stream=True)
    async with rig.open() as offloader:
        assert rig.compute is not None
        keys = keys_of(offloader, 2)
        rig.write([0, 1])
        store = offloader.store_soon(keys, [0, 1])
        rig.manual_device.hang_direction(Direction.STORE)
        store.fence()
        rig.manual_device.launch(rig.compute, lambda: rig.write([0, 1], seed=5))
        rig.manual_device.land_all()
        assert rig.holds([0, 1], seed=1), "the engine's next step overtook the store"
        rig.manual_device.release()
        await rig.land()
        assert rig.holds([0, 1], seed=5)
        load = offloader.prepare_load(keys).start([4, 5])
        load.fence()
        seen: list[bool] = []
        rig.manual_device.launch(rig.compute, lambda: seen.append(rig.holds([4, 5], seed=1)))
        await rig.land()
        assert seen == [True]


@on_both_loops
async def test_a_fence_on_a_joined_load_waits_for_the_copy_it_joined() -> None:
    rig = Rig(compute_stream=True)
    async with rig.open() as offloader:
        assert rig.compute is not None
        keys = keys_of(offloader, 2)
        rig.write([0, 1])
        offloader.store_soon(keys, [0, 1])
        await rig.land()
        rig.manual_device.hang_direction(Direction.LOAD)
        offloader.prepare_load(keys).start([4, 5])
        joined = offloader.prepare_load(keys).start([4, 5])
        assert rig.copies(Direction.LOAD) == 2
        joined.fence()
        seen: list[bool] = []
        rig.manual_device.launch(rig.compute, lambda: seen.append(rig.holds([4, 5])))
        rig.manual_device.land_all()
        assert seen == []
        rig.manual_device.release()
        await rig.land()
        assert seen == [True]
        assert joined.result is not None
        assert joined.result.token_count == 8


@on_both_loops
async def test_a_fence_needs_a_compute_stream() -> None:
    rig = Rig()
    async with rig.open() as offloader:
        handle = offloader.store_soon(keys_of(offloader, 1), [0])
        with pytest.raises(StateError, match="no compute stream was named"):
            handle.fence()
        await rig.land()


@on_both_loops
async def test_cancel_takes_back_what_is_queued_and_nothing_else() -> None:
    rig = Rig(in_flight_bytes=1)
    async with rig.open() as offloader:
        sent = offloader.store_soon(keys_of(offloader, 1), [0])
        keys = keys_of(offloader, 1, salt="queued")
        queued = offloader.store_soon(keys, [1])
        idle: list[object] = []
        queued.on_idle(idle.append)
        assert not sent.cancel()
        assert queued.cancel()
        assert queued.is_idle
        assert idle == [queued]
        assert queued.outcomes == (StoreOutcome.REFUSED,)
        assert queued.result is not None
        assert queued.result.error == "withdrawn before it was sent"
        assert not queued.cancel()
        assert states(offloader, keys) == ["MISS"]
        await rig.land()
        assert not sent.cancel()
        assert_idle(offloader)


@on_both_loops
async def test_on_idle_is_called_once_or_at_once() -> None:
    rig = Rig()
    async with rig.open() as offloader:
        handle = offloader.store_soon(keys_of(offloader, 1), [0])
        calls: list[object] = []
        handle.on_idle(calls.append)
        assert calls == []
        await rig.land()
        await rig.land()
        assert calls == [handle]
        handle.on_idle(calls.append)
        assert calls == [handle, handle]


@on_both_loops
async def test_a_dropped_handle_does_not_stop_its_transfer() -> None:
    rig = Rig()
    async with rig.open() as offloader:
        keys = keys_of(offloader, 1)
        offloader.store_soon(keys, [0])
        await rig.land()
        assert states(offloader, keys) == ["HIT"]


@on_both_loops
async def test_a_blocking_wait_works_on_a_loop_too() -> None:
    rig = Rig()
    async with rig.open() as offloader:
        handle = offloader.store_soon(keys_of(offloader, 1), [0])
        assert handle.wait(timeout_seconds=1).success
        hung = offloader.store_soon(keys_of(offloader, 1, salt="hung"), [1])
        rig.manual_device.hang_direction(Direction.STORE)
        with pytest.raises(BlocksInFlightError, match="GPU blocks 1 "):
            hung.wait(timeout_seconds=0.1)
        rig.manual_device.release()
        await rig.land()


@on_both_loops
async def test_poll_commits_sends_and_returns_what_has_ended() -> None:
    rig = Rig(in_flight_bytes=1)
    async with rig.open() as offloader:
        first = offloader.store_soon(keys_of(offloader, 1), [0])
        second = offloader.store_soon(keys_of(offloader, 1, salt="second"), [1])
        rig.manual_device.land_all()
        # Without giving the loop a chance:
        assert offloader.poll() == [first]
        assert second.is_sent
        assert states(offloader, keys_of(offloader, 1)) == ["HIT"]
        rig.manual_device.land_all()
        assert offloader.poll() == [second]
        assert offloader.poll() == []


class SilentDevice(ManualDevice):
    """Has no doorbell."""

    def add_doorbell(self, ring: Callable[[], None]) -> Callable[[], None]:
        none: Callable[[], None] = None  # type: ignore[assignment]  # a ManualDevice promises to have one
        return none


@on_both_loops
async def test_a_device_without_a_doorbell_is_polled_by_the_clock() -> None:
    rig = Rig(device=SilentDevice(), deadlines=Deadlines(landing_seconds=5))
    async with rig.open() as offloader:
        await settle()
        handle = offloader.store_soon(keys_of(offloader, 1), [0])
        await settle()
        await rig.land()
        assert not handle.is_idle
        rig.manual_clock.advance(0.1)
        await settle()
        assert handle.is_idle
        rig.manual_device.hang_direction(Direction.STORE)
        hung = offloader.store_soon(keys_of(offloader, 1, salt="hung"), [1])
        await settle()
        rig.manual_clock.advance(5)
        await settle()
        with pytest.raises(BlocksInFlightError):
            await hung
        rig.manual_device.release()
        rig.manual_device.land_all()
        rig.manual_clock.advance(0.1)
        await settle()
        assert hung.is_idle
        assert_idle(offloader)


# What a transfer waits for

After = Callable[[Rig, Stream], object]
AFTERS: dict[str, After] = {
    "by default": lambda _rig, _stream: None,
    "a stream": lambda _rig, stream: stream,
    "an event": lambda rig, stream: rig.manual_device.record(stream),
}


@pytest.mark.parametrize("way", AFTERS)
@on_both_loops
async def test_a_transfer_waits_for_what_was_there_at_the_moment_of_the_call(way: str) -> None:
    rig = Rig(in_flight_bytes=1, compute_stream=True)
    device = rig.manual_device
    async with rig.open() as offloader:
        compute = rig.compute if way == "by default" else device.create_stream("another")
        assert compute is not None
        # Something fills the budget, so that the store is sent long after it was asked for.
        offloader.store_soon(keys_of(offloader, 1), [9], after=ALREADY_DONE)
        device.launch(compute, lambda: rig.write([0], seed=2))
        store = offloader.store_soon(keys_of(offloader, 1, salt="asked"), [0], after=AFTERS[way](rig, compute))
        later = device.create_stream("gate")
        device.hang(later)
        device.launch(later, lambda: None)
        device.wait_event(compute, device.record(later))
        device.launch(compute, lambda: rig.write([0], seed=3))
        assert not store.is_sent
        await rig.land()
        # It was sent now. It had to wait for seed 2 and must not wait for what came later, which hangs.
        await rig.land()
        assert store.is_idle
        assert rig.holds([0], seed=2)
        load = offloader.prepare_load(keys_of(offloader, 1, salt="asked")).start([5], after=ALREADY_DONE)
        await rig.land()
        assert load.is_idle
        assert rig.holds([5], seed=2)
        device.release()
        await rig.land()


@on_both_loops
async def test_a_transfer_after_already_done_waits_for_nothing() -> None:
    rig = Rig(compute_stream=True)
    async with rig.open() as offloader:
        assert rig.compute is not None
        rig.manual_device.hang(rig.compute)
        rig.manual_device.launch(rig.compute, lambda: rig.write([0], seed=2))
        rig.write([0], seed=1)
        held = offloader.store_soon(keys_of(offloader, 1, salt="held"), [0])
        handle = offloader.store_soon(keys_of(offloader, 1), [0], after=ALREADY_DONE)
        await rig.land()
        assert handle.is_idle
        assert not held.is_idle
        rig.manual_device.release()
        await rig.land()
        assert held.is_idle


@on_both_loops
async def test_a_load_that_waits_for_a_write_goes_after_the_moment_of_its_call() -> None:
    rig = Rig(compute_stream=True)
    async with rig.open() as offloader, anyio.create_task_group() as tasks:
        assert rig.compute is not None
        keys = keys_of(offloader, 1)
        offloader.store_soon(keys, [0])
        tokens: list[int] = []

        async def load() -> None:
            tokens.append(await offloader.load(keys, [5]))

        tasks.start_soon(load)
        await settle()
        # Launched while the load waits for the block: no business of the load's.
        rig.manual_device.hang(rig.compute)
        rig.manual_device.launch(rig.compute, lambda: None)
        await rig.land()
        await rig.land()
        assert tokens == [4]
        rig.manual_device.release()
        await rig.land()


# Tickets


@on_both_loops
async def test_a_ticket_pins_until_it_is_started_or_aborted() -> None:
    rig = Rig()
    async with rig.open() as offloader:
        keys = keys_of(offloader, 2)
        offloader.store_soon(keys, [0, 1])
        await rig.land()
        ticket = offloader.prepare_load(keys)
        assert offloader.statistics().manager.pinned == 2
        assert (ticket.result, ticket.token_count) == (LookupResult.HIT, 8)
        assert (ticket.group_sizes, ticket.block_indices) == ((2,), (0,))
        ticket.abort()
        ticket.abort()
        assert offloader.statistics().manager.pinned == 0
        with pytest.raises(StateError, match="started or aborted before"):
            ticket.start([4, 5])
        with offloader.prepare_load(keys) as left:
            pass
        assert offloader.statistics().manager.pinned == 0
        with pytest.raises(StateError, match="started or aborted before"):
            left.start([4, 5])
        with offloader.prepare_load(keys) as started:
            handle = started.start([4, 5])
        assert offloader.statistics().manager.pinned == 2
        await rig.land()
        assert handle.is_idle
        assert_idle(offloader)


@on_both_loops
async def test_a_pending_ticket_is_made_ready_by_the_commit_or_shrinks_at_the_timeout() -> None:
    rig = Rig()
    async with rig.open() as offloader, anyio.create_task_group() as tasks:
        keys = keys_of(offloader, 3)
        offloader.store_soon(keys[:1], [0])
        await rig.land()
        rig.manual_device.hang_direction(Direction.STORE)
        offloader.store_soon(keys[1:], [1, 2])
        ticket = offloader.prepare_load(keys)
        assert ticket.result is LookupResult.PENDING
        assert ticket.token_count == 12
        with pytest.raises(StateError, match=r"await ticket\.ready\(\) first"):
            ticket.start([4, 5, 6])
        results: list[LookupResult] = []

        async def ready() -> None:
            results.append(await ticket.ready(timeout_seconds=2))

        tasks.start_soon(ready)
        await settle()
        assert results == []
        rig.manual_clock.advance(2)
        await settle()
        assert results == [LookupResult.HIT]
        assert (ticket.token_count, ticket.group_sizes) == (4, (1,))
        handle = ticket.start([4])
        rig.manual_device.release()
        await rig.land()
        assert await handle == handle.result
        assert_idle(offloader)


@on_both_loops
async def test_closing_ends_the_wait_of_a_pending_ticket() -> None:
    rig = Rig()
    async with anyio.create_task_group() as tasks:
        offloader = await rig.open().__aenter__()
        keys = keys_of(offloader, 1)
        written = offloader.manager.prepare_store_nowait(keys)
        tokens: list[int] = []

        async def load() -> None:
            tokens.append(await offloader.load(keys, [5]))

        tasks.start_soon(load)
        await settle()
        assert tokens == []
        await offloader.aclose()
        await settle()
        assert tokens == [0]
        offloader.manager.complete_store_nowait(written, success=False)
        assert_idle(offloader)


def test_a_handle_knows_its_blocks() -> None:
    rig = Rig(factor=2)
    with rig.open() as offloader:
        keys = keys_of(offloader, 2)
        handle = offloader.store_soon(keys, [3, 1, 0, 2])
        assert isinstance(handle, TransferHandle)
        assert handle.gpu_blocks == {0, 1, 2, 3}
        with pytest.raises(AssertionError, match="transfers sent and not landed: 1"):
            assert_idle(offloader)
        handle.wait(timeout_seconds=1)
        assert_idle(offloader)
