"""A cancelled wait never leaves a copy behind that touches blocks somebody takes for idle, and never hangs."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Coroutine, Sequence
from typing import Any

import anyio
import pytest
from offloader_rig import Interrupted, Rig, keys_of, on_both_loops, settle, states

from aiokvoffload import BlocksInFlightError, ClosedError, Deadlines, LookupResult, Offloader, StoreOutcome
from aiokvoffload.devices.base import Direction
from aiokvoffload.testing.asserts import assert_idle

pytestmark = pytest.mark.timeout(60)

STORE_BLOCKS = [0, 1, 2, 3]
LOAD_BLOCKS = [7, 5, 6, 4]


class Finish:
    """Remembers how an awaited operation ended."""

    def __init__(self) -> None:
        self.is_over = False
        self.error: BaseException | None = None
        self.value: object = None

    async def of(self, operation: Awaitable[object]) -> None:
        try:
            self.value = await operation
        except BaseException as exc:
            self.error = exc
            raise
        finally:
            self.is_over = True


async def stored(rig: Rig, offloader: Offloader, count: int = 4) -> list[Any]:
    """Store `count` blocks and wait until they are ready."""
    keys = keys_of(offloader, count)
    rig.write(STORE_BLOCKS[:count])
    handle = offloader.store_soon(keys, STORE_BLOCKS[:count])
    rig.manual_device.land_all()
    await handle
    return keys


# A scope outside the offloader


@on_both_loops
async def test_a_scope_around_the_offloader_that_is_cancelled_in_mid_copy_waits_for_the_landing() -> None:
    rig = Rig()
    finish = Finish()
    offloaders: list[Offloader] = []

    async def serve() -> None:
        async with rig.open() as offloader:
            offloaders.append(offloader)
            rig.write(STORE_BLOCKS)
            await finish.of(offloader.store(keys_of(offloader, 4), STORE_BLOCKS))

    async with anyio.create_task_group() as tasks:
        scope = anyio.CancelScope()

        async def cancelled_from_outside() -> None:
            with scope:
                await serve()

        tasks.start_soon(cancelled_from_outside)
        await settle()
        scope.cancel()
        await settle()
        assert not finish.is_over
        assert rig.manual_device.pending_copies
        await rig.land()
        assert isinstance(finish.error, anyio.get_cancelled_exc_class())
    assert scope.cancelled_caught
    (offloader,) = offloaders
    assert_idle(offloader)
    assert offloader.statistics().manager.ready == 4


@on_both_loops
async def test_a_scope_around_the_offloader_cancelled_while_nobody_waits_closes_it_all_the_same() -> None:
    rig = Rig()
    offloaders: list[Offloader] = []
    closed = anyio.Event()

    async def serve(scope: anyio.CancelScope) -> None:
        with scope:
            async with rig.open() as offloader:
                offloaders.append(offloader)
                offloader.store_soon(keys_of(offloader, 2), [0, 1])
                await anyio.sleep_forever()
        closed.set()

    async with anyio.create_task_group() as tasks:
        scope = anyio.CancelScope()
        tasks.start_soon(serve, scope)
        await settle()
        scope.cancel()
        await settle()
        assert not closed.is_set()
        await rig.land()
        assert closed.is_set()
    assert_idle(offloaders[0])
    assert offloaders[0].statistics().manager.ready == 2


@on_both_loops
async def test_an_uncancelled_waiter_is_told_although_the_scope_around_the_offloader_was_cancelled() -> None:
    rig = Rig()
    finish = Finish()
    opened: list[Offloader] = []

    async def serve(scope: anyio.CancelScope) -> None:
        with scope:
            async with rig.open() as offloader:
                opened.append(offloader)
                await anyio.sleep_forever()

    async with anyio.create_task_group() as tasks:
        scope = anyio.CancelScope()
        tasks.start_soon(serve, scope)
        await settle()
        tasks.start_soon(finish.of, opened[0].store(keys_of(opened[0], 2), [0, 1]))
        await settle()
        scope.cancel()
        await settle()
        assert not finish.is_over
        await rig.land()
        assert finish.value == (StoreOutcome.ACCEPTED,) * 2
    assert_idle(opened[0])


# One call


@on_both_loops
async def test_a_cancelled_store_ends_when_it_has_landed_and_is_ready_then() -> None:
    rig = Rig()
    async with rig.open() as offloader, anyio.create_task_group() as tasks:
        keys = keys_of(offloader, 2)
        rig.write([0, 1])
        finish = Finish()
        with anyio.CancelScope() as scope:
            tasks.start_soon(_cancel_then_land, rig, scope, finish)
            await finish.of(offloader.store(keys, [0, 1]))
        assert scope.cancelled_caught
        assert_idle(offloader)
        assert states(offloader, keys) == ["HIT", "HIT"]
        await _check_loads(rig, offloader, keys, [8, 9])


@on_both_loops
async def test_a_cancelled_load_ends_when_it_has_landed_and_is_unpinned_then() -> None:
    rig = Rig()
    async with rig.open() as offloader, anyio.create_task_group() as tasks:
        keys = await stored(rig, offloader)
        finish = Finish()
        with anyio.CancelScope() as scope:
            tasks.start_soon(_cancel_then_land, rig, scope, finish)
            await finish.of(offloader.load(keys, LOAD_BLOCKS))
        assert scope.cancelled_caught
        assert_idle(offloader)
        assert rig.holds(LOAD_BLOCKS)


async def _pass_deadline_then_land(rig: Rig, scope: anyio.CancelScope, finish: Finish) -> None:
    await settle()
    scope.deadline = anyio.current_time()
    await _check_wait_then_land(rig, finish)


async def _cancel_then_land(rig: Rig, scope: anyio.CancelScope, finish: Finish) -> None:
    await settle()
    scope.cancel()
    await _check_wait_then_land(rig, finish)


async def _check_wait_then_land(rig: Rig, finish: Finish) -> None:
    await settle()
    assert not finish.is_over, "the wait ended while a copy was under way"
    assert rig.manual_device.pending_copies
    await rig.land()
    assert finish.is_over


@on_both_loops
async def test_move_on_after_ends_only_with_the_landing() -> None:
    rig = Rig()
    async with rig.open() as offloader, anyio.create_task_group() as tasks:
        finish = Finish()
        with anyio.move_on_after(3600) as scope:
            tasks.start_soon(_pass_deadline_then_land, rig, scope, finish)
            await finish.of(offloader.store(keys_of(offloader, 1), [0]))
        assert scope.cancelled_caught
        assert_idle(offloader)


@on_both_loops
async def test_a_call_in_a_cancelled_scope_changes_nothing() -> None:
    rig = Rig()
    async with rig.open() as offloader:
        keys = await stored(rig, offloader)
        before = offloader.statistics()
        with anyio.CancelScope() as scope:
            scope.cancel()
            await offloader.store(keys_of(offloader, 2, salt="other"), [0, 1])
        with anyio.CancelScope() as scope:
            scope.cancel()
            await offloader.load(keys, LOAD_BLOCKS)
        assert offloader.statistics() == before


@on_both_loops
async def test_a_cancelled_load_gives_up_its_wait_for_blocks_that_are_being_written() -> None:
    rig = Rig()
    async with rig.open() as offloader, anyio.create_task_group() as tasks:
        keys = keys_of(offloader, 2)
        store = offloader.store_soon(keys, [0, 1])
        finish = Finish()
        with anyio.CancelScope() as scope:
            tasks.start_soon(_cancel_soon, scope)
            await finish.of(offloader.load(keys, [4, 5]))
        assert scope.cancelled_caught
        assert offloader.statistics().manager.waiting_loads == 0
        assert rig.copies(Direction.LOAD) == 0
        await rig.land()
        assert store.is_idle
        assert_idle(offloader)


async def _cancel_soon(scope: anyio.CancelScope) -> None:
    await settle()
    scope.cancel()


@on_both_loops
async def test_what_is_only_queued_is_taken_back_at_once() -> None:
    rig = Rig(in_flight_bytes=1)
    async with rig.open() as offloader, anyio.create_task_group() as tasks:
        first = offloader.store_soon(keys_of(offloader, 1), [0])
        other_keys = keys_of(offloader, 2, salt="other")
        with anyio.CancelScope() as scope:
            tasks.start_soon(_cancel_soon, scope)
            await offloader.store(other_keys, [1, 2])
        assert scope.cancelled_caught
        assert not first.is_idle, "it ended without anything having landed"
        assert states(offloader, other_keys) == ["MISS", "MISS"]
        assert offloader.statistics().manager.writing == 1
        await rig.land()
        assert rig.copies(Direction.STORE) == 1
        assert_idle(offloader)


@on_both_loops
async def test_a_queued_load_that_is_cancelled_is_unpinned_at_once() -> None:
    rig = Rig(in_flight_bytes=1)
    async with rig.open() as offloader, anyio.create_task_group() as tasks:
        keys = await stored(rig, offloader)
        store = offloader.store_soon(keys_of(offloader, 1, salt="other"), [8])
        with anyio.CancelScope() as scope:
            tasks.start_soon(_cancel_soon, scope)
            await offloader.load(keys, LOAD_BLOCKS)
        assert scope.cancelled_caught
        assert not store.is_idle
        assert offloader.statistics().manager.pinned == 0
        await rig.land()
        assert rig.copies(Direction.LOAD) == 0
        assert_idle(offloader)


# Native cancellation of asyncio


@pytest.mark.parametrize("cancel_count", [1, 2, 3])
@pytest.mark.parametrize("verb", ["store", "load"])
def test_a_task_cancelled_natively_ends_with_the_landing(verb: str, cancel_count: int) -> None:
    async def main() -> None:
        rig = Rig()
        async with rig.open() as offloader:
            keys = await stored(rig, offloader)
            operation: Coroutine[Any, Any, object]
            if verb == "store":
                operation = offloader.store(keys_of(offloader, 2, salt="other"), [8, 9])
            else:
                operation = offloader.load(keys, LOAD_BLOCKS)
            task = asyncio.create_task(operation)
            await settle()
            for _ in range(cancel_count):
                task.cancel()
                await settle()
                assert not task.done()
            await rig.land()
            assert task.cancelled()
            assert_idle(offloader)
            assert offloader.statistics().manager.ready == (6 if verb == "store" else 4)

    asyncio.run(main())


def test_asyncio_timeout_around_a_load_ends_with_the_landing() -> None:
    async def main() -> None:
        rig = Rig()
        async with rig.open() as offloader:
            keys = await stored(rig, offloader)
            finish = Finish()

            async def with_timeout() -> None:
                async with asyncio.timeout(0):
                    await finish.of(offloader.load(keys, LOAD_BLOCKS))

            task = asyncio.create_task(with_timeout())
            await settle()
            assert not finish.is_over
            assert rig.manual_device.pending_copies
            await rig.land()
            with pytest.raises(TimeoutError):
                task.result()
            assert isinstance(finish.error, asyncio.CancelledError)
            assert rig.holds(LOAD_BLOCKS)
            assert_idle(offloader)

    asyncio.run(main())


def test_asyncio_timeout_around_a_wait_for_a_pending_block() -> None:
    async def main() -> None:
        rig = Rig()
        async with rig.open() as offloader:
            keys = keys_of(offloader, 2)
            store = offloader.store_soon(keys, [0, 1])
            with pytest.raises(TimeoutError):
                async with asyncio.timeout(0):
                    await offloader.load(keys, [4, 5])
            assert offloader.statistics().manager.waiting_loads == 0
            await rig.land()
            assert store.is_idle
            assert_idle(offloader)

    asyncio.run(main())


def test_a_native_cancellation_on_top_of_a_scope_is_not_lost() -> None:
    async def main() -> None:
        rig = Rig()
        async with rig.open() as offloader:
            scope = anyio.CancelScope()
            went_on = False

            async def work() -> None:
                nonlocal went_on
                with scope:
                    await offloader.store(keys_of(offloader, 1), [0])
                went_on = True

            task = asyncio.create_task(work())
            await settle()
            scope.cancel()
            await settle()
            task.cancel()
            await settle()
            assert not task.done()
            await rig.land()
            assert task.cancelled()
            assert not went_on
            assert_idle(offloader)

    asyncio.run(main())


# At each await point

Scenario = Callable[[Rig, Offloader], Coroutine[Any, Any, object]]


async def _store(rig: Rig, offloader: Offloader) -> object:
    return await offloader.store(keys_of(offloader, 3, salt="new"), [8, 9, 10])


async def _load(rig: Rig, offloader: Offloader) -> object:
    return await offloader.load(keys_of(offloader, 4), LOAD_BLOCKS)


async def _load_pending(rig: Rig, offloader: Offloader) -> object:
    keys = keys_of(offloader, 2, salt="pending")
    offloader.store_soon(keys, [8, 9])
    return await offloader.load(keys, [5, 6])


async def _load_joined(rig: Rig, offloader: Offloader) -> object:
    with offloader.prepare_load(keys_of(offloader, 2)) as ticket:
        ticket.start([5, 6])
    return await offloader.load(keys_of(offloader, 2), [5, 6])


async def _load_in_steps(rig: Rig, offloader: Offloader) -> object:
    keys = keys_of(offloader, 2, salt="pending")
    offloader.store_soon(keys, [8, 9])
    with offloader.prepare_load(keys) as ticket:
        if await ticket.ready() is LookupResult.MISS:
            return None
        handle = ticket.start([5, 6])
    await handle.sent()
    try:
        return await handle
    finally:
        await handle.wait_out()


async def _overlapping_stores(rig: Rig, offloader: Offloader) -> object:
    first = offloader.store_soon(keys_of(offloader, 1, salt="new"), [8])
    return await offloader.store(keys_of(offloader, 2, salt="new"), [8, 9]), first.is_idle


async def _demote(rig: Rig, offloader: Offloader) -> object:
    return await offloader.demote(keys_of(offloader, 2, salt="new"), [8, 9])


async def _load_and_take_along(rig: Rig, offloader: Offloader) -> object:
    return await offloader.load(keys_of(offloader, 2), [5, 6], take_along=True)


SCENARIOS: dict[str, tuple[Scenario, Direction | None]] = {
    "store": (_store, Direction.STORE),
    "load": (_load, Direction.LOAD),
    "load pending": (_load_pending, Direction.LOAD),
    "load joined": (_load_joined, None),
    "load in steps": (_load_in_steps, Direction.LOAD),
    "overlapping stores": (_overlapping_stores, None),
    "demote": (_demote, Direction.STORE),
    "load and take along": (_load_and_take_along, Direction.LOAD),
}
"""With the direction in which nothing may be under way at their end, where nobody else copies."""


async def _keep_landing(rig: Rig, delay: int) -> None:
    for _ in range(delay):
        await anyio.lowlevel.checkpoint()
    while True:
        rig.manual_device.land_next()
        await anyio.lowlevel.checkpoint()


async def _interrupt_at(
    name: str, at: Sequence[int], delay: int, *, is_native: bool, in_flight_bytes: int, fails: bool
) -> int:
    """Interrupt a scenario at some of its suspensions; return how many suspensions it had."""
    scenario, direction = SCENARIOS[name]
    rig = Rig(in_flight_bytes=in_flight_bytes)
    async with anyio.create_task_group() as tasks, rig.open() as offloader:
        await stored(rig, offloader)
        if fails:
            rig.manual_device.fail_next(None, "broken")
        tasks.start_soon(_keep_landing, rig, delay)
        scope = anyio.CancelScope()
        under_way_at_end: list[Direction] = []

        async def work() -> None:
            try:
                await scenario(rig, offloader)
            finally:
                under_way_at_end.extend(plan.direction for plan in rig.manual_device.pending_copies)

        if is_native:
            task = asyncio.current_task()
            assert task is not None
            interrupted = Interrupted(work(), task.cancel, *at)
            try:
                await interrupted
            except asyncio.CancelledError:
                while task.cancelling():
                    task.uncancel()
        else:
            interrupted = Interrupted(work(), scope.cancel, *at)
            with scope:
                await interrupted
        assert direction not in under_way_at_end, "it ended while a copy touched its blocks"
        await settle()
        assert_idle(offloader)
        assert not rig.manual_device.pending_copies
        assert rig.holds(STORE_BLOCKS)
        tasks.cancel_scope.cancel()
    assert_idle(offloader)
    return interrupted.suspension_count


@pytest.mark.parametrize("fails", [False, True], ids=["", "failing"])
@pytest.mark.parametrize("in_flight_bytes", [1 << 30, 1], ids=["sent", "queued"])
@pytest.mark.parametrize("delay", [0, 1, 2, 5, 12])
@pytest.mark.parametrize("name", SCENARIOS)
@on_both_loops
async def test_a_scope_cancelled_at_each_await_point_leaks_nothing(
    name: str, delay: int, in_flight_bytes: int, fails: bool
) -> None:
    at = 1
    while at <= await _interrupt_at(name, [at], delay, is_native=False, in_flight_bytes=in_flight_bytes, fails=fails):
        at += 1
    assert at > 1


@pytest.mark.parametrize("fails", [False, True], ids=["", "failing"])
@pytest.mark.parametrize("in_flight_bytes", [1 << 30, 1], ids=["sent", "queued"])
@pytest.mark.parametrize("delay", [0, 1, 2, 5, 12])
@pytest.mark.parametrize("name", SCENARIOS)
def test_a_task_cancelled_at_each_await_point_once_and_twice_leaks_nothing(
    name: str, delay: int, in_flight_bytes: int, fails: bool
) -> None:
    async def interrupt(*at: int) -> int:
        return await _interrupt_at(name, at, delay, is_native=True, in_flight_bytes=in_flight_bytes, fails=fails)

    async def main() -> None:
        at = 1
        while at <= await interrupt(at):
            for again in (at + 1, at + 2):
                await interrupt(at, again)
            at += 1
        assert at > 1

    asyncio.run(main())


@pytest.mark.parametrize("delay", [0, 1, 3, 8])
@on_both_loops
async def test_opening_using_and_closing_cancelled_at_each_await_point_leaks_nothing(delay: int) -> None:
    at = 1
    while True:
        rig = Rig()
        offloaders: list[Offloader] = []

        async def serve(rig: Rig = rig, offloaders: list[Offloader] = offloaders) -> None:
            async with rig.open() as offloader:
                offloaders.append(offloader)
                rig.write([0, 1])
                await offloader.store(keys_of(offloader, 2), [0, 1])
                offloader.store_soon(keys_of(offloader, 2, salt="late"), [0, 1])

        async with anyio.create_task_group() as tasks:
            tasks.start_soon(_keep_landing, rig, delay)
            with anyio.CancelScope() as scope:
                interrupted = Interrupted(serve(), scope.cancel, at)
                await interrupted
            tasks.cancel_scope.cancel()
        if offloaders:
            assert_idle(offloaders[0])
            with pytest.raises(ClosedError):
                offloaders[0].store_soon([], [])
        if interrupted.suspension_count < at:
            break
        at += 1
    assert at > 2


@on_both_loops
async def test_a_cancelled_wait_sleeps_instead_of_spinning() -> None:
    rig = Rig()
    async with rig.open() as offloader, anyio.create_task_group() as tasks:
        scope = anyio.CancelScope()
        waits: list[Interrupted[object]] = []

        async def store() -> None:
            with scope:
                waits.append(Interrupted(offloader.store(keys_of(offloader, 1), [0]), lambda: None))
                await waits[0]

        tasks.start_soon(store)
        await settle()
        scope.cancel()
        await settle()
        await settle()
        # Once for the wait that was cancelled, once for the wait that nothing ends but the landing.
        assert waits[0].suspension_count == 2
        await rig.land()
        assert_idle(offloader)


# A copy that never lands


@on_both_loops
async def test_a_store_that_never_lands_names_its_blocks_and_keeps_its_slots() -> None:
    rig = Rig(deadlines=Deadlines(landing_seconds=5), cpu_blocks=4)
    async with rig.open() as offloader, anyio.create_task_group() as tasks:
        keys = keys_of(offloader, 2)
        rig.manual_device.hang_direction(Direction.STORE)
        errors: list[BlocksInFlightError] = []

        async def store() -> None:
            with pytest.raises(BlocksInFlightError) as caught:
                await offloader.store(keys, [3, 1])
            errors.append(caught.value)

        tasks.start_soon(store)
        await settle()
        rig.manual_clock.advance(4.9)
        await settle()
        assert not errors
        rig.manual_clock.advance(0.2)
        await settle()
        assert errors[0].gpu_blocks == {1, 3}
        assert "1, 3" in str(errors[0])
        # Its keys are free for others, its slots are not.
        assert states(offloader, keys) == ["MISS", "MISS"]
        statistics = offloader.statistics()
        assert (statistics.manager.leased_without_key, statistics.manager.writing) == (2, 0)
        assert statistics.sent_transfers == 1
        again = offloader.store_soon(keys_of(offloader, 4, salt="other"), [8, 9, 10, 11])
        assert again.outcomes == (StoreOutcome.ACCEPTED,) * 2 + (StoreOutcome.REFUSED,) * 2
        # The late landing gives everything back, and commits nothing.
        rig.manual_device.release()
        await rig.land()
        assert again.is_idle
        assert states(offloader, keys) == ["MISS", "MISS"]
        assert_idle(offloader)
        assert offloader.statistics().manager.free == 2


@on_both_loops
async def test_a_load_that_never_lands_keeps_its_blocks_until_the_late_landing() -> None:
    rig = Rig(deadlines=Deadlines(landing_seconds=5), cpu_blocks=4)
    async with rig.open() as offloader, anyio.create_task_group() as tasks:
        keys = await stored(rig, offloader)
        rig.manual_device.hang_direction(Direction.LOAD)
        ticket = offloader.prepare_load(keys)
        handle = ticket.start(LOAD_BLOCKS)
        idle: list[object] = []
        handle.on_idle(idle.append)
        failed: list[frozenset[int]] = []

        async def wait() -> None:
            try:
                await handle
            except BlocksInFlightError as exc:
                failed.append(exc.gpu_blocks)

        for _ in range(3):
            tasks.start_soon(wait)
        await settle()
        rig.manual_clock.advance(5)
        await settle()
        assert failed == [frozenset(LOAD_BLOCKS)] * 3
        assert not handle.is_idle
        assert not idle
        # The slots are still read: they cannot be evicted for anybody.
        assert offloader.store_soon(keys_of(offloader, 1, salt="other"), [0]).outcomes == (StoreOutcome.REFUSED,)
        rig.manual_device.release()
        await rig.land()
        assert idle == [handle]
        assert handle.is_idle
        assert handle.result is not None
        assert not handle.result.success
        assert handle.result.token_count == 0
        assert_idle(offloader)
        assert states(offloader, keys) == ["HIT"] * 4


@on_both_loops
async def test_a_cancelled_wait_for_a_copy_that_never_lands_is_bounded() -> None:
    rig = Rig(deadlines=Deadlines(landing_seconds=5))
    async with rig.open() as offloader, anyio.create_task_group() as tasks:
        rig.manual_device.hang_direction(Direction.STORE)
        finish = Finish()
        scope = anyio.CancelScope()

        async def store() -> None:
            with scope, pytest.raises(BlocksInFlightError) as caught:
                await finish.of(offloader.store(keys_of(offloader, 1), [2]))
            assert caught.value.gpu_blocks == {2}

        tasks.start_soon(store)
        await settle()
        scope.cancel()
        await settle()
        rig.manual_clock.advance(4)
        await settle()
        assert not finish.is_over
        rig.manual_clock.advance(1)
        await settle()
        assert isinstance(finish.error, BlocksInFlightError)
        rig.manual_device.release()
        await rig.land()
        assert_idle(offloader)


@pytest.mark.parametrize("cancel_count", [1, 2])
def test_a_natively_cancelled_wait_for_a_copy_that_never_lands_names_its_blocks(cancel_count: int) -> None:
    async def main() -> None:
        rig = Rig(deadlines=Deadlines(landing_seconds=5))
        async with rig.open() as offloader:
            rig.manual_device.hang_direction(Direction.STORE)
            task = asyncio.create_task(offloader.store(keys_of(offloader, 1), [2]))
            await settle()
            for _ in range(cancel_count):
                task.cancel()
                await settle()
            assert not task.done()
            rig.manual_clock.advance(5)
            await settle()
            with pytest.raises(BlocksInFlightError, match="GPU blocks 2"):
                task.result()
            rig.manual_device.release()
            await rig.land()
            assert_idle(offloader)

    asyncio.run(main())


@on_both_loops
async def test_a_late_load_leaves_the_blocks_of_its_successors_alone() -> None:
    rig = Rig(deadlines=Deadlines(landing_seconds=5))
    async with rig.open() as offloader:
        keys = await stored(rig, offloader)
        rig.manual_device.hang_direction(Direction.LOAD)
        late = offloader.prepare_load(keys).start(LOAD_BLOCKS)
        await settle()
        rig.manual_clock.advance(5)
        await settle()
        # The engine was told and retired the blocks. Another load into one of them waits for the late copy.
        other_keys = keys_of(offloader, 1, salt="other")
        rig.write([10], seed=9)
        store = offloader.store_soon(other_keys, [10])
        await rig.land()
        assert store.is_idle
        other = offloader.prepare_load(other_keys).start([LOAD_BLOCKS[0]])
        await settle()
        assert not other.is_idle
        rig.manual_device.release()
        await rig.land()
        assert late.is_idle
        assert other.is_idle
        assert rig.holds([LOAD_BLOCKS[0]], seed=9)
        assert_idle(offloader)


@on_both_loops
async def test_what_cannot_be_sent_behind_a_hung_copy_fails_at_the_bound() -> None:
    rig = Rig(deadlines=Deadlines(landing_seconds=5), in_flight_bytes=1)
    async with rig.open() as offloader, anyio.create_task_group() as tasks:
        rig.manual_device.hang_direction(Direction.STORE)
        stuck = offloader.store_soon(keys_of(offloader, 1), [0])
        finish = Finish()
        tasks.start_soon(finish.of, offloader.store(keys_of(offloader, 2, salt="behind"), [1, 2]))
        await settle()
        rig.manual_clock.advance(5)
        await settle()
        assert finish.value == (StoreOutcome.REFUSED,) * 2
        assert not stuck.is_idle
        rig.manual_device.release()
        await rig.land()
        assert_idle(offloader)
        assert offloader.statistics().manager.free == rig.cpu_blocks


# Closing


@on_both_loops
async def test_closing_waits_for_what_is_under_way_and_queued() -> None:
    rig = Rig(in_flight_bytes=1)
    finish = Finish()
    async with anyio.create_task_group() as tasks:
        offloader = await rig.open().__aenter__()
        handles = [offloader.store_soon(keys_of(offloader, 1, salt=str(number)), [number]) for number in range(3)]
        tasks.start_soon(finish.of, offloader.aclose())
        await settle()
        assert not finish.is_over
        for _ in handles:
            await rig.land()
        assert finish.is_over
        assert all(handle.result is not None and handle.result.success for handle in handles)
        assert_idle(offloader)


@on_both_loops
async def test_a_cancelled_close_still_closes() -> None:
    rig = Rig()
    finish = Finish()
    async with anyio.create_task_group() as tasks:
        offloader = await rig.open().__aenter__()
        handle = offloader.store_soon(keys_of(offloader, 1), [0])
        scope = anyio.CancelScope()

        async def close() -> None:
            with scope:
                await finish.of(offloader.aclose())

        tasks.start_soon(close)
        await settle()
        scope.cancel()
        await settle()
        assert not finish.is_over
        await rig.land()
        assert finish.is_over
        assert handle.result is not None
        assert handle.result.success
        assert_idle(offloader)
        await offloader.aclose()
        with pytest.raises(ClosedError):
            offloader.store_soon([], [])


@pytest.mark.parametrize("cancel_count", [1, 2])
def test_a_natively_cancelled_close_waits_closes_and_is_cancelled_then(cancel_count: int) -> None:
    async def main() -> None:
        rig = Rig()
        offloader = await rig.open().__aenter__()
        handle = offloader.store_soon(keys_of(offloader, 1), [0])
        tasks = [asyncio.create_task(offloader.aclose()), asyncio.create_task(handle.wait_out())]
        await settle()
        for _ in range(cancel_count):
            for task in tasks:
                task.cancel()
            await settle()
        assert not any(task.done() for task in tasks)
        await rig.land()
        assert all(task.cancelled() for task in tasks)
        assert handle.result is not None
        assert handle.result.success
        assert_idle(offloader)

    asyncio.run(main())


@pytest.mark.parametrize("cancel_count", [1, 2, 3])
def test_a_close_cancelled_natively_at_any_point_still_closes(cancel_count: int) -> None:
    async def main(at: int) -> int:
        rig = Rig(deadlines=Deadlines(drain_seconds=3))
        rig.manual_device.hang_direction(Direction.STORE)
        offloader = await rig.open().__aenter__()
        stuck = offloader.store_soon(keys_of(offloader, 1), [0])
        stream = offloader.events()
        await settle()

        async def advance() -> None:
            await settle()
            rig.manual_clock.advance(3)

        advancing = asyncio.create_task(advance())
        task = asyncio.current_task()
        assert task is not None
        interrupted = Interrupted(offloader.aclose(), task.cancel, *range(at, at + cancel_count))
        with pytest.raises((asyncio.CancelledError, BlocksInFlightError)):
            await interrupted
        while task.cancelling():
            task.uncancel()
        await settle()
        await advancing
        assert [event async for event in stream] == []
        with pytest.raises(ClosedError):
            offloader.store_soon([], [])
        rig.manual_device.release()
        rig.manual_device.land_all()
        offloader.poll()
        assert stuck.is_idle
        assert_idle(offloader)
        return interrupted.suspension_count

    at = 1
    while at <= asyncio.run(main(at)):
        at += 1
    assert at > 2


@on_both_loops
async def test_closing_is_bounded_and_says_which_blocks_are_stuck() -> None:
    rig = Rig(deadlines=Deadlines(landing_seconds=100, drain_seconds=3))
    rig.manual_device.hang_direction(Direction.STORE)
    async with anyio.create_task_group() as tasks:
        offloader = await rig.open().__aenter__()
        handle = offloader.store_soon(keys_of(offloader, 2), [4, 2])
        idle: list[object] = []
        handle.on_idle(idle.append)
        finish = Finish()

        async def close() -> None:
            with pytest.raises(BlocksInFlightError) as caught:
                await finish.of(offloader.aclose())
            assert caught.value.gpu_blocks == {2, 4}

        tasks.start_soon(close)
        await settle()
        assert not finish.is_over
        rig.manual_clock.advance(3)
        await settle()
        assert finish.is_over
        with pytest.raises(BlocksInFlightError):
            await handle
        # The memory is still there for the late landing, which a poll of the owner finds.
        rig.manual_device.release()
        rig.manual_device.land_all()
        assert offloader.poll() == [handle]
        assert idle == [handle]
        assert_idle(offloader)


@on_both_loops
async def test_what_is_still_queued_at_the_end_of_a_close_is_taken_back() -> None:
    rig = Rig(deadlines=Deadlines(landing_seconds=100, drain_seconds=3), in_flight_bytes=1)
    rig.manual_device.hang_direction(Direction.STORE)
    async with anyio.create_task_group() as tasks:
        offloader = await rig.open().__aenter__()
        offloader.store_soon(keys_of(offloader, 1), [4])
        queued = offloader.store_soon(keys_of(offloader, 1, salt="queued"), [2])

        async def close() -> None:
            with pytest.raises(BlocksInFlightError) as caught:
                await offloader.aclose()
            assert caught.value.gpu_blocks == {4}

        tasks.start_soon(close)
        await settle()
        assert not queued.is_idle
        rig.manual_clock.advance(3)
        await settle()
        assert queued.is_idle
        assert queued.outcomes == (StoreOutcome.REFUSED,)
        rig.manual_device.release()
        rig.manual_device.land_all()
        offloader.poll()
        assert rig.copies(Direction.STORE) == 1
        assert_idle(offloader)


@on_both_loops
async def test_closing_takes_an_own_bound() -> None:
    rig = Rig()
    rig.manual_device.hang_direction(Direction.STORE)
    async with anyio.create_task_group() as tasks:
        offloader = await rig.open().__aenter__()
        offloader.store_soon(keys_of(offloader, 1), [0])
        finish = Finish()

        async def close() -> None:
            with pytest.raises(BlocksInFlightError, match=r"0\.5 s"):
                await finish.of(offloader.aclose(drain_seconds=0.5))

        tasks.start_soon(close)
        await settle()
        rig.manual_clock.advance(0.5)
        await settle()
        assert finish.is_over


@on_both_loops
async def test_leaving_the_context_with_a_stuck_copy_raises() -> None:
    rig = Rig(deadlines=Deadlines(drain_seconds=3))
    rig.manual_device.hang_direction(Direction.STORE)

    async def serve() -> None:
        async with rig.open() as offloader:
            offloader.store_soon(keys_of(offloader, 1), [0])

    async with anyio.create_task_group() as tasks:
        finish = Finish()

        async def serve_and_look() -> None:
            with pytest.raises(BlocksInFlightError):
                await finish.of(serve())

        tasks.start_soon(serve_and_look)
        await settle()
        rig.manual_clock.advance(3)
        await settle()
        assert finish.is_over


@on_both_loops
async def test_an_error_of_the_body_is_not_replaced_by_a_stuck_copy() -> None:
    rig = Rig(deadlines=Deadlines(drain_seconds=3))
    rig.manual_device.hang_direction(Direction.STORE)
    finish = Finish()

    async def serve() -> None:
        async with rig.open() as offloader:
            offloader.store_soon(keys_of(offloader, 1), [0])
            raise KeyError("of the body")

    async with anyio.create_task_group() as tasks:

        async def serve_and_look() -> None:
            with pytest.raises(KeyError, match="of the body"):
                await finish.of(serve())

        tasks.start_soon(serve_and_look)
        await settle()
        rig.manual_clock.advance(3)
        await settle()
        assert finish.is_over


async def _check_loads(rig: Rig, offloader: Offloader, keys: Sequence[Any], blocks: Sequence[int]) -> None:
    ticket = offloader.prepare_load(keys)
    handle = ticket.start(list(blocks))
    await rig.land()
    assert handle.result is not None
    assert handle.result.success
    assert rig.holds(blocks)
