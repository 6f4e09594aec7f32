"""A worker over a few small blocks and slots, on a device whose copies land when the test says so."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from numpy.typing import NDArray

from aiokvoffload.devices.base import Direction, Event
from aiokvoffload.kv_caches import CanonicalKVCaches
from aiokvoffload.memory.pinned import PinnedMemory
from aiokvoffload.specs import CPULoadStoreSpec, GPULoadStoreSpec
from aiokvoffload.testing.clock import ManualClock
from aiokvoffload.testing.device import ManualDevice
from aiokvoffload.transfers.base import Transfer
from aiokvoffload.transfers.device_host import SingleDirectionOffloadingHandler
from aiokvoffload.transfers.pointers import SlotLayout
from aiokvoffload.transfers.worker import OffloadingWorker

BLOCK_BYTES = 8
BLOCK_COUNT = 16
SLOT_COUNT = 16
LANDING_SECONDS = 5.0


class WorkerRig:
    """One group, one page per block; block and slot numbers tell their first bytes apart.

    Args:
        in_flight_blocks: How many blocks may be sent and not landed.
        device: Where the copies run.
        streams_per_direction: Streams of each direction.
        clock: Where deadlines are read.
    """

    def __init__(
        self,
        *,
        in_flight_blocks: int = 1000,
        device: ManualDevice | None = None,
        streams_per_direction: int = 2,
        clock: ManualClock | None = None,
    ) -> None:
        self.device = device or ManualDevice()
        self.clock = clock or ManualClock()
        self.gpu = torch.zeros((BLOCK_COUNT, BLOCK_BYTES), dtype=torch.int8)
        layout = SlotLayout(CanonicalKVCaches.from_layers([self.gpu]), 1)
        self.memory = PinnedMemory(SLOT_COUNT, layout.slot_bytes, self.device)
        self.cpu: NDArray[np.uint8] = self.memory.buffer.reshape(SLOT_COUNT, BLOCK_BYTES)
        for block in range(BLOCK_COUNT):
            self.gpu[block] = block + 1
        for slot in range(SLOT_COUNT):
            self.cpu[slot] = slot + 101
        handlers = {
            direction: SingleDirectionOffloadingHandler(direction, layout, self.memory, self.device)
            for direction in Direction
        }
        self.worker = OffloadingWorker(
            self.device,
            layout,
            handlers,
            self.clock,
            streams_per_direction=streams_per_direction,
            in_flight_bytes=in_flight_blocks * BLOCK_BYTES,
            landing_seconds=LANDING_SECONDS,
        )
        self.over: list[Transfer] = []
        self.overdue: list[Transfer] = []

    def store(self, *pairs: tuple[int, int], after: Event | None = None) -> Transfer:
        """Submit a store of (GPU block, slot) pairs."""
        return self.submit(Direction.STORE, pairs, after)

    def load(self, *pairs: tuple[int, int], after: Event | None = None) -> Transfer:
        """Submit a load of (slot, GPU block) pairs."""
        return self.submit(Direction.LOAD, [(block, slot) for slot, block in pairs], after)

    def submit(self, direction: Direction, pairs: Sequence[tuple[int, int]], after: Event | None = None) -> Transfer:
        """Submit a transfer of (GPU block, slot) pairs."""
        transfer = Transfer(
            direction,
            GPULoadStoreSpec([block for block, _ in pairs], [len(pairs)], [0]),
            CPULoadStoreSpec([slot for _, slot in pairs]),
            after=after,
            on_over=lambda: self.over.append(transfer),
            on_overdue=lambda: self.overdue.append(transfer),
        )
        self.worker.submit(transfer)
        return transfer

    def land(self) -> list[Transfer]:
        """Let everything land that can, and poll."""
        self.device.land_all()
        return self.worker.poll()

    def blocks(self) -> list[int]:
        """Return the first byte of every GPU block."""
        return [int(value) & 0xFF for value in self.gpu[:, 0].tolist()]

    def slots(self) -> list[int]:
        """Return the first byte of every slot."""
        return [int(value) for value in self.cpu[:, 0].tolist()]
