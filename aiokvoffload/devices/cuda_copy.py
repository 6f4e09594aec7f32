"""Ways to make the copies of a batch on a CUDA stream."""

from __future__ import annotations

import ctypes
from abc import ABC, abstractmethod
from enum import IntEnum

import numpy as np

from aiokvoffload.devices.base import CopyPlan
from aiokvoffload.devices.cuda_driver import CopyAttributes, CudaDriver
from aiokvoffload.errors import ConfigurationError

MOST_DESCRIPTORS = 4096
"""Copies per call of the driver; one call with some 50,000 has crashed drivers, and a call costs little beside them."""


class SourceOrder(IntEnum):
    """CUmemcpySrcAccessOrder: when the sources of a batch may be read; destinations are always written in order."""

    STREAM = 1
    """When the stream gets there."""
    ANY = 3
    """Also before: for sources that nothing ahead on any stream writes."""


class Copier(ABC):
    """One way to make the copies of a batch."""

    @abstractmethod
    def submit(self, plan: CopyPlan, order: SourceOrder, stream: int) -> None:
        """Put the copies of a plan that is not empty into a stream; the context is current.

        Raises:
            DeviceError: Not all of them were taken; those that were will run.
        """


class BatchCopier(Copier):
    """Batches of the driver's own, on the copy engines: cuMemcpyBatchAsync, CUDA 12.8 and newer.

    The address arrays of the plan are handed over as they are.

    Args:
        driver: Has the call.
        most_descriptors: Copies per call.

    Raises:
        ConfigurationError: The driver is too old.
    """

    def __init__(self, driver: CudaDriver, most_descriptors: int = MOST_DESCRIPTORS) -> None:
        if driver.batched_copy is None:
            raise ConfigurationError(f"batched copies need a driver of CUDA 12.8, this one is of {driver.version}")
        self._driver = driver
        self._call = driver.batched_copy
        self._most_descriptors = most_descriptors
        self._attributes = {order: CopyAttributes(source_access_order=order) for order in SourceOrder}
        self._first_copy = ctypes.c_size_t(0)
        self._failed_copy = ctypes.c_size_t()

    def submit(self, plan: CopyPlan, order: SourceOrder, stream: int) -> None:
        """Put the copies into the stream, so many per call."""
        columns = [np.ascontiguousarray(column) for column in (plan.destinations, plan.sources, plan.byte_counts)]
        destinations, sources, byte_counts = (column.ctypes.data for column in columns)
        copy_count = len(plan.sources)
        for first in range(0, copy_count, self._most_descriptors):
            skipped = first * np.dtype(np.int64).itemsize
            code = self._call(
                destinations + skipped,
                sources + skipped,
                byte_counts + skipped,
                min(self._most_descriptors, copy_count - first),
                ctypes.byref(self._attributes[order]),
                ctypes.byref(self._first_copy),  # the attributes hold from copy 0 on
                1,
                ctypes.byref(self._failed_copy),
                stream,
            )
            if code:
                raise self._driver.error("cuMemcpyBatchAsync", code)


class LoopCopier(Copier):
    """One call per copy, always in stream order; for drivers without the batched one.

    Args:
        driver: Has the call.
    """

    def __init__(self, driver: CudaDriver) -> None:
        self._driver = driver

    def submit(self, plan: CopyPlan, order: SourceOrder, stream: int) -> None:
        """Put the copies into the stream one by one."""
        columns = (plan.destinations.tolist(), plan.sources.tolist(), plan.byte_counts.tolist())
        for destination, source, byte_count in zip(*columns, strict=True):
            self._driver.call("cuMemcpyAsync", destination, source, byte_count, stream)
