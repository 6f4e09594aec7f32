"""Who writes into a directory and is alive; what the dead leave behind is swept."""

from __future__ import annotations

import itertools
import os
import secrets

from aiokvoffload.errors import ConfigurationError
from aiokvoffload.tiers.fs.files import Files
from aiokvoffload.tiers.fs.layout import Layout
from aiokvoffload.tiers.fs.locks import FileLock

_MOST_ATTEMPTS = 10


class Writer:
    """One process, or one tier of it, that writes into a directory; alive as long as its lock is held.

    Args:
        files: The file system.
        layout: The directory.
    """

    def __init__(self, files: Files, layout: Layout) -> None:
        self._files = files
        self._numbers = itertools.count()
        for _ in range(_MOST_ATTEMPTS):
            self.name = secrets.token_hex(8)
            self.directory = layout.writer(self.name)
            files.make_directories(self.directory)
            self._lock = FileLock(files, f"{self.directory}/lock")
            try:
                if self._lock.take():
                    self._lock.forget_in_children()
                    return
            except FileNotFoundError:
                continue  # a sweep took the directory for one that somebody dead had left
        raise ConfigurationError(f"{self.directory} cannot be locked; does its file system know flock()?")

    def new_path(self) -> str:
        """Return where a block can be written before it is put in its place."""
        return f"{self.directory}/{next(self._numbers)}"

    def now_ns(self) -> int:
        """Return the time of the file system."""
        return self._files.now_ns(self._lock.descriptor)

    def close(self) -> None:
        """Remove what is left, and stop being a writer."""
        try:
            remove_writer(self._files, self.directory)
        finally:
            self._lock.release()


def is_alive(files: Files, layout: Layout, writer: str) -> bool:
    """Return whether a writer holds its lock."""
    lock = FileLock(files, f"{layout.writer(writer)}/lock")
    try:
        if not lock.take():
            return True
    except (FileNotFoundError, NotADirectoryError):
        return False
    lock.release()
    return False


def sweep_dead_writers(files: Files, layout: Layout, *, own: str) -> None:
    """Remove what writers that are not alive have left behind."""
    for writer in files.list(layout.writers):
        if writer == own:
            continue
        lock = FileLock(files, f"{layout.writer(writer)}/lock")
        try:
            if lock.take():
                remove_writer(files, layout.writer(writer))
        except (FileNotFoundError, NotADirectoryError):
            continue  # somebody else has swept it
        finally:
            lock.release()


def remove_writer(files: Files, directory: str) -> None:
    """Remove a writer's directory, its lock last."""
    for name in sorted(files.list(directory), key=lambda name: name == "lock"):
        files.unlink(os.path.join(directory, name))
    files.remove_directory(directory)
