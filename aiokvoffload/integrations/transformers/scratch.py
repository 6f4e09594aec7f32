"""Blocks on the model's device, between its cache and the offloader.

A cache of Transformers is one growing tensor a layer, so its tokens are copied into blocks to be stored, and out of
blocks that were loaded. There are a few such blocks, which requests take in turns.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import Any

import anyio
import numpy as np
import torch

from aiokvoffload.integrations.transformers.layout import CacheLayout, CutLayer
from aiokvoffload.kv_caches import CanonicalKVCaches

_ALIGNMENT_BYTES = 16
"""Where elements of any dtype may begin."""


class ScratchBlocks:
    """Blocks that are lent to whoever asked first; block `b` of one KV group and of another are different memory.

    Args:
        layout: What a block holds.
        tensors: Their memory, see `new_block_tensors`.
        block_tokens: Tokens of a block.
        block_count: How many there are.
    """

    def __init__(self, layout: CacheLayout, tensors: BlockTensors, block_tokens: int, block_count: int) -> None:
        self.block_tokens = block_tokens
        self.block_count = block_count
        self._layout = layout
        self._tensors = tensors
        self._free = list(range(block_count))
        self._line = anyio.Lock()
        self._change = anyio.Event()

    def kv_caches(self) -> CanonicalKVCaches:
        """Return the blocks as an offloader takes them."""
        return CanonicalKVCaches.from_layers(self._tensors.groups, groups=self._layout.kv_groups(self.block_tokens))

    @property
    def free_count(self) -> int:
        """Blocks that nobody has."""
        return len(self._free)

    async def take(self, count: int) -> list[int]:
        """Wait until so many blocks are free, and this caller's turn has come; cancelled, it takes none."""
        async with self._line:
            while len(self._free) < count:
                self._change = anyio.Event()
                await self._change.wait()
            taken, self._free = self._free[:count], self._free[count:]
            return taken

    def give_back(self, blocks: Sequence[int]) -> None:
        """Return blocks that no copy touches any more."""
        self._free += blocks
        self._change.set()

    def fill(self, group: int, blocks: Sequence[int], cache: Any, row: int, first_column: int) -> None:
        """Copy the tokens of a row, from a column of the batch on, out of a cache into blocks.

        Args:
            group: The KV group.
            blocks: As many as are to be filled.
            cache: A cache whose layers keep all these tokens.
            row: Row of the batch.
            first_column: Where the first block begins.
        """
        into = torch.tensor(blocks, device=self._layout.device)
        for layer in self._layout.groups[group]:
            kept = cache.layers[layer.index]
            start = first_column - first_kept_column(kept)
            for blocks_of, tensor in ((self._tensors.keys, kept.keys), (self._tensors.values, kept.values)):
                tokens = tensor[row, :, start : start + len(blocks) * self.block_tokens]
                blocks_of[layer.index][into] = tokens.unflatten(1, (len(blocks), self.block_tokens)).movedim(1, 0)

    def empty(
        self,
        layer: CutLayer,
        blocks: Sequence[int],
        keys: torch.Tensor,
        values: torch.Tensor,
        source: range,
        first_column: int,
    ) -> None:
        """Copy tokens of blocks into the keys and values of one row.

        Args:
            layer: Whose.
            blocks: In token order.
            keys: `(heads, columns, elements)`.
            values: The same.
            source: Which tokens, counted from the first block's start.
            first_column: Where the first of them goes.
        """
        stop = first_column - source.start
        for run in runs(blocks, len(blocks)):
            loaded = range(stop, stop + len(run) * self.block_tokens)
            stop = loaded.stop
            columns = range(max(loaded.start, first_column), min(loaded.stop, first_column + len(source)))
            for blocks_of, row in ((self._tensors.keys, keys), (self._tensors.values, values)) if columns else ():
                tokens = blocks_of[layer.index][run.start : run.stop].movedim(0, 1)
                into = row[:, columns.start : columns.stop]
                if columns == loaded:
                    _copy(tokens, into.view(tokens.shape))
                else:
                    _copy(tokens.flatten(1, 2)[:, columns.start - loaded.start : columns.stop - loaded.start], into)


@dataclass(frozen=True, slots=True)
class BlockTensors:
    """The memory of scratch blocks.

    All that a KV group has of a block lies in one piece, so that a block is moved by one copy.

    Attributes:
        groups: The blocks of each KV group, `(blocks, bytes)`.
        keys: The keys in them, of each layer: `(blocks, heads, tokens, elements)`.
        values: The same of the values.
    """

    groups: list[torch.Tensor]
    keys: dict[int, torch.Tensor]
    values: dict[int, torch.Tensor]


def new_block_tensors(layout: CacheLayout, block_tokens: int, block_count: int) -> BlockTensors:
    """Return the memory of scratch blocks, as zeros."""
    tensors = BlockTensors([], {}, {})
    for group in layout.groups:
        parts = [
            (layer, shape, views)
            for layer in group
            for shape, views in ((layer.key_shape, tensors.keys), (layer.value_shape, tensors.values))
        ]
        sizes = [math.prod(shape) * block_tokens * layer.dtype.itemsize for layer, shape, _ in parts]
        aligned = [-(-size // _ALIGNMENT_BYTES) * _ALIGNMENT_BYTES for size in sizes]
        blocks = torch.zeros(block_count, sum(aligned), dtype=torch.uint8, device=layout.device)
        tensors.groups.append(blocks)
        for start, size, (layer, (heads, elements), views) in zip(
            accumulate(aligned, initial=0), sizes, parts, strict=False
        ):
            rows = blocks[:, start : start + size].view(layer.dtype)
            views[layer.index] = rows.view(block_count, heads, block_tokens, elements)
    return tensors


def _copy(tokens: torch.Tensor, into: torch.Tensor) -> None:
    """Copy `(..., elements)`, on a CPU in this thread alone.

    PyTorch would share each of many small copies with its team of threads, and wait for whichever has no processor now.
    """
    if into.device.type == "cpu":
        np.copyto(into.view(torch.uint8).numpy(), tokens.view(torch.uint8).numpy())
    else:
        into.copy_(tokens)


def runs(blocks: Sequence[int], longest: int) -> Iterator[range]:
    """Split numbers into ranges of neighbours, none longer than `longest`, in their order."""
    start = 0
    for place in range(1, len(blocks) + 1):
        is_last = place == len(blocks)
        if is_last or blocks[place] != blocks[place - 1] + 1 or place - start == longest:
            yield range(blocks[start], blocks[place - 1] + 1)
            start = place


def first_kept_column(layer: Any) -> int:
    """Return the first column of the batch that a layer of a cache still keeps."""
    kept: int = layer.keys.shape[-2]
    return int(layer.get_seq_length()) - kept
