"""Calls into the operating system that do less than they were asked for."""

from __future__ import annotations

import errno
import os
from collections.abc import Iterator, Sequence
from contextlib import closing
from itertools import accumulate
from pathlib import Path

import pytest
from fs_rig import FILE_BYTES, Directory, load, store

from aiokvoffload.testing.tier_contract import BLOCK_BYTES, IDENTITY
from aiokvoffload.tiers.fs.files import Files, read_fully, read_whole, write_fully
from aiokvoffload.tiers.fs.tier import FileTier, FileTierOptions
from aiokvoffload.tiers.outcomes import Reason


class ReluctantFiles(Files):
    """Moves a few bytes at a time.

    Args:
        most_bytes: Of one call.
    """

    def __init__(self, most_bytes: int) -> None:
        self.most_bytes = most_bytes

    def read(self, descriptor: int, views: Sequence[memoryview], offset: int) -> int:
        return super().read(descriptor, self._some_of(views), offset)

    def write(self, descriptor: int, views: Sequence[memoryview], offset: int) -> int:
        return super().write(descriptor, self._some_of(views), offset)

    def _some_of(self, views: Sequence[memoryview]) -> list[memoryview]:
        starts = accumulate((view.nbytes for view in views), initial=0)
        return [view[: max(0, self.most_bytes - start)] for view, start in zip(views, starts, strict=False)]


@pytest.fixture
def descriptor(tmp_path: Path) -> Iterator[int]:
    descriptor = os.open(tmp_path / "file", os.O_CREAT | os.O_RDWR)
    yield descriptor
    os.close(descriptor)


def views_of(*sizes: int) -> list[memoryview]:
    return [memoryview(bytearray(size)) for size in sizes]


@pytest.mark.parametrize("most_bytes", [1, 3, 4, 7, 10, 11, 100])
def test_a_file_is_moved_piece_by_piece(descriptor: int, most_bytes: int) -> None:
    files = ReluctantFiles(most_bytes)
    write_fully(files, descriptor, [memoryview(b"abc"), memoryview(b""), memoryview(b"defg"), memoryview(b"hij")])
    assert os.pread(descriptor, 100, 0) == b"abcdefghij"
    for sizes in ((3, 0, 4, 3), (1, 9), (10,), (4,)):
        views = views_of(*sizes)
        assert read_fully(files, descriptor, views)
        assert b"".join(views) == b"abcdefghij"[: sum(sizes)]
    assert not read_fully(files, descriptor, views_of(3, 8))


@pytest.mark.parametrize("most_bytes", [1, 4, 10, 100])
def test_a_whole_file_is_as_long_as_it_should_be(descriptor: int, most_bytes: int) -> None:
    files = ReluctantFiles(most_bytes)
    os.pwrite(descriptor, b"abcdefghij", 0)
    views = views_of(4, 6, 5)
    assert read_whole(files, descriptor, views, 10)
    assert b"".join(views[:2]) == b"abcdefghij"
    assert not read_whole(files, descriptor, views_of(4, 7, 5), 11)


def test_a_file_that_is_too_long_is_not_a_whole_one(descriptor: int) -> None:
    os.pwrite(descriptor, b"abcdefghij", 0)
    assert not read_whole(Files(), descriptor, views_of(4, 5, 5), 9)


def test_a_write_that_writes_nothing_is_an_error(descriptor: int) -> None:
    with pytest.raises(OSError, match="wrote nothing") as caught:
        write_fully(ReluctantFiles(0), descriptor, [memoryview(b"abc")])
    assert caught.value.errno == errno.EIO


def test_blocks_survive_a_file_system_that_moves_little_at_a_time(tmp_path: Path) -> None:
    options = FileTierOptions(
        capacity_bytes=8 * FILE_BYTES, block_bytes=(BLOCK_BYTES,), keep_free_bytes=0, io="buffered", upkeep_seconds=None
    )
    with closing(FileTier(str(tmp_path / "kv"), IDENTITY, options, files=ReluctantFiles(1000))) as tier:
        tier.upkeep_step()
        assert store(tier, 1)[0].is_good
        assert load(tier, 1).is_good
        os.truncate(Directory(tmp_path / "kv").file(1), FILE_BYTES - 4096)
        assert load(tier, 1).reason is Reason.WRONG_LENGTH
