"""Opening prepares the CPU memory; an opening that fails or is cancelled leaves nothing behind."""

from __future__ import annotations

import gc
import logging
import threading
import weakref
from typing import Any

import anyio
import anyio.to_thread
import pytest
import torch
from offloader_rig import on_both_loops

from aiokvoffload import ClosedError, ConfigurationError, OffloaderStatistics, open_offloader
from aiokvoffload.devices.host import HostDevice
from aiokvoffload.memory.base import PreparationProgress, PreparationStep
from aiokvoffload.offloader import OffloaderContext
from aiokvoffload.offloader.parts import Parts
from aiokvoffload.testing.asserts import assert_idle
from aiokvoffload.testing.memory_contract import PinCountingDevice, StopPreparing, stop_at

CPU_BYTES = 4 << 20
PATIENCE_SECONDS = 30.0
pytestmark = pytest.mark.timeout(60)


def open_over(device: HostDevice | str, **options: Any) -> OffloaderContext:
    """Return the context of an offloader with more memory than is prepared at once."""
    return open_offloader([torch.zeros((8, 64), dtype=torch.int8)], cpu_bytes=CPU_BYTES, device=device, **options)


def watched(context: OffloaderContext, built: list[Parts]) -> OffloaderContext:
    """Return a context that opens what `context` would, and notes the parts in `built`."""
    make_parts = context._make_parts
    assert make_parts is not None

    def make_and_note() -> Parts:
        built.append(make_parts())
        return built[-1]

    context._make_parts = make_and_note
    return context


def test_memory_is_pinned_as_long_as_a_synchronous_offloader_is_open() -> None:
    device = PinCountingDevice()
    told: list[PreparationProgress] = []
    with open_over(device, on_progress=told.append) as offloader:
        assert device.is_pinned(offloader.memory.address, CPU_BYTES)
        assert offloader.statistics().memory_is_pinned
        assert told[-1] == PreparationProgress(PreparationStep.REGISTERING, CPU_BYTES, CPU_BYTES)
        assert_idle(offloader)
    assert not device.pinned


@on_both_loops
async def test_memory_is_pinned_as_long_as_an_async_offloader_is_open() -> None:
    device = PinCountingDevice()
    threads: list[int] = []
    async with open_over(device, on_progress=lambda _: threads.append(threading.get_ident())) as offloader:
        assert device.is_pinned(offloader.memory.address, CPU_BYTES)
        assert offloader.statistics().memory_is_pinned
        assert threading.get_ident() not in threads
        keys = offloader.keys(range(16))
        await offloader.store(keys, [0])
        assert await offloader.load(keys, [1]) == 16
    assert not device.pinned


@on_both_loops
async def test_a_device_that_pins_nothing_is_said_once(caplog: pytest.LogCaptureFixture) -> None:
    device = PinCountingDevice(limit=0)
    with caplog.at_level(logging.WARNING):
        async with open_over(device) as offloader:
            statistics: OffloaderStatistics = offloader.statistics()
            assert not statistics.memory_is_pinned
    assert len(caplog.records) == 1


@on_both_loops
async def test_an_opening_that_is_cancelled_leaves_nothing_pinned_or_mapped() -> None:
    device = PinCountingDevice()
    is_in_the_middle, gate = threading.Event(), threading.Event()
    built: list[Parts] = []
    mapped: list[weakref.ref[Any]] = []

    def wait_in_the_middle(progress: PreparationProgress) -> None:
        if progress.step is PreparationStep.REGISTERING and progress.done_bytes:
            assert device.pinned
            is_in_the_middle.set()
            if not gate.wait(PATIENCE_SECONDS):
                raise TimeoutError("the test never opened the gate")

    async def open_it(scope: anyio.CancelScope) -> None:
        with scope:
            async with watched(open_over(device, on_progress=wait_in_the_middle), built):
                raise AssertionError("it was cancelled")

    async with anyio.create_task_group() as tasks:
        scope = anyio.CancelScope()
        tasks.start_soon(open_it, scope)
        await anyio.to_thread.run_sync(is_in_the_middle.wait, PATIENCE_SECONDS)
        mapped.append(weakref.ref(built.pop().memory.buffer.base))
        scope.cancel()
        gate.set()
    assert scope.cancelled_caught
    assert not device.pinned
    gc.collect()
    assert [array() for array in mapped] == [None]


@on_both_loops
async def test_an_async_opening_that_fails_closes_its_own_device() -> None:
    built: list[Parts] = []
    with pytest.raises(StopPreparing):
        async with watched(open_over("host", on_progress=stop_at(1)), built):
            raise AssertionError("its report raised")
    device = built[0].own_device
    assert device is not None
    with pytest.raises(ClosedError):
        device.create_stream("too late")


def test_a_synchronous_opening_that_fails_leaves_nothing_pinned() -> None:
    device = PinCountingDevice()
    with pytest.raises(StopPreparing), open_over(device, on_progress=stop_at(3)):
        raise AssertionError("its report raised")
    assert not device.pinned
    device.create_stream("not closed, because it was given")


def test_a_numa_node_that_is_not_there() -> None:
    with (
        pytest.raises(ConfigurationError, match="no memory of NUMA node 1000"),
        open_over(HostDevice(), numa_node=1000),
    ):
        raise AssertionError("there is no such node")
