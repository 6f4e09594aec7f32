"""Up to which size a kernel copies faster than the copy engines, measured on the device that will do it."""

from __future__ import annotations

from collections.abc import Callable, Mapping

import numpy as np
from numpy.typing import NDArray

from aiokvoffload.devices.base import CopyPlan, Device, Direction, Proceed, Stream, ignore_bytes
from aiokvoffload.errors import DeviceError

SIZES = (4 << 10, 16 << 10, 64 << 10, 256 << 10)
"""Bytes per copy that are tried."""
SCRATCH_BYTES = 8 << 20
TOTAL_BYTES = SCRATCH_BYTES * len(SIZES) * len(Direction)
"""What is tried at most, each size in each direction counted once."""

_MOST_COPIES = 512
_TRIALS = 3
_MUST_BE_FASTER = 1.1
"""A kernel takes processors from the model, so it has to be clearly faster."""
_PATIENCE_SECONDS = 10.0

Put = Callable[[CopyPlan, Stream], None]
"""Puts copies into a stream, in one certain way."""


class Calibration:
    """Tries two ways of copying between scratch memory on both sides.

    Args:
        device: Orders and times.
        put_by_engine: The way that is known to work.
        put_by_kernel: The other; it must prove that it copies the right bytes.
        device_address: Where `SCRATCH_BYTES` of GPU memory begin.
        host: `SCRATCH_BYTES` of pinned host memory.
    """

    def __init__(
        self, device: Device, put_by_engine: Put, put_by_kernel: Put, device_address: int, host: NDArray[np.uint8]
    ) -> None:
        self._device = device
        self._put_by_engine = put_by_engine
        self._put_by_kernel = put_by_kernel
        self._device_address = device_address
        self._host = host
        self._stream = device.create_stream("calibration")

    def kernel_limits(self, proceed: Proceed = ignore_bytes) -> Mapping[Direction, int]:
        """Return the bytes per copy up to which the kernel is clearly faster; 0 if it never is.

        Args:
            proceed: Called before each size.

        Raises:
            DeviceError: The kernel fails, or copies wrong bytes.
        """
        limits = dict.fromkeys(Direction, 0)
        for tried, direction in enumerate(Direction):
            for index, size in enumerate(SIZES):
                proceed(SCRATCH_BYTES * (tried * len(SIZES) + index), TOTAL_BYTES)
                self._check_kernel(direction, size)
                kernel, engine = (
                    self._seconds(put, direction, size) for put in (self._put_by_kernel, self._put_by_engine)
                )
                if not is_clearly_faster(kernel, engine):
                    break
                limits[direction] = size
        proceed(TOTAL_BYTES, TOTAL_BYTES)
        return limits

    def _check_kernel(self, direction: Direction, size: int) -> None:
        """Copy there by one way and back by the other."""
        plan, rows, host_rows = self._scattered(direction, size)
        content = np.random.default_rng(size).integers(0, 256, SCRATCH_BYTES, np.uint8)
        there, back = self._whole(Direction.LOAD), self._whole(Direction.STORE)
        self._host[:] = content
        self._run(self._put_by_engine, there)
        expected = content.reshape(-1, size).copy()
        if direction is Direction.LOAD:
            self._run(self._put_by_kernel, plan)
            self._host[:] = 0
            self._run(self._put_by_engine, back)
            expected[rows] = content.reshape(-1, size)[host_rows]
        else:
            self._host[:] = 0
            self._run(self._put_by_kernel, plan)
            expected[:] = 0
            expected[host_rows] = content.reshape(-1, size)[rows]
        if not np.array_equal(self._host.reshape(-1, size), expected):
            raise DeviceError(f"the copy kernel moved wrong bytes ({direction.value}, {size} bytes a copy)")

    def _seconds(self, put: Put, direction: Direction, size: int) -> float:
        """Return the shortest of a few trials; `_check_kernel` was the first, which compiles and warms up."""
        plan, _, _ = self._scattered(direction, size)
        return min(self._run(put, plan) for _ in range(_TRIALS))

    def _run(self, put: Put, plan: CopyPlan) -> float:
        start = self._device.record(self._stream)
        put(plan, self._stream)
        end = self._device.record(self._stream)
        if not self._device.synchronize(end, _PATIENCE_SECONDS):
            raise DeviceError(f"trial copies were not over after {_PATIENCE_SECONDS:g} s")
        self._device.is_done(end)
        return self._device.elapsed_seconds(start, end)

    def _scattered(self, direction: Direction, size: int) -> tuple[CopyPlan, NDArray[np.int64], NDArray[np.int64]]:
        """Return copies between rows of `size` bytes, none beside the one before, with the rows on either side."""
        row_count = SCRATCH_BYTES // size
        rows, host_rows = (
            np.random.default_rng(seed).permutation(row_count)[: min(_MOST_COPIES, row_count // 2)] for seed in (1, 2)
        )
        ends = self._device_address + rows * size, self._host.ctypes.data + host_rows * size
        sources, destinations = ends if direction is Direction.STORE else ends[::-1]
        plan = CopyPlan(sources, destinations, np.full(len(rows), size, np.int64), direction, (self._host,))
        return plan, rows, host_rows

    def _whole(self, direction: Direction) -> CopyPlan:
        ends = (np.array([address], np.int64) for address in (self._device_address, self._host.ctypes.data))
        sources, destinations = ends if direction is Direction.STORE else reversed([*ends])
        return CopyPlan(sources, destinations, np.array([SCRATCH_BYTES], np.int64), direction, (self._host,))


def is_clearly_faster(seconds: float, than_seconds: float) -> bool:
    """Return whether a way that takes processors from the model is worth it."""
    return seconds * _MUST_BE_FASTER < than_seconds
