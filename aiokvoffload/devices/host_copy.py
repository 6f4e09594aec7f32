"""Copies between addresses of this process, many of them per call and with the GIL released.

Each call into C gives up the GIL and must win it back, which takes up to the switch interval (5 ms) while another
thread runs Python. A loop of `memmove` over small pages therefore crawls as soon as the process has anything else
to do. `process_vm_readv` on the own process moves up to 1024 pages per call.
"""

from __future__ import annotations

import ctypes
import os
from collections.abc import Callable

import numpy as np
from numpy.typing import NDArray

from aiokvoffload.devices.base import CopyPlan

MAXIMUM_VECTOR_COUNT = 1024
"""IOV_MAX of Linux: the most descriptors one call takes."""

SINGLE_COPY_BYTES = 1024 * 1024
"""From this size on a copy is worth a call of its own.

Both ways are about equally fast from 16 KiB on while the GIL is free, and batches are much faster while it is not.
From this size on memmove gains up to a tenth, and a copy lasts long enough that winning the GIL back matters less.
"""

_ProcessVmReadv = Callable[[int, int, int, int, int, int], int]


class HostCopier:
    """Runs copy plans between addresses of this process.

    Attributes:
        is_vectored: Small copies go in batches; False where the system forbids it, which is slower.
    """

    def __init__(self) -> None:
        self._process_vm_readv = _find_process_vm_readv()
        self.is_vectored = self._process_vm_readv is not None and self._probe()

    def copy(self, plan: CopyPlan) -> None:
        """Move the bytes of a valid plan in the calling thread.

        Raises:
            OSError: An address is not mapped; part of the plan may have been copied. (Copies of
                `SINGLE_COPY_BYTES` and more, or all where `is_vectored` is False, crash the process instead.)
        """
        if not self.is_vectored:
            copy_one_by_one(plan.sources, plan.destinations, plan.byte_counts)
            return
        is_small = plan.byte_counts < SINGLE_COPY_BYTES
        if is_small.any():
            self._copy_vectored(plan.sources[is_small], plan.destinations[is_small], plan.byte_counts[is_small])
        if not is_small.all():
            is_big = ~is_small
            copy_one_by_one(plan.sources[is_big], plan.destinations[is_big], plan.byte_counts[is_big])

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
    for source, destination, byte_count in zip(
        sources.tolist(), destinations.tolist(), byte_counts.tolist(), strict=True
    ):
        ctypes.memmove(destination, source, byte_count)


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
