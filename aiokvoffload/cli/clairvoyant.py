"""The bound that no policy can pass: what a cache would hit that knew all requests beforehand.

L. Belady, "A study of replacement algorithms for a virtual-storage computer", IBM Systems Journal 5 (2), 1966: the
block whose next use is farthest leaves first. Here the deepest of equals leaves first, as every request that uses a
block uses its prefix too; and a block without a next use is not stored.
"""

from __future__ import annotations

import heapq
from collections.abc import Callable, Hashable, Sequence

_NEVER = -1


def next_uses(requests: Sequence[Sequence[Hashable]]) -> list[list[int]]:
    """Return, for each block of each request, the number of the next request that uses it, or -1."""
    found: list[list[int]] = []
    next_use_of: dict[Hashable, int] = {}
    for number in range(len(requests) - 1, -1, -1):
        blocks = requests[number]
        found.append([next_use_of.get(block, _NEVER) for block in blocks])
        next_use_of.update(dict.fromkeys(blocks, number))
    found.reverse()
    return found


def clairvoyant_hits(
    requests: Sequence[Sequence[Hashable]],
    capacity: int,
    uses: Sequence[Sequence[int]] | None = None,
    advance: Callable[[int], None] = lambda _count: None,
) -> int:
    """Return how many blocks hit at best; a block whose prefix is absent is no hit.

    Args:
        requests: The blocks of each request, in order, each block once.
        capacity: How many blocks the cache holds.
        uses: What `next_uses` says of the requests, if it is known already.
        advance: Called with 1 after each request.
    """
    uses = next_uses(requests) if uses is None else uses
    next_use_of: dict[Hashable, int] = {}
    leaving: list[tuple[int, int, int, Hashable]] = []
    hit_count = order = 0
    for blocks, next_of_each in zip(requests, uses, strict=True):
        for block in blocks:
            if block not in next_use_of:
                break
            hit_count += 1
        for depth, (block, next_use) in enumerate(zip(blocks, next_of_each, strict=True)):
            if next_use == _NEVER:
                next_use_of.pop(block, None)
            else:
                next_use_of[block] = next_use
                order += 1  # so that blocks themselves are never compared
                heapq.heappush(leaving, (-next_use, -depth, order, block))
        while len(next_use_of) > capacity:
            farthest, _, _, block = heapq.heappop(leaving)
            if next_use_of.get(block) == -farthest:
                del next_use_of[block]
        advance(1)
    return hit_count
