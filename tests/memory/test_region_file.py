"""The file of a region: exclusive, locked by its creator, and swept once its creator is dead."""

from __future__ import annotations

import os
import threading
from pathlib import Path

import pytest
from region_rig import shape_of

from aiokvoffload.errors import ConfigurationError, StateError
from aiokvoffload.memory import region_file
from aiokvoffload.memory.page_calls import PAGE_BYTES
from aiokvoffload.memory.region_board import header_of
from aiokvoffload.memory.region_file import RegionFile, region_path, sweep_stale_files
from aiokvoffload.memory.shared import SharedOffloadRegion
from aiokvoffload.testing.clock import ManualClock

TAIL = header_of(shape_of())


def make(path: Path) -> RegionFile:
    file = RegionFile.create(path, shape_of().file_bytes, TAIL)
    assert file is not None
    return file


def make_stale(path: Path) -> None:
    """Make a file whose creator is dead, as the kernel sees it: nobody has it open."""
    os.close(make(path).descriptor)


def find(path: Path) -> RegionFile:
    file = RegionFile.find(path)
    assert file is not None
    return file


@pytest.fixture
def path(directory: Path) -> Path:
    return region_path(directory, "engine")


def test_whoever_finds_the_name_finds_a_whole_file_with_a_living_creator(path: Path) -> None:
    assert RegionFile.find(path) is None
    made = make(path)
    assert RegionFile.create(path, PAGE_BYTES, b"") is None
    found = find(path)
    assert found.read_tail(len(TAIL)) == TAIL
    assert found.has_living_creator()
    assert path.stat().st_mode & 0o777 == 0o600
    made.close()
    assert not found.has_living_creator()
    assert not path.exists()
    found.close()


def test_a_place_has_one_process(path: Path) -> None:
    made, found = make(path), find(path)
    assert made.take_place(0)
    assert not found.take_place(0)
    assert found.take_place(1)
    assert made.has_process(1)
    assert not made.has_process(2)
    found.close()
    assert not made.has_process(1)
    made.close()


def test_a_mapping_does_not_keep_the_locks(path: Path) -> None:
    import mmap

    made, found = make(path), find(path)
    mapping = mmap.mmap(made.descriptor, PAGE_BYTES)
    made.close()
    assert not found.has_living_creator()
    found.close()
    mapping.close()


def test_only_a_file_of_a_dead_creator_is_swept(directory: Path) -> None:
    living = make(region_path(directory, "living"))
    stale = [region_path(directory, name) for name in ("stale-1", "stale-2")]
    for path in stale:
        make_stale(path)
    foreign = directory / "somebody_elses.mmap"
    foreign.touch()
    assert sweep_stale_files(directory) == stale
    assert sorted(directory.iterdir()) == [living.path, foreign]
    living.close()
    foreign.unlink()


def test_a_new_region_sweeps_what_any_dead_engine_has_left(directory: Path) -> None:
    make_stale(region_path(directory, "other"))
    region = SharedOffloadRegion("engine", shape_of(), 0, None, directory=directory)
    assert os.listdir(directory) == ["aiokvoffload_engine.mmap"]
    region.close()


def test_who_sweeps_too_late_does_not_take_the_successors_name(path: Path) -> None:
    make_stale(path)
    early, late = find(path), find(path)
    assert early.sweep()
    assert not late.sweep()  # while the other sweeps
    successor = make(path)
    early.close()
    assert late.sweep()  # of a file that has no name any more
    late.close()
    assert find(path).has_living_creator()
    successor.close()


def test_a_creator_does_not_take_the_successors_name(path: Path) -> None:
    made = make(path)
    path.unlink()
    successor = make(path)
    made.close()
    assert path.exists()
    successor.close()
    successor.close()
    assert not path.exists()


def test_a_stale_file_that_somebody_else_sweeps_for_ever(path: Path) -> None:
    make_stale(path)
    sweeper = find(path)
    assert sweeper._lock(region_file._SWEEPER)
    clock = ManualClock()
    with pytest.raises(StateError, match="had no place for rank 0 within 3 s"):
        SharedOffloadRegion("engine", shape_of(), 0, None, directory=path.parent, clock=clock, join_seconds=3)
    assert 3 <= clock.now() <= 3.1
    path.unlink()
    sweeper.close()


@pytest.mark.parametrize("tail", [b"", b"something else", b"aiokvoffload  0\n" + TAIL[16:]])
def test_a_living_file_that_is_no_region(path: Path, tail: bytes) -> None:
    other = RegionFile.create(path, PAGE_BYTES, tail)
    assert other is not None
    with pytest.raises(ConfigurationError, match="use the same version in all processes"):
        SharedOffloadRegion("engine", shape_of(), 0, None, directory=path.parent)
    other.close()


def test_a_name_that_leads_elsewhere_is_refused(path: Path) -> None:
    target = path.with_name("target")
    target.touch()
    path.symlink_to(target)
    with pytest.raises(ConfigurationError, match=r"cannot open .*; remove it, or use another engine_id"):
        SharedOffloadRegion("engine", shape_of(), 0, None, directory=path.parent)
    path.unlink()
    target.unlink()


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can give a file away")
def test_another_users_file_is_refused_and_not_swept(path: Path) -> None:
    make_stale(path)
    os.chown(path, 12345, -1)
    assert sweep_stale_files(path.parent) == []
    with pytest.raises(ConfigurationError, match="is no file of this user; use another engine_id"):
        SharedOffloadRegion("engine", shape_of(), 0, None, directory=path.parent)
    path.unlink()


def test_many_processes_that_start_over_a_stale_file_agree_on_one(path: Path) -> None:
    shape = shape_of(world_size=8)
    for _ in range(20):
        make_stale(path)
        start = threading.Barrier(8)
        regions: list[SharedOffloadRegion] = []

        def join(rank: int, start: threading.Barrier, regions: list[SharedOffloadRegion]) -> None:
            start.wait()
            regions.append(SharedOffloadRegion("engine", shape, rank, None, directory=path.parent))

        threads = [threading.Thread(target=join, args=(rank, start, regions)) for rank in range(8)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert len(regions) == 8
        assert len({os.fstat(region._group.descriptor).st_ino for region in regions}) == 1
        for region in regions:
            region.close()
        assert not path.exists()
