"""The file that processes find a shared region by, until all of them have mapped it.

It is created without a name, sized and locked, and only then named: whoever finds the name finds a whole file, whose
creator holds a lock on it. The kernel drops the lock when the creator dies, so a file without it is stale, and nobody
has to trust process numbers. The locks are those of open file descriptions, which also tell threads apart.

All unlinking happens under a lock on the file itself: by its creator, or by the one process that sweeps it.
"""

from __future__ import annotations

import errno
import fcntl
import logging
import os
import re
import stat
import struct
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Self

from aiokvoffload.errors import ConfigurationError
from aiokvoffload.memory.page_calls import PAGE_BYTES

_logger = logging.getLogger(__name__)

_PREFIX = "aiokvoffload_"
_SUFFIX = ".mmap"
_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,127}")

# Bytes of the file that stand for something when they are locked; nothing is read or written there for it.
_CREATOR = 0
_SWEEPER = 1
_FIRST_PLACE = 2

_FLOCK = struct.Struct("hhqqi4x")  # struct flock of 64-bit Linux


class RegionFile:
    """An open file of a region, created or found."""

    def __init__(self, path: Path, descriptor: int, *, is_creator: bool) -> None:
        self.path = path
        self.descriptor = descriptor
        self.is_creator = is_creator
        self._has_name = is_creator

    @classmethod
    def create(cls, path: Path, byte_count: int, tail: bytes) -> Self | None:
        """Create, lock and name a file whose last page begins with `tail`; None if the name is taken.

        Raises:
            ConfigurationError: No such file can be made there.
        """
        try:
            descriptor = os.open(path.parent, os.O_TMPFILE | os.O_RDWR | os.O_CLOEXEC, 0o600)
        except OSError as exc:
            raise ConfigurationError(
                f"cannot make a file in {path.parent}: {exc}; it has to be a tmpfs, as /dev/shm is"
            ) from exc
        file = cls(path, descriptor, is_creator=True)
        try:
            os.ftruncate(descriptor, byte_count)
            os.pwrite(descriptor, tail, byte_count - PAGE_BYTES)
            file._lock(_CREATOR)
            folder = os.open(path.parent, os.O_DIRECTORY | os.O_CLOEXEC)
            try:
                # Only with a folder's descriptor does Python follow the link to the file that has no name.
                os.link(f"/proc/self/fd/{descriptor}", path.name, dst_dir_fd=folder)
            finally:
                os.close(folder)
        except FileExistsError:
            os.close(descriptor)
            return None
        except OSError as exc:
            os.close(descriptor)
            raise ConfigurationError(f"cannot make {path} of {byte_count} bytes: {exc}") from exc
        return file

    @classmethod
    def find(cls, path: Path) -> Self | None:
        """Open the file of that name; None if there is none.

        Raises:
            ConfigurationError: It belongs to another user, or is no plain file.
        """
        try:
            descriptor = os.open(path, os.O_RDWR | os.O_NOFOLLOW | os.O_CLOEXEC)
        except FileNotFoundError:
            return None
        except OSError as exc:
            raise ConfigurationError(f"cannot open {path}: {exc}; remove it, or use another engine_id") from exc
        status = os.fstat(descriptor)
        if status.st_uid != os.geteuid() or not stat.S_ISREG(status.st_mode):
            os.close(descriptor)
            raise ConfigurationError(f"{path} is no file of this user; use another engine_id")
        return cls(path, descriptor, is_creator=False)

    def read_tail(self, byte_count: int) -> bytes:
        """Return the bytes that the last page begins with."""
        page = os.fstat(self.descriptor).st_size - PAGE_BYTES
        return os.pread(self.descriptor, byte_count, page) if page >= 0 else b""

    def has_living_creator(self) -> bool:
        """Return whether another process has made the file and lives."""
        return self._is_locked(_CREATOR)

    def take_place(self, number: int) -> bool:
        """Become the one process with that number; False if another living process is."""
        return self._lock(_FIRST_PLACE + number)

    def has_process(self, number: int) -> bool:
        """Return whether another living process has that number."""
        return self._is_locked(_FIRST_PLACE + number)

    def sweep(self) -> bool:
        """Remove the file's name if its creator is dead; False if the creator lives or somebody else sweeps it."""
        if self._is_locked(_CREATOR) or not self._lock(_SWEEPER):
            return False
        self._unlink()
        return True

    def drop_name(self) -> None:
        """Remove the name of a file that this process has made; idempotent."""
        if self._has_name:
            self._has_name = False
            self._unlink()

    def close(self) -> None:
        """Drop all locks and, by its creator, the name; idempotent."""
        if self.descriptor < 0:
            return
        self.drop_name()
        # A mapping keeps a copy of the descriptor, and the copy would keep the locks.
        with suppress(OSError):
            self._control(fcntl.F_OFD_SETLK, fcntl.F_UNLCK, 0, 0)
        os.close(self.descriptor)
        self.descriptor = -1

    def _lock(self, byte: int) -> bool:
        """Take a lock; False if somebody else holds it."""
        try:
            self._control(fcntl.F_OFD_SETLK, fcntl.F_WRLCK, byte)
        except OSError as exc:
            if exc.errno in (errno.EAGAIN, errno.EACCES):
                return False
            raise
        return True

    def _is_locked(self, byte: int) -> bool:
        """Return whether somebody else holds a lock."""
        return self._control(fcntl.F_OFD_GETLK, fcntl.F_WRLCK, byte) != fcntl.F_UNLCK

    def _unlink(self) -> None:
        """Remove the name if it is still this file's."""
        with suppress(FileNotFoundError):
            if os.path.samestat(os.stat(self.path, follow_symlinks=False), os.fstat(self.descriptor)):
                self.path.unlink()

    def _control(self, command: int, kind: int, first: int, count: int = 1) -> int:
        """Return the kind of lock that the kernel answers with."""
        answer = fcntl.fcntl(self.descriptor, command, _FLOCK.pack(kind, os.SEEK_SET, first, count, 0))
        found: int = _FLOCK.unpack(answer)[0]
        return found


def region_path(directory: Path, engine_id: str) -> Path:
    """Return where the file of an engine's region is.

    Raises:
        ConfigurationError: The id cannot be part of a file's name.
    """
    if not _NAME.fullmatch(engine_id):
        raise ConfigurationError(
            f"engine_id is {engine_id!r}; it names a file: up to 128 letters, digits, dots, dashes and underscores"
        )
    return directory / f"{_PREFIX}{engine_id}{_SUFFIX}"


def sweep_stale_files(directory: Path) -> list[Path]:
    """Remove what engines that were killed have left behind, and return what that was."""
    swept = []
    for path in _region_files(directory):
        try:
            file = RegionFile.find(path)
        except ConfigurationError:
            continue  # another user's
        if file is not None:
            try:
                if file.sweep():
                    swept.append(path)
            finally:
                file.close()
    if swept:
        _logger.info("removed what dead engines have left: %s", ", ".join(map(str, swept)))
    return swept


def _region_files(directory: Path) -> Iterator[Path]:
    for path in sorted(directory.glob(f"{_PREFIX}*{_SUFFIX}")):
        if _NAME.fullmatch(path.name.removeprefix(_PREFIX).removesuffix(_SUFFIX)):
            yield path
