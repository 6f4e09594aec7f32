"""A shared region: its processes find each other, prepare it together, and agree."""

from __future__ import annotations

import gc
import logging
import os
import threading
from pathlib import Path

import anyio
import numpy as np
import pytest
from region_rig import PATIENCE_SECONDS, Group, prepare_all, shape_of

from aiokvoffload.errors import ClosedError, ConfigurationError, StateError, WrongThreadError
from aiokvoffload.memory.base import HostMemory, PreparationProgress, PreparationStep
from aiokvoffload.memory.page_calls import PAGE_BYTES, PageCalls
from aiokvoffload.memory.preparation import PreparationOptions
from aiokvoffload.memory.shared import SharedOffloadRegion
from aiokvoffload.memory.threads import prepare_in_thread
from aiokvoffload.testing.clock import ManualClock
from aiokvoffload.testing.memory_contract import MemoryContract, PinCountingDevice, StopPreparing, slot_of, stop_at

pytestmark = pytest.mark.timeout(60)


class OldKernel(PageCalls):
    """Cannot populate."""

    def populate(self, address: int, byte_count: int) -> bool:
        return False


class TestSharedOffloadRegion(MemoryContract):
    @pytest.fixture(autouse=True)
    def _directory(self, directory: Path) -> None:
        self.directory = directory

    def make_memory(self, slot_count: int, slot_bytes: int, device: PinCountingDevice) -> HostMemory:
        return SharedOffloadRegion("engine", shape_of(slot_count, slot_bytes, 1), 0, device, directory=self.directory)


class TestSharedOffloadRegionOnAnOldKernel(TestSharedOffloadRegion):
    def make_memory(self, slot_count: int, slot_bytes: int, device: PinCountingDevice) -> HostMemory:
        options = PreparationOptions(page_calls=OldKernel(), piece_bytes=10_000)
        shape = shape_of(slot_count, slot_bytes, 1)
        return SharedOffloadRegion("engine", shape, 0, device, directory=self.directory, options=options)


def files(directory: Path) -> list[str]:
    return sorted(os.listdir(directory))


# Together


@pytest.mark.parametrize("page_calls", [PageCalls(), OldKernel()])
def test_all_prepare_it_together_and_its_name_is_gone_before_it_is_filled(
    directory: Path, page_calls: PageCalls
) -> None:
    files_while_filled: list[list[str]] = []

    class WatchingPages(PageCalls):
        def populate(self, address: int, byte_count: int) -> bool:
            files_while_filled.append(files(directory))
            return page_calls.populate(address, byte_count)

    shape = shape_of(block_count=5, slice_bytes=3 * PAGE_BYTES + 17, world_size=3, has_scheduler=True)
    group = Group(directory, shape, options=PreparationOptions(page_calls=WatchingPages()))
    assert files(directory) == ["aiokvoffload_engine.mmap"]
    file_descriptor = group.regions[0]._group.descriptor
    allocated_before = os.fstat(file_descriptor).st_blocks
    watched = os.dup(file_descriptor)
    assert group.prepare() == [None] * 4
    assert files_while_filled == [[]] * len(files_while_filled) != []
    assert (os.fstat(watched).st_blocks - allocated_before) * 512 == shape.board_offset
    os.close(watched)
    for region, device in zip(group.regions, group.devices, strict=False):
        assert region.is_pinned
        assert device.is_pinned(region.rows.ctypes.data, shape.byte_count)
    assert "pinned" in repr(group.regions[0])
    group.close()
    assert not any(device.pinned for device in group.devices)


def test_slices_can_be_registered_alone(directory: Path) -> None:
    shape = shape_of(block_count=3, slice_bytes=PAGE_BYTES + 1)
    group = Group(directory, shape, registers_slices=True)
    assert group.prepare() == [None, None]
    for region, device in zip(group.regions, group.devices, strict=True):
        assert region.slots_per_piece == 1
        assert device.pinned == {
            region.address + slot * shape.row_bytes: shape.slice_bytes for slot in range(shape.block_count)
        }
    group.close()


def test_slices_too_close_to_each_other_cannot_be_registered_alone(directory: Path) -> None:
    with pytest.raises(ConfigurationError, match="at least a page between two of its slices"):
        Group(directory, shape_of(slice_bytes=100), registers_slices=True)
    assert files(directory) == []


@pytest.mark.parametrize("refusing", [[0], [1], [0, 2]])
def test_one_that_cannot_pin_the_memory_makes_it_pageable_for_all(
    directory: Path, refusing: list[int], caplog: pytest.LogCaptureFixture
) -> None:
    group = Group(directory, shape_of(world_size=3, has_scheduler=True), limits=dict.fromkeys(refusing, 0))
    with caplog.at_level(logging.WARNING):
        assert group.prepare() == [None] * 4
    for region in group.regions:
        assert not region.is_pinned
        assert "pageable" in repr(region)
    assert not any(device.pinned for device in group.devices)
    assert [record.message for record in caplog.records] == [
        "CPU memory stays pageable in all processes, copies will be slower: no more memory may be pinned"
    ]
    slot_of(group.regions[0], 1)[:] = 3
    assert np.all(slot_of(group.regions[0], 1) == 3)
    group.close()


@pytest.mark.parametrize("backend", ["asyncio", "trio"])
def test_it_is_awaited_on_both_loops(directory: Path, backend: str) -> None:
    group = Group(directory, shape_of())
    told: list[PreparationProgress] = []

    async def prepare() -> None:
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(prepare_in_thread, group.regions[0], told.append)
            await anyio.lowlevel.checkpoint()
            tasks.start_soon(prepare_in_thread, group.regions[1])

    anyio.run(prepare, backend=backend)
    assert all(region.is_pinned for region in group.regions)
    assert {progress.step for progress in told} >= {PreparationStep.POPULATING, PreparationStep.REGISTERING}
    group.close()


@pytest.mark.parametrize("backend", ["asyncio", "trio"])
def test_a_wait_that_is_cancelled_ends_soon_and_removes_the_name(directory: Path, backend: str) -> None:
    region = SharedOffloadRegion("engine", shape_of(), 0, PinCountingDevice(), directory=directory)
    is_waiting = threading.Event()

    async def cancel(scope: anyio.CancelScope) -> None:
        await anyio.to_thread.run_sync(is_waiting.wait, PATIENCE_SECONDS)
        scope.cancel()

    async def prepare() -> None:
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(cancel, tasks.cancel_scope)
            await prepare_in_thread(region, lambda _: is_waiting.set())

    anyio.run(prepare, backend=backend)
    assert files(directory) == []
    region.close()


# One is missing


def test_a_worker_that_never_joins_is_named_at_the_deadline(directory: Path) -> None:
    clock = ManualClock()
    told: list[PreparationProgress] = []
    shape = shape_of(world_size=4)
    joined = [
        SharedOffloadRegion("engine", shape, rank, None, directory=directory, clock=clock, join_seconds=7)
        for rank in (0, 2)
    ]
    with pytest.raises(StateError, match=r"engine\.mmap: rank 1, rank 3 has not joined the region within 7 s"):
        joined[0].prepare(told.append)
    assert 7 <= clock.now() <= 7.1
    assert told[0] == PreparationProgress(PreparationStep.WAITING, 0, shape.byte_count)
    assert files(directory) == []
    with pytest.raises(StateError, match="rank 0 has failed"):
        joined[1].prepare()
    for region in joined:
        region.close()


def test_a_worker_that_is_never_ready_is_named_at_the_deadline(directory: Path) -> None:
    gate, is_filling = threading.Event(), threading.Event()

    class StuckPages(PageCalls):
        def populate(self, address: int, byte_count: int) -> bool:
            is_filling.set()
            return gate.wait(PATIENCE_SECONDS)

    clock = ManualClock()
    shape = shape_of(slice_bytes=PAGE_BYTES)
    stuck = SharedOffloadRegion(
        "engine", shape, 1, None, directory=directory, options=PreparationOptions(page_calls=StuckPages())
    )
    region = SharedOffloadRegion(
        "engine", shape, 0, PinCountingDevice(), directory=directory, clock=clock, prepare_seconds=9
    )
    errors: list[list[Exception | None]] = []
    thread = threading.Thread(target=lambda: errors.append(prepare_all([stuck])))

    def start_once_the_other_is_stuck(_: PreparationProgress) -> None:
        if _.step is PreparationStep.POPULATING and not _.done_bytes:
            assert is_filling.wait(PATIENCE_SECONDS)

    thread.start()
    with pytest.raises(StateError, match="rank 1 has not become ready within 9 s"):
        region.prepare(start_once_the_other_is_stuck)
    gate.set()
    thread.join()
    ((error,),) = errors
    assert "rank 0 has failed" in str(error)
    for one in (region, stuck):
        assert not one.is_pinned
        one.close()


@pytest.mark.parametrize("count", range(3))
def test_one_that_fails_fails_all(directory: Path, count: int) -> None:
    group = Group(directory, shape_of(world_size=3))
    errors: list[Exception | None] = []
    thread = threading.Thread(target=lambda: errors.extend(prepare_all(group.regions[1:])))
    thread.start()

    def report(progress: PreparationProgress) -> None:
        if progress.step is not PreparationStep.WAITING:
            stop(progress)

    stop = stop_at(count)
    with pytest.raises(StopPreparing):
        group.regions[0].prepare(report)
    thread.join()
    assert ["rank 0 has failed" in str(error) for error in errors] == [True, True]
    assert not any(device.pinned for device in group.devices)
    group.close()
    assert files(directory) == []


def test_one_that_leaves_early_fails_the_others(directory: Path) -> None:
    group = Group(directory, shape_of())
    group.regions[0].close()
    assert files(directory) == []
    with pytest.raises(StateError, match="rank 0 has failed"):
        group.regions[1].prepare()
    group.close()


def test_a_file_system_that_runs_full_meanwhile_is_an_error_not_a_signal(directory: Path) -> None:
    class FullPages(PageCalls):
        def populate(self, address: int, byte_count: int) -> bool:
            raise OSError(28, "No space left on device")

    group = Group(directory, shape_of(slice_bytes=PAGE_BYTES), options=PreparationOptions(page_calls=FullPages()))
    errors = group.prepare()
    assert any(isinstance(error, ConfigurationError) and "No space left" in str(error) for error in errors)
    assert all(errors)
    group.close()


# What cannot work


def test_too_little_room_says_how_much_is_needed_and_free(directory: Path) -> None:
    shape = shape_of(block_count=100, slice_bytes=PAGE_BYTES)
    with pytest.raises(ConfigurationError) as caught:
        SharedOffloadRegion("engine", shape, 0, None, directory=directory, free_bytes=lambda _: 5000)
    assert f"{directory} has 5000 bytes free, but aiokvoffload_engine.mmap needs {201 * PAGE_BYTES}" in str(
        caught.value
    )
    assert "--shm-size" in str(caught.value)
    assert files(directory) == []
    exact = SharedOffloadRegion("engine", shape, 0, None, directory=directory, free_bytes=lambda _: 201 * PAGE_BYTES)
    exact.close()


def test_too_little_memory_is_found_before_anything_is_made(directory: Path) -> None:
    options = PreparationOptions(available_bytes=lambda: 29_999)
    with pytest.raises(ConfigurationError, match="has 29999 bytes of memory available, but 30000 are needed"):
        SharedOffloadRegion("engine", shape_of(), 0, None, directory=directory, options=options)


@pytest.mark.parametrize(
    "other",
    [
        shape_of(block_count=4),
        shape_of(slice_bytes=5001),
        shape_of(world_size=3),
        shape_of(is_replicated=True),
        shape_of(has_scheduler=True),
    ],
)
def test_processes_that_disagree_are_told_about_what(directory: Path, other: object) -> None:
    region = SharedOffloadRegion("engine", shape_of(), 0, None, directory=directory)
    with pytest.raises(ConfigurationError) as caught:
        SharedOffloadRegion("engine", other, 1, None, directory=directory)  # type: ignore[arg-type]
    assert str(other) in str(caught.value)
    assert str(shape_of()) in str(caught.value)
    assert files(directory) == ["aiokvoffload_engine.mmap"]
    region.close()


def test_a_rank_has_one_process(directory: Path) -> None:
    group = Group(directory, shape_of())
    clock = ManualClock()
    with pytest.raises(StateError, match=r"no place for rank 1 within 2 s: it has one, or .* use another"):
        SharedOffloadRegion("engine", shape_of(), 1, None, directory=directory, clock=clock, join_seconds=2)
    assert 2 <= clock.now() <= 2.1
    assert group.prepare() == [None, None]
    group.close()


def test_nobody_joins_a_group_that_has_failed(directory: Path) -> None:
    shape = shape_of(world_size=3)
    waiting, failed = (SharedOffloadRegion("engine", shape, rank, None, directory=directory) for rank in (0, 1))
    failed.close()
    clock = ManualClock()
    with pytest.raises(StateError, match="no place for rank 2 within 2 s"):
        SharedOffloadRegion("engine", shape, 2, None, directory=directory, clock=clock, join_seconds=2)
    waiting.close()
    SharedOffloadRegion("engine", shape, 2, None, directory=directory).close()


@pytest.mark.parametrize("engine_id", ["", "a/b", "..", ".hidden", "a b", "x" * 129, "ü"])
def test_an_id_that_cannot_name_a_file(directory: Path, engine_id: str) -> None:
    with pytest.raises(ConfigurationError, match="engine_id is"):
        SharedOffloadRegion(engine_id, shape_of(), 0, None, directory=directory)


def test_a_directory_that_is_not_there(directory: Path) -> None:
    with pytest.raises(ConfigurationError, match="it has to be a tmpfs"):
        SharedOffloadRegion("engine", shape_of(), 0, None, directory=directory / "no", free_bytes=lambda _: 1 << 40)


# Its end


def test_a_closed_region_has_no_bytes_but_its_views_do(directory: Path) -> None:
    group = Group(directory, shape_of())
    view = group.regions[0].create_next_view(10)
    assert group.prepare() == [None, None]
    view[:] = 4
    for region in group.regions:
        for _ in range(2):
            region.close()
        with pytest.raises(ClosedError):
            _ = region.rows
        with pytest.raises(ClosedError):
            region.create_next_view(1)
        with pytest.raises(StateError, match="closed or prepared before"):
            region.prepare()
    assert np.all(view == 4)
    assert "closed" in repr(group.regions[0])


def test_a_region_that_nobody_closes_leaves_no_file(directory: Path) -> None:
    region = SharedOffloadRegion("engine", shape_of(), 0, None, directory=directory)
    assert files(directory) == ["aiokvoffload_engine.mmap"]
    del region
    gc.collect()
    assert files(directory) == []


def test_no_descriptor_is_left(directory: Path) -> None:
    before = len(os.listdir("/proc/self/fd"))
    group = Group(directory, shape_of())
    with pytest.raises(StateError):
        SharedOffloadRegion("engine", shape_of(), 1, None, directory=directory, join_seconds=0)
    assert group.prepare() == [None, None]
    group.close()
    del group
    gc.collect()
    assert len(os.listdir("/proc/self/fd")) == before


def test_a_forked_process_shares_the_bytes_but_is_refused(directory: Path) -> None:
    region = SharedOffloadRegion("engine", shape_of(), 0, None, directory=directory)
    reader, writer = os.pipe()
    child = os.fork()
    if not child:
        try:
            region.rows[0, 0] = 9
            region.prepare()
        except WrongThreadError as exc:
            region.close()
            os.write(writer, str(exc).encode())
        finally:
            os._exit(0)
    os.close(writer)
    with os.fdopen(reader) as said:
        assert "belongs to the parent process; make one in each process" in said.read()
    os.waitpid(child, 0)
    assert region.rows[0, 0] == 9
    assert files(directory) == ["aiokvoffload_engine.mmap"]
    with pytest.raises(StateError, match="no place for rank 0"):
        SharedOffloadRegion("engine", shape_of(), 0, None, directory=directory, join_seconds=0)
    region.close()
    assert files(directory) == []
