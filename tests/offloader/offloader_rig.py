"""An offloader over a few small blocks, on a device whose copies land when the test says so."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Awaitable, Callable, Coroutine, Generator, Sequence
from dataclasses import replace
from typing import Any, TypeVar

import anyio
import anyio.lowlevel
import pytest
import torch

from aiokvoffload.clock import Clock
from aiokvoffload.devices.base import Device, Direction
from aiokvoffload.keys import CacheIdentity, OffloadKey
from aiokvoffload.kv_caches import CanonicalKVCaches
from aiokvoffload.managers.cpu import CPUOffloadingManager
from aiokvoffload.managers.reuse import with_reuse_filter
from aiokvoffload.offloader import Deadlines, OffloaderContext
from aiokvoffload.offloader.machine import OffloaderMachine
from aiokvoffload.offloader.parts import LocalParts, build_parts
from aiokvoffload.testing.clock import ManualClock
from aiokvoffload.testing.device import ManualDevice

BACKENDS = ("asyncio", "trio")
BLOCK_TOKENS = 4
PAGE_BYTES = 8
LAYER_COUNT = 2
BLOCK_BYTES = PAGE_BYTES * LAYER_COUNT

Result = TypeVar("Result")
_TICKS = 40
"""More checkpoints than any chain of wake-ups in these tests has links."""


def on_both_loops(test: Callable[..., Coroutine[Any, Any, None]]) -> Callable[..., None]:
    """Run an async test once on asyncio and once on trio, each time in a loop of its own."""

    @functools.wraps(test)
    def run(*, backend: str, **arguments: object) -> None:
        anyio.run(functools.partial(test, **arguments), backend=backend)

    signature = inspect.signature(test)
    backend = inspect.Parameter("backend", inspect.Parameter.KEYWORD_ONLY)
    parameters = [parameter.replace(kind=parameter.KEYWORD_ONLY) for parameter in signature.parameters.values()]
    run.__signature__ = signature.replace(parameters=[*parameters, backend])  # type: ignore[attr-defined]
    on_each: Callable[..., None] = pytest.mark.parametrize("backend", BACKENDS)(run)
    return on_each


async def settle() -> None:
    """Let every task go on as far as it can; in a cancelled scope too."""
    with anyio.CancelScope(shield=True):
        for _ in range(_TICKS):
            await anyio.lowlevel.checkpoint()


class Rig:
    """The GPU side, the device and the clock of an offloader.

    Args:
        device: Where the copies run; by default one that lets them land when told to.
        factor: GPU blocks per offloaded block.
        cpu_blocks: Slots.
        in_flight_bytes: How much may be sent and not landed.
        deadlines: How long anything may take.
        clock: Where deadlines are read.
        compute_stream: Whether transfers wait for `compute`.
        manager_class: Class of the manager.
    """

    def __init__(
        self,
        *,
        device: Device | None = None,
        factor: int = 1,
        cpu_blocks: int = 8,
        gpu_blocks: int = 16,
        in_flight_bytes: int = 1 << 30,
        deadlines: Deadlines | None = None,
        clock: Clock | None = None,
        compute_stream: bool = False,
        manager_class: type[CPUOffloadingManager] = CPUOffloadingManager,
        policy: str = "lru",
        store_threshold: int = 0,
    ) -> None:
        self.manual_clock = ManualClock()
        self.clock = clock or self.manual_clock
        self.manual_device = ManualDevice()
        self.device: Device = device or self.manual_device
        if isinstance(device, ManualDevice):
            self.manual_device = device
        self.deadlines = deadlines or Deadlines()
        self.factor = factor
        self.cpu_blocks = cpu_blocks
        self.layers = [torch.zeros((gpu_blocks, PAGE_BYTES), dtype=torch.uint8) for _ in range(LAYER_COUNT)]
        self.compute = self.device.create_stream("compute") if compute_stream else None
        self._in_flight_bytes = in_flight_bytes
        self._manager_class = manager_class
        self._policy = policy
        self._store_threshold = store_threshold

    def open(self) -> OffloaderContext:
        """Return the context manager of an offloader."""
        return OffloaderContext(self.parts)

    def parts(self) -> LocalParts:
        """Build what an offloader is made of."""
        parts = build_parts(
            CanonicalKVCaches.from_layers(self.layers, block_tokens=BLOCK_TOKENS),
            cpu_bytes=self.cpu_blocks * self.factor * BLOCK_BYTES,
            block_size_factor=self.factor,
            identity=CacheIdentity(model="rig"),
            policy=self._policy,
            store_threshold=self._store_threshold,
            device=self.device,
            compute_stream=self.compute,
            deadlines=self.deadlines,
            clock=self.clock,
            in_flight_bytes=self._in_flight_bytes,
        )
        manager = self._manager_class(
            self.cpu_blocks,
            policy=self._policy,
            groups=parts.layout.kv_caches.groups,
            block_size_factor=self.factor,
            event_sink=parts.hub,
            clock=self.clock,
        )
        return replace(parts, manager=with_reuse_filter(manager, self._store_threshold))

    def write(self, gpu_blocks: Sequence[int], seed: int = 1) -> None:
        """Fill GPU blocks with bytes that depend on `seed` and on their place in the list."""
        for place, block in enumerate(gpu_blocks):
            for layer, tensor in enumerate(self.layers):
                tensor[block] = torch.tensor([_byte(seed, place, layer, index) for index in range(PAGE_BYTES)])

    def holds(self, gpu_blocks: Sequence[int], seed: int = 1, *, first: int = 0) -> bool:
        """Return whether GPU blocks hold what `write` wrote, from its block `first` on."""
        return all(
            self.layers[layer][block].tolist()
            == [_byte(seed, first + place, layer, index) for index in range(PAGE_BYTES)]
            for place, block in enumerate(gpu_blocks)
            for layer in range(LAYER_COUNT)
        )

    def copies(self, direction: Direction) -> int:
        """Return how many blocks were ever submitted to be copied in one direction."""
        moved = sum(plan.total_bytes for plan in self.manual_device.copies if plan.direction is direction)
        return moved // BLOCK_BYTES

    async def land(self) -> None:
        """Let all copies land, and everybody learn of it."""
        self.manual_device.land_all()
        await settle()


def keys_of(offloader: OffloaderMachine, count: int, *, salt: str = "") -> list[OffloadKey]:
    """Return the keys of `count` offloaded blocks of one prefix."""
    return offloader.keys(range(count * BLOCK_TOKENS * offloader.block_size_factor), salt=salt)


def states(offloader: OffloaderMachine, keys: Sequence[OffloadKey]) -> list[str]:
    """Return what a lookup says of each key."""
    return [result.name for result in offloader.manager.lookup_nowait(keys)]


class Interrupted(Awaitable[Result]):
    """A coroutine that is interrupted while it waits: `interrupt` is called at chosen suspensions.

    Args:
        coroutine: What is awaited.
        interrupt: Called in the awaiting task, right before it waits.
        at: Numbers of the suspensions, from 1.
    """

    def __init__(self, coroutine: Coroutine[Any, Any, Result], interrupt: Callable[[], object], *at: int) -> None:
        self._coroutine = coroutine
        self._interrupt = interrupt
        self._at = at
        self.suspension_count = 0

    def __await__(self) -> Generator[Any, Any, Result]:
        resume: Callable[[], Any] = functools.partial(self._coroutine.send, None)
        while True:
            try:
                waited_for = resume()
            except StopIteration as stop:
                result: Result = stop.value
                return result
            self.suspension_count += 1
            if self.suspension_count in self._at:
                self._interrupt()
            try:
                resume = functools.partial(self._coroutine.send, (yield waited_for))
            except BaseException as exc:  # noqa: BLE001  passed on to where it belongs
                resume = functools.partial(self._coroutine.throw, exc)


def _byte(seed: int, place: int, layer: int, index: int) -> int:
    return (seed * 37 + place * 11 + layer * 5 + index) % 255 + 1
