"""The race detector: it finds seeded faults, stays silent on right programs, and agrees with a brute-force search."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np
import pytest
from numpy.typing import NDArray

from aiokvoffload.devices.base import CopyPlan, Device, Direction, Event, Stream
from aiokvoffload.devices.host import HostDevice
from aiokvoffload.errors import DeviceError, InvalidRequestError
from aiokvoffload.testing.device import ManualDevice
from aiokvoffload.testing.device_contract import DeviceContract
from aiokvoffload.testing.device_memory import plan_of
from aiokvoffload.testing.order import OrderChecker

PAGE = 16


class TestOrderCheckerAroundManualDevice(DeviceContract):
    def make_device(self) -> OrderChecker:
        return OrderChecker(ManualDevice())

    def hold(self, device: Device, stream: Stream) -> Callable[[], None]:
        assert isinstance(device, OrderChecker)
        manual = device.wrapped
        assert isinstance(manual, ManualDevice)
        manual.hang(stream)
        return lambda: manual.release(stream)


class TestOrderCheckerAroundHostDevice(DeviceContract):
    def make_device(self) -> OrderChecker:
        return OrderChecker(HostDevice())


class Setting:
    """An engine with one GPU tensor and slots of two blocks each."""

    def __init__(self, *, strict: bool = False) -> None:
        self.gpu: NDArray[np.uint8] = np.zeros((8, PAGE), np.uint8)
        self.cpu: NDArray[np.uint8] = np.zeros((4, 2 * PAGE), np.uint8)
        self.manual = ManualDevice()
        self.device = OrderChecker(self.manual, strict=strict)
        self.device.watch("gpu", self.gpu.ctypes.data, 8, PAGE)
        self.device.watch("cpu", self.cpu.ctypes.data, 4, 2 * PAGE, cell_bytes=PAGE)
        self.compute = self.device.create_stream("compute")
        self.stores = self.device.create_stream("stores")
        self.loads = self.device.create_stream("loads")

    def plan(self, direction: Direction, gpu_block: int, half_slot: int, block_count: int = 1) -> CopyPlan:
        ends = [self.gpu.ctypes.data + gpu_block * PAGE, self.cpu.ctypes.data + half_slot * PAGE]
        source, destination = ends if direction is Direction.STORE else ends[::-1]
        return plan_of(direction, [(source, destination, block_count * PAGE)], self)

    def store(self, gpu_block: int, half_slot: int, block_count: int = 1) -> Event:
        self.device.copy_batch(self.plan(Direction.STORE, gpu_block, half_slot, block_count), self.stores)
        return self.device.record(self.stores)

    def load(self, gpu_block: int, half_slot: int, block_count: int = 1) -> Event:
        self.device.copy_batch(self.plan(Direction.LOAD, gpu_block, half_slot, block_count), self.loads)
        return self.device.record(self.loads)

    def compute_on(self, reads: Sequence[int] = (), writes: Sequence[int] = ()) -> Event:
        self.device.launch(
            self.compute, lambda: None, reads=[("gpu", reads)], writes=[("gpu", writes)], label="a forward pass"
        )
        return self.device.record(self.compute)

    @property
    def found(self) -> list[tuple[str, str, int, str, str]]:
        assert self.device.violation_count == len(self.device.violations)
        return [(v.kind, v.region, v.row, v.stream, v.earlier_stream) for v in self.device.violations]


@pytest.fixture
def setting() -> Setting:
    return Setting()


def test_a_right_program_is_silent(setting: Setting) -> None:
    device = setting.device
    written = setting.compute_on(writes=[0, 1, 2])
    device.wait_event(setting.stores, written)
    stored = setting.store(0, 0, 3)
    setting.manual.land_all()
    assert device.is_done(stored)
    setting.compute_on(writes=[0, 1, 2])
    setting.load(4, 1, 2)
    loaded = setting.load(6, 0)
    device.wait_event(setting.compute, loaded)
    computed = setting.compute_on(reads=[4, 5, 6], writes=[7])
    assert device.synchronize(computed, 1.0)
    device.host_access(reads=[("gpu", [4, 5, 6, 7]), ("cpu", [0, 1])])
    assert setting.found == []
    assert device.access_count > 20


def test_a_store_that_does_not_wait_for_the_compute_stream_reads_too_early(setting: Setting) -> None:
    setting.compute_on(writes=[1])
    setting.store(1, 0)
    assert setting.found == [("read-too-early", "gpu", 1, "stores", "compute")]
    text = str(setting.device.violations[0])
    assert "a forward pass on compute" in text
    assert "GPU->CPU" in text
    assert "row 1 of 'gpu'" in text


def test_a_wait_for_an_older_event_is_not_enough(setting: Setting) -> None:
    older = setting.compute_on(writes=[0])
    setting.compute_on(writes=[1])
    setting.device.wait_event(setting.stores, older)
    setting.store(0, 0)
    setting.store(1, 1)
    assert setting.found == [("read-too-early", "gpu", 1, "stores", "compute")]


@pytest.mark.parametrize("fault", ["not asked", "not done", "none"])
def test_a_block_is_free_only_once_its_store_is_known_done(setting: Setting, fault: str) -> None:
    stored = setting.store(2, 0)
    if fault != "not done":
        setting.manual.land_all()
    if fault != "not asked":
        setting.device.is_done(stored)
    setting.compute_on(writes=[2])
    expected = [] if fault == "none" else [("overwrite-too-early", "gpu", 2, "compute", "stores")]
    assert setting.found == expected


@pytest.mark.parametrize("is_seen", [True, False])
def test_the_host_reads_a_loaded_block_only_once_it_has_seen_the_event(setting: Setting, is_seen: bool) -> None:
    loaded = setting.load(3, 0)
    setting.manual.land_all()
    if is_seen:
        assert setting.device.is_done(loaded)
    setting.device.host_access(reads=[("gpu", np.array([3]))])
    assert setting.found == ([] if is_seen else [("read-too-early", "gpu", 3, "host", "loads")])


def test_compute_on_blocks_that_are_still_being_loaded_is_found(setting: Setting) -> None:
    setting.load(0, 0, 4)
    setting.compute_on(reads=[2, 6])
    assert setting.found == [("read-too-early", "gpu", 2, "compute", "loads")]


@pytest.mark.parametrize("is_ordered", [True, False])
def test_a_load_and_a_store_that_share_a_slot_are_ordered(setting: Setting, is_ordered: bool) -> None:
    stored = setting.store(0, 2, 2)
    if is_ordered:
        setting.device.wait_event(setting.loads, stored)
    setting.load(4, 2, 2)
    setting.store(1, 0)
    setting.load(6, 1)
    assert setting.found == ([] if is_ordered else [("read-too-early", "cpu", 1, "loads", "stores")])


def test_a_slot_is_overwritten_only_after_it_was_loaded(setting: Setting) -> None:
    setting.load(0, 0)
    setting.store(5, 1)
    assert setting.found == []
    setting.store(6, 0)
    assert setting.found == [("overwrite-too-early", "cpu", 0, "stores", "loads")]


def test_order_is_known_through_a_third_stream(setting: Setting) -> None:
    device = setting.device
    written = setting.compute_on(writes=[0])
    device.wait_event(setting.loads, written)
    device.wait_event(setting.stores, device.record(setting.loads))
    setting.store(0, 0)
    assert setting.found == []


def test_readers_do_not_conflict(setting: Setting) -> None:
    setting.store(0, 0)
    setting.compute_on(reads=[0])
    setting.device.host_access(reads=[("gpu", [0])])
    assert setting.found == []
    setting.device.host_access(writes=[("gpu", [0])], label="zeroing")
    assert setting.found == [("overwrite-too-early", "gpu", 0, "host", "compute")]
    assert setting.device.violations[0].access == "zeroing"


def test_what_the_host_did_before_a_submission_is_known_and_after_it_is_not(setting: Setting) -> None:
    setting.device.host_access(writes=[("cpu", [0])])
    setting.load(0, 0)
    setting.device.host_access(writes=[("cpu", [0])])
    assert setting.found == [("overwrite-too-early", "cpu", 0, "host", "loads")]


def test_a_failed_event_orders_what_comes_after_it(setting: Setting) -> None:
    setting.manual.fail_next(None, "lost")
    stored = setting.store(2, 0)
    setting.manual.land_all()
    with pytest.raises(DeviceError, match="lost"):
        setting.device.is_done(stored)
    setting.compute_on(writes=[2])
    assert setting.found == []


def test_a_refused_batch_has_accessed_nothing(setting: Setting) -> None:
    setting.manual.refuse_next("full")
    with pytest.raises(DeviceError, match="full"):
        setting.store(2, 0)
    setting.compute_on(writes=[2])
    assert setting.found == []


def test_the_same_row_is_reported_once_per_operation(setting: Setting) -> None:
    setting.store(0, 0, 4)
    setting.load(4, 0, 4)
    assert [row for _, region, row, _, _ in setting.found if region == "cpu"] == [0, 1]


def test_violations_are_bounded_and_counted(setting: Setting) -> None:
    device = OrderChecker(setting.manual, most_violations=3)
    device.watch("gpu", setting.gpu.ctypes.data, 8, PAGE)
    streams = [device.create_stream("one"), device.create_stream("two")]
    for stream in streams:
        device.launch(stream, lambda: None, writes=[("gpu", range(8))])
    assert device.violation_count == 8
    assert [violation.row for violation in device.violations] == [0, 1, 2]


def test_bytes_nobody_watches_matter_only_when_strict() -> None:
    outside = np.zeros(64, np.uint8)
    for strict in (False, True):
        setting = Setting(strict=strict)
        inside = plan_of(Direction.LOAD, [(setting.cpu.ctypes.data, setting.gpu.ctypes.data, 64)])
        overrun = plan_of(Direction.LOAD, [(setting.cpu.ctypes.data + 96, outside.ctypes.data, 48)])
        setting.device.copy_batch(inside, setting.loads)
        setting.device.copy_batch(overrun, setting.loads)
        addresses = [overrun.sources[0], overrun.destinations[0]] if strict else []
        assert [(v.kind, v.row) for v in setting.device.violations] == [("outside", at) for at in addresses]
        assert all("leaves the watched regions" in str(violation) for violation in setting.device.violations)
        setting.device.close()


def test_regions_are_checked_and_may_interleave(setting: Setting) -> None:
    device = OrderChecker(setting.manual)
    memory = np.zeros((6, 3, PAGE), np.uint8)
    for layer in range(2):
        device.watch(f"layer {layer}", memory[:, layer].ctypes.data, 6, PAGE, row_stride_bytes=3 * PAGE)
    one, two = device.create_stream("one"), device.create_stream("two")
    device.launch(one, lambda: None, writes=[("layer 0", [2]), ("layer 1", [3])])
    target = np.zeros(memory.nbytes, np.uint8)

    def read(start: int, byte_count: int) -> list[tuple[str, int]]:
        found_before = device.violation_count
        source = memory.ctypes.data + start
        device.copy_batch(plan_of(Direction.STORE, [(source, target.ctypes.data, byte_count)]), two)
        return [(violation.region, violation.row) for violation in device.violations[found_before:]]

    row = 3 * PAGE
    assert read(2 * row + PAGE, 2 * PAGE) == []
    assert read(2 * row + PAGE - 1, 2) == [("layer 0", 2)]
    assert read(3 * row, PAGE) == []
    assert read(3 * row, PAGE + 1) == [("layer 1", 3)]
    assert read(2 * row + 2 * PAGE, PAGE) == []
    assert read(0, memory.nbytes) == [("layer 0", 2), ("layer 1", 3)]
    with pytest.raises(InvalidRequestError, match="already"):
        device.watch("layer 0", 64, 1, 1)
    for sizes in ({"row_bytes": 0}, {"row_bytes": 8, "cell_bytes": 9}, {"row_bytes": 8, "row_stride_bytes": 7}):
        with pytest.raises(InvalidRequestError, match="row_bytes"):
            device.watch("bad", 64, 1, **sizes)
    for accesses in ([("layer 9", [0])], [("layer 1", [6])], [("layer 1", [-1])]):
        with pytest.raises(InvalidRequestError, match="layer"):
            device.launch(one, lambda: None, reads=accesses)
