"""Copies within the host: in batches, one by one, and which of both is faster at the moment."""

from __future__ import annotations

import ctypes
import subprocess
import sys

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from aiokvoffload.devices import host_copy
from aiokvoffload.devices.base import Direction
from aiokvoffload.devices.host_copy import HostCopier
from aiokvoffload.testing.clock import ManualClock
from aiokvoffload.testing.device_memory import pattern, plan_of

PAGE_BYTES = 64 << 10
PAGE_COUNT = 64
SAMPLE_COUNT = 16
"""Pages of the first batch."""
BATCH_READINGS = 3
"""Before and after that batch, and when single copies begin."""
LOOK_COUNT = 8
"""Pages between two readings after that."""


def test_vectored_copies_work_on_this_system() -> None:
    assert HostCopier().is_vectored


def test_a_system_that_forbids_vectored_copies_is_found_out(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(host_copy, "_find_process_vm_readv", lambda: lambda *_: -1)
    copier = HostCopier()
    assert not copier.is_vectored
    source, target = pattern(100), np.zeros(100, np.uint8)
    copier.copy(plan_of(Direction.LOAD, [(source.ctypes.data, target.ctypes.data, 100)]))
    assert np.array_equal(source, target)


@pytest.mark.parametrize("most_bytes", [1, 7, 64, 1000])
def test_copies_that_stop_early_are_finished(most_bytes: int, monkeypatch: pytest.MonkeyPatch) -> None:
    genuine = host_copy._find_process_vm_readv()
    assert genuine is not None

    def stops_early(process: int, local: int, local_count: int, remote: int, remote_count: int, flags: int) -> int:
        vectors = [np.ctypeslib.as_array((ctypes.c_int64 * 2).from_address(at)) for at in (local, remote)]
        full = int(vectors[0][1])
        for vector in vectors:
            vector[1] = min(full, most_bytes)
        return genuine(process, local, 1, remote, 1, flags)

    monkeypatch.setattr(host_copy, "_find_process_vm_readv", lambda: stops_early)
    copier = HostCopier()
    assert copier.is_vectored
    source, target = pattern(3000), np.zeros(3000, np.uint8)
    copies = [(source.ctypes.data + at, target.ctypes.data + at, size) for at, size in ((0, 64), (64, 936), (1000, 1))]
    copier.copy(plan_of(Direction.LOAD, copies))
    assert np.array_equal(source[:1001], target[:1001])
    assert not target[1001:].any()


class JumpingClock(ManualClock):
    """Stands still, but for a second before each of some readings."""

    def __init__(self) -> None:
        super().__init__()
        self._readings: list[int] = []

    def jump_before(self, *readings: int) -> None:
        """Name readings by their numbers; the next one is number 1."""
        self._readings = list(readings)

    def now(self) -> float:
        self._readings = [number - 1 for number in self._readings]
        if 0 in self._readings:
            self.advance(1.0)
        return super().now()


class Pages:
    """Copies pages in another order, and notes of how many pages each batch was."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.clock = JumpingClock()
        self.batches: list[int] = []
        genuine = host_copy._find_process_vm_readv()
        assert genuine is not None

        def counted(process: int, local: int, local_count: int, remote: int, remote_count: int, flags: int) -> int:
            self.batches.append(local_count)
            return genuine(process, local, local_count, remote, remote_count, flags)

        monkeypatch.setattr(host_copy, "_find_process_vm_readv", lambda: counted)
        monkeypatch.setattr(host_copy, "_LEAST_PIECE_BYTES", PAGE_COUNT * PAGE_BYTES)  # nothing is shared
        self.copier = HostCopier(self.clock)
        self.source = pattern(PAGE_COUNT * PAGE_BYTES)
        self.source[::PAGE_BYTES] = np.arange(PAGE_COUNT)

    def copy(self) -> list[int]:
        """Copy all, check the bytes, and return the batches."""
        self.batches.clear()
        target = np.zeros_like(self.source)
        order = np.random.default_rng(0).permutation(PAGE_COUNT) * PAGE_BYTES
        places = zip(range(0, len(target), PAGE_BYTES), order.tolist(), strict=True)
        copies = [(self.source.ctypes.data + at, target.ctypes.data + to, PAGE_BYTES) for at, to in places]
        self.copier.copy(plan_of(Direction.LOAD, copies))
        pages = target.reshape(PAGE_COUNT, PAGE_BYTES)[order // PAGE_BYTES]
        assert np.array_equal(pages.ravel(), self.source)
        return self.batches


def test_after_a_first_batch_larger_pages_go_one_by_one(monkeypatch: pytest.MonkeyPatch) -> None:
    assert Pages(monkeypatch).copy() == [SAMPLE_COUNT]


def test_pages_go_in_batches_for_a_while_once_one_by_one_takes_longer(monkeypatch: pytest.MonkeyPatch) -> None:
    pages = Pages(monkeypatch)
    pages.clock.jump_before(BATCH_READINGS + 1)
    assert pages.copy() == [SAMPLE_COUNT, PAGE_COUNT - SAMPLE_COUNT - LOOK_COUNT]
    assert pages.copy() == [SAMPLE_COUNT, PAGE_COUNT - SAMPLE_COUNT]
    pages.clock.advance(1.0)
    assert pages.copy() == [SAMPLE_COUNT]


@pytest.mark.parametrize(("look", "is_late"), [(1, True), (2, False)])
def test_single_copies_may_take_as_long_as_the_batch_did(
    look: int, is_late: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    pages = Pages(monkeypatch)
    pages.clock.jump_before(2, BATCH_READINGS + look)  # a second for 16 pages, then one for 8 or 16 others
    assert pages.copy() == [SAMPLE_COUNT, *[PAGE_COUNT - SAMPLE_COUNT - look * LOOK_COUNT] * is_late]


def test_while_another_thread_copies_one_by_one_pages_go_in_batches(monkeypatch: pytest.MonkeyPatch) -> None:
    pages = Pages(monkeypatch)
    with pages.copier._one_by_one:
        assert pages.copy() == [SAMPLE_COUNT, PAGE_COUNT - SAMPLE_COUNT]
    assert pages.copy() == [SAMPLE_COUNT]


@given(
    byte_counts=st.lists(st.integers(1, 9000), max_size=20),
    piece_bytes=st.integers(1, 10000),
    shared_bytes=st.integers(1, 20000),
    watched_bytes=st.integers(1, 5000),
    is_vectored=st.booleans(),
)
def test_a_plan_is_copied_whole_however_it_is_divided(
    byte_counts: list[int], piece_bytes: int, shared_bytes: int, watched_bytes: int, is_vectored: bool
) -> None:
    source, target = pattern(sum(byte_counts)), np.zeros(sum(byte_counts), np.uint8)
    starts = np.cumsum([0, *byte_counts]).tolist()
    copies = [
        (source.ctypes.data + at, target.ctypes.data + at, size)
        for at, size in zip(starts[:-1], byte_counts, strict=True)
    ]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(host_copy, "_LEAST_PIECE_BYTES", piece_bytes)
        patch.setattr(host_copy, "_LEAST_SHARED_BYTES", shared_bytes)
        patch.setattr(host_copy, "WATCHED_COPY_BYTES", watched_bytes)
        patch.setattr(host_copy, "SINGLE_COPY_BYTES", 2 * watched_bytes)
        patch.setattr(host_copy, "_SAMPLE_BYTES", watched_bytes)
        copier = HostCopier()
        copier.is_vectored = is_vectored
        copier.copy(plan_of(Direction.LOAD, copies))
        copier.close()
    assert np.array_equal(source, target)


@pytest.mark.parametrize(("byte_count", "piece_count"), [(1, 1), (10, 1), (11, 2), (35, 4)])
def test_a_long_copy_is_cut(byte_count: int, piece_count: int) -> None:
    columns = (np.array(column, np.int64) for column in ([100, 500], [300, 700], [byte_count, 1]))
    sources, destinations, byte_counts = host_copy._cut((next(columns), next(columns), next(columns)), 10)
    assert byte_counts.tolist() == [10] * (piece_count - 1) + [byte_count - 10 * (piece_count - 1), 1]
    assert sources.tolist() == [*range(100, 100 + 10 * piece_count, 10), 500]
    assert destinations.tolist() == [*range(300, 300 + 10 * piece_count, 10), 700]


LEAVES_WHILE_COPYING = """
import itertools, threading
import numpy as np
from aiokvoffload.devices.base import CopyPlan, Direction
from aiokvoffload.devices.host_copy import HostCopier

source, target = np.ones(64, np.uint8), np.zeros(64, np.uint8)
offsets = np.arange(0, 64, 8)
plan = CopyPlan(source.ctypes.data + offsets, target.ctypes.data + offsets, np.full(8, 8), Direction.LOAD)
copier, is_copying = HostCopier(), threading.Event()

def copy():
    for count in itertools.count():
        copier.copy(plan)
        if count == 20:
            is_copying.set()

for _ in range(6):
    threading.Thread(target=copy, daemon=True).start()
is_copying.wait()
"""


def test_a_process_may_leave_while_threads_copy() -> None:
    for _ in range(8):
        left = subprocess.run(
            [sys.executable, "-c", LEAVES_WHILE_COPYING], capture_output=True, text=True, timeout=50, check=False
        )
        assert (left.returncode, left.stderr) == (0, "")
