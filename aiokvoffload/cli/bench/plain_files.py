"""The yardstick of a tier: the same bytes in plain files, written and read by plain threads."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Sequence


class PlainFiles:
    """A file per block in a directory, by number.

    Args:
        directory: An empty directory.
        thread_count: Files in work at a time.
        is_direct: Past the page cache.
    """

    def __init__(self, directory: str, *, thread_count: int, is_direct: bool) -> None:
        self._directory = directory
        self._thread_count = thread_count
        self._flags = os.O_DIRECT if is_direct else 0

    def write(self, payloads: Sequence[memoryview]) -> None:
        """Write new files."""

        def write_one(number: int, _thread: int) -> None:
            descriptor = os.open(self._path(number), os.O_CREAT | os.O_EXCL | os.O_WRONLY | self._flags, 0o600)
            os.pwritev(descriptor, [payloads[number]], 0)
            os.close(descriptor)

        self._run(len(payloads), write_one)

    def read(self, count: int, buffers: Sequence[memoryview]) -> None:
        """Read the files, each thread into its own buffer."""

        def read_one(number: int, thread: int) -> None:
            descriptor = os.open(self._path(number), os.O_RDONLY | self._flags)
            os.preadv(descriptor, [buffers[thread]], 0)
            os.close(descriptor)

        self._run(count, read_one)

    def remove(self, count: int) -> None:
        """Remove the files."""
        for number in range(count):
            os.unlink(self._path(number))

    def _path(self, number: int) -> str:
        return f"{self._directory}/{number}"

    def _run(self, count: int, work: Callable[[int, int], None]) -> None:
        """Do the work on each number, in threads."""
        numbers = iter(range(count))
        guard = threading.Lock()
        errors: list[OSError] = []

        def run(thread: int) -> None:
            while True:
                with guard:
                    number = next(numbers, None)
                if number is None:
                    return
                try:
                    work(number, thread)
                except OSError as exc:
                    errors.append(exc)
                    return

        threads = [threading.Thread(target=run, args=(thread,)) for thread in range(self._thread_count)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        for error in errors:
            raise error
