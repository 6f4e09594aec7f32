"""The contract of host memory as tests: subclass `MemoryContract` and say how to make the memory."""

# ruff: noqa: S101 - assertions are what a contract suite consists of

from __future__ import annotations

import gc
import itertools
from abc import ABC, abstractmethod

import numpy as np
import pytest
from numpy.typing import NDArray

from aiokvoffload.devices.base import Direction
from aiokvoffload.devices.host import HostDevice
from aiokvoffload.errors import ClosedError, DeviceError, StateError
from aiokvoffload.memory.base import HostMemory, PreparationProgress, PreparationStep, Report
from aiokvoffload.testing.device_memory import DeviceMemory, pattern, plan_of

PATIENCE_SECONDS = 60.0
"""Bounds a failing test; a passing one never waits for it."""


class PinCountingDevice(HostDevice):
    """A host device that shows what is pinned, and can run out of memory that may be.

    Args:
        limit: How many ranges may be pinned at a time.
    """

    def __init__(self, *, limit: int | None = None) -> None:
        super().__init__()
        self.limit = limit
        self.pinned: dict[int, int] = {}

    def pin(self, address: int, byte_count: int) -> None:
        """Pin a range, if there is room for one more."""
        if self.limit is not None and len(self.pinned) >= self.limit:
            raise DeviceError("no more memory may be pinned")
        super().pin(address, byte_count)
        self.pinned[address] = byte_count

    def unpin(self, address: int) -> None:
        """Unpin a range."""
        super().unpin(address)
        del self.pinned[address]

    def is_pinned(self, address: int, byte_count: int) -> bool:
        """Return whether one pinned range holds all of these bytes."""
        return any(start <= address and address + byte_count <= start + length for start, length in self.pinned.items())


class StopPreparing(Exception):
    """Raised by a report, to end a preparation."""


class MemoryContract(ABC):
    """What `aiokvoffload.memory.base` promises of all host memory.

    ::

        class TestMyMemory(MemoryContract):
            def make_memory(self, slot_count: int, slot_bytes: int, device: Device) -> MyMemory:
                return MyMemory(slot_count, slot_bytes, device)
    """

    @abstractmethod
    def make_memory(self, slot_count: int, slot_bytes: int, device: PinCountingDevice) -> HostMemory:
        """Return new memory, not prepared, which registers itself with the device if it does so at all."""

    @pytest.mark.parametrize(("slot_count", "slot_bytes"), [(1, 1), (3, 100), (5, 4096), (2, 12289)])
    def test_slots_are_zeroed_and_apart_from_each_other(self, slot_count: int, slot_bytes: int) -> None:
        """Before and after the preparation."""
        memory = self.make_memory(slot_count, slot_bytes, PinCountingDevice())
        assert (memory.slot_count, memory.slot_bytes) == (slot_count, slot_bytes)
        assert memory.slot_stride_bytes >= slot_bytes
        assert memory.buffer.dtype == np.uint8
        assert memory.buffer.ctypes.data == memory.address
        assert not any(slot_of(memory, slot).any() for slot in range(slot_count))
        memory.prepare()
        assert not any(slot_of(memory, slot).any() for slot in range(slot_count))
        for slot in range(slot_count):
            slot_of(memory, slot)[:] = slot + 1
        for slot in range(slot_count):
            assert np.all(slot_of(memory, slot) == slot + 1)
        memory.close()

    def test_a_device_copies_to_slots_and_back(self) -> None:
        """By address, as transfers do."""
        device = PinCountingDevice()
        memory = self.make_memory(3, 1000, device)
        memory.prepare()
        source, target = DeviceMemory(pattern(1000)), DeviceMemory(np.zeros(1000, np.uint8))
        slot_address = memory.address + 2 * memory.slot_stride_bytes
        stream = device.create_stream("copies")
        device.copy_batch(
            plan_of(Direction.STORE, [(source.address, slot_address, 1000)], memory.buffer, source), stream
        )
        device.copy_batch(
            plan_of(Direction.LOAD, [(slot_address, target.address, 1000)], memory.buffer, target), stream
        )
        assert device.synchronize(device.record(stream), PATIENCE_SECONDS)
        assert np.array_equal(slot_of(memory, 2), pattern(1000))
        assert np.array_equal(target.read(), pattern(1000))
        assert not slot_of(memory, 1).any()
        memory.close()
        device.close()

    def test_each_piece_lies_in_one_registration(self) -> None:
        """A driver refuses a copy that crosses from one into another."""
        device = PinCountingDevice()
        memory = self.make_memory(7, 5000, device)
        assert not device.pinned
        memory.prepare()
        if memory.is_pinned:
            for first in range(0, 7, memory.slots_per_piece):
                count = min(memory.slots_per_piece, 7 - first)
                piece_bytes = (count - 1) * memory.slot_stride_bytes + 5000
                assert device.is_pinned(memory.address + first * memory.slot_stride_bytes, piece_bytes)
        else:
            assert not device.pinned
        memory.close()

    def test_closing_gives_back_what_is_pinned(self) -> None:
        """As often as one likes."""
        device = PinCountingDevice()
        memory = self.make_memory(2, 64, device)
        memory.prepare()
        for _ in range(2):
            memory.close()
            assert not device.pinned
            assert not memory.is_pinned
        with pytest.raises(ClosedError):
            _ = memory.buffer

    def test_memory_that_nobody_closes_is_not_left_pinned(self) -> None:
        """The registration would outlive the mapping."""
        device = PinCountingDevice()
        memory = self.make_memory(2, 64, device)
        memory.prepare()
        buffer = memory.buffer
        was_pinned = len(device.pinned)
        del memory
        gc.collect()
        # A copy may still be reading what it holds.
        assert len(device.pinned) == was_pinned
        del buffer
        gc.collect()
        assert not device.pinned

    def test_a_device_that_closes_first_is_no_trouble(self) -> None:
        """Its registrations went with it."""
        device = PinCountingDevice()
        memory = self.make_memory(2, 64, device)
        memory.prepare()
        device.close()
        memory.close()
        assert not memory.is_pinned

    def test_bytes_outlive_the_memory_as_long_as_anybody_holds_them(self) -> None:
        """A copy that has outlived its deadline does."""
        memory = self.make_memory(2, 4096, PinCountingDevice())
        memory.prepare()
        slot = slot_of(memory, 1)
        slot[:] = 5
        memory.close()
        del memory
        gc.collect()
        assert np.all(slot == 5)

    @pytest.mark.parametrize("limit", [0, 1])
    def test_memory_that_cannot_be_pinned_is_slower_not_wrong(self, limit: int) -> None:
        """Nor is half of it left pinned."""
        device = PinCountingDevice(limit=limit)
        memory = self.make_memory(9, 8192, device)
        memory.prepare()
        assert memory.is_pinned == bool(device.pinned)
        slot_of(memory, 8)[:] = 1
        assert not slot_of(memory, 7).any()
        memory.close()
        assert not device.pinned

    def test_progress_is_told_and_reaches_its_end(self) -> None:
        """Of each step, in bytes that never shrink."""
        told: list[PreparationProgress] = []
        memory = self.make_memory(4, 8192, PinCountingDevice())
        memory.prepare(told.append)
        for step in PreparationStep:
            steps = [progress for progress in told if progress.step is step]
            done = [progress.done_bytes for progress in steps]
            assert done == sorted(done)
            assert all(0 <= progress.done_bytes <= progress.total_bytes for progress in steps)
            if step is not PreparationStep.WAITING and steps:
                assert steps[-1].done_bytes == steps[-1].total_bytes
        memory.close()

    def test_a_report_that_raises_ends_the_preparation_and_leaves_nothing_pinned(self) -> None:
        """Whichever report it is; that is how a cancelled opening stops."""
        told: list[PreparationProgress] = []
        memory = self.make_memory(4, 8192, PinCountingDevice())
        memory.prepare(told.append)
        memory.close()
        for count in range(len(told)):
            device = PinCountingDevice()
            memory = self.make_memory(4, 8192, device)
            with pytest.raises(StopPreparing):
                memory.prepare(stop_at(count))
            assert not device.pinned
            assert not memory.is_pinned
            memory.close()

    def test_memory_is_prepared_once(self) -> None:
        """Once more would find bytes in it."""
        memory = self.make_memory(2, 64, PinCountingDevice())
        memory.prepare()
        slot_of(memory, 0)[:] = 3
        with pytest.raises(StateError):
            memory.prepare()
        assert np.all(slot_of(memory, 0) == 3)
        memory.close()


def stop_at(number: int) -> Report:
    """Return a report that raises `StopPreparing` when it is called for that time, from 0."""
    numbers = itertools.count()

    def report(_: PreparationProgress) -> None:
        if next(numbers) >= number:
            raise StopPreparing

    return report


def slot_of(memory: HostMemory, slot: int) -> NDArray[np.uint8]:
    """Return the bytes of a slot."""
    start = slot * memory.slot_stride_bytes
    return memory.buffer[start : start + memory.slot_bytes]
