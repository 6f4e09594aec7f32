"""The calls into the operating system; a test overrides some of them to let them fail or hang."""

from __future__ import annotations

import errno
import os
from collections.abc import Callable, Sequence

FILE_MODE = 0o600
DIRECTORY_MODE = 0o700


class Files:
    """The file system as it is."""

    def open(self, path: str, flags: int) -> int:
        """Open a file, never through a symbolic link in its place, and never waiting for one that is a pipe."""
        return os.open(path, flags | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK, FILE_MODE)

    def close(self, descriptor: int) -> None:
        """Close a file."""
        os.close(descriptor)

    def read(self, descriptor: int, views: Sequence[memoryview], offset: int) -> int:
        """Read into views and return how many bytes came."""
        return os.preadv(descriptor, views, offset)

    def write(self, descriptor: int, views: Sequence[memoryview], offset: int) -> int:
        """Write views and return how many bytes went."""
        return os.pwritev(descriptor, views, offset)

    def stat(self, path: str) -> os.stat_result:
        """Return what stands in a place, a symbolic link included."""
        return os.stat(path, follow_symlinks=False)

    def stat_open(self, descriptor: int) -> os.stat_result:
        """Return what an open file is."""
        return os.fstat(descriptor)

    def rename(self, path: str, to_path: str) -> None:
        """Put a file in a place, instead of what stands there."""
        os.rename(path, to_path)

    def unlink(self, path: str) -> None:
        """Remove a file."""
        os.unlink(path)

    def make_directories(self, path: str) -> None:
        """Make a directory and those above it, for the owner alone."""
        os.makedirs(path, DIRECTORY_MODE, exist_ok=True)

    def remove_directory(self, path: str) -> None:
        """Remove an empty directory."""
        os.rmdir(path)

    def list(self, path: str) -> list[str]:
        """Return the names in a directory; none if there is no such directory."""
        try:
            return os.listdir(path)
        except (FileNotFoundError, NotADirectoryError):
            return []

    def set_times(self, path: str, nanoseconds: int) -> None:
        """Set the times of a file."""
        os.utime(path, ns=(nanoseconds, nanoseconds), follow_symlinks=False)

    def now_ns(self, descriptor: int) -> int:
        """Return the time of the file system, which is the same for all who share it."""
        os.utime(descriptor)
        return os.fstat(descriptor).st_mtime_ns

    def free_bytes(self, path: str) -> int:
        """Return how many bytes may still be written to the file system of a path."""
        found = os.statvfs(path)
        return found.f_bavail * found.f_frsize


def read_fully(files: Files, descriptor: int, views: Sequence[memoryview]) -> bool:
    """Fill views from the start of a file; return False if it is too short."""
    byte_count = sum(map(len, views))
    return _move(files.read, descriptor, views, byte_count) == byte_count


def read_whole(files: Files, descriptor: int, views: Sequence[memoryview], byte_count: int) -> bool:
    """Read a file of so many bytes into views that have room for more; return False if it is of another length."""
    return _move(files.read, descriptor, views, byte_count) == byte_count


def write_fully(files: Files, descriptor: int, views: Sequence[memoryview]) -> None:
    """Write views to the start of a file.

    Raises:
        OSError: The file system has failed; also if it takes nothing without saying why.
    """
    byte_count = sum(map(len, views))
    if _move(files.write, descriptor, views, byte_count) < byte_count:
        raise OSError(errno.EIO, "a write to a file wrote nothing")


def write_small_file(files: Files, directory: str, name: str, content: bytes) -> None:
    """Write a file beside its place and put it there."""
    temporary = f"{directory}/.{name}.{os.urandom(8).hex()}"
    descriptor = files.open(temporary, os.O_CREAT | os.O_EXCL | os.O_WRONLY)
    try:
        write_fully(files, descriptor, [memoryview(content)])
    finally:
        files.close(descriptor)
    files.rename(temporary, f"{directory}/{name}")


def _move(
    move: Callable[[int, Sequence[memoryview], int], int], descriptor: int, views: Sequence[memoryview], at_least: int
) -> int:
    """Call `move` until so many bytes have moved or no more do, and return how many have."""
    total = moved = move(descriptor, views, 0)
    left = list(views)
    while moved and total < at_least:
        while moved >= left[0].nbytes:
            moved -= left.pop(0).nbytes
        left[0] = left[0][moved:]
        moved = move(descriptor, left, total)
        total += moved
    return total
