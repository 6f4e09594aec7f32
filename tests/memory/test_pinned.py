"""Pinned memory: an anonymous mapping, prepared in steps."""

from __future__ import annotations

import logging
import os
import re
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from aiokvoffload.errors import ConfigurationError
from aiokvoffload.memory.base import HostMemory, PreparationStep, ignore_progress
from aiokvoffload.memory.page_calls import PAGE_BYTES, PageCalls
from aiokvoffload.memory.pinned import PinnedMemory
from aiokvoffload.memory.preparation import Preparation, PreparationOptions, row_aligned_pieces
from aiokvoffload.testing.memory_contract import MemoryContract, PinCountingDevice, StopPreparing, stop_at

MIB = 1 << 20


class OldKernel(PageCalls):
    """Cannot populate, nor be advised."""

    def populate(self, address: int, byte_count: int) -> bool:
        return False

    def _advise(self, address: int, byte_count: int, advice: int) -> int:
        return 22


class TestPinnedMemory(MemoryContract):
    def make_memory(self, slot_count: int, slot_bytes: int, device: PinCountingDevice) -> HostMemory:
        return PinnedMemory(slot_count, slot_bytes, device)


class TestPinnedMemoryInPieces(MemoryContract):
    def make_memory(self, slot_count: int, slot_bytes: int, device: PinCountingDevice) -> HostMemory:
        return PinnedMemory(slot_count, slot_bytes, device, options=PreparationOptions(piece_bytes=10_000))


class TestPinnedMemoryOnAnOldKernel(MemoryContract):
    def make_memory(self, slot_count: int, slot_bytes: int, device: PinCountingDevice) -> HostMemory:
        return PinnedMemory(slot_count, slot_bytes, device, options=PreparationOptions(page_calls=OldKernel()))


# Populating


def resident_pages(memory: HostMemory) -> int:
    """Return how many pages of the mapping that `memory` lies in have memory of their own."""
    for mapping in re.split(r"^(?=[0-9a-f]+-[0-9a-f]+ )", Path("/proc/self/smaps").read_text(), flags=re.MULTILINE)[1:]:
        start, end = (int(bound, 16) for bound in mapping.split(maxsplit=1)[0].split("-"))
        if start <= memory.address < end:
            resident = re.search(r"^Rss:\s+(\d+) kB$", mapping, re.MULTILINE)
            assert resident is not None
            return int(resident[1]) * 1024 // PAGE_BYTES
    raise AssertionError("not mapped")


@pytest.mark.parametrize("page_calls", [PageCalls(), OldKernel()])
def test_every_page_is_there_before_the_first_copy(page_calls: PageCalls) -> None:
    memory = PinnedMemory(3, 5 * MIB, PinCountingDevice(), options=PreparationOptions(page_calls=page_calls))
    before = resident_pages(memory)
    memory.prepare()
    # The kernel may have joined the mapping with a neighbour.
    assert resident_pages(memory) - before >= 15 * MIB // PAGE_BYTES
    memory.close()


class RecordingPages(PageCalls):
    """Notes what is populated; fails after some bytes."""

    def __init__(self, room: int = 1 << 60) -> None:
        super().__init__()
        self.room = room
        self.populated: list[range] = []

    def populate(self, address: int, byte_count: int) -> bool:
        self.populated.append(range(address, address + byte_count))
        if sum(map(len, self.populated)) > self.room:
            raise OSError(12, "Cannot allocate memory")
        return True


@pytest.mark.parametrize("thread_count", [1, 3])
def test_threads_populate_all_of_it_once_in_chunks(thread_count: int) -> None:
    pages = RecordingPages()
    options = PreparationOptions(thread_count=thread_count, page_calls=pages, available_bytes=lambda: None)
    # Only mapped, never touched: it costs nothing.
    memory = PinnedMemory(1001, MIB, PinCountingDevice(), options=options)
    told: list[int] = []
    memory.prepare(lambda progress: told.append(progress.done_bytes))
    assert_covers(pages.populated, range(memory.address, memory.address + 1001 * MIB))
    assert len(pages.populated) == 8
    assert told.count(1001 * MIB) == 2  # populated, registered
    memory.close()


def assert_covers(parts: Sequence[range], whole: range) -> None:
    """Check that the parts are the whole, without overlap."""
    end = whole.start
    for part in sorted(parts, key=lambda part: part.start):
        assert part.start == end
        end = part.stop
    assert end == whole.stop


@pytest.mark.parametrize("thread_count", [1, 3])
def test_a_machine_without_that_much_memory_says_so(thread_count: int) -> None:
    device = PinCountingDevice()
    options = PreparationOptions(
        thread_count=thread_count, page_calls=RecordingPages(room=300 * MIB), available_bytes=lambda: None
    )
    memory = PinnedMemory(1001, MIB, device, options=options)
    with pytest.raises(ConfigurationError, match=f"cannot populate {1001 * MIB} bytes of CPU memory: .*Cannot alloc"):
        memory.prepare()
    assert not device.pinned
    memory.close()


def test_room_in_a_file_is_reserved_before_it_is_written_to() -> None:
    mapped = np.zeros(4 * PAGE_BYTES, np.uint8)
    mapped[:] = 1
    preparation = Preparation(mapped, PreparationOptions(page_calls=OldKernel()))
    reserved: list[range] = []

    def reserve(part: range) -> None:
        reserved.append(part)
        if len(reserved) == 2:
            raise OSError(28, "No space left on device")

    parts = [range(PAGE_BYTES), range(2 * PAGE_BYTES, 4 * PAGE_BYTES)]
    with pytest.raises(ConfigurationError, match="No space left on device"):
        preparation.populate(parts, 3 * PAGE_BYTES, ignore_progress, reserve)
    assert reserved == parts
    assert mapped[::PAGE_BYTES].tolist() == [0, 1, 1, 1]


def test_a_stopped_preparation_populates_no_further() -> None:
    pages = RecordingPages()
    memory = PinnedMemory(
        4096,
        MIB,
        PinCountingDevice(),
        options=PreparationOptions(thread_count=2, page_calls=pages, available_bytes=lambda: None),
    )
    with pytest.raises(StopPreparing):
        memory.prepare(stop_at(2))
    assert sum(map(len, pages.populated)) < 1024 * MIB
    memory.close()


@pytest.mark.parametrize(("slot_count", "slot_bytes"), [(1 << 40, 1 << 20), (1 << 62, 4), (0, 64)])
def test_more_memory_than_can_be_mapped(slot_count: int, slot_bytes: int) -> None:
    with pytest.raises(ConfigurationError, match=f"cannot map {slot_count * slot_bytes} bytes"):
        PinnedMemory(slot_count, slot_bytes, PinCountingDevice())


def test_more_memory_than_is_available() -> None:
    for available, is_enough in [(299, False), (300, True), (None, True)]:
        options = PreparationOptions(available_bytes=lambda available=available: available)  # type: ignore[misc]
        if is_enough:
            PinnedMemory(3, 100, PinCountingDevice(), options=options).close()
            continue
        with pytest.raises(ConfigurationError, match="has 299 bytes of memory available, but 300 are needed"):
            PinnedMemory(3, 100, PinCountingDevice(), options=options)


class DeviceOfTheParent(PinCountingDevice):
    def __init__(self) -> None:
        super().__init__()
        self.process = os.getpid()

    def unpin(self, address: int) -> None:
        if os.getpid() != self.process:
            os._exit(2)
        super().unpin(address)


def test_a_forked_process_sees_zeros_and_unpins_nothing() -> None:
    memory = PinnedMemory(1, 64, DeviceOfTheParent())
    memory.prepare()
    memory.buffer[:] = 7
    child = os.fork()
    if not child:
        is_wiped = not memory.buffer.any()
        memory.close()
        os._exit(0 if is_wiped else 1)
    _, status = os.waitpid(child, 0)
    assert os.waitstatus_to_exitcode(status) == 0
    assert np.all(memory.buffer == 7)
    memory.close()


# Registering


def test_it_is_registered_in_pieces_of_whole_rows() -> None:
    device = PinCountingDevice()
    memory = PinnedMemory(10, 3 * PAGE_BYTES, device, options=PreparationOptions(piece_bytes=7 * PAGE_BYTES))
    memory.prepare()
    assert device.pinned == {memory.address + 6 * PAGE_BYTES * piece: 6 * PAGE_BYTES for piece in range(5)}
    memory.close()


@given(
    st.integers(1, 300),
    st.one_of(st.integers(1, 40), st.integers(1, 5 * PAGE_BYTES), st.integers(1, 5).map(lambda n: n * PAGE_BYTES)),
    st.integers(1, 40 * PAGE_BYTES),
)
@example(300, 1024, 10_000)
@example(300, 5 * 1024, 21 * 1024)
def test_pieces_are_whole_rows_in_turn(row_count: int, row_bytes: int, piece_bytes: int) -> None:
    pieces = list(row_aligned_pieces(row_count, row_bytes, piece_bytes))
    assert_covers(pieces, range(row_count * row_bytes))
    assert all(part.start % row_bytes == 0 and part for part in pieces)
    assert all(len(part) <= max(piece_bytes, row_bytes) for part in pieces)
    shared = [part.start for part in pieces if part.start % PAGE_BYTES]
    period = np.lcm(row_bytes, PAGE_BYTES)
    assert not shared or period > piece_bytes


def test_a_refused_registration_is_said_once(caplog: pytest.LogCaptureFixture) -> None:
    device = PinCountingDevice(limit=2)
    options = PreparationOptions(piece_bytes=PAGE_BYTES)
    memory = PinnedMemory(5, PAGE_BYTES, device, options=options)
    with caplog.at_level(logging.WARNING):
        memory.prepare()
    assert not device.pinned
    assert repr(memory) == f"<PinnedMemory 5 x {PAGE_BYTES} bytes, pageable>"
    assert [record.message for record in caplog.records] == [
        "CPU memory stays pageable, copies will be slower: no more memory may be pinned"
    ]
    memory.close()
    assert "closed" in repr(memory)


def test_progress_goes_by_pieces() -> None:
    told: list[int] = []
    options = PreparationOptions(piece_bytes=2 * PAGE_BYTES)
    memory = PinnedMemory(5, PAGE_BYTES, PinCountingDevice(), options=options)
    memory.prepare(
        lambda progress: told.append(progress.done_bytes) if progress.step is PreparationStep.REGISTERING else None
    )
    assert told == [0, 2 * PAGE_BYTES, 4 * PAGE_BYTES, 5 * PAGE_BYTES]
    memory.close()


@pytest.mark.parametrize(
    ("options", "sentence"),
    [
        ({"piece_bytes": 0}, "piece_bytes is 0"),
        ({"thread_count": 0}, "thread_count 0"),
        ({"numa_node": -1}, "numa_node is -1"),
    ],
)
def test_options_that_cannot_work(options: dict[str, int], sentence: str) -> None:
    with pytest.raises(ConfigurationError, match=sentence):
        PreparationOptions(**options)  # type: ignore[arg-type]
