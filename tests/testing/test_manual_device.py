"""The device whose work lands when a test says so."""

from __future__ import annotations

import random
from collections.abc import Callable

import numpy as np
import pytest
from numpy.typing import NDArray

from aiokvoffload.devices.base import CopyPlan, Device, Direction, Stream
from aiokvoffload.errors import DeviceError, StateError
from aiokvoffload.testing.clock import ManualClock
from aiokvoffload.testing.device import ManualDevice
from aiokvoffload.testing.device_contract import DeviceContract
from aiokvoffload.testing.device_memory import plan_of


class TestManualDevice(DeviceContract):
    def make_device(self) -> ManualDevice:
        return ManualDevice()

    def hold(self, device: Device, stream: Stream) -> Callable[[], None]:
        assert isinstance(device, ManualDevice)
        device.hang(stream)
        return lambda: device.release(stream)


class TestManualDeviceThatLandsByItself(TestManualDevice):
    def make_device(self) -> ManualDevice:
        return ManualDevice(auto_land=True)


class TestManualDeviceInRandomOrder(TestManualDevice):
    def make_device(self) -> ManualDevice:
        return ManualDevice(random_order=random.Random(7))


class Memory:
    """Two rows of host memory to copy between."""

    def __init__(self, row_count: int = 4) -> None:
        self.gpu: NDArray[np.uint8] = np.arange(1, row_count + 1, dtype=np.uint8).repeat(16).reshape(row_count, 16)
        self.cpu: NDArray[np.uint8] = np.zeros_like(self.gpu)

    def store(self, *rows: int) -> CopyPlan:
        return plan_of(
            Direction.STORE, [(self.gpu[row].ctypes.data, self.cpu[row].ctypes.data, 16) for row in rows], self
        )

    def load(self, *rows: int) -> CopyPlan:
        return plan_of(
            Direction.LOAD, [(self.cpu[row].ctypes.data, self.gpu[row].ctypes.data, 16) for row in rows], self
        )


@pytest.fixture
def device() -> ManualDevice:
    return ManualDevice()


@pytest.fixture
def memory() -> Memory:
    return Memory()


def test_bytes_move_only_when_a_copy_lands(device: ManualDevice, memory: Memory) -> None:
    stream = device.create_stream("store")
    plan = memory.store(0, 1)
    device.copy_batch(plan, stream)
    event = device.record(stream)
    assert not device.is_done(event)
    assert not memory.cpu.any()
    assert not device.is_idle
    assert device.copies == device.pending_copies == [plan]
    assert device.landed_copies == []
    assert device.land_next()
    assert device.is_done(event)
    assert np.array_equal(memory.cpu[:2], memory.gpu[:2])
    assert device.is_idle
    assert device.landed_copies == [plan]
    assert device.pending_copies == []
    assert not device.land_next()


def test_operations_land_in_order_of_submission_or_on_the_stream_named(device: ManualDevice) -> None:
    first, second = device.create_stream("first"), device.create_stream("second")
    landed: list[str] = []
    for name, stream in (("a", second), ("b", first), ("c", second), ("d", first)):
        device.launch(stream, lambda name=name: landed.append(name))  # type: ignore[misc]
    assert device.land_next(first)
    assert device.land_all() == 3
    assert landed == ["b", "a", "c", "d"]


def test_random_order_is_repeatable_and_keeps_the_order_of_each_stream() -> None:
    def run(seed: int) -> list[tuple[int, int]]:
        device = ManualDevice(random_order=random.Random(seed))
        landed: list[tuple[int, int]] = []
        streams = [device.create_stream(str(number)) for number in range(4)]
        for step in range(5):
            for number, stream in enumerate(streams):
                device.launch(stream, lambda place=(number, step): landed.append(place))  # type: ignore[misc]
        device.land_all()
        for number in range(4):
            assert [step for stream, step in landed if stream == number] == list(range(5))
        return landed

    assert run(1) == run(1)
    assert len({tuple(run(seed)) for seed in range(5)}) > 1


def test_nothing_lands_before_the_event_it_waits_for(device: ManualDevice) -> None:
    first, second = device.create_stream("first"), device.create_stream("second")
    device.launch(first, lambda: None)
    event = device.record(first)
    device.wait_event(second, event)
    device.launch(second, lambda: None)
    assert not device.land_next(second)
    assert device.land_next(first)
    assert device.land_next(second)


def test_synchronize_lands_what_the_event_needs_and_nothing_else(device: ManualDevice) -> None:
    first, second, third = (device.create_stream(name) for name in ("first", "second", "third"))
    landed: list[str] = []
    device.launch(third, lambda: landed.append("unrelated"))
    device.launch(first, lambda: landed.append("needed"))
    device.wait_event(second, device.record(first))
    device.launch(first, lambda: landed.append("later"))
    device.launch(second, lambda: landed.append("awaited"))
    event = device.record(second)
    assert not device.synchronize(event, 0.0)
    assert landed == []
    assert device.synchronize(event, 1.0)
    assert landed == ["needed", "awaited"]


def test_a_failed_copy_moves_nothing_or_a_part(device: ManualDevice, memory: Memory) -> None:
    stream = device.create_stream("store")
    device.fail_next(stream, "link down")
    device.fail_next_copy(Direction.STORE, "link half down", moved_copies=1)
    device.copy_batch(memory.store(0, 1), stream)
    nothing = device.record(stream)
    device.copy_batch(memory.store(2, 3), stream)
    part = device.record(stream)
    device.copy_batch(memory.store(0), stream)
    whole = device.record(stream)
    assert device.land_all() == 3
    with pytest.raises(DeviceError, match="link down"):
        device.is_done(nothing)
    with pytest.raises(DeviceError, match="half"):
        device.is_done(part)
    assert device.is_done(whole)
    assert memory.cpu[:, 0].tolist() == [1, 0, 3, 0]
    assert device.landed_copies == device.copies[2:]


def test_faults_strike_only_where_they_were_meant(device: ManualDevice, memory: Memory) -> None:
    loads, stores = device.create_stream("loads"), device.create_stream("stores")
    device.fail_next_copy(Direction.LOAD, "load lost")
    device.launch(loads, lambda: None)
    launched = device.record(loads)
    device.copy_batch(memory.store(0), stores)
    stored = device.record(stores)
    device.copy_batch(memory.load(0), loads)
    loaded = device.record(loads)
    device.land_all()
    assert device.is_done(launched)
    assert device.is_done(stored)
    with pytest.raises(DeviceError, match="load lost"):
        device.is_done(loaded)
    device.fail_next(None, "anything")
    device.launch(stores, lambda: None)
    failed = device.record(stores)
    device.land_all()
    with pytest.raises(DeviceError, match="anything"):
        device.is_done(failed)


def test_refused_batches_are_not_submitted(device: ManualDevice, memory: Memory) -> None:
    stream = device.create_stream("store")
    device.refuse_next("no more channels")
    device.refuse_next("still none")
    for error in ("no more channels", "still none"):
        with pytest.raises(DeviceError, match=error):
            device.copy_batch(memory.store(0), stream)
    assert device.is_idle
    assert device.copies == []
    device.copy_batch(memory.store(0), stream)
    assert device.land_all() == 1


def test_a_hung_stream_lands_late(device: ManualDevice, memory: Memory) -> None:
    hung, other = device.create_stream("hung"), device.create_stream("other")
    device.hang(hung)
    device.copy_batch(memory.store(0), hung)
    event = device.record(hung)
    device.wait_event(other, event)
    device.copy_batch(memory.store(1), other)
    behind = device.record(other)
    assert device.land_all() == 0
    assert not device.synchronize(event, 10.0)
    assert not device.synchronize(behind, 10.0)
    device.release(other)
    assert not device.land_next(hung)
    device.release(hung)
    assert not memory.cpu.any()
    assert device.land_all() == 2
    assert device.is_done(behind)


def test_an_event_on_a_hung_stream_is_not_done(device: ManualDevice) -> None:
    stream = device.create_stream("hung")
    device.hang(stream)
    event = device.record(stream)
    assert not device.is_done(event)
    device.release()
    assert device.is_done(event)


def test_a_hung_direction_holds_only_its_copies(device: ManualDevice, memory: Memory) -> None:
    stream, other = device.create_stream("both"), device.create_stream("other")
    device.hang_direction(Direction.LOAD)
    device.copy_batch(memory.store(0), stream)
    device.copy_batch(memory.load(1), stream)
    device.copy_batch(memory.store(2), other)
    assert device.land_all() == 2
    assert [plan.direction for plan in device.pending_copies] == [Direction.LOAD]
    device.release(Direction.LOAD)
    assert device.land_all() == 1


def test_landing_by_itself_stops_at_what_is_hung(memory: Memory) -> None:
    device = ManualDevice(auto_land=True)
    stream = device.create_stream("store")
    device.copy_batch(memory.store(0), stream)
    assert device.is_done(device.record(stream))
    device.hang_direction(Direction.STORE)
    device.copy_batch(memory.store(1), stream)
    event = device.record(stream)
    assert not device.is_done(event)
    device.release()
    assert device.is_done(event)
    assert memory.cpu[:, 0].tolist() == [1, 2, 0, 0]


def test_doorbells_ring_once_per_event_and_may_use_the_device(device: ManualDevice) -> None:
    stream = device.create_stream("ringing")
    device.launch(stream, lambda: None)
    events = [device.record(stream), device.record(stream)]
    seen: list[list[bool]] = []

    def ring() -> None:
        seen.append([device.is_done(event) for event in events])
        if len(seen) == 1:
            device.launch(stream, lambda: None)
            events.append(device.record(stream))

    device.add_doorbell(ring)
    device.land_next()
    assert seen == [[True, True], [True, True, False]]
    device.land_next()
    assert seen[2:] == [[True, True, True]]


def test_time_is_the_clocks_or_counts_operations(device: ManualDevice) -> None:
    for made, expected in ((device, 0.003), (ManualDevice(clock=ManualClock()), 5.0)):
        stream = made.create_stream("timed")
        start = made.record(stream)
        for _ in range(3):
            made.launch(stream, lambda: None)
        end = made.record(stream)
        with pytest.raises(StateError):
            made.elapsed_seconds(start, end)
        made.hang(stream)
        assert not made.synchronize(end, 5.0)
        made.release()
        assert made.synchronize(end, 5.0)
        assert made.elapsed_seconds(start, end) == pytest.approx(expected)


def test_no_byte_moves_after_close(device: ManualDevice, memory: Memory) -> None:
    device.copy_batch(memory.store(0), device.create_stream("store"))
    device.close()
    assert device.land_all() == 0
    assert not memory.cpu.any()
