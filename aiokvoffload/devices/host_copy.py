"""Copies between addresses of this process, many of them per call and with the GIL released.

Each call into C gives up the GIL and must win it back, which takes up to the switch interval (5 ms) while another
thread runs Python. A loop of `memmove` over small pages therefore crawls as soon as the process has anything else
to do. `process_vm_readv` on the own process moves up to 1024 pages per call, but has each 4 KiB of them looked up. For
pages in between, `memmove` is faster as long as the GIL comes back at once, so it is tried and watched. What is small
keeps a processor busy rather than memory, so two threads share it; of large pages they share only a large plan.
"""

from __future__ import annotations

import ctypes
import os
import threading
from collections.abc import Callable, Iterable
from functools import partial
from itertools import pairwise

import numpy as np
from numpy.typing import NDArray

from aiokvoffload.clock import Clock, SystemClock
from aiokvoffload.devices.base import CopyPlan
from aiokvoffload.devices.helper_thread import HelperThread, Piece

MAXIMUM_VECTOR_COUNT = 1024
"""IOV_MAX of Linux: the most descriptors one call takes."""

WATCHED_COPY_BYTES = 64 * 1024
"""From this size on a copy may be worth a call of its own, if the GIL comes back at once."""

SINGLE_COPY_BYTES = 1024 * 1024
"""From this size on it always is: it lasts so long that winning the GIL back matters less."""

_SAMPLE_BYTES = 1024 * 1024
"""So much of a plan's watched copies goes in a batch, which tells how fast those are."""
_GRACE_SECONDS = 0.0005
"""How much longer than batches single copies may take before the rest goes in batches."""
_RETRY_SECONDS = 0.1
"""For so long after that, all do."""
_LOOK_BYTES = 512 * 1024
"""After so many bytes of single copies the clock is looked at."""

_LEAST_SHARED_BYTES = 32 * 1024 * 1024
"""One thread copies less than this of large pages about as fast as two, which may have to wait for each other."""
_LEAST_PIECE_BYTES = 2 * 1024 * 1024
_MOST_PIECES = 8
"""A plan is copied in so many pieces, each by one of two threads: one does not fill memory's time with small pages."""

_ProcessVmReadv = Callable[[int, int, int, int, int, int], int]
_Copies = tuple[NDArray[np.int64], NDArray[np.int64], NDArray[np.int64]]
"""Sources, destinations and byte counts."""


class HostCopier:
    """Runs copy plans between addresses of this process.

    Args:
        clock: By which copies are watched.

    Attributes:
        is_vectored: Small copies go in batches; False where the system forbids it, which is slower.
    """

    def __init__(self, clock: Clock | None = None) -> None:
        self._now = (clock or SystemClock()).now
        self._retry_at = self._now()
        self._one_by_one = threading.Lock()  # two threads would lose the GIL to each other
        self._helper = HelperThread("aiokvoffload-copies")
        self._process_vm_readv = _find_process_vm_readv()
        self.is_vectored = self._process_vm_readv is not None and self._probe()

    def copy(self, plan: CopyPlan) -> None:
        """Move the bytes of a valid plan, in the calling thread and, if they are many, one that helps it.

        Raises:
            OSError: An address is not mapped; part of the plan may have been copied. (Copies of
                `WATCHED_COPY_BYTES` and more may crash the process instead, as all do where `is_vectored` is False.)
        """
        copies = plan.sources, plan.destinations, plan.byte_counts
        piece_bytes = max(_LEAST_PIECE_BYTES, plan.total_bytes // _MOST_PIECES)
        if not self.is_vectored:
            self._helper.share(_single_pieces(copies, piece_bytes))
            return
        pieces: list[Piece] = []
        size_classes = np.searchsorted((WATCHED_COPY_BYTES, SINGLE_COPY_BYTES), plan.byte_counts, side="right")
        for size_class, pieces_of in enumerate((self._vectored_pieces, self._watched_pieces, _single_pieces)):
            chosen = _part(copies, size_classes == size_class)
            byte_count = int(chosen[2].sum())
            is_shared = size_class == 0 or byte_count >= _LEAST_SHARED_BYTES
            if byte_count:
                pieces += pieces_of(chosen, piece_bytes if is_shared else byte_count)
        self._helper.share(pieces)

    def close(self) -> None:
        """Let the helping thread end; copies go on without it."""
        self._helper.close()

    def _vectored_pieces(self, copies: _Copies, piece_bytes: int) -> list[Piece]:
        return _pieces(self._copy_vectored, copies, piece_bytes)

    def _watched_pieces(self, copies: _Copies, piece_bytes: int) -> list[Piece]:
        """Copy some in a batch, and return what copies the others: one by one as long as that is not slower."""
        byte_counts = copies[2]
        sample_count = 1 + int(np.searchsorted(np.cumsum(byte_counts), _SAMPLE_BYTES))
        started = self._now()
        self._copy_vectored(*_part(copies, slice(sample_count)))
        sampled = self._now()
        seconds_per_byte = (sampled - started) / int(byte_counts[:sample_count].sum())
        copy = partial(self._copy_watched, seconds_per_byte)
        return _pieces(copy, _part(copies, slice(sample_count, None)), piece_bytes)

    def _copy_watched(
        self,
        seconds_per_byte: float,
        sources: NDArray[np.int64],
        destinations: NDArray[np.int64],
        byte_counts: NDArray[np.int64],
    ) -> None:
        copies = sources, destinations, byte_counts
        done_count, now = 0, self._now()
        if now >= self._retry_at and self._one_by_one.acquire(blocking=False):
            try:
                done_count = self._copy_while_prompt(copies, now, seconds_per_byte)
            finally:
                self._one_by_one.release()
        if done_count < len(byte_counts):
            self._copy_vectored(*_part(copies, slice(done_count, None)))

    def _copy_while_prompt(self, copies: _Copies, now: float, seconds_per_byte: float) -> int:
        """Copy one by one until that takes longer than batches would, and return how many were copied."""
        memmove = ctypes.memmove
        latest = now + _GRACE_SECONDS
        unseen_bytes = 0
        for index, (source, destination, byte_count) in enumerate(_rows(copies)):
            memmove(destination, source, byte_count)
            unseen_bytes += byte_count
            if unseen_bytes >= _LOOK_BYTES:
                latest += unseen_bytes * seconds_per_byte
                unseen_bytes = 0
                looked_at = self._now()
                if looked_at > latest:
                    self._retry_at = looked_at + _RETRY_SECONDS
                    return index + 1
        return len(copies[0])

    def _copy_vectored(
        self, sources: NDArray[np.int64], destinations: NDArray[np.int64], byte_counts: NDArray[np.int64]
    ) -> None:
        if self._process_vm_readv is None:
            raise OSError("process_vm_readv is missing")
        # Two int64 columns are an array of `struct iovec`.
        local = np.stack((destinations, byte_counts), axis=1)
        remote = np.stack((sources, byte_counts), axis=1)
        ends = np.cumsum(byte_counts)
        total_bytes = int(ends[-1])
        process_id = os.getpid()
        moved_bytes = first = 0
        while moved_bytes < total_bytes:
            count = min(MAXIMUM_VECTOR_COUNT, len(byte_counts) - first)
            skipped = first * local.strides[0]
            moved = self._process_vm_readv(
                process_id, local.ctypes.data + skipped, count, remote.ctypes.data + skipped, count, 0
            )
            if moved <= 0:
                number = ctypes.get_errno()
                raise OSError(
                    number,
                    f"{os.strerror(number)} while copying {byte_counts[first]} bytes "
                    f"from {sources[first]:#x} to {destinations[first]:#x}",
                )
            moved_bytes += moved
            # The system call may stop early, between two copies or inside one: go on right there.
            first = int(np.searchsorted(ends, moved_bytes, side="right"))
            if first < len(byte_counts):
                part = moved_bytes - int(ends[first] - byte_counts[first])
                local[first] = destinations[first] + part, byte_counts[first] - part
                remote[first] = sources[first] + part, byte_counts[first] - part

    def _probe(self) -> bool:
        source = np.arange(64, dtype=np.uint8)
        destination = np.zeros_like(source)
        offsets = np.array([0, 40], np.int64)
        try:
            self._copy_vectored(
                source.ctypes.data + offsets, destination.ctypes.data + offsets, np.array([40, 24], np.int64)
            )
        except OSError:
            return False
        return np.array_equal(source, destination)


def copy_one_by_one(
    sources: NDArray[np.int64], destinations: NDArray[np.int64], byte_counts: NDArray[np.int64]
) -> None:
    """Move the bytes of each copy with a call of its own."""
    for source, destination, byte_count in _rows((sources, destinations, byte_counts)):
        ctypes.memmove(destination, source, byte_count)


def _rows(copies: _Copies) -> Iterable[tuple[int, int, int]]:
    sources, destinations, byte_counts = copies
    return zip(sources.tolist(), destinations.tolist(), byte_counts.tolist(), strict=True)


def _single_pieces(copies: _Copies, piece_bytes: int) -> list[Piece]:
    return _pieces(copy_one_by_one, _cut(copies, piece_bytes), piece_bytes)


def _pieces(copy: Callable[..., None], copies: _Copies, piece_bytes: int) -> list[Piece]:
    """Return calls of `copy` that copy about so many bytes each."""
    byte_counts = copies[2]
    ends = np.cumsum(byte_counts)
    marks = np.arange(piece_bytes, byte_counts.sum(), piece_bytes)
    bounds = sorted({0, *(np.searchsorted(ends, marks) + 1).tolist(), len(ends)})
    return [partial(copy, *_part(copies, slice(start, stop))) for start, stop in pairwise(bounds)]


def _cut(copies: _Copies, most_bytes: int) -> _Copies:
    """Cut copies of more bytes into several."""
    sources, destinations, byte_counts = copies
    cut_counts = -(-byte_counts // most_bytes)
    owners = np.repeat(np.arange(len(byte_counts)), cut_counts)
    firsts = np.repeat(np.cumsum(cut_counts) - cut_counts, cut_counts)
    offsets = (np.arange(len(owners)) - firsts) * most_bytes
    return (
        sources[owners] + offsets,
        destinations[owners] + offsets,
        np.minimum(byte_counts[owners] - offsets, most_bytes),
    )


def _part(copies: _Copies, chosen: slice | NDArray[np.bool_]) -> _Copies:
    sources, destinations, byte_counts = copies
    return sources[chosen], destinations[chosen], byte_counts[chosen]


def _find_process_vm_readv() -> _ProcessVmReadv | None:
    try:
        function = ctypes.CDLL(None, use_errno=True).process_vm_readv
    except (OSError, AttributeError, TypeError):
        return None
    function.argtypes = [
        ctypes.c_int,
        ctypes.c_void_p,
        ctypes.c_ulong,
        ctypes.c_void_p,
        ctypes.c_ulong,
        ctypes.c_ulong,
    ]
    function.restype = ctypes.c_ssize_t
    found: _ProcessVmReadv = function
    return found
