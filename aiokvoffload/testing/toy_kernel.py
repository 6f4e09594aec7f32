"""The steps of the toy engine on the compute stream: what attention reads is checked, what it computes is written."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import lru_cache
from hashlib import shake_128

import numpy as np
from numpy.typing import NDArray

from aiokvoffload.devices.base import Event, Stream
from aiokvoffload.kv_caches import CanonicalKVCaches
from aiokvoffload.memory.base import HostMemory
from aiokvoffload.offloader import TransferHandle
from aiokvoffload.testing.order import OrderChecker


@dataclass(frozen=True, slots=True)
class ToyRead:
    """A block that a step reads; what it finds counts only if the load that may have brought it is good."""

    block: int
    block_hash: bytes
    load: TransferHandle | None


@dataclass(frozen=True, slots=True)
class ToyWrite:
    """Tokens of one block that a step writes."""

    block: int
    block_hash: bytes
    tokens: slice


class ToyKernel:
    """Launches steps, with everything they read and write declared.

    The content of a block is a function of its hash, the layer and the epoch.

    Args:
        kv_caches: The GPU blocks, in CPU tensors, of one KV group.
        memory: The slots.
        checker: Runs and watches the steps.
        stream: What they run on.

    Attributes:
        verified_count: Blocks read and compared so far.
    """

    def __init__(self, kv_caches: CanonicalKVCaches, memory: HostMemory, checker: OrderChecker, stream: Stream) -> None:
        self.verified_count = 0
        self._checker = checker
        self._stream = stream
        self._block_tokens = kv_caches.groups[0].block_tokens
        self._pages: list[NDArray[np.int8]] = [canonical.tensor.numpy() for canonical in kv_caches.tensors]
        self._regions = [f"GPU tensor {index}" for index in range(len(self._pages))]
        self._wrong: list[ToyRead] = []
        smallest = min(canonical.page_bytes for canonical in kv_caches.tensors)
        checker.watch("slots", memory.address, memory.slot_count, memory.slot_bytes, cell_bytes=smallest)
        for region, canonical in zip(self._regions, kv_caches.tensors, strict=True):
            tensor = canonical.tensor
            checker.watch(
                region, tensor.data_ptr(), len(tensor), canonical.page_bytes, row_stride_bytes=tensor.stride(0)
            )

    @property
    def wrong_block_count(self) -> int:
        """How many blocks were read with the wrong content; known once everything has landed."""
        loads = [read.load for read in self._wrong]
        return sum(load is None or (load.result is not None and load.result.success) for load in loads)

    def launch(self, reads: Sequence[ToyRead], writes: Sequence[ToyWrite], epoch: int) -> None:
        """Launch one step."""
        rows = [read.block for read in reads], [write.block for write in writes]
        read_rows, written_rows = ([(region, side) for region in self._regions] for side in rows)
        self._checker.launch(
            self._stream, self._work(reads, writes, epoch), read_rows, written_rows, label="a step of the engine"
        )

    def record(self) -> Event:
        """Return the event of all steps so far."""
        return self._checker.record(self._stream)

    def _work(self, reads: Sequence[ToyRead], writes: Sequence[ToyWrite], epoch: int) -> Callable[[], None]:
        def work() -> None:
            for layer, pages in enumerate(self._pages):
                for read in reads:
                    if not np.array_equal(
                        pages[read.block], block_content(read.block_hash, layer, epoch, pages.shape[1])
                    ):
                        self._wrong.append(read)
                for write in writes:
                    content = block_content(write.block_hash, layer, epoch, pages.shape[1]).reshape(
                        self._block_tokens, -1
                    )
                    pages[write.block].reshape(self._block_tokens, -1)[write.tokens] = content[write.tokens]
            self.verified_count += len(reads)

        return work


@lru_cache(maxsize=4096)
def block_content(block_hash: bytes, layer: int, epoch: int, page_bytes: int) -> NDArray[np.int8]:
    """Return what the page of one layer of a block holds in an epoch."""
    place = layer.to_bytes(4, "big") + epoch.to_bytes(4, "big")
    return np.frombuffer(shake_128(place + block_hash).digest(page_bytes), np.int8)
