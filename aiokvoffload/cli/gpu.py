"""The simulated GPU of a replay: blocks to hand out, kernels that write and check them, bytes to corrupt."""

from __future__ import annotations

import random
from collections import deque
from collections.abc import Sequence

import anyio
import numpy as np
import torch

from aiokvoffload.cli.options import ReplayOptions
from aiokvoffload.cli.pattern import BlockPattern, seeds_of
from aiokvoffload.cli.prefix_cache import Grant, PrefixCache
from aiokvoffload.devices.base import SimulatedDevice, Stream
from aiokvoffload.keys import OffloadKey
from aiokvoffload.managers.base import OffloadingManager
from aiokvoffload.memory.base import HostMemory
from aiokvoffload.testing.order import OrderChecker


class _Turn:
    """A place in the line for GPU blocks."""

    def __init__(self, hashes: Sequence[bytes]) -> None:
        self.hashes = hashes
        self.grant: Grant | None = None
        self.has_come = anyio.Event()


class BlockPool:
    """GPU blocks, handed out in the order in which they are asked for.

    Args:
        cache: Knows which blocks can be had.
    """

    def __init__(self, cache: PrefixCache) -> None:
        self._cache = cache
        self._line: deque[_Turn] = deque()

    async def take(self, hashes: Sequence[bytes]) -> Grant:
        """Wait for a block per hash, no more than there are in all, and take them."""
        turn = _Turn(hashes)
        self._line.append(turn)
        self._serve()
        await turn.has_come.wait()
        if turn.grant is None:
            raise RuntimeError("a turn for GPU blocks has come without any")
        return turn.grant

    def give_back(self, grant: Grant) -> None:
        """Make the blocks of a request free, or idle where their content is cached."""
        self._cache.release(grant)
        self._serve()

    def _serve(self) -> None:
        while self._line and (grant := self._cache.take(self._line[0].hashes)) is not None:
            turn = self._line.popleft()
            turn.grant = grant
            turn.has_come.set()


class SimulatedGpu:
    """One tensor per layer, and kernels on one compute stream.

    Args:
        options: Sizes.
        block_count: GPU blocks.
        device: Runs the kernels.
    """

    def __init__(self, options: ReplayOptions, block_count: int, device: SimulatedDevice) -> None:
        self.layers = [torch.zeros((block_count, options.page_bytes), dtype=torch.uint8) for _ in range(options.layers)]
        self.compute_stream: Stream = device.create_stream("compute")
        self.verified_count = 0
        self.mismatch_count = 0
        self._device = device
        self._pattern = BlockPattern(options.page_bytes, options.layers)
        self._pages = [layer.numpy() for layer in self.layers]
        self._names = [f"layer {number}" for number in range(options.layers)]
        if isinstance(device, OrderChecker):
            for name, layer in zip(self._names, self.layers, strict=True):
                device.watch(name, layer.data_ptr(), block_count, options.page_bytes)

    def step(self, loaded: dict[int, bytes], computed: dict[int, bytes]) -> None:
        """Launch what an engine does in a step: read the blocks of the prefix, write those that are computed.

        Args:
            loaded: Hash of each GPU block to read and check.
            computed: Hash of each GPU block to write.
        """
        read_rows, written_rows = (np.fromiter(blocks, dtype=np.int64) for blocks in (loaded, computed))
        read_seeds, written_seeds = (seeds_of(blocks.values()) for blocks in (loaded, computed))

        def run() -> None:
            wrong = np.zeros(len(read_rows), dtype=np.bool_)
            for layer, pages in enumerate(self._pages):
                wrong |= self._pattern.mismatches(read_seeds, layer, pages, read_rows)
                self._pattern.fill(written_seeds, layer, pages, written_rows)
            self.verified_count += len(read_rows)
            self.mismatch_count += int(wrong.sum())

        if isinstance(self._device, OrderChecker):
            reads = [(name, read_rows) for name in self._names]
            writes = [(name, written_rows) for name in self._names]
            self._device.launch(self.compute_stream, run, reads, writes, label="a step")
        else:
            self._device.launch(self.compute_stream, run)


class Corruption:
    """Flips bytes of stored blocks on purpose, just before they are loaded.

    Args:
        count: How many bytes.
        seed: Which ones.
    """

    def __init__(self, count: int, seed: int) -> None:
        self.left = count
        self._random = random.Random(seed)  # noqa: S311  reproducible, not secret
        self._flipped: set[tuple[int, int]] = set()

    def strike(self, manager: OffloadingManager, memory: HostMemory, keys: Sequence[OffloadKey]) -> None:
        """Flip a byte of the first of `keys`, if that block is stored."""
        if not self.left or not keys:
            return
        ticket = manager.prepare_load_nowait(keys[:1])
        if not ticket.is_waiting and ticket.slots:
            place = (ticket.slots[0], self._random.randrange(memory.slot_bytes))
            if place not in self._flipped:
                self._flipped.add(place)
                memory.buffer[place[0] * memory.slot_stride_bytes + place[1]] ^= 0xFF
                self.left -= 1
        manager.complete_load_nowait(ticket)
