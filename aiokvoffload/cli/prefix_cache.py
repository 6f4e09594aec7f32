"""The prefix cache of a simulated GPU: which block holds which content, and which one is given up next."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Grant:
    """GPU blocks for one request.

    Attributes:
        hashes: Content of each of its blocks, in order.
        blocks: The GPU blocks, one per hash.
        hit_count: How many of them, from the start, hold their content already.
        given_up: Hash and block of what the others have held until now, in the order in which it was given up.
    """

    hashes: Sequence[bytes]
    blocks: list[int]
    hit_count: int
    given_up: list[tuple[bytes, int]]


class PrefixCache:
    """Hands out GPU blocks; what nobody uses stays until its block is needed, the least recently used goes first.

    Of one request the deepest block goes first.

    Args:
        block_count: How many blocks there are.
        is_caching: Whether contents are found again at all.
    """

    def __init__(self, block_count: int, *, is_caching: bool = True) -> None:
        self._is_caching = is_caching
        self._free = list(range(block_count))
        self._user_count = [0] * block_count
        self._block_of: dict[bytes, int] = {}
        self._idle: OrderedDict[bytes, int] = OrderedDict()

    def take(self, hashes: Sequence[bytes]) -> Grant | None:
        """Return blocks for a request, or None while too few are free or idle; no more than there are in all."""
        hit_count = 0
        while hit_count < len(hashes) and hashes[hit_count] in self._block_of:
            hit_count += 1
        hits = hashes[:hit_count]
        new_count = len(hashes) - hit_count
        if new_count > len(self._free) + len(self._idle) - sum(content in self._idle for content in hits):
            return None
        blocks = [self._block_of[content] for content in hits]
        for content in hits:
            self._idle.pop(content, None)
        given_up = [self._idle.popitem(last=False) for _ in range(max(0, new_count - len(self._free)))]
        for content, block in given_up:
            del self._block_of[content]
            self._free.append(block)
        kept = len(self._free) - new_count
        blocks += self._free[kept:]
        del self._free[kept:]
        for block in blocks:
            self._user_count[block] += 1
        return Grant(hashes, blocks, hit_count, given_up)

    def publish(self, grant: Grant) -> None:
        """Let others find what the blocks of a request hold from now on."""
        if self._is_caching:
            for content, block in zip(grant.hashes, grant.blocks, strict=True):
                self._block_of.setdefault(content, block)

    def release(self, grant: Grant) -> None:
        """Take the blocks of a request back."""
        for content, block in zip(reversed(grant.hashes), reversed(grant.blocks), strict=True):
            self._user_count[block] -= 1
            if not self._user_count[block]:
                if self._block_of.get(content) == block:
                    self._idle[content] = block
                else:
                    self._free.append(block)
