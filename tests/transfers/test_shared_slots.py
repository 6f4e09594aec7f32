"""Transfers of several workers into one shared region, each into its slices."""

from __future__ import annotations

import tempfile
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from aiokvoffload.devices.base import Direction
from aiokvoffload.devices.host import HostDevice
from aiokvoffload.kv_caches import CanonicalKVCaches
from aiokvoffload.memory.region_shape import RegionShape
from aiokvoffload.memory.shared import SHARED_MEMORY, SharedOffloadRegion
from aiokvoffload.specs import CPULoadStoreSpec, GPULoadStoreSpec
from aiokvoffload.transfers.device_host import SingleDirectionOffloadingHandler
from aiokvoffload.transfers.pointers import SlotLayout

FACTOR = 2
PAGE_BYTES = (48, 16)
"""Of the two layers."""
GPU_BLOCKS = 8
PATIENCE_SECONDS = 30.0


@pytest.fixture
def directory() -> Iterator[Path]:
    with tempfile.TemporaryDirectory(prefix="aiokvoffload_tests_", dir=SHARED_MEMORY) as name:
        yield Path(name)


class Worker:
    """One rank: its GPU blocks, its device, and its slices of the region."""

    def __init__(self, rank: int, world_size: int, directory: Path) -> None:
        generator = torch.Generator().manual_seed(rank)
        self.layers = [
            torch.randint(-128, 128, (GPU_BLOCKS, size), dtype=torch.int8, generator=generator) for size in PAGE_BYTES
        ]
        self.device = HostDevice()
        layout = SlotLayout(CanonicalKVCaches.from_layers(self.layers), FACTOR)
        shape = RegionShape(block_count=4, slice_bytes=layout.slot_bytes, world_size=world_size)
        self.region = SharedOffloadRegion("transfers", shape, rank, self.device, directory=directory)
        self.views = [torch.from_numpy(self.region.create_next_view(size * FACTOR)) for size in PAGE_BYTES]
        assert self.region.unviewed_bytes == 0
        self._handlers = {
            direction: SingleDirectionOffloadingHandler(direction, layout, self.region, self.device)
            for direction in Direction
        }

    def copy(self, direction: Direction, gpu_blocks: list[int], slots: list[int]) -> None:
        """Copy between GPU blocks and slots, and wait for it."""
        plan = self._handlers[direction].plan(
            GPULoadStoreSpec(gpu_blocks, [len(gpu_blocks)], [0]), CPULoadStoreSpec(slots)
        )
        stream = self.device.create_stream("copies")
        self.device.copy_batch(plan, stream)
        assert self.device.synchronize(self.device.record(stream), PATIENCE_SECONDS)

    def close(self) -> None:
        self.region.close()
        self.device.close()


@pytest.mark.parametrize("world_size", [1, 3])
def test_each_worker_finds_its_own_bytes_again(directory: Path, world_size: int) -> None:
    workers = [Worker(rank, world_size, directory) for rank in range(world_size)]
    threads = [threading.Thread(target=worker.region.prepare) for worker in workers]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    before = [[layer.clone() for layer in worker.layers] for worker in workers]
    for worker in workers:
        worker.copy(Direction.STORE, [6, 1, 0, 5], [3, 1])
    for worker, layers in zip(workers, before, strict=True):
        for view, layer in zip(worker.views, layers, strict=True):
            pages = view.view(torch.int8).reshape(4, FACTOR, -1)
            assert torch.equal(pages[3], layer[[6, 1]])
            assert torch.equal(pages[1], layer[[0, 5]])
            assert not pages[[0, 2]].any()
    for worker in workers:
        worker.copy(Direction.LOAD, [2, 3, 4, 7], [1, 3])
    for worker, layers in zip(workers, before, strict=True):
        for now, layer in zip(worker.layers, layers, strict=True):
            assert torch.equal(now[[2, 3, 4, 7]], layer[[0, 5, 6, 1]])
        worker.close()
