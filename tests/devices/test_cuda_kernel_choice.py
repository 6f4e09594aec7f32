"""Which copies go by the kernel: found by calibration on the device, checked, overridable."""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Callable, Iterator

import numpy as np
import pytest
from cuda_rig import Count, FakeKernel, Fate, StandIn, hold

from aiokvoffload.devices import cuda, cuda_calibration
from aiokvoffload.devices.base import CopyPlan, Direction, Event
from aiokvoffload.devices.cuda import CudaDevice
from aiokvoffload.devices.cuda_copy import Copier
from aiokvoffload.devices.cuda_driver import CudaDriver
from aiokvoffload.devices.cuda_streams import CudaStream
from aiokvoffload.errors import PartialCopyError
from aiokvoffload.testing.device_contract import PATIENCE_SECONDS
from aiokvoffload.testing.device_memory import pattern, plan_of

KIB = 1024


class TimedDevice(CudaDevice):
    """Says how long copies took by a table instead of a clock."""

    kernel_seconds: Callable[[Direction, int], float]

    def _device_for_trials(self) -> TimedDevice:
        trials = TimedDevice(driver=self._driver, tensor_kind="cpu", kernel_up_to_bytes=0)
        trials.kernel_seconds = self.kernel_seconds
        return trials

    def elapsed_seconds(self, start: Event, end: Event) -> float:
        super().elapsed_seconds(start, end)
        copier, plan = self.last_put
        is_kernel = isinstance(copier, FakeKernel)
        return self.kernel_seconds(plan.direction, int(plan.byte_counts[0])) if is_kernel else 1.0

    def _put(self, copier: Copier, plan: CopyPlan, stream: object) -> None:
        self.last_put = copier, plan
        super()._put(copier, plan, stream)  # type: ignore[arg-type]


@pytest.fixture
def driver(stand_in: StandIn) -> CudaDriver:
    return stand_in.driver()


def calibrated(driver: CudaDriver, kernel: FakeKernel, seconds: Callable[[Direction, int], float]) -> TimedDevice:
    device = TimedDevice(driver=driver, tensor_kind="cpu", kernel=kernel)
    device.kernel_seconds = seconds
    device.prepare({16 * KIB})
    return device


@pytest.mark.parametrize(
    ("seconds", "limits"),
    [
        (lambda _direction, _size: 0.1, {Direction.STORE: 256 * KIB, Direction.LOAD: 256 * KIB}),
        (lambda _direction, _size: 0.95, {Direction.STORE: 0, Direction.LOAD: 0}),
        (lambda _direction, size: size / (32 * KIB), {Direction.STORE: 16 * KIB, Direction.LOAD: 16 * KIB}),
        (lambda direction, _size: float(direction is Direction.STORE), {Direction.STORE: 0, Direction.LOAD: 256 * KIB}),
    ],
)
def test_the_kernel_is_used_up_to_where_it_is_clearly_faster(
    stand_in: StandIn, driver: CudaDriver, seconds: Callable[[Direction, int], float], limits: dict[Direction, int]
) -> None:
    device = calibrated(driver, FakeKernel(driver), seconds)
    assert device.kernel_limits == limits
    assert stand_in.count(Count.REGISTRATIONS) == 0
    device.close()


def test_calibration_is_done_once(driver: CudaDriver) -> None:
    kernel = FakeKernel(driver)
    device = calibrated(driver, kernel, lambda _direction, _size: 0.1)
    count = len(kernel.plans)
    device.prepare({4 * KIB})
    assert len(kernel.plans) == count
    device.close()


def test_times_of_the_device_itself_choose_something(driver: CudaDriver) -> None:
    device = CudaDevice(driver=driver, tensor_kind="cpu", kernel=FakeKernel(driver))
    device.prepare({4 * KIB})
    assert set(device.kernel_limits) == set(Direction)
    device.close()


def raises(_plan: CopyPlan) -> CopyPlan:
    raise RuntimeError("no kernel image")


def drops_a_copy(plan: CopyPlan) -> CopyPlan:
    return CopyPlan(plan.sources[1:], plan.destinations[1:], plan.byte_counts[1:], plan.direction)


def misses_the_last_word(plan: CopyPlan) -> CopyPlan:
    return CopyPlan(plan.sources, plan.destinations, plan.byte_counts - 8, plan.direction)


@pytest.mark.parametrize(
    ("fate", "reason"),
    [(raises, "no kernel image"), (drops_a_copy, "wrong bytes"), (misses_the_last_word, "wrong bytes")],
)
def test_a_kernel_that_fails_or_copies_wrong_bytes_is_not_used(
    stand_in: StandIn, driver: CudaDriver, caplog: pytest.LogCaptureFixture, fate: Fate, reason: str
) -> None:
    device = calibrated(driver, FakeKernel(driver, fate), lambda _direction, _size: 0.1)
    assert device.kernel_limits == dict.fromkeys(Direction, 0)
    assert reason in caplog.text
    assert stand_in.count(Count.REGISTRATIONS) == 0
    device.close()


def test_trials_that_are_not_over_in_time_keep_their_memory(
    stand_in: StandIn, driver: CudaDriver, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    releases: list[Callable[[], None]] = []

    class HeldDevice(CudaDevice):
        def _device_for_trials(self) -> HeldDevice:
            return HeldDevice(driver=self._driver, tensor_kind="cpu", kernel_up_to_bytes=0, close_timeout_seconds=0.2)

        def create_stream(self, name: str) -> CudaStream:
            stream = super().create_stream(name)
            releases.append(hold(stand_in.library, self, stream))
            return stream

    monkeypatch.setattr(cuda_calibration, "_PATIENCE_SECONDS", 0.0)
    device = HeldDevice(driver=driver, tensor_kind="cpu", kernel=FakeKernel(driver))
    device.prepare({16 * KIB})
    assert device.kernel_limits == dict.fromkeys(Direction, 0)
    assert "not over after" in caplog.text
    assert stand_in.count(Count.REGISTRATIONS) == 1
    (late,) = [thread for thread in threading.enumerate() if thread.name == "aiokvoffload-late-copies"]
    releases[0]()
    late.join(PATIENCE_SECONDS)
    assert stand_in.count(Count.REGISTRATIONS) == 0
    device.close()


@pytest.mark.parametrize("reason", ["pages too large", "no pages", "given", "other addresses", "no Triton"])
def test_nothing_is_tried_where_there_is_nothing_to_win(
    stand_in: StandIn, reason: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    stand_in.set_can_use_host_pointer(reason != "other addresses")
    kernel = FakeKernel(stand_in.driver())
    monkeypatch.setattr(cuda, "_find_kernel", lambda _ordinal: None)
    device = CudaDevice(
        driver=stand_in.driver(),
        tensor_kind="cpu",
        kernel=None if reason == "no Triton" else kernel,
        kernel_up_to_bytes=8 * KIB if reason == "given" else None,
    )
    device.prepare({"pages too large": {1 << 20}, "no pages": set[int]()}.get(reason, {4 * KIB}))
    assert kernel.plans == []
    assert device.kernel_limits == dict.fromkeys(Direction, 8 * KIB if reason == "given" else 0)
    device.close()


@pytest.fixture
def chosen(driver: CudaDriver) -> Iterator[tuple[CudaDevice, FakeKernel]]:
    kernel = FakeKernel(driver)
    device = CudaDevice(driver=driver, tensor_kind="cpu", kernel=kernel, kernel_up_to_bytes=64)
    yield device, kernel
    device.close()


@pytest.mark.parametrize("direction", Direction)
def test_small_aligned_pinned_copies_go_by_the_kernel(
    chosen: tuple[CudaDevice, FakeKernel], direction: Direction
) -> None:
    device, kernel = chosen
    memory = np.zeros(3 * 4096, np.uint8)
    host = memory[-memory.ctypes.data % 4096 :][:4096]
    gpu = np.zeros(4096, np.uint8)
    device.pin(host.ctypes.data, 2048)
    #          small, large, small at an odd place, odd size, small but not pinned, small
    copies = [(0, 64), (64, 128), (193, 64), (264, 63), (2048, 64), (3072 - 2048, 8)]
    sides = (gpu, host) if direction is Direction.STORE else (host, gpu)
    sides[0][:] = pattern(4096)
    plan = plan_of(
        direction, [(sides[0].ctypes.data + at, sides[1].ctypes.data + at, size) for at, size in copies], gpu, host
    )
    stream = device.create_stream("mixed")
    device.copy_batch(plan, stream)
    event = device.record(stream)
    assert device.synchronize(event, PATIENCE_SECONDS)
    assert device.is_done(event)
    expected = np.zeros(4096, np.uint8)
    for at, size in copies:
        expected[at : at + size] = pattern(4096)[at : at + size]
    assert np.array_equal(sides[1], expected)
    (by_kernel,) = kernel.plans
    assert Counter((by_kernel.sources - sides[0].ctypes.data).tolist()) == Counter([0, 1024])
    device.unpin(host.ctypes.data)


def test_a_kernel_that_fails_later_fails_its_batch_and_is_not_used_again(
    driver: CudaDriver, caplog: pytest.LogCaptureFixture
) -> None:
    kernel = FakeKernel(driver, raises)
    device = CudaDevice(driver=driver, tensor_kind="cpu", kernel=kernel, kernel_up_to_bytes=64)
    memory = np.zeros(3 * 4096, np.uint8)
    host = memory[-memory.ctypes.data % 4096 :][:4096]
    gpu = pattern(64)
    device.pin(host.ctypes.data, 4096)
    stream = device.create_stream("failing")
    plan = plan_of(Direction.STORE, [(gpu.ctypes.data, host.ctypes.data, 64)], gpu, host)
    with pytest.raises(PartialCopyError, match="no kernel image"):
        device.copy_batch(plan, stream)
    device.copy_batch(plan, stream)
    event = device.record(stream)
    assert device.synchronize(event, PATIENCE_SECONDS)
    assert device.is_done(event)
    assert np.array_equal(host[:64], gpu)
    assert len(kernel.plans) == 1
    assert "from now on small copies go by the copy engines" in caplog.text
    device.close()
