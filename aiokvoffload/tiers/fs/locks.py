"""A lock on a file that ends with its process, however it ends."""

from __future__ import annotations

import fcntl
import os
import weakref
from functools import partial

from aiokvoffload.tiers.fs.files import Files


class FileLock:
    """Held by at most one holder on one machine; on network file systems by one of all machines where they lock.

    Args:
        files: The file system.
        path: The file to lock; made if it is missing.
    """

    def __init__(self, files: Files, path: str) -> None:
        self._files = files
        self._path = path
        self._descriptor: int | None = None

    @property
    def descriptor(self) -> int:
        """The open file, while the lock is held."""
        if self._descriptor is None:
            raise ValueError(f"the lock {self._path} is not held")
        return self._descriptor

    @property
    def is_held(self) -> bool:
        """Whether it is held here."""
        return self._descriptor is not None

    def take(self) -> bool:
        """Take the lock if nobody has it; return whether it is held now."""
        if self._descriptor is not None:
            return True
        descriptor = self._files.open(self._path, os.O_CREAT | os.O_RDWR)
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as exc:
            self._files.close(descriptor)
            if isinstance(exc, BlockingIOError):
                return False
            raise
        self._descriptor = descriptor
        if self._is_still_there():
            return True
        self.release()
        return False

    def forget_in_children(self) -> None:
        """Let forked children close the file, for a lock that is held for long.

        They inherit it, and with it the lock, which would outlive the one who took it.
        """
        os.register_at_fork(after_in_child=partial(_release, weakref.ref(self)))

    def release(self) -> None:
        """Give the lock back; idempotent."""
        descriptor, self._descriptor = self._descriptor, None
        if descriptor is not None:
            self._files.close(descriptor)

    def _is_still_there(self) -> bool:
        """Return whether the locked file is the one at the path: someone may have swept it away in between."""
        try:
            there = self._files.stat(self._path)
        except FileNotFoundError:
            return False
        held = self._files.stat_open(self.descriptor)
        return (there.st_dev, there.st_ino) == (held.st_dev, held.st_ino)


def _release(lock: weakref.ref[FileLock]) -> None:
    found = lock()
    if found is not None:
        found.release()
