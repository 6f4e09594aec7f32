"""Pinned memory: zeroed slots that stay as long as anybody needs them."""

from __future__ import annotations

import logging

import numpy as np
import pytest

from aiokvoffload.errors import ConfigurationError, DeviceError
from aiokvoffload.memory.pinned import PinnedMemory
from aiokvoffload.testing.device import ManualDevice


class RefusingDevice(ManualDevice):
    def pin(self, address: int, byte_count: int) -> None:
        raise DeviceError("no more pinned memory")


class WatchedDevice(ManualDevice):
    def __init__(self) -> None:
        super().__init__()
        self.ranges: dict[int, int] = {}

    def pin(self, address: int, byte_count: int) -> None:
        super().pin(address, byte_count)
        self.ranges[address] = byte_count

    def unpin(self, address: int) -> None:
        super().unpin(address)
        del self.ranges[address]


def test_slots_are_zeroed_and_next_to_each_other() -> None:
    memory = PinnedMemory(3, 100, ManualDevice())
    assert (memory.slot_count, memory.slot_bytes, memory.slot_stride_bytes) == (3, 100, 100)
    assert memory.buffer.shape == (300,)
    assert not memory.buffer.any()
    assert memory.address == memory.buffer.ctypes.data
    memory.buffer[100:200] = 7
    assert memory.buffer.reshape(3, 100)[1].tolist() == [7] * 100


def test_memory_is_pinned_until_it_is_closed() -> None:
    device = WatchedDevice()
    memory = PinnedMemory(2, 64, device)
    assert memory.is_pinned
    assert device.ranges == {memory.address: 128}
    memory.close()
    memory.close()
    assert device.ranges == {}
    assert not memory.is_pinned


def test_bytes_outlive_the_memory_as_long_as_anybody_holds_them() -> None:
    memory = PinnedMemory(1, 1 << 16, ManualDevice())
    buffer = memory.buffer
    buffer[:] = 5
    memory.close()
    del memory
    assert np.all(buffer == 5)


def test_memory_that_cannot_be_pinned_is_slower_not_wrong(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING):
        memory = PinnedMemory(2, 64, RefusingDevice())
    assert not memory.is_pinned
    assert [record.message for record in caplog.records] == [
        "CPU memory stays pageable, copies will be slower: no more pinned memory"
    ]
    memory.buffer[:] = 1
    memory.close()


@pytest.mark.parametrize(("slot_count", "slot_bytes"), [(1 << 40, 1 << 20), (1 << 62, 4), (0, 64)])
def test_more_memory_than_there_is(slot_count: int, slot_bytes: int) -> None:
    with pytest.raises(ConfigurationError, match=f"cannot map {slot_count * slot_bytes} bytes"):
        PinnedMemory(slot_count, slot_bytes, ManualDevice())
