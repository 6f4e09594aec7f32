"""A file system that fails, hangs or is full when a test says so."""

from __future__ import annotations

import os
import threading
from collections import Counter
from collections.abc import Sequence

from aiokvoffload.tiers.fs.files import Files


class FaultyFiles(Files):
    """The real file system, with trouble on demand; the names of calls are those of the methods of `Files`.

    Attributes:
        free: What `free_bytes` answers; None: the truth.
        calls: How often each call that can fail was made.
    """

    def __init__(self) -> None:
        self.free: int | None = None
        self.calls: Counter[str] = Counter()
        self._errors: dict[str, tuple[int, int]] = {}
        self._gates: dict[str, threading.Event] = {}
        self._held = threading.Semaphore(0)

    def fail(self, call: str, error: int, *, times: int = -1) -> None:
        """Let a call raise OSError with this errno, so many times or until `heal`."""
        self._errors[call] = (error, times)

    def heal(self) -> None:
        """End all failures."""
        self._errors.clear()

    def hold(self, call: str) -> None:
        """Let a call wait until `let_go`."""
        self._gates[call] = threading.Event()

    def wait_held(self, timeout_seconds: float) -> bool:
        """Wait until a call is held up that was not waited for before."""
        return self._held.acquire(timeout=timeout_seconds)

    def let_go(self) -> None:
        """Let all calls go on."""
        gates, self._gates = self._gates, {}
        for gate in gates.values():
            gate.set()

    def open(self, path: str, flags: int) -> int:
        """Open a file."""
        self._meet("open")
        if flags & (os.O_WRONLY | os.O_RDWR):
            self._meet("create")
        return super().open(path, flags)

    def read(self, descriptor: int, views: Sequence[memoryview], offset: int) -> int:
        """Read."""
        self._meet("read")
        return super().read(descriptor, views, offset)

    def write(self, descriptor: int, views: Sequence[memoryview], offset: int) -> int:
        """Write."""
        self._meet("write")
        return super().write(descriptor, views, offset)

    def stat(self, path: str) -> os.stat_result:
        """Look."""
        self._meet("stat")
        return super().stat(path)

    def rename(self, path: str, to_path: str) -> None:
        """Put in place."""
        self._meet("rename")
        super().rename(path, to_path)

    def unlink(self, path: str) -> None:
        """Remove."""
        self._meet("unlink")
        super().unlink(path)

    def list(self, path: str) -> list[str]:
        """List."""
        self._meet("list")
        return super().list(path)

    def set_times(self, path: str, nanoseconds: int) -> None:
        """Set times."""
        self._meet("set_times")
        super().set_times(path, nanoseconds)

    def free_bytes(self, path: str) -> int:
        """Return what the test says."""
        return super().free_bytes(path) if self.free is None else self.free

    def _meet(self, call: str) -> None:
        self.calls[call] += 1
        gate = self._gates.get(call)
        if gate is not None:
            self._held.release()
            gate.wait()
        error, times = self._errors.get(call, (0, 0))
        if error and times:
            self._errors[call] = (error, times - 1)
            raise OSError(error, os.strerror(error))
