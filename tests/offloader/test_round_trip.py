"""Every byte that was stored comes back, whatever the layout, the device and the loop."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import anyio
import pytest
import torch

from aiokvoffload import (
    CanonicalKVCaches,
    KVGroup,
    Offloader,
    OffloadKey,
    StoreOutcome,
    SyncOffloader,
    TransferHandle,
    open_offloader,
)
from aiokvoffload.devices.base import Device
from aiokvoffload.devices.host import HostDevice
from aiokvoffload.offloader import OffloaderContext
from aiokvoffload.testing.asserts import assert_idle
from aiokvoffload.testing.device import ManualDevice

pytestmark = pytest.mark.timeout(60)

GPU_BLOCKS = 64
TOKENS = 4


@dataclass(frozen=True, slots=True)
class Layout:
    """An engine's KV cache.

    Attributes:
        storage: The engine's memory, as bytes.
        caches: The same as pages.
    """

    storage: tuple[torch.Tensor, ...]
    caches: CanonicalKVCaches


def _layers() -> Layout:
    layers = [torch.zeros((GPU_BLOCKS, TOKENS, 2, 8), dtype=torch.float16) for _ in range(3)]
    return Layout(tuple(layers), CanonicalKVCaches.from_layers(layers, block_tokens=TOKENS))


def _flash_attention() -> Layout:
    layers = [torch.zeros((2, GPU_BLOCKS, TOKENS, 8), dtype=torch.float16) for _ in range(2)]
    return Layout(tuple(layers), CanonicalKVCaches.from_layers(layers, block_axis=1, block_tokens=TOKENS))


def _one_tensor_for_all_layers() -> Layout:
    tensor = torch.zeros((2, 3, GPU_BLOCKS, TOKENS, 8), dtype=torch.bfloat16)
    return Layout((tensor,), CanonicalKVCaches.from_layers(tensor, block_axis=2, block_tokens=TOKENS))


def _packed() -> Layout:
    tensor = torch.zeros((GPU_BLOCKS, 3, TOKENS, 6), dtype=torch.int8)
    layers = [tensor[:, layer] for layer in range(3)]
    return Layout((tensor,), CanonicalKVCaches.from_layers(layers, block_tokens=TOKENS))


def _padded() -> Layout:
    layers = [torch.zeros((GPU_BLOCKS, 40), dtype=torch.uint8) for _ in range(2)]
    return Layout(tuple(layers), CanonicalKVCaches.from_layers(layers, block_tokens=TOKENS, page_bytes=[33, 40]))


def _full_window_state() -> Layout:
    layers = [torch.zeros((GPU_BLOCKS, size), dtype=torch.uint8) for size in (16, 16, 24, 56)]
    groups = [
        KVGroup(block_tokens=TOKENS, layers=[0, 1]),
        KVGroup(block_tokens=2 * TOKENS, layers=[2], kind="window", window_tokens=10),
        KVGroup(block_tokens=TOKENS, layers=[3], kind="state"),
    ]
    return Layout(tuple(layers), CanonicalKVCaches.from_layers(layers, groups=groups))


LAYOUTS: dict[str, Callable[[], Layout]] = {
    "a tensor per layer": _layers,
    "FlashAttention": _flash_attention,
    "one tensor for all layers": _one_tensor_for_all_layers,
    "packed": _packed,
    "padded": _padded,
    "full, window and state": _full_window_state,
}


class Engine:
    """Knows what every GPU block should hold."""

    def __init__(self, layout: Layout, seed: int = 0) -> None:
        self.caches = layout.caches
        self.storage = layout.storage
        self.random = random.Random(seed)
        self.generator = torch.Generator().manual_seed(seed)

    def fill(self) -> None:
        """Fill all memory with random bytes, padding and gaps included."""
        for tensor in self.storage:
            raw = tensor.view(torch.uint8)
            raw.copy_(torch.randint(0, 256, raw.shape, generator=self.generator, dtype=torch.uint8))

    def content(self, group: int, block: int) -> list[bytes]:
        """Return the bytes of one GPU block of a group."""
        return [
            bytes(self.caches.tensors[ref.tensor_index].tensor[block, : ref.page_bytes].view(torch.uint8).tolist())
            for ref in self.caches.group_refs[group]
        ]

    def everything(self) -> list[bytes]:
        return [bytes(tensor.contiguous().view(torch.uint8).flatten().tolist()) for tensor in self.storage]

    def take_blocks(self, count: int) -> list[int]:
        """Return some GPU blocks, each once and in any order."""
        return self.random.sample(range(GPU_BLOCKS), count)


class Plan:
    """A request of some blocks: where it was computed, and where each of its blocks is loaded to."""

    def __init__(self, engine: Engine, factor: int, keys_of: Callable[[Sequence[int]], list[OffloadKey]]) -> None:
        self.engine = engine
        self.factor = factor
        tokens = range(6 * factor * 2 * TOKENS)
        self.keys = keys_of(tokens)
        self.token_count = len(tokens)
        counts = [len(tokens) // group.block_tokens for group in engine.caches.groups]
        engine.fill()
        self.stored_at = [engine.take_blocks(count) for count in counts]
        self.expected = [
            [engine.content(group, block) for block in blocks] for group, blocks in enumerate(self.stored_at)
        ]

    @property
    def gpu_blocks(self) -> list[int]:
        return [block for blocks in self.stored_at for block in blocks]

    def overwrite(self) -> None:
        """Forget what the GPU holds."""
        self.engine.fill()
        self.before = self.engine.everything()
        self.pages_before = [canonical.tensor.clone() for canonical in self.engine.caches.tensors]

    def check(self, sizes: Sequence[int], firsts: Sequence[int], loaded_to: Sequence[int]) -> None:
        """Check every byte that was loaded, and that no other byte has changed, padding and gaps included."""
        caches = self.engine.caches
        assert len(loaded_to) == sum(sizes)
        start = 0
        for group, (size, first) in enumerate(zip(sizes, firsts, strict=True)):
            for number, block in enumerate(loaded_to[start : start + size]):
                assert self.engine.content(group, block) == self.expected[group][first + number]
                for ref in caches.group_refs[group]:
                    page = caches.tensors[ref.tensor_index].tensor[block, : ref.page_bytes]
                    page.copy_(self.pages_before[ref.tensor_index][block, : ref.page_bytes])
            start += size
        assert self.engine.everything() == self.before


def _resident(factor: int) -> list[int]:
    # Whole GPU blocks of each group, also in the middle of an offloaded block.
    return [0, 2 * TOKENS, 2 * TOKENS * factor, 2 * TOKENS * (factor + 1)]


def _make_device(name: str) -> Device:
    return HostDevice() if name == "host" else ManualDevice(auto_land=name == "landing")


def _allocate(engine: Engine, sizes: Sequence[int]) -> list[int]:
    # Each group's blocks are distinct; groups have tensors of their own.
    return [block for size in sizes for block in engine.take_blocks(size)]


@pytest.mark.parametrize("factor", [1, 2, 3])
@pytest.mark.parametrize("device_name", ["host", "manual"])
@pytest.mark.parametrize("layout_name", LAYOUTS)
@pytest.mark.parametrize("backend", ["asyncio", "trio"])
def test_asynchronously(layout_name: str, device_name: str, factor: int, backend: str) -> None:
    anyio.run(_round_trip, layout_name, device_name, factor, backend=backend)


async def _round_trip(layout_name: str, device_name: str, factor: int) -> None:
    device = _make_device(device_name)
    engine = Engine(LAYOUTS[layout_name]())
    async with _open(engine, device, factor) as offloader, anyio.create_task_group() as tasks:
        assert isinstance(offloader, Offloader)
        if isinstance(device, ManualDevice):
            tasks.start_soon(_keep_landing, device)
        plan = Plan(engine, factor, offloader.keys)
        outcomes = await offloader.store(plan.keys, plan.gpu_blocks)
        assert set(outcomes) == {StoreOutcome.ACCEPTED}
        plan.overwrite()
        assert await offloader.lookup_prefix(plan.keys) == plan.token_count
        for resident in _resident(factor):
            plan.overwrite()
            with offloader.prepare_load(plan.keys, resident_tokens=resident) as ticket:
                blocks = _allocate(engine, ticket.group_sizes)
                shape = ticket.group_sizes, ticket.block_indices
                assert ticket.token_count == plan.token_count
                assert (await ticket.start(blocks)).token_count == plan.token_count
            plan.check(*shape, blocks)
        loaded_to = _allocate(engine, [len(blocks) for blocks in plan.stored_at])
        plan.overwrite()
        with offloader.prepare_load(plan.keys) as ticket:
            shape = ticket.group_sizes, ticket.block_indices
            chosen = ticket.choose(loaded_to)
        assert await offloader.load(plan.keys, loaded_to) == plan.token_count
        plan.check(*shape, chosen)
        assert_idle(offloader)
        tasks.cancel_scope.cancel()
    device.close()


async def _keep_landing(device: ManualDevice) -> None:
    while True:
        device.land_next()
        await anyio.lowlevel.checkpoint()


@pytest.mark.parametrize("factor", [1, 2, 3])
@pytest.mark.parametrize("device_name", ["host", "manual", "landing"])
@pytest.mark.parametrize("layout_name", LAYOUTS)
def test_synchronously(layout_name: str, device_name: str, factor: int) -> None:
    device = _make_device(device_name)
    engine = Engine(LAYOUTS[layout_name](), seed=1)
    with _open(engine, device, factor) as offloader:
        assert isinstance(offloader, SyncOffloader)
        plan = Plan(engine, factor, offloader.keys)
        assert set(offloader.store(plan.keys, plan.gpu_blocks)) == {StoreOutcome.ACCEPTED}
        for resident in _resident(factor):
            plan.overwrite()
            with offloader.prepare_load(plan.keys, resident_tokens=resident) as ticket:
                blocks = _allocate(engine, ticket.group_sizes)
                shape = ticket.group_sizes, ticket.block_indices
                handle = ticket.start(blocks)
            assert isinstance(handle, TransferHandle)
            assert handle.wait(timeout_seconds=30).token_count == plan.token_count
            plan.check(*shape, blocks)
        assert_idle(offloader)
    device.close()


@pytest.mark.parametrize("factor", [1, 2])
def test_a_load_begins_inside_an_offloaded_block_and_ends_at_a_boundary(factor: int) -> None:
    engine = Engine(_layers(), seed=2)
    with _open(engine, ManualDevice(), factor) as offloader:
        plan = Plan(engine, factor, offloader.keys)
        offloader.store(plan.keys[:3], plan.gpu_blocks[: 3 * factor])
        with offloader.prepare_load(plan.keys, resident_tokens=TOKENS) as ticket:
            assert ticket.token_count == 3 * factor * TOKENS
            assert ticket.group_sizes == (3 * factor - 1,)
            assert ticket.block_indices == (1,)


def test_a_window_and_a_state_load_only_what_they_reach() -> None:
    engine = Engine(_full_window_state(), seed=3)
    with _open(engine, ManualDevice(), 1) as offloader:
        plan = Plan(engine, 1, offloader.keys)
        offloader.store(plan.keys, plan.gpu_blocks)
        with offloader.prepare_load(plan.keys) as ticket:
            # 48 tokens: 12 blocks of 4 of the full group, the last 3 of 8 that a window of 10 can reach, one state.
            assert ticket.token_count == 48
            assert ticket.group_sizes == (12, 3, 1)
            assert ticket.block_indices == (0, 3, 11)


def _open(engine: Engine, device: Device, factor: int) -> OffloaderContext:
    return open_offloader(engine.caches, cpu_bytes=1 << 20, block_size_factor=factor, device=device)
