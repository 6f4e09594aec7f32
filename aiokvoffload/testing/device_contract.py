"""The device contract as tests: subclass `DeviceContract` and say how to make the device."""

# ruff: noqa: S101 - assertions are what a contract suite consists of

from __future__ import annotations

import gc
import itertools
import threading
import weakref
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator

import numpy as np
import pytest
from numpy.typing import NDArray

from aiokvoffload.devices.base import CopyPlan, Device, Direction, Event, SimulatedDevice, Stream
from aiokvoffload.errors import ClosedError, DeviceError, InvalidRequestError, StateError
from aiokvoffload.testing.device_memory import DeviceMemory, pattern, plan_of, scattered

PATIENCE_SECONDS = 60.0
"""Bounds a failing test; a passing one never waits for it."""


class DeviceContract(ABC):
    """What `aiokvoffload.devices.base` promises of every device.

    ::

        class TestMyDevice(DeviceContract):
            def make_device(self) -> MyDevice:
                return MyDevice()
    """

    @abstractmethod
    def make_device(self) -> Device:
        """Return a new device; the suite closes it."""

    def make_device_memory(self, device: Device, content: NDArray[np.uint8]) -> DeviceMemory:
        """Return device memory that holds `content`."""
        return DeviceMemory(content)

    def make_host_memory(self, content: NDArray[np.uint8]) -> NDArray[np.uint8]:
        """Return host memory that holds `content`, of the kind that slots are made of.

        A device that copies other memory only while the caller waits overrides it.
        """
        return content.copy()

    def hold(self, device: Device, stream: Stream) -> Callable[[], None]:
        """Keep work put into `stream` from now on from running; return what lets it go on.

        The default launches work that waits. A device that runs work in the caller's thread overrides it; one that
        cannot be held up skips the tests that need it.
        """
        if not isinstance(device, SimulatedDevice):
            pytest.skip("nothing holds up a stream of this device")
        gate = threading.Event()

        def wait() -> None:
            if not gate.wait(PATIENCE_SECONDS):
                raise TimeoutError("the test never opened the gate")

        device.launch(stream, wait)
        return gate.set

    @pytest.fixture
    def device(self) -> Iterator[Device]:
        """A device, closed after the test."""
        device = self.make_device()
        yield device
        device.close()

    # Order and events

    def test_an_event_on_an_empty_stream_is_done(self, device: Device) -> None:
        """Nothing stands before it."""
        event = device.record(device.create_stream("empty"))
        finish(device, event)
        assert device.is_done(event)

    def test_an_event_covers_what_stands_before_it_and_no_more(self, device: Device) -> None:
        """Work put into the stream later does not hold it up."""
        stream = device.create_stream("one")
        before = device.record(stream)
        finish(device, before)
        release = self.hold(device, stream)
        after = device.record(stream)
        assert device.is_done(before)
        assert not device.is_done(after)
        release()
        finish(device, after)

    def test_a_mark_is_an_event(self, device: Device) -> None:
        """Whether a doorbell rings for it or not, it is done, waited for and timed like any other."""
        stream, other = device.create_stream("marked"), device.create_stream("other")
        release = self.hold(device, stream)
        mark = device.mark(stream)
        device.wait_event(other, mark)
        behind, end = device.record(other), device.record(stream)
        assert not device.is_done(mark)
        assert not device.is_done(behind)
        release()
        for event in (mark, behind, end):
            finish(device, event)
            assert device.is_done(event)
        assert device.elapsed_seconds(mark, end) >= 0.0

    def test_work_of_one_stream_runs_in_order(self, device: Device) -> None:
        """Each batch copies what the one before it has brought."""
        host = [self.make_host_memory(np.zeros(4096, np.uint8)) for _ in range(8)]
        content = pattern(4096)
        host[0][:] = content
        memory = self.make_device_memory(device, np.zeros(4096, np.uint8))
        stream = device.create_stream("chain")
        for source, destination in itertools.pairwise(host):
            device.copy_batch(plan_of(Direction.LOAD, [(source.ctypes.data, memory.address, 4096)], source), stream)
            device.copy_batch(
                plan_of(Direction.STORE, [(memory.address, destination.ctypes.data, 4096)], destination), stream
            )
        finish(device, device.record(stream))
        assert np.array_equal(host[-1], content)
        assert np.array_equal(memory.read(), content)

    def test_launched_work_runs_in_order(self, device: Device) -> None:
        """Launches and copies share one order."""
        simulated = only_simulated(device)
        stream = device.create_stream("work")
        source, destination = np.zeros(8, np.uint8), np.zeros(8, np.uint8)
        seen: list[int] = []
        for value in range(1, 6):
            simulated.launch(stream, lambda value=value: source.fill(value))  # type: ignore[misc]
            device.copy_batch(
                plan_of(Direction.STORE, [(source.ctypes.data, destination.ctypes.data, 8)], source, destination),
                stream,
            )
            simulated.launch(stream, lambda: seen.append(int(destination[0])))
        finish(device, device.record(stream))
        assert seen == [1, 2, 3, 4, 5]

    def test_streams_do_not_hold_each_other_up(self, device: Device) -> None:
        """Work on one goes on while another is stuck."""
        stuck, free = device.create_stream("stuck"), device.create_stream("free")
        release = self.hold(device, stuck)
        stuck_event, free_event = device.record(stuck), device.record(free)
        finish(device, free_event)
        assert not device.is_done(stuck_event)
        release()
        finish(device, stuck_event)

    def test_a_wait_orders_streams_and_not_the_host(self, device: Device) -> None:
        """The waiting stream starts after the event; everything is submitted while the event is not done."""
        content = pattern(1000)
        source, target = (self.make_host_memory(start) for start in (content, np.zeros(1000, np.uint8)))
        memory = self.make_device_memory(device, np.zeros(1000, np.uint8))
        first, second = device.create_stream("first"), device.create_stream("second")
        release = self.hold(device, first)
        device.copy_batch(plan_of(Direction.LOAD, [(source.ctypes.data, memory.address, 1000)], source), first)
        loaded = device.record(first)
        device.wait_event(second, loaded)
        device.copy_batch(plan_of(Direction.STORE, [(memory.address, target.ctypes.data, 1000)], target), second)
        stored = device.record(second)
        assert not device.is_done(loaded)
        assert not device.is_done(stored)
        assert not target.any()
        release()
        finish(device, stored)
        assert device.is_done(loaded)
        assert np.array_equal(target, content)

    def test_a_wait_for_a_done_event_holds_nothing_up(self, device: Device) -> None:
        """What is over orders nothing any more."""
        first, second = device.create_stream("first"), device.create_stream("second")
        event = device.record(first)
        finish(device, event)
        device.wait_event(second, event)
        device.wait_event(first, event)
        finish(device, device.record(second))
        finish(device, device.record(first))

    def test_synchronize_gives_up_at_its_timeout(self, device: Device) -> None:
        """It answers False, and later True."""
        stream = device.create_stream("slow")
        release = self.hold(device, stream)
        event = device.record(stream)
        assert device.synchronize(event, 0.0) is False
        assert device.synchronize(event, 0.001) is False
        release()
        assert device.synchronize(event, PATIENCE_SECONDS) is True
        assert device.synchronize(event, 0.0) is True

    def test_elapsed_time_is_known_once_both_events_are_over(self, device: Device) -> None:
        """It is never negative, and additive."""
        stream = device.create_stream("timed")
        first = device.record(stream)
        finish(device, first)
        release = self.hold(device, stream)
        second = device.record(stream)
        with pytest.raises(StateError):
            device.elapsed_seconds(first, second)
        release()
        third = device.record(stream)
        finish(device, third)
        parts = device.elapsed_seconds(first, second), device.elapsed_seconds(second, third)
        assert min(parts) >= 0.0
        assert device.elapsed_seconds(first, third) == pytest.approx(sum(parts), rel=1e-3, abs=1e-5)

    # Copies

    @pytest.mark.parametrize("seed", range(6))
    @pytest.mark.parametrize("direction", list(Direction))
    def test_batches_move_the_right_bytes(self, device: Device, direction: Direction, seed: int) -> None:
        """Scattered copies of many sizes arrive whole, and no byte beside them changes."""
        random = np.random.default_rng(seed)
        sizes = random.integers(1, [16, 700, 70_000, 300_000, 70_000, 700][seed], size=[3000, 1500, 90, 9, 1, 0][seed])
        if seed == 3:
            sizes[0] = 5_000_000
        from_offsets, to_offsets = scattered(random, sizes), scattered(random, sizes)
        total = int(sizes.sum()) * 2 + 4096
        origin = random.integers(0, 256, total, dtype=np.uint8)
        before = random.integers(0, 256, total, dtype=np.uint8)
        expected = before.copy()
        for start, end, size in zip(from_offsets, to_offsets, sizes, strict=True):
            expected[end : end + size] = origin[start : start + size]

        host = self.make_host_memory(before if direction is Direction.STORE else origin)
        memory = self.make_device_memory(device, origin if direction is Direction.STORE else before)
        source, destination = memory.address, host.ctypes.data
        if direction is Direction.LOAD:
            source, destination = destination, source
        stream = device.create_stream("copies")
        plan = CopyPlan(source + from_offsets, destination + to_offsets, sizes, direction, (host, memory))
        assert plan.total_bytes == sizes.sum()
        device.copy_batch(plan, stream)
        finish(device, device.record(stream))
        assert np.array_equal(host if direction is Direction.STORE else memory.read(), expected)

    def test_a_plan_keeps_its_owners_until_it_is_over(self, device: Device) -> None:
        """The caller may forget the plan as soon as it is submitted."""
        stream = device.create_stream("kept")
        content = pattern(64)
        memory = self.make_device_memory(device, np.zeros(64, np.uint8))
        source = self.make_host_memory(content)
        owner = weakref.ref(source)
        release = self.hold(device, stream)
        device.copy_batch(plan_of(Direction.LOAD, [(source.ctypes.data, memory.address, 64)], source), stream)
        del source
        gc.collect()
        assert owner() is not None
        release()
        finish(device, device.record(stream))
        assert np.array_equal(memory.read(), content)

    @pytest.mark.parametrize("fault", ["lengths", "zero", "negative", "address", "type"])
    def test_a_refused_batch_runs_nothing(self, device: Device, fault: str) -> None:
        """One bad copy refuses the whole batch, at once; the stream stays usable."""
        stream = device.create_stream("refusing")
        host = self.make_host_memory(pattern(64))
        memory = self.make_device_memory(device, np.zeros(64, np.uint8))
        sources = np.array([host.ctypes.data, host.ctypes.data + 32], np.int64)
        destinations = np.array([memory.address, memory.address + 32], np.int64)
        byte_counts = np.array([32, 32], np.int64)
        match fault:
            case "lengths":
                sources = sources[:1]
            case "zero":
                byte_counts[1] = 0
            case "negative":
                byte_counts[1] = -32
            case "address":
                sources[1] = 0
            case _:
                byte_counts = byte_counts.astype(np.int32)
        with pytest.raises(DeviceError):
            device.copy_batch(CopyPlan(sources, destinations, byte_counts, Direction.LOAD, (host, memory)), stream)
        event = device.record(stream)
        finish(device, event)
        assert device.is_done(event)
        assert not memory.read().any()
        device.copy_batch(plan_of(Direction.LOAD, [(host.ctypes.data, memory.address, 64)], host), stream)
        finish(device, device.record(stream))
        assert np.array_equal(memory.read(), host)

    # Failures

    def test_a_failure_belongs_to_the_next_event_of_its_stream(self, device: Device) -> None:
        """Events before it, after that one, and on other streams are clean."""
        simulated = only_simulated(device)
        stream, other = device.create_stream("failing"), device.create_stream("other")
        release = self.hold(device, stream)
        before = device.record(stream)
        simulated.launch(stream, fail)
        failed, after = device.record(stream), device.record(stream)
        elsewhere = device.record(other)
        release()
        for event in (before, failed, after, elsewhere):
            assert device.synchronize(event, PATIENCE_SECONDS)
        for _ in range(2):
            with pytest.raises(DeviceError, match="on purpose"):
                device.is_done(failed)
        assert device.is_done(before)
        assert device.is_done(after)
        assert device.is_done(elsewhere)
        assert device.elapsed_seconds(before, failed) >= 0.0

    def test_work_behind_a_failure_still_runs(self, device: Device) -> None:
        """A failed event is over: the stream goes on, and so does a stream that waits for it."""
        simulated = only_simulated(device)
        failing, waiting = device.create_stream("failing"), device.create_stream("waiting")
        ran: list[str] = []
        release = self.hold(device, failing)
        simulated.launch(failing, fail)
        simulated.launch(failing, lambda: ran.append("failing"))
        failed = device.record(failing)
        device.wait_event(waiting, failed)
        simulated.launch(waiting, lambda: ran.append("waiting"))
        waited = device.record(waiting)
        release()
        finish(device, waited)
        assert device.is_done(waited)
        assert ran == ["failing", "waiting"]
        with pytest.raises(DeviceError):
            device.is_done(failed)

    # Pinning, doorbells, the end

    def test_pinned_ranges_do_not_overlap(self, device: Device) -> None:
        """Pinning twice is refused and changes nothing; an unpinned range can be pinned again."""
        if type(device).pin is Device.pin:
            pytest.skip("this device pins nothing")
        host = np.zeros(64 * 1024, np.uint8)
        address = (host.ctypes.data + 4095) // 4096 * 4096
        device.pin(address + 8192, 8192)
        for start, byte_count in ((8192, 8192), (0, 12288), (12288, 8192), (0, 32768), (12288, 4096)):
            with pytest.raises(DeviceError):
                device.pin(address + start, byte_count)
        device.pin(address, 8192)
        device.pin(address + 16384, 4096)
        with pytest.raises(DeviceError):
            device.unpin(address + 4096)
        for start in (8192, 0, 16384):
            device.unpin(address + start)
        with pytest.raises(DeviceError):
            device.unpin(address)
        device.pin(address, 20480)
        device.unpin(address)

    def test_a_doorbell_rings_after_an_event_until_it_is_taken_away(self, device: Device) -> None:
        """The ring follows the event, so that who polls on it sees the event done."""
        stream = device.create_stream("ringing")
        doorbell = Doorbell()
        remove = device.add_doorbell(doorbell.ring)
        if remove is None:
            pytest.skip("this device has no doorbell")
        release = self.hold(device, stream)
        event = device.record(stream)
        assert doorbell.count == 0
        release()
        finish(device, event)
        assert doorbell.rung.wait(PATIENCE_SECONDS)
        remove()
        remove()
        finish(device, device.record(stream))
        count = doorbell.count
        for _ in range(3):
            finish(device, device.record(stream))
        assert doorbell.count == count

    def test_a_doorbell_that_raises_harms_nobody(self, device: Device) -> None:
        """Events go on, and so do the other doorbells."""
        doorbell = Doorbell()
        if device.add_doorbell(fail) is None:
            pytest.skip("this device has no doorbell")
        device.add_doorbell(doorbell.ring)
        stream = device.create_stream("ringing")
        for _ in range(2):
            doorbell.rung.clear()
            event = device.record(stream)
            finish(device, event)
            assert device.is_done(event)
            assert doorbell.rung.wait(PATIENCE_SECONDS)

    def test_only_its_own_streams_are_adopted(self, device: Device) -> None:
        """A stream of the device can be adopted; a stranger is refused with a sentence."""
        stream = device.adopt_stream(device.create_stream("own"))
        finish(device, device.record(stream))
        with pytest.raises(InvalidRequestError, match="create_stream"):
            device.adopt_stream(object())

    def test_close_is_idempotent_and_final(self, device: Device) -> None:
        """Calls after it are refused."""
        stream = device.create_stream("closing")
        event = device.record(stream)
        finish(device, event)
        device.close()
        device.close()
        with pytest.raises(ClosedError):
            device.create_stream("late")
        with pytest.raises(ClosedError):
            device.record(stream)
        with pytest.raises(ClosedError):
            device.is_done(event)
        with pytest.raises(ClosedError):
            device.copy_batch(plan_of(Direction.LOAD, []), stream)


class Doorbell:
    """A doorbell that counts."""

    def __init__(self) -> None:
        self.count = 0
        self.rung = threading.Event()

    def ring(self) -> None:
        """Count one ring."""
        self.count += 1
        self.rung.set()


def fail() -> None:
    """Raise what a test expects to find again."""
    raise RuntimeError("on purpose")


def finish(device: Device, event: Event) -> None:
    """Wait until `event` is over."""
    assert device.synchronize(event, PATIENCE_SECONDS), "the event is never over"


def only_simulated(device: Device) -> SimulatedDevice:
    """Return `device` if work can be launched on it, and skip the test if not."""
    if not isinstance(device, SimulatedDevice):
        pytest.skip("no work can be launched on this device")
    return device
