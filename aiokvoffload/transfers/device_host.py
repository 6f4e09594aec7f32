"""Copies in one direction between a device and host slots."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from aiokvoffload.devices.base import CopyPlan, Device, Direction, Stream
from aiokvoffload.memory.base import HostMemory
from aiokvoffload.specs import CPULoadStoreSpec, GPULoadStoreSpec
from aiokvoffload.transfers.pointers import SlotLayout


class SingleDirectionOffloadingHandler:
    """Turns the two ends of a transfer into copies and puts them on a stream; orders nothing.

    Args:
        direction: Which way.
        layout: How GPU blocks lie in slots.
        memory: Where the slots are.
        device: Does the copying.
    """

    def __init__(self, direction: Direction, layout: SlotLayout, memory: HostMemory, device: Device) -> None:
        self.direction = direction
        self._layout = layout
        self._memory = memory
        self._device = device

    def plan(
        self, gpu_spec: GPULoadStoreSpec, cpu_spec: CPULoadStoreSpec, keep: NDArray[np.bool_] | None = None
    ) -> CopyPlan:
        """Return the copies of a transfer; `keep` says of which GPU blocks, by default all.

        Raises:
            InvalidRequestError: See `SlotLayout.plan`.
        """
        return self._layout.plan(gpu_spec, cpu_spec, self.direction, self._memory, keep)

    def send(self, plan: CopyPlan, stream: Stream) -> None:
        """Put copies on a stream.

        Raises:
            DeviceError: The device refused them; then none of them runs.
        """
        self._device.copy_batch(plan, stream)
