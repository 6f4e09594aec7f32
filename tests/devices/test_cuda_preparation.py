"""A kernel for small copies is tried while an offloader opens: off the event loop, and nothing of it goes on behind."""

from __future__ import annotations

import gc
import threading
from collections.abc import Iterator

import anyio
import anyio.to_thread
import pytest
import torch
from cuda_rig import Count, FakeKernel, StandIn
from offloader_rig import on_both_loops

from aiokvoffload import DeviceError, open_offloader
from aiokvoffload.devices.base import CopyPlan
from aiokvoffload.devices.cuda import CudaDevice
from aiokvoffload.devices.cuda_calibration import TOTAL_BYTES
from aiokvoffload.devices.cuda_copy import SourceOrder
from aiokvoffload.memory.base import PreparationProgress, PreparationStep, Report, ignore_progress
from aiokvoffload.offloader import OffloaderContext
from aiokvoffload.testing.asserts import assert_idle
from aiokvoffload.testing.memory_contract import StopPreparing

PATIENCE_SECONDS = 30.0
PAGE_BYTES = 4096
ILLEGAL_ADDRESS = 700
pytestmark = pytest.mark.timeout(60)


class GatedKernel(FakeKernel):
    """Stops at its first copies until the gate opens."""

    def __init__(self, stand_in: StandIn) -> None:
        super().__init__(stand_in.driver(), self._wait_at_the_gate)
        self.is_at_the_gate, self.gate = threading.Event(), threading.Event()
        self.threads: set[int] = set()

    async def reach_the_gate(self) -> None:
        await anyio.to_thread.run_sync(self.is_at_the_gate.wait, PATIENCE_SECONDS)
        assert self.is_at_the_gate.is_set()

    def _wait_at_the_gate(self, plan: CopyPlan) -> CopyPlan:
        self.threads.add(threading.get_ident())
        self.is_at_the_gate.set()
        if not self.gate.wait(PATIENCE_SECONDS):
            raise TimeoutError("the test never opened the gate")
        return plan


@pytest.fixture
def kernel(stand_in: StandIn) -> GatedKernel:
    return GatedKernel(stand_in)


@pytest.fixture
def device(stand_in: StandIn, kernel: GatedKernel) -> Iterator[CudaDevice]:
    before = [stand_in.count(which) for which in (Count.STREAMS, Count.EVENTS, Count.RETAINED_CONTEXTS)]
    device = stand_in.device(kernel=kernel, kernel_up_to_bytes=None)
    yield device
    device.close()
    gc.collect()
    assert [stand_in.count(which) for which in (Count.STREAMS, Count.EVENTS, Count.RETAINED_CONTEXTS)] == before
    assert stand_in.count(Count.REGISTRATIONS) == 0


def open_over(device: CudaDevice, on_progress: Report = ignore_progress) -> OffloaderContext:
    """Return the context of an offloader whose memory alone would be prepared at once."""
    layers = [torch.zeros((8, PAGE_BYTES), dtype=torch.int8)]
    compute_stream = device.create_stream("compute")
    return open_offloader(
        layers, cpu_bytes=1 << 19, device=device, compute_stream=compute_stream, on_progress=on_progress
    )


@on_both_loops
async def test_the_loop_goes_on_while_a_kernel_is_tried(device: CudaDevice, kernel: GatedKernel) -> None:
    is_open = False

    async def open_it() -> None:
        nonlocal is_open
        async with open_over(device) as offloader:
            is_open = True
            assert threading.get_ident() not in kernel.threads
            keys = offloader.keys(range(16))
            await offloader.store(keys, [0])
            assert await offloader.load(keys, [1]) == 16

    async with anyio.create_task_group() as tasks:
        tasks.start_soon(open_it)
        await kernel.reach_the_gate()
        device.create_stream("the engine goes on using the device meanwhile")
        assert not is_open
        kernel.gate.set()
    assert is_open


@on_both_loops
async def test_a_cancelled_opening_waits_until_nothing_is_tried_any_more(
    device: CudaDevice, kernel: GatedKernel, stand_in: StandIn
) -> None:
    is_back = False

    async def open_it(scope: anyio.CancelScope) -> None:
        nonlocal is_back
        with scope:
            try:
                async with open_over(device):
                    raise AssertionError("it was cancelled")
            finally:
                is_back = True
                assert stand_in.count(Count.REGISTRATIONS) == 0

    async with anyio.create_task_group() as tasks:
        scope = anyio.CancelScope()
        tasks.start_soon(open_it, scope)
        await kernel.reach_the_gate()
        assert stand_in.count(Count.REGISTRATIONS) > 0
        scope.cancel()
        for _ in range(10):
            await anyio.lowlevel.checkpoint()
        assert not is_back
        kernel.gate.set()
    assert scope.cancelled_caught
    tried_count = len(kernel.plans)
    async with open_over(device):
        assert len(kernel.plans) > tried_count  # what was cut short is done the next time


def test_a_synchronous_opening_just_takes_its_time_and_says_how_far_it_is(
    device: CudaDevice, kernel: GatedKernel
) -> None:
    kernel.gate.set()
    told: list[PreparationProgress] = []
    with open_over(device, told.append) as offloader:
        assert_idle(offloader)
    assert kernel.threads == {threading.get_ident()}
    tried = [progress for progress in told if progress.step is PreparationStep.CALIBRATING]
    assert tried == told[: len(tried)]
    assert (tried[0].done_bytes, tried[-1].done_bytes) == (0, TOTAL_BYTES)
    assert {progress.total_bytes for progress in tried} == {TOTAL_BYTES}
    assert [progress.done_bytes for progress in tried] == sorted(progress.done_bytes for progress in tried)


def test_what_the_report_raises_ends_the_trials(device: CudaDevice, kernel: GatedKernel) -> None:
    def stop(progress: PreparationProgress) -> None:
        if progress.step is PreparationStep.CALIBRATING and kernel.plans:
            raise StopPreparing

    kernel.gate.set()
    with pytest.raises(StopPreparing), open_over(device, stop):
        raise AssertionError("its report raised")


@on_both_loops
async def test_a_kernel_that_breaks_the_gpu_ends_the_opening_with_one_error(stand_in: StandIn) -> None:
    class BreakingKernel(FakeKernel):
        def submit(self, plan: CopyPlan, order: SourceOrder, stream: int) -> None:
            stand_in.library.standin_break(stream, ILLEGAL_ADDRESS)

    device = stand_in.device(kernel=BreakingKernel(stand_in.driver()), kernel_up_to_bytes=None)
    with pytest.raises(DeviceError, match=r"GPU 0 was found broken .* CudaDevice\(0, kernel_up_to_bytes=0\)") as caught:
        async with open_over(device):
            raise AssertionError("it opened")
    assert "ILLEGAL_ADDRESS" in str(caught.value)
    assert "restart the process" in str(caught.value)
    device.close()
