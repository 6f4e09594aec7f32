"""How the keys of a request, its GPU blocks and its token positions correspond, for every KV group."""

from __future__ import annotations

import operator
from collections.abc import Sequence
from itertools import accumulate, pairwise

from aiokvoffload.errors import InvalidRequestError
from aiokvoffload.keys import OffloadKey, offload_group_index
from aiokvoffload.kv_caches import CacheShape
from aiokvoffload.specs import PrepareLoadOutput


class BlockShapes:
    """Checks and cuts the arguments of stores and loads.

    Args:
        cache: The KV cache.
    """

    def __init__(self, cache: CacheShape) -> None:
        self._factor = cache.block_size_factor
        self._block_count = cache.block_count
        self._block_tokens = tuple(group.block_tokens for group in cache.groups)

    def group_sizes(self, keys: Sequence[OffloadKey]) -> list[int]:
        """Count the keys of each KV group.

        Raises:
            InvalidRequestError: The keys are not group after group, of a group that does not exist, or no keys.
        """
        sizes = [0] * len(self._block_tokens)
        last = 0
        for key in keys:
            if not isinstance(key, bytes):
                raise InvalidRequestError(f"a key is bytes, see keys() and offload_keys(), not {key!r}")
            group = offload_group_index(key)
            if not last <= group < len(sizes):
                raise InvalidRequestError(
                    f"a key of KV group {group} after one of group {last}: give keys group after group, "
                    f"of groups 0 to {len(sizes) - 1}"
                )
            sizes[group] += 1
            last = group
        return sizes

    def check_blocks(self, gpu_blocks: Sequence[int], count: int) -> list[int]:
        """Return GPU blocks as a list.

        Raises:
            InvalidRequestError: They are not `count` whole numbers, or one is out of range.
        """
        try:
            blocks = list(map(operator.index, gpu_blocks))
        except TypeError as exc:
            raise InvalidRequestError(f"GPU blocks are a sequence of whole numbers: {exc}") from exc
        if len(blocks) != count:
            raise InvalidRequestError(f"{len(blocks)} GPU blocks were given, but {count} are needed")
        for block in blocks:
            if not 0 <= block < self._block_count:
                raise InvalidRequestError(f"GPU block {block} is out of range: there are {self._block_count}, from 0")
        return blocks

    def check_distinct_keys(self, keys: Sequence[OffloadKey]) -> None:
        """Refuse a prefix that names a block twice: which GPU blocks belong to which key would be unclear.

        Raises:
            InvalidRequestError: It does.
        """
        if len(set(keys)) < len(keys):
            raise InvalidRequestError("a key is given twice; give every block of the request once, in token order")

    def check_resident_tokens(self, resident_tokens: int) -> None:
        """Refuse a number of tokens that is no whole number of blocks of every group.

        Raises:
            InvalidRequestError: It is not.
        """
        for tokens in self._block_tokens:
            if resident_tokens < 0 or resident_tokens % tokens:
                raise InvalidRequestError(
                    f"resident_tokens is {resident_tokens}, no whole number of blocks of {tokens} tokens"
                )

    def depths(self, group_sizes: Sequence[int], first_block: int = 0) -> Sequence[int]:
        """Return the token position of each block's end, group after group.

        Args:
            group_sizes: Offloaded blocks of each group.
            first_block: Position of the first one within the request.

        Raises:
            InvalidRequestError: The position is negative.
        """
        if first_block < 0:
            raise InvalidRequestError(f"first_block is {first_block}, it must be at least 0")
        widths = [tokens * self._factor for tokens in self._block_tokens]
        runs = [
            range((first_block + 1) * width, (first_block + size + 1) * width, width)
            for size, width in zip(group_sizes, widths, strict=True)
        ]
        return runs[0] if len(runs) == 1 else [depth for run in runs for depth in run]

    def load_shape(self, ticket: PrepareLoadOutput, resident_tokens: int) -> tuple[tuple[int, ...], tuple[int, ...]]:
        """Return how many GPU blocks of each group a load fills, and the logical index of the first of each."""
        sizes = [0] * len(self._block_tokens)
        firsts = [0] * len(self._block_tokens)
        for group, (key_count, first_key) in enumerate(zip(ticket.group_sizes, ticket.first_indices, strict=True)):
            if key_count:
                firsts[group] = max(first_key * self._factor, resident_tokens // self._block_tokens[group])
                sizes[group] = (first_key + key_count) * self._factor - firsts[group]
        return tuple(sizes), tuple(firsts)

    def check_distinct_blocks(self, gpu_blocks: Sequence[int], group_sizes: Sequence[int]) -> None:
        """Refuse a load that fills a block of one group twice.

        Raises:
            InvalidRequestError: It does.
        """
        for start, end in pairwise(accumulate(group_sizes, initial=0)):
            if len(set(gpu_blocks[start:end])) < end - start:
                raise InvalidRequestError("a GPU block is given twice in one load; each can hold one block")

    def blocks_to_fill(
        self,
        key_counts: Sequence[int],
        gpu_blocks: Sequence[int],
        shape: tuple[Sequence[int], Sequence[int]],
    ) -> list[int]:
        """Return which of the GPU blocks for all keys of a request a load of `shape` fills."""
        chosen: list[int] = []
        start = 0
        for key_count, size, first in zip(key_counts, *shape, strict=True):
            chosen += gpu_blocks[start + first : start + first + size]
            start += key_count * self._factor
        return chosen

    def blocks_to_store(
        self, keys: Sequence[OffloadKey], gpu_blocks: Sequence[int], keys_to_store: Sequence[OffloadKey]
    ) -> tuple[list[int], list[int]]:
        """Return the GPU blocks behind some of the keys of an offer, and how many of each group they are."""
        position_of = dict(zip(reversed(keys), reversed(range(len(keys))), strict=True))
        chosen: list[int] = []
        for key in keys_to_store:
            first = position_of[key] * self._factor
            chosen += gpu_blocks[first : first + self._factor]
        return chosen, [size * self._factor for size in self.group_sizes(keys_to_store)]
