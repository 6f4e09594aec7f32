"""Memory of a manager besides the keys: its own, and what its policy remembers of blocks that left."""

from __future__ import annotations

import inspect
import sys
import tracemalloc
from collections.abc import Iterable
from dataclasses import dataclass

from aiokvoffload.cli.bench.contestants import Keys, batches, depths_of
from aiokvoffload.cli.bench.rounds import KeySource
from aiokvoffload.managers.cpu import CPUOffloadingManager
from aiokvoffload.policies.base import POLICIES, CachePolicy

_HISTORY_KNOB = "history_bytes_per_block"
_TURNOVERS = 4
_MAX_STORED_BLOCKS = 500_000


@dataclass(frozen=True, slots=True)
class Footprint:
    """Bytes per block that a manager takes, the blocks' keys left out.

    Attributes:
        own_bytes: When it was just filled, and remembers nothing of blocks that left.
        history_bytes: What ghosts, their keys included, and shadows take on top of that, once the cache was turned over
            four times; None for a size at which that takes too long.
    """

    own_bytes: float
    history_bytes: float | None


def measure_footprint(policy: str, keys: Keys, batch_size: int) -> Footprint:
    """Measure the memory of a manager that holds just these blocks."""
    kind = POLICIES.resolve(policy)
    count = len(keys)
    options = {_HISTORY_KNOB: 0} if _HISTORY_KNOB in inspect.signature(kind).parameters else {}
    own_bytes = _bytes_used(kind, count, batches(keys, batch_size), **options) / count
    if (1 + _TURNOVERS) * count > _MAX_STORED_BLOCKS:
        return Footprint(own_bytes, None)
    others = KeySource(0).draw
    new_batches = (others(batch_size) for _ in range((1 + _TURNOVERS) * count // batch_size))
    # These keys live only in the manager, so they are counted: those of stored blocks are taken off again.
    turned_over_bytes = _bytes_used(kind, count, new_batches) / count - sys.getsizeof(keys[0])
    return Footprint(own_bytes, max(0.0, turned_over_bytes - own_bytes))


def _bytes_used(kind: type[CachePolicy], block_count: int, offers: Iterable[Keys], **options: int) -> int:
    """Return what a manager takes after it has stored the offers."""
    tracemalloc.start()
    try:
        manager = CPUOffloadingManager(block_count, policy=kind(block_count, **options))
        for keys in offers:
            manager.complete_store_nowait(manager.prepare_store_nowait(keys, depths=depths_of(keys)))
        del keys
        used_bytes, _ = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    manager.close_nowait()
    return used_bytes
