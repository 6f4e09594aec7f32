"""Where the processes of an engine meet: a directory of sockets, and a lock that one engine of a name can hold."""

from __future__ import annotations

import fcntl
import os
import stat
from pathlib import Path

from aiokvoffload.errors import ConfigurationError
from aiokvoffload.memory.region_file import region_path

_MAX_SOCKET_PATH_BYTES = 107
_PID_LETTERS = 20
_BOOT_ID = Path("/proc/sys/kernel/random/boot_id")


def meeting_directory(given: Path | None = None) -> Path:
    """Return the directory of sockets, made for this user alone if it is not there.

    Args:
        given: Where; by default the same place for all processes of a user, whatever their environment.

    Raises:
        ConfigurationError: It cannot be made, or others can reach into it.
    """
    directory = given or Path("/tmp") / f"aiokvoffload-{os.geteuid()}"  # noqa: S108  its owner and mode are checked
    try:
        directory.mkdir(mode=0o700, exist_ok=True)
        status = directory.lstat()
    except OSError as exc:
        raise ConfigurationError(f"cannot make the directory {directory} for sockets: {exc}") from exc
    if not stat.S_ISDIR(status.st_mode) or status.st_uid != os.geteuid() or status.st_mode & 0o077:
        raise ConfigurationError(f"{directory} is no directory of this user alone; remove it, or let it have mode 0700")
    return directory


def socket_path(directory: Path, engine_id: str) -> Path:
    """Return where the scheduler of an engine listens.

    Raises:
        ConfigurationError: The id cannot be part of a file's name, or the path is too long for a socket.
    """
    region_path(directory, engine_id)  # it names a region too
    path = directory / f"{engine_id}.socket"
    if len(os.fsencode(path)) > _MAX_SOCKET_PATH_BYTES:
        raise ConfigurationError(f"{path} is too long for a socket; use a shorter engine_id or directory")
    return path


def boot_id() -> str:
    """Return what differs between machines, and between two starts of one; "" if the system does not say."""
    try:
        return _BOOT_ID.read_text().strip()
    except OSError:
        return ""


class EngineLock:
    """Held by the one process that schedules for an engine of this name; goes with the process.

    Two in one process are not told apart here: the system gives such a lock to a process, so that none forked from it
    keeps it.

    Args:
        directory: Where engines meet.
        engine_id: The name.

    Raises:
        ConfigurationError: Another process holds it, or the file cannot be made.
    """

    def __init__(self, directory: Path, engine_id: str) -> None:
        self._path = directory / f"{engine_id}.lock"
        self._descriptor = -1
        while self._descriptor < 0:
            try:
                descriptor = os.open(self._path, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600)
            except OSError as exc:
                raise ConfigurationError(f"cannot make {self._path}: {exc}") from exc
            try:
                fcntl.lockf(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except OSError as exc:
                holder = os.pread(descriptor, _PID_LETTERS, 0).decode("ascii", "replace") or "unknown"
                os.close(descriptor)
                raise ConfigurationError(describe_taken(engine_id, holder)) from exc
            if self._is_current(descriptor):
                self._descriptor = descriptor
            else:
                os.close(descriptor)  # its holder has just removed it
        os.ftruncate(self._descriptor, 0)
        os.pwrite(self._descriptor, str(os.getpid()).encode(), 0)

    def release(self) -> None:
        """Let another engine have the name; idempotent."""
        if self._descriptor >= 0:
            self._path.unlink(missing_ok=True)
            os.close(self._descriptor)
            self._descriptor = -1

    def _is_current(self, descriptor: int) -> bool:
        try:
            return os.path.samestat(os.stat(self._path), os.fstat(descriptor))
        except FileNotFoundError:
            return False


def describe_taken(engine_id: str, holder: object) -> str:
    """Return what to say when an engine of that name is open already."""
    return f"an engine {engine_id!r} is open already, by process {holder}; close it, or use another engine_id"
