"""Preparing memory off the event loop: both loops go on, and a cancelled wait lets nothing go on behind it."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable, Coroutine
from typing import Any

import anyio
import pytest

from aiokvoffload.errors import ConfigurationError
from aiokvoffload.memory.base import PreparationProgress, PreparationStep, Report, ignore_progress
from aiokvoffload.memory.pinned import PinnedMemory
from aiokvoffload.memory.threads import prepare_in_thread
from aiokvoffload.testing.memory_contract import PinCountingDevice, StopPreparing

PATIENCE_SECONDS = 30.0
pytestmark = pytest.mark.timeout(60)


def on_both_loops(test: Callable[[], Coroutine[Any, Any, None]]) -> Callable[[str], None]:
    def run(backend: str) -> None:
        anyio.run(test, backend=backend)

    on_each: Callable[[str], None] = pytest.mark.parametrize("backend", ["asyncio", "trio"])(run)
    return on_each


class GatedMemory(PinnedMemory):
    """Stops in the middle of its preparation until the gate opens; then reports once more, and goes on."""

    def __init__(self) -> None:
        self.counting_device = PinCountingDevice()
        super().__init__(4, 1 << 20, self.counting_device)
        self.gate = threading.Event()
        self.is_in_the_middle = threading.Event()
        self.is_over = False
        self.thread: int | None = None

    def prepare(self, report: Report = ignore_progress) -> None:
        self.thread = threading.get_ident()

        def gated(progress: PreparationProgress) -> None:
            if progress.step is PreparationStep.REGISTERING and progress.done_bytes:
                self.is_in_the_middle.set()
                if not self.gate.wait(PATIENCE_SECONDS):
                    raise TimeoutError("the test never opened the gate")
            report(progress)

        try:
            super().prepare(gated)
        finally:
            self.is_over = True

    async def reach_the_middle(self) -> None:
        """Wait until the preparation is there."""
        await anyio.to_thread.run_sync(self.is_in_the_middle.wait, PATIENCE_SECONDS)
        assert self.counting_device.pinned


@on_both_loops
async def test_the_loop_goes_on_meanwhile() -> None:
    memory = GatedMemory()
    async with anyio.create_task_group() as tasks:
        tasks.start_soon(prepare_in_thread, memory)
        await memory.reach_the_middle()
        assert not memory.is_over
        memory.gate.set()
    assert memory.is_pinned
    assert memory.thread != threading.get_ident()
    memory.close()


@on_both_loops
async def test_little_memory_is_prepared_at_once() -> None:
    threads: list[int] = []
    memory = PinnedMemory(4, 4096, PinCountingDevice())
    await prepare_in_thread(memory, lambda _: threads.append(threading.get_ident()))
    assert set(threads) == {threading.get_ident()}
    memory.close()


@on_both_loops
async def test_a_cancelled_scope_stops_it_and_waits_until_nothing_is_pinned() -> None:
    memory = GatedMemory()
    is_back = False

    async def prepare(scope: anyio.CancelScope) -> None:
        nonlocal is_back
        with scope:
            try:
                await prepare_in_thread(memory)
            finally:
                is_back = True
                assert memory.is_over
                assert not memory.counting_device.pinned

    async with anyio.create_task_group() as tasks:
        scope = anyio.CancelScope()
        tasks.start_soon(prepare, scope)
        await memory.reach_the_middle()
        scope.cancel()
        for _ in range(10):
            await anyio.lowlevel.checkpoint()
        assert not is_back
        memory.gate.set()
    assert scope.cancelled_caught
    memory.close()


@pytest.mark.asyncio
async def test_asyncio_may_cancel_it_more_than_once() -> None:
    memory = GatedMemory()
    task = asyncio.create_task(prepare_in_thread(memory))
    await memory.reach_the_middle()
    for _ in range(3):
        task.cancel()
        await asyncio.sleep(0)
        await asyncio.sleep(0)
        assert not task.done()
    memory.gate.set()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert memory.is_over
    assert not memory.counting_device.pinned
    memory.close()


@on_both_loops
async def test_cancelled_before_it_begins_it_never_begins() -> None:
    memory = GatedMemory()
    with anyio.CancelScope() as scope:
        scope.cancel()
        await prepare_in_thread(memory)
    assert scope.cancelled_caught
    assert memory.thread is None
    memory.close()


@on_both_loops
async def test_what_the_report_raises_comes_out() -> None:
    memory = GatedMemory()
    memory.gate.set()

    def refuse(_: PreparationProgress) -> None:
        raise StopPreparing

    with pytest.raises(StopPreparing):
        await prepare_in_thread(memory, refuse)
    memory.close()


class MemoryWithoutRoom(PinnedMemory):
    def prepare(self, report: Report = ignore_progress) -> None:
        raise ConfigurationError("there is no room")


@on_both_loops
async def test_what_the_preparation_raises_comes_out() -> None:
    memory = MemoryWithoutRoom(4, 1 << 20, PinCountingDevice())
    with pytest.raises(ConfigurationError, match="there is no room"):
        await prepare_in_thread(memory)
    memory.close()
