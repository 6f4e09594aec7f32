"""Reading and writing whole files past the page cache, where the file system can."""

from __future__ import annotations

import ctypes
import mmap
import os
import threading
from collections.abc import Sequence

import numpy as np

from aiokvoffload.tiers.envelope import FILE_ALIGNMENT_BYTES
from aiokvoffload.tiers.fs.files import Files, read_fully, read_whole, write_fully

_ZEROS = bytes(FILE_ALIGNMENT_BYTES)


class AlignedScratch(threading.local):
    """Memory of each thread that begins at a page, and grows as needed."""

    def __init__(self) -> None:
        self._memory = memoryview(mmap.mmap(-1, FILE_ALIGNMENT_BYTES))

    def take(self, byte_count: int) -> memoryview:
        """Return the first bytes of this thread's memory; what they were is undefined."""
        if self._memory.nbytes < byte_count:
            self._memory = memoryview(mmap.mmap(-1, byte_count))
        return self._memory[:byte_count]


class BlockIO:
    """Moves a header, a payload and its padding between memory and the start of a file, in one call each.

    Args:
        files: The file system.
        is_direct: Past the page cache. A payload that is not aligned is copied on its way.
    """

    def __init__(self, files: Files, *, is_direct: bool) -> None:
        self._files = files
        self.is_direct = is_direct
        self._scratch = AlignedScratch()

    @property
    def open_flags(self) -> int:
        """What files must be opened with."""
        return os.O_DIRECT if self.is_direct else 0

    def write(self, descriptor: int, header: bytes, payload: memoryview) -> None:
        """Write a block."""
        padding_bytes = -payload.nbytes % FILE_ALIGNMENT_BYTES
        views: Sequence[memoryview] = [memoryview(header), payload, memoryview(_ZEROS)[:padding_bytes]]
        if self.is_direct:
            is_bounced = not _is_aligned(payload)
            scratch = self._scratch.take(len(header) + is_bounced * (payload.nbytes + padding_bytes))
            scratch[: len(header)] = header
            if is_bounced:
                end = len(header) + payload.nbytes
                _copy(payload, scratch[len(header) : end])
                scratch[end:] = views[2]
            views = [scratch] if is_bounced else [scratch, payload]
        write_fully(self._files, descriptor, views)

    def read(self, descriptor: int, header_bytes: int, payload: memoryview) -> tuple[bytes, bytes] | None:
        """Read a block into `payload` and return its header and its padding; None if the file is of another length."""
        payload_end = header_bytes + payload.nbytes
        padding_bytes = -payload.nbytes % FILE_ALIGNMENT_BYTES
        file_bytes = payload_end + padding_bytes
        # There is room for more than the file should have: one call tells where it ends, too.
        if self.is_direct and not _is_aligned(payload):
            scratch = self._scratch.take(file_bytes + FILE_ALIGNMENT_BYTES)
            if not read_whole(self._files, descriptor, [scratch], file_bytes):
                return None
            _copy(scratch[header_bytes:payload_end], payload)
            return bytes(scratch[:header_bytes]), bytes(scratch[payload_end:file_bytes])
        scratch = self._scratch.take(header_bytes + padding_bytes + FILE_ALIGNMENT_BYTES)
        header, rest = scratch[:header_bytes], scratch[header_bytes:]
        if not read_whole(self._files, descriptor, [header, payload, rest], file_bytes):
            return None
        return bytes(header), bytes(rest[:padding_bytes])


def can_be_direct(files: Files, path: str) -> bool:
    """Return whether the file system takes direct I/O, by trying it with a file at `path`."""
    scratch = AlignedScratch().take(FILE_ALIGNMENT_BYTES)
    scratch[:5] = b"probe"
    try:
        descriptor = files.open(path, os.O_CREAT | os.O_RDWR | os.O_DIRECT)
    except OSError:
        return False
    try:
        write_fully(files, descriptor, [scratch])
        scratch[:5] = b"-----"
        return read_fully(files, descriptor, [scratch]) and bytes(scratch[:5]) == b"probe"
    except OSError:
        return False
    finally:
        files.close(descriptor)
        files.unlink(path)


def _is_aligned(view: memoryview) -> bool:
    if view.nbytes % FILE_ALIGNMENT_BYTES:
        return False
    if view.readonly:
        address = np.frombuffer(view, np.uint8).ctypes.data
    else:
        address = ctypes.addressof(ctypes.c_char.from_buffer(view))  # six times as fast
    return address % FILE_ALIGNMENT_BYTES == 0


def _copy(source: memoryview, target: memoryview) -> None:
    """Copy bytes; unlike the assignment of a slice, other threads run meanwhile."""
    np.copyto(np.frombuffer(target, np.uint8), np.frombuffer(source, np.uint8))
