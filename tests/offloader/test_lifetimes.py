"""How an offloader lives and dies: with its loop, its thread, its process, and with faults inside it."""

from __future__ import annotations

import asyncio
import logging
import os
import subprocess
import sys
import textwrap
from collections.abc import AsyncIterator, Collection, Sequence
from dataclasses import replace
from typing import Any

import anyio
import anyio.to_thread
import pytest
import pytest_asyncio
from offloader_rig import Rig, keys_of, on_both_loops, settle, states

from aiokvoffload import (
    BlocksInFlightError,
    ClosedError,
    Completion,
    CPUOffloadingManager,
    Deadlines,
    LookupResult,
    Offloader,
    OffloadKey,
    PrepareStoreOutput,
    StateError,
    StoreOutcome,
    SyncOffloader,
    TransferHandle,
    WrongThreadError,
)
from aiokvoffload.devices.base import Direction, Event
from aiokvoffload.devices.host import HostDevice
from aiokvoffload.memory.pinned import PinnedMemory
from aiokvoffload.testing.asserts import assert_idle
from aiokvoffload.testing.device import ManualDevice
from aiokvoffload.transfers.device_host import SingleDirectionOffloadingHandler
from aiokvoffload.transfers.worker import OffloadingWorker

pytestmark = pytest.mark.timeout(30)


# As a fixture


@pytest.fixture
def rig() -> Rig:
    return Rig()


@pytest_asyncio.fixture
async def asyncio_offloader(rig: Rig) -> AsyncIterator[Offloader]:
    async with rig.open() as offloader:
        yield offloader
        landing = asyncio.create_task(_land_soon(rig))
    await landing
    assert_idle(offloader)


@pytest.mark.asyncio
async def test_works_as_a_fixture_of_pytest_asyncio(rig: Rig, asyncio_offloader: Offloader) -> None:
    await _store_and_load(rig, asyncio_offloader)


@pytest.mark.asyncio
async def test_leaves_a_fixture_of_pytest_asyncio_in_mid_copy(rig: Rig, asyncio_offloader: Offloader) -> None:
    handle = asyncio_offloader.store_soon(keys_of(asyncio_offloader, 2), [0, 1])
    await settle()
    assert not handle.is_idle


@pytest.fixture(params=["asyncio", "trio"])
def anyio_backend(request: pytest.FixtureRequest) -> Any:
    return request.param


@pytest.fixture
async def anyio_offloader(rig: Rig, anyio_backend: str) -> AsyncIterator[Offloader]:
    async with rig.open() as offloader:
        yield offloader
    assert_idle(offloader)


@pytest.mark.anyio
async def test_works_as_a_fixture_of_anyio(rig: Rig, anyio_offloader: Offloader) -> None:
    await _store_and_load(rig, anyio_offloader)


@on_both_loops
async def test_is_entered_in_one_task_and_left_in_another() -> None:
    rig = Rig()
    context = rig.open()
    offloaders: list[Offloader] = []

    async def enter() -> None:
        offloaders.append(await context.__aenter__())

    async def leave() -> None:
        await context.__aexit__(None, None, None)

    for step in (enter, leave):
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(step)
        if step is enter:
            await _store_and_load(rig, offloaders[0])
    assert_idle(offloaders[0])


async def _store_and_load(rig: Rig, offloader: Offloader) -> None:
    keys = keys_of(offloader, 2)
    rig.write([0, 1])
    async with anyio.create_task_group() as tasks:
        tasks.start_soon(_land_soon, rig)
        assert await offloader.store(keys, [0, 1]) == (StoreOutcome.ACCEPTED,) * 2
    async with anyio.create_task_group() as tasks:
        tasks.start_soon(_land_soon, rig)
        assert await offloader.load(keys, [6, 4]) == offloader.manager.lookup_prefix_nowait(keys, group_sizes=[2])
    assert rig.holds([6, 4])


async def _land_soon(rig: Rig) -> None:
    await settle()
    await rig.land()


# The end of a loop


class MainError(Exception):
    pass


@pytest.mark.parametrize("ending", ["returns", "raises"])
def test_asyncio_run_that_ends_in_mid_copy(ending: str) -> None:
    rig = Rig()
    ends: list[object] = []

    async def wait(offloader: Offloader) -> None:
        try:
            ends.append(await offloader.store(keys_of(offloader, 2), [0, 1]))
        except asyncio.CancelledError:
            assert not rig.manual_device.pending_copies
            ends.append("cancelled")
            raise

    async def main() -> tuple[Offloader, TransferHandle]:
        # Not left: as when a server's main function just returns.
        offloader = await rig.open().__aenter__()
        asyncio.get_running_loop().waiter = asyncio.create_task(wait(offloader))  # type: ignore[attr-defined]
        await settle()
        handle = offloader.store_soon(keys_of(offloader, 1, salt="dropped"), [3])
        opened.append((offloader, handle))
        if ending == "raises":
            raise MainError
        return offloader, handle

    opened: list[tuple[Offloader, TransferHandle]] = []
    try:
        asyncio.run(main())
    except MainError:
        assert ending == "raises"
    ((offloader, handle),) = opened
    assert ends == ["cancelled"]
    assert handle.is_idle
    assert_idle(offloader)
    assert offloader.statistics().manager.ready == 3


@pytest.mark.parametrize("backend", ["asyncio", "trio"])
def test_a_loop_that_ends_before_the_poller_ever_ran_drains_all_the_same(backend: str) -> None:
    rig = Rig()

    async def main() -> tuple[Offloader, TransferHandle]:
        offloader = await rig.open().__aenter__()
        return offloader, offloader.store_soon(keys_of(offloader, 1), [0])

    offloader, handle = anyio.run(main, backend=backend)
    assert handle.is_idle
    assert_idle(offloader)
    with pytest.raises(StateError, match="event loop"):
        offloader.store_soon([], [])


@pytest.mark.parametrize("backend", ["asyncio", "trio"])
def test_a_loop_that_ends_with_a_hung_copy_ends_bounded_and_the_late_landing_is_found_by_a_poll(backend: str) -> None:
    rig = Rig(deadlines=Deadlines(landing_seconds=5))
    rig.device = rig.manual_device = ManualDevice(clock=rig.manual_clock)
    rig.manual_device.hang_direction(Direction.STORE)

    async def main() -> tuple[Offloader, TransferHandle]:
        offloader = await rig.open().__aenter__()
        handle = offloader.store_soon(keys_of(offloader, 1), [0])
        await settle()
        return offloader, handle

    offloader, handle = anyio.run(main, backend=backend)
    assert rig.manual_clock.now() == pytest.approx(5, abs=0.1)
    assert not handle.is_idle
    rig.manual_device.release()
    rig.manual_device.land_all()
    assert offloader.poll() == [handle]
    assert handle.outcomes == (StoreOutcome.REFUSED,)
    assert_idle(offloader)


@pytest.mark.parametrize("backend", ["asyncio", "trio"])
def test_two_loops_in_one_process(backend: str) -> None:
    device = HostDevice()
    for _ in range(2):

        async def main() -> None:
            rig = Rig(device=device)
            async with rig.open() as offloader:
                rig.write([0, 1])
                keys = keys_of(offloader, 2)
                assert await offloader.store(keys, [0, 1]) == (StoreOutcome.ACCEPTED,) * 2
                assert await offloader.load(keys, [5, 4]) == 8
                assert rig.holds([5, 4])
            assert_idle(offloader)

        anyio.run(main, backend=backend)
    device.close()


@pytest.mark.parametrize("backend", ["asyncio", "trio"])
def test_an_offloader_whose_loop_has_ended_is_refused_in_the_next(backend: str) -> None:
    rig = Rig()

    async def first() -> Offloader:
        offloader = await rig.open().__aenter__()
        await settle()
        return offloader

    async def second(offloader: Offloader) -> None:
        with pytest.raises(StateError, match="the event loop this offloader was opened in has ended"):
            await offloader.store(keys_of(offloader, 1), [0])
        with pytest.raises(StateError, match="event loop"):
            await offloader.load([], [])
        with pytest.raises(StateError, match="event loop"):
            offloader.prepare_load([])
        await offloader.aclose()

    offloader = anyio.run(first, backend=backend)
    anyio.run(second, offloader, backend=backend)
    with pytest.raises(ClosedError):
        offloader.store_soon([], [])


def test_an_offloader_of_a_loop_that_stands_still_is_refused_in_another() -> None:
    rig = Rig()
    home, elsewhere = asyncio.new_event_loop(), asyncio.new_event_loop()
    offloader = home.run_until_complete(rig.open().__aenter__())

    async def use() -> None:
        with pytest.raises(WrongThreadError, match="another event loop"):
            await offloader.store(keys_of(offloader, 1), [0])
        with pytest.raises(WrongThreadError, match="another event loop"):
            await offloader.aclose()

    elsewhere.run_until_complete(use())
    elsewhere.close()
    home.run_until_complete(offloader.aclose())
    home.close()
    assert_idle(offloader)


def test_whoever_cancels_all_tasks_of_a_loop_can_still_close() -> None:
    async def main() -> None:
        rig = Rig()
        offloader = await rig.open().__aenter__()
        task = asyncio.create_task(offloader.store(keys_of(offloader, 1), [0]))
        await settle()
        for other in asyncio.all_tasks() - {asyncio.current_task()}:
            other.cancel()
        await settle()
        assert task.cancelled()
        await offloader.aclose()
        assert_idle(offloader)
        assert offloader.statistics().manager.ready == 1

    asyncio.run(main())


# Threads and processes


@on_both_loops
async def test_another_thread_is_refused() -> None:
    rig = Rig()
    async with rig.open() as offloader:
        handle = offloader.store_soon(keys_of(offloader, 1), [0])

        def use() -> None:
            for call in (
                lambda: offloader.store_soon([], []),
                lambda: offloader.prepare_load([]),
                offloader.poll,
                offloader.reset_nowait,
                offloader.bump_epoch_nowait,
                handle.cancel,
                lambda: handle.wait(timeout_seconds=1),
            ):
                with pytest.raises(WrongThreadError, match="thread"):
                    call()

        await anyio.to_thread.run_sync(use)
        await rig.land()


def test_a_forked_process_is_refused() -> None:
    rig = Rig()
    with rig.open() as offloader:
        reader, writer = os.pipe()
        child = os.fork()
        if not child:
            try:
                offloader.store_soon([], [])
            except WrongThreadError as exc:
                os.write(writer, str(exc).encode())
            finally:
                os._exit(0)
        os.close(writer)
        with os.fdopen(reader) as said:
            assert "parent process; open a new one after the fork" in said.read()
        os.waitpid(child, 0)


def test_the_interpreter_exits_promptly_while_a_copy_hangs() -> None:
    program = textwrap.dedent(
        """
        import anyio, sys, threading, torch
        from aiokvoffload import Deadlines, open_offloader
        from aiokvoffload.devices.host import HostDevice

        async def main():
            device = HostDevice(close_timeout_seconds=0.05)
            compute = device.create_stream("compute")
            device.launch(compute, threading.Event().wait)
            deadlines = Deadlines(landing_seconds=0.05, drain_seconds=0.05)
            context = open_offloader(
                [torch.zeros((4, 64), dtype=torch.int8)], cpu_bytes=256, device=device, compute_stream=compute,
                deadlines=deadlines,
            )
            offloader = await context.__aenter__()
            offloader.store_soon(offloader.keys(range(16)), [0])
            await anyio.lowlevel.checkpoint()
            return offloader

        offloader = anyio.run(main, backend=sys.argv[1])
        print("in flight", sorted(offloader.gpu_blocks_in_flight()))
        """
    )
    for backend in ("asyncio", "trio"):
        done = subprocess.run(
            [sys.executable, "-W", "error", "-c", program, backend],
            capture_output=True,
            text=True,
            timeout=50,
            check=False,
        )
        assert (done.returncode, done.stdout, done.stderr) == (0, "in flight [0]\n", "")


# Without a loop


def test_the_synchronous_offloader_stores_and_loads() -> None:
    rig = Rig()
    with rig.open() as offloader:
        keys = keys_of(offloader, 2)
        rig.write([0, 1])
        assert offloader.store(keys, [0, 1]) == (StoreOutcome.ACCEPTED,) * 2
        assert offloader.lookup_prefix(keys) == 8
        assert offloader.load(keys, [5, 4]) == 8
        assert rig.holds([5, 4])
        assert_idle(offloader)
    with pytest.raises(ClosedError):
        offloader.load(keys, [5, 4])


def test_a_synchronous_host_polls_in_each_step() -> None:
    rig = Rig(in_flight_bytes=1)
    with rig.open() as offloader:
        keys = keys_of(offloader, 1)
        first = offloader.store_soon(keys, [0])
        second = offloader.store_soon(keys_of(offloader, 1, salt="other"), [1])
        assert offloader.poll() == []
        assert (first.is_sent, second.is_sent) == (True, False)
        assert offloader.prepare_load(keys).result is LookupResult.PENDING
        rig.manual_device.land_all()
        assert offloader.poll() == [first]
        assert second.is_sent
        rig.manual_device.land_all()
        assert offloader.poll() == [second]
        assert offloader.poll() == []


def test_a_synchronous_load_waits_for_blocks_that_are_being_written() -> None:
    rig = Rig()
    with rig.open() as offloader:
        keys = keys_of(offloader, 2)
        rig.write([0, 1])
        offloader.store_soon(keys, [0, 1])
        assert offloader.load(keys, [5, 4]) == 8
        assert rig.holds([5, 4])
        assert_idle(offloader)


def test_a_synchronous_wait_is_bounded() -> None:
    rig = Rig(deadlines=Deadlines(landing_seconds=5, drain_seconds=2))
    rig.manual_device.hang_direction(Direction.STORE)
    context = rig.open()
    offloader = context.__enter__()
    keys = keys_of(offloader, 1)
    handle = offloader.store_soon(keys, [3])
    with pytest.raises(BlocksInFlightError):
        handle.wait(timeout_seconds=1)
    assert rig.manual_clock.now() == pytest.approx(1)
    assert offloader.load(keys, [4], timeout_seconds=1) == 0
    with pytest.raises(BlocksInFlightError):
        handle.wait(timeout_seconds=60)
    assert rig.manual_clock.now() == pytest.approx(5, abs=0.01)
    with pytest.raises(BlocksInFlightError) as caught:
        context.__exit__(None, None, None)
    assert caught.value.gpu_blocks == {3}
    rig.manual_device.release()
    rig.manual_device.land_all()
    assert offloader.poll() == [handle]
    assert_idle(offloader)


def test_an_error_of_the_synchronous_body_is_not_replaced(caplog: pytest.LogCaptureFixture) -> None:
    rig = Rig(deadlines=Deadlines(drain_seconds=2))
    rig.manual_device.hang_direction(Direction.STORE)

    def serve() -> None:
        with rig.open() as offloader:
            offloader.store_soon(keys_of(offloader, 1), [3])
            raise MainError

    with pytest.raises(MainError):
        serve()
    assert "GPU blocks 3" in caplog.text


# Faults inside


class FaultyDevice(ManualDevice):
    """Breaks its contract for a while: one of its calls raises what no caller expects."""

    def __init__(self, broken: str) -> None:
        super().__init__()
        self._broken = broken
        self.is_faulty = False

    def is_done(self, event: Event) -> bool:
        self._break("is_done")
        return super().is_done(event)

    def elapsed_seconds(self, start: Event, end: Event) -> float:
        self._break("elapsed_seconds")
        return super().elapsed_seconds(start, end)

    def _break(self, name: str) -> None:
        if self.is_faulty and name == self._broken:
            raise RuntimeError(f"{name} is broken")


@pytest.mark.parametrize("broken", ["is_done", "elapsed_seconds"])
@on_both_loops
async def test_a_crash_in_the_poller_cancels_nobody(broken: str, caplog: pytest.LogCaptureFixture) -> None:
    device = FaultyDevice(broken)
    rig = Rig(device=device)
    async with rig.open() as offloader, anyio.create_task_group() as tasks:
        keys = keys_of(offloader, 1)
        rig.write([0])
        outcomes: list[Sequence[StoreOutcome]] = []

        async def store() -> None:
            outcomes.append(await offloader.store(keys, [0]))

        tasks.start_soon(store)
        await settle()
        device.is_faulty = True
        await rig.land()
        device.is_faulty = False
        await _check_is_out_of_order(rig, offloader, f"RuntimeError: {broken} is broken")
        # Its copies were still found to have landed, once the device could say so.
        rig.manual_clock.advance(1)
        await settle()
        assert outcomes == [(StoreOutcome.ACCEPTED,)]
    assert "a fault inside the offloader" in caplog.text
    assert offloader.statistics().sent_transfers == 0


class FaultyManager(CPUOffloadingManager):
    """Raises when a store completes, or when a lease is given back."""

    broken = "complete_store_nowait"

    def complete_store_nowait(
        self, ticket: PrepareStoreOutput, success: bool = True, *, failed_keys: Collection[OffloadKey] = ()
    ) -> Completion:
        if self.broken == "complete_store_nowait":
            raise RuntimeError("complete_store_nowait is broken")
        return super().complete_store_nowait(ticket, success, failed_keys=failed_keys)

    def release(self, slots: Sequence[int]) -> None:
        if self.broken == "release":
            raise RuntimeError("release is broken")
        super().release(slots)


class ManagerThatCannotRelease(FaultyManager):
    broken = "release"


@pytest.mark.parametrize("manager_class", [FaultyManager, ManagerThatCannotRelease])
@on_both_loops
async def test_a_manager_that_raises_cancels_nobody(manager_class: type[FaultyManager]) -> None:
    rig = Rig(manager_class=manager_class)
    async with rig.open() as offloader, anyio.create_task_group() as tasks:
        ends: list[object] = []

        async def store() -> None:
            ends.append(await offloader.store(keys_of(offloader, 1), [0]))

        tasks.start_soon(store)
        await settle()
        await rig.land()
        assert len(ends) == 1
        await _check_is_out_of_order(rig, offloader, f"RuntimeError: {manager_class.broken} is broken")


async def _check_is_out_of_order(rig: Rig, offloader: Offloader, fault: str) -> None:
    """An offloader with a fault goes on answering: misses and refusals."""
    assert offloader.statistics().fault == fault
    with pytest.raises(AssertionError, match="is broken"):
        assert_idle(offloader)
    keys = keys_of(offloader, 2, salt="later")
    copies = len(rig.manual_device.copies)
    assert await offloader.store(keys, [2, 3]) == (StoreOutcome.REFUSED,) * 2
    assert offloader.store_soon(keys, [2, 3]).is_idle
    assert await offloader.load(keys, [2, 3]) == 0
    assert await offloader.lookup_prefix(keys) == 0
    with offloader.prepare_load(keys) as ticket:
        assert ticket.result is LookupResult.MISS
        assert ticket.start([]).is_idle
    assert len(rig.manual_device.copies) == copies


class FaultyMemory(PinnedMemory):
    """Cannot say where it is, for a while."""

    is_faulty = False

    @property
    def address(self) -> int:
        if self.is_faulty:
            raise RuntimeError("the address is broken")
        return super().address


def test_what_raises_before_anything_is_sent_reserves_and_pins_nothing() -> None:
    rig = Rig()
    parts = rig.parts()
    memory = FaultyMemory(rig.cpu_blocks, parts.memory.slot_bytes, rig.device)
    handlers = {
        direction: SingleDirectionOffloadingHandler(direction, parts.layout, memory, rig.device)
        for direction in Direction
    }
    offloader = SyncOffloader(
        replace(parts, memory=memory, worker=OffloadingWorker(rig.device, parts.layout, handlers, rig.clock))
    )
    keys = keys_of(offloader, 1)
    offloader.store(keys, [0])
    memory.is_faulty = True
    with pytest.raises(RuntimeError, match="the address is broken"):
        offloader.store(keys_of(offloader, 1, salt="other"), [0])
    assert_idle(offloader)
    with pytest.raises(RuntimeError, match="the address is broken"):
        offloader.load(keys, [0])
    assert_idle(offloader)
    memory.is_faulty = False
    assert offloader.load(keys, [1]) == 4
    offloader.close()


@on_both_loops
async def test_a_callback_that_raises_is_only_logged(caplog: pytest.LogCaptureFixture) -> None:
    rig = Rig()
    async with rig.open() as offloader, anyio.create_task_group() as tasks:
        handle = offloader.store_soon(keys_of(offloader, 1), [0])
        called: list[object] = []

        def fail(_handle: object) -> None:
            raise MainError("by the caller")

        handle.on_idle(fail)
        handle.on_idle(called.append)
        tasks.start_soon(handle.wait_out)
        await rig.land()
        assert called == [handle]
        assert_idle(offloader)
        assert states(offloader, keys_of(offloader, 1)) == ["HIT"]
    assert "by the caller" in caplog.text
    assert [record.levelno for record in caplog.records] == [logging.ERROR]


@on_both_loops
async def test_a_callback_may_use_the_offloader() -> None:
    rig = Rig()
    async with rig.open() as offloader:
        handle = offloader.store_soon(keys_of(offloader, 1), [0])
        further: list[TransferHandle] = []
        handle.on_idle(lambda _: further.append(offloader.store_soon(keys_of(offloader, 1, salt="more"), [0])))
        await rig.land()
        await rig.land()
        assert further[0].is_idle
        assert_idle(offloader)
        assert offloader.statistics().manager.ready == 2


def test_a_synchronous_offloader_with_a_fault_misses_and_refuses() -> None:
    device = FaultyDevice("is_done")
    rig = Rig(device=device)
    with rig.open() as offloader:
        handle = offloader.store_soon(keys_of(offloader, 1), [0])
        device.is_faulty = True
        with pytest.raises(BlocksInFlightError):
            handle.wait(timeout_seconds=0.5)
        device.is_faulty = False
        assert isinstance(offloader, SyncOffloader)
        assert offloader.lookup_prefix(keys_of(offloader, 1)) == 0
        assert offloader.load(keys_of(offloader, 1), [0]) == 0
        assert offloader.store(keys_of(offloader, 1), [0]) == (StoreOutcome.REFUSED,)
        assert handle.wait(timeout_seconds=1).success


def test_a_device_that_stays_broken_does_not_keep_the_offloader_from_closing() -> None:
    device = FaultyDevice("is_done")
    rig = Rig(device=device)
    context = rig.open()
    offloader = context.__enter__()
    offloader.store_soon(keys_of(offloader, 1), [0])
    device.is_faulty = True
    with pytest.raises(BlocksInFlightError):
        context.__exit__(None, None, None)
