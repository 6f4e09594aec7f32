"""Which of the blocks that the GPU gives up can go down at once."""

from __future__ import annotations

from collections.abc import Sequence

from aiokvoffload.keys import OffloadKey, offload_group_index
from aiokvoffload.kv_caches import CacheShape
from aiokvoffload.specs import LookupResult
from aiokvoffload.transfers.base import TransferWorker


def choose_sendable(
    keys: Sequence[OffloadKey],
    gpu_blocks: Sequence[int],
    results: Sequence[LookupResult],
    cache: CacheShape,
    worker: TransferWorker,
) -> list[int]:
    """Return the positions of keys that need no copy, or whose copies the worker can send now; each key once.

    Args:
        keys: The blocks that are given up.
        gpu_blocks: `block_size_factor` GPU blocks for each key.
        results: What the manager says of each key.
        cache: How large they are.
        worker: Would send them.
    """
    allowed_bytes = worker.sendable_bytes()
    filled_later = worker.blocks_with_queued_loads(gpu_blocks)
    factor, group_slot_bytes = cache.block_size_factor, cache.group_slot_bytes
    chosen: list[int] = []
    seen: set[OffloadKey] = set()
    for position, (key, result) in enumerate(zip(keys, results, strict=True)):
        if key in seen:
            continue
        seen.add(key)
        if result is LookupResult.MISS:
            if not filled_later.isdisjoint(gpu_blocks[position * factor : (position + 1) * factor]):
                continue
            byte_count = group_slot_bytes[offload_group_index(key)]
            if allowed_bytes is not None:
                if byte_count > allowed_bytes:
                    continue
                allowed_bytes -= byte_count
        chosen.append(position)
    return chosen
