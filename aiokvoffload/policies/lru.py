"""Least recently used: the request that has waited longest loses its deepest block first."""

from __future__ import annotations

from aiokvoffload.policies.last_use import LastUsePolicy


class LRUPolicy(LastUsePolicy):
    """Evicts the blocks of the request that was last used longest ago, deepest first.

    Args:
        capacity: Number of slots.
        late_slots: See `LastUsePolicy`.
    """
