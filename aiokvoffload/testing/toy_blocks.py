"""The GPU blocks of the toy engine: reference counts, a prefix cache, and who still touches them."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable, Sequence

from aiokvoffload.offloader import TransferHandle


class ToyBlocks:
    """Hands out GPU blocks; one that nobody refers to keeps its content until it is handed out again.

    A block is free when nobody refers to it and all handles that touch it are idle. Free blocks are handed out
    least recently used first.

    Args:
        block_count: How many there are.
        free_too_early: Ignore the handles, which is wrong.
    """

    def __init__(self, block_count: int, *, free_too_early: bool = False) -> None:
        self.block_count = block_count
        self._free_too_early = free_too_early
        self._references = [0] * block_count
        self._handle_counts = [0] * block_count
        self._hash_of: list[bytes | None] = [None] * block_count
        self._block_of: dict[bytes, int] = {}
        self._free: OrderedDict[int, None] = OrderedDict.fromkeys(range(block_count))

    @property
    def free_count(self) -> int:
        """How many blocks are free."""
        return len(self._free)

    def match(self, hashes: Sequence[bytes]) -> list[int]:
        """Return the blocks of the longest cached prefix, and refer to them."""
        blocks: list[int] = []
        for block_hash in hashes:
            block = self._block_of.get(block_hash)
            if block is None:
                break
            blocks.append(block)
        self.refer_to(blocks)
        return blocks

    def allocate(self, count: int) -> list[int] | None:
        """Return free blocks, referred to; None if there are not that many."""
        if count > len(self._free):
            return None
        blocks = [self._free.popitem(last=False)[0] for _ in range(count)]
        for block in blocks:
            self._forget(block)
        self.refer_to(blocks)
        return blocks

    def refer_to(self, blocks: Iterable[int]) -> None:
        """Count one more reference to each block."""
        for block in blocks:
            self._references[block] += 1
            self._free.pop(block, None)

    def release(self, blocks: Sequence[int]) -> None:
        """Count one reference less of each block; of a prefix the end becomes free first."""
        for block in reversed(blocks):
            self._references[block] -= 1
            self._free_if_unused(block)

    def follow(self, handle: TransferHandle) -> None:
        """Keep the blocks that a handle touches from being free until it is idle."""
        for block in handle.gpu_blocks:
            self._handle_counts[block] += 1
        handle.on_idle(self._unfollow)

    def publish(self, hashes: Sequence[bytes], blocks: Sequence[int]) -> None:
        """Put blocks into the prefix cache, except those whose content is there already."""
        for block_hash, block in zip(hashes, blocks, strict=False):
            if self._hash_of[block] is None and block_hash not in self._block_of:
                self._hash_of[block] = block_hash
                self._block_of[block_hash] = block

    def forget(self) -> None:
        """Empty the prefix cache."""
        for block in range(self.block_count):
            self._forget(block)

    def _forget(self, block: int) -> None:
        block_hash = self._hash_of[block]
        if block_hash is not None:
            del self._block_of[block_hash]
            self._hash_of[block] = None

    def _unfollow(self, handle: TransferHandle) -> None:
        for block in handle.gpu_blocks:
            self._handle_counts[block] -= 1
            self._free_if_unused(block)

    def _free_if_unused(self, block: int) -> None:
        is_touched = self._handle_counts[block] and not self._free_too_early
        if not self._references[block] and not is_touched:
            self._free.setdefault(block)
