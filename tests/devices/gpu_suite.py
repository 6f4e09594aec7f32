"""What offloading has to do on a GPU; runs on the stand-in driver, and where there is a GPU on that."""

from __future__ import annotations

import mmap
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial

import numpy as np
import pytest
import torch
from numpy.typing import NDArray

from aiokvoffload import CanonicalKVCaches, KVGroup, Offloader, SyncOffloader, open_offloader
from aiokvoffload.devices.base import CopyPlan, Device, Direction, Stream
from aiokvoffload.devices.cuda import CudaDevice
from aiokvoffload.testing.asserts import assert_idle

BLOCKS = 32
TOKENS = 4
TRIALS = 3
PATIENCE_SECONDS = 60.0


class Gpu(ABC):
    """A GPU and its compute stream.

    Attributes:
        tensor_device: Where torch makes its tensors.
        device: Copies.
        compute_stream: What an engine would pass.
    """

    tensor_device: str
    device: CudaDevice
    compute_stream: object

    @abstractmethod
    def launch_late(self, work: Callable[[], object]) -> Callable[[], None]:
        """Put torch operations on the compute stream behind something long; return what ends that, or waits for it."""

    @abstractmethod
    def synchronize(self) -> None:
        """Wait for the compute stream."""


@dataclass(frozen=True, slots=True)
class Layout:
    """An engine's memory, and the same as pages."""

    storage: tuple[torch.Tensor, ...]
    caches: CanonicalKVCaches


def layers(on: str) -> Layout:
    tensors = [torch.zeros((BLOCKS, TOKENS, 2, 8), dtype=torch.float16, device=on) for _ in range(3)]
    return Layout(tuple(tensors), CanonicalKVCaches.from_layers(tensors, block_tokens=TOKENS))


def keys_before_values(on: str) -> Layout:
    tensors = [torch.zeros((2, BLOCKS, TOKENS, 8), dtype=torch.float16, device=on) for _ in range(2)]
    return Layout(tuple(tensors), CanonicalKVCaches.from_layers(tensors, block_axis=1, block_tokens=TOKENS))


def one_tensor(on: str) -> Layout:
    tensor = torch.zeros((2, 3, BLOCKS, TOKENS, 8), dtype=torch.bfloat16, device=on)
    return Layout((tensor,), CanonicalKVCaches.from_layers(tensor, block_axis=2, block_tokens=TOKENS))


def padded(on: str) -> Layout:
    tensors = [torch.zeros((BLOCKS, 40), dtype=torch.uint8, device=on) for _ in range(2)]
    return Layout(tuple(tensors), CanonicalKVCaches.from_layers(tensors, block_tokens=TOKENS, page_bytes=[33, 40]))


def two_groups(on: str) -> Layout:
    tensors = [torch.zeros((BLOCKS, size), dtype=torch.uint8, device=on) for size in (16, 16, 24)]
    groups = [
        KVGroup(block_tokens=TOKENS, layers=[0, 1]),
        KVGroup(block_tokens=TOKENS, layers=[2], kind="window", window_tokens=BLOCKS * TOKENS),
    ]
    return Layout(tuple(tensors), CanonicalKVCaches.from_layers(tensors, groups=groups))


LAYOUTS = {function.__name__: function for function in (layers, keys_before_values, one_tensor, padded, two_groups)}


def content(caches: CanonicalKVCaches, group: int, blocks: Sequence[int]) -> list[torch.Tensor]:
    """Return the bytes of some GPU blocks of a group, in CPU memory."""
    pages = ((caches.tensors[ref.tensor_index].tensor, ref.page_bytes) for ref in caches.group_refs[group])
    return [tensor[list(blocks), :byte_count].cpu() for tensor, byte_count in pages]


class GpuSuite(ABC):
    """Tests of an offloader on a GPU; subclass it and make the GPU."""

    @pytest.fixture
    @abstractmethod
    def gpu(self) -> Iterator[Gpu]:
        """A GPU."""

    @pytest.fixture
    def layer(self, gpu: Gpu) -> torch.Tensor:
        """The only layer of a KV cache."""
        return torch.zeros((BLOCKS, 16 * 1024), dtype=torch.uint8, device=gpu.tensor_device)

    @pytest.fixture
    def offloader(self, gpu: Gpu, layer: torch.Tensor) -> Iterator[SyncOffloader]:
        """An offloader of that layer, idle at the end."""
        context = open_offloader(
            [layer], cpu_bytes=4 << 20, block_tokens=TOKENS, device=gpu.device, compute_stream=gpu.compute_stream
        )
        with context as offloader:
            yield offloader
            assert_idle(offloader)

    @pytest.mark.parametrize("factor", [1, 3])
    @pytest.mark.parametrize("layout", LAYOUTS)
    @pytest.mark.asyncio
    async def test_every_layout_comes_back(self, gpu: Gpu, layout: str, factor: int) -> None:
        """Store, wipe, load into other blocks."""
        made = LAYOUTS[layout](gpu.tensor_device)
        caches = made.caches
        groups = range(len(caches.groups))
        for number, tensor in enumerate(made.storage):
            raw = tensor.view(torch.uint8)
            values = torch.randint(0, 256, raw.shape, generator=torch.Generator().manual_seed(number))
            raw.copy_(values.to(torch.uint8))
        stored, loaded = [list(range(6)), list(range(20, 26))], [list(range(11, 5, -1)), list(range(31, 25, -1))]
        before = [content(caches, group, stored[group]) for group in groups]
        gpu.synchronize()
        context = open_offloader(
            caches, cpu_bytes=1 << 20, block_size_factor=factor, device=gpu.device, compute_stream=gpu.compute_stream
        )
        offloader: Offloader
        async with context as offloader:
            keys = offloader.keys(range(6 * TOKENS))
            await offloader.store(keys, [block for group in groups for block in stored[group]])
            for tensor in made.storage:
                tensor.zero_()
            if gpu.tensor_device != "cpu":
                torch.cuda.synchronize()
            tokens = await offloader.load(keys, [block for group in groups for block in loaded[group]])
            assert tokens == 6 * TOKENS
            assert_idle(offloader)
        for group in groups:
            for old, new in zip(before[group], content(caches, group, loaded[group]), strict=True):
                assert torch.equal(old, new)

    def test_a_store_takes_what_the_compute_stream_will_have_written(
        self, gpu: Gpu, layer: torch.Tensor, offloader: SyncOffloader
    ) -> None:
        """The store is asked for while the kernel that writes its blocks has not begun."""
        for trial in range(1, TRIALS + 1):
            keys = offloader.keys(range(TOKENS), salt=str(trial))
            end = gpu.launch_late(partial(layer[0].fill_, trial))
            handle = offloader.store_soon(keys, [0])
            end()
            assert handle.wait(timeout_seconds=PATIENCE_SECONDS).success
            slots = offloader.memory.buffer.reshape(offloader.memory.slot_count, -1)
            assert (slots == trial).all(axis=1).any()
            assert int((slots == trial).all(axis=1).sum()) == 1

    def test_a_load_overwrites_what_the_compute_stream_has_written_before(
        self, gpu: Gpu, layer: torch.Tensor, offloader: SyncOffloader
    ) -> None:
        """The load is asked for while the kernel that writes, or reads, its block has not begun."""
        keys = offloader.keys(range(TOKENS))
        layer[0].fill_(7)
        gpu.synchronize()
        assert offloader.store_soon(keys, [0]).wait(timeout_seconds=PATIENCE_SECONDS).success
        for trial in range(1, TRIALS + 1):
            layer[5].fill_(100 + trial)
            seen = torch.zeros_like(layer[5])
            gpu.synchronize()

            def read_and_write(value: int = trial, seen: torch.Tensor = seen) -> None:
                seen.copy_(layer[5])
                layer[5].fill_(value)

            end = gpu.launch_late(read_and_write)
            handle = offloader.prepare_load(keys).start([5])
            end()
            assert handle.wait(timeout_seconds=PATIENCE_SECONDS).success
            gpu.synchronize()
            assert (seen.cpu() == 100 + trial).all()
            assert (layer[5].cpu() == 7).all()

    def test_what_is_launched_behind_a_fence_sees_the_load(
        self, gpu: Gpu, layer: torch.Tensor, offloader: SyncOffloader
    ) -> None:
        """Nobody waits between the load and the kernel that reads its block."""
        keys = offloader.keys(range(TOKENS))
        layer[0].fill_(7)
        gpu.synchronize()
        assert offloader.store_soon(keys, [0]).wait(timeout_seconds=PATIENCE_SECONDS).success
        for _ in range(TRIALS):
            layer[5].zero_()
            seen = torch.zeros_like(layer[5])
            gpu.synchronize()
            first = gpu.launch_late(lambda: None)
            handle = offloader.prepare_load(keys).start([5])
            handle.fence()
            second = gpu.launch_late(partial(seen.copy_, layer[5]))
            first()
            second()
            assert handle.wait(timeout_seconds=PATIENCE_SECONDS).success
            gpu.synchronize()
            assert (seen.cpu() == 7).all()


@dataclass(frozen=True, slots=True)
class Bandwidth:
    """Gigabytes per second of copies of one size, and what part of a contiguous copy's that is."""

    direction: Direction
    copy_bytes: int
    gigabytes_per_second: float
    share_of_contiguous: float


def bandwidths(device: CudaDevice, gpu_address: int, total_bytes: int, sizes: Sequence[int]) -> list[Bandwidth]:
    """Measure scattered copies of each size beside one contiguous copy of the same bytes.

    Args:
        device: Copies.
        gpu_address: Where twice `total_bytes` of GPU memory begin.
        total_bytes: Bytes of each measurement.
        sizes: Bytes per copy.
    """
    host: NDArray[np.uint8] = np.frombuffer(mmap.mmap(-1, 2 * total_bytes), np.uint8)
    device.pin(host.ctypes.data, host.nbytes)
    stream = device.create_stream("bandwidth")
    found = []
    for direction in Direction:
        contiguous = _seconds(device, stream, _scattered(gpu_address, host, direction, total_bytes, total_bytes))
        for size in sizes:
            seconds = _seconds(device, stream, _scattered(gpu_address, host, direction, total_bytes, size))
            found.append(Bandwidth(direction, size, total_bytes / seconds / 1e9, contiguous / seconds))
    device.unpin(host.ctypes.data)
    return found


def _scattered(
    gpu_address: int, host: NDArray[np.uint8], direction: Direction, total_bytes: int, size: int
) -> CopyPlan:
    """Return copies between every second page of both sides, in random order."""
    count = total_bytes // size
    ends = [
        address + np.random.default_rng(seed).permutation(count) * 2 * size
        for seed, address in enumerate((gpu_address, host.ctypes.data))
    ]
    sources, destinations = ends if direction is Direction.STORE else reversed(ends)
    return CopyPlan(sources, destinations, np.full(count, size, np.int64), direction, (host,))


def _seconds(device: Device, stream: Stream, plan: CopyPlan) -> float:
    seconds = []
    for _ in range(4):
        start = device.record(stream)
        device.copy_batch(plan, stream)
        end = device.record(stream)
        assert device.synchronize(end, PATIENCE_SECONDS)
        assert device.is_done(end)
        seconds.append(device.elapsed_seconds(start, end))
    return min(seconds[1:])
