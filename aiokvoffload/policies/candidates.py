"""The ways to run a cache that `adaptive` chooses from."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from aiokvoffload.policies.uses import FIRST, LAST, PREVIOUS, WEIGHTS, Uses

_TICK_BITS = 48
_STEPS_PER_HALF_LIFE = 1 << 32

Ranking = Callable[[Uses], list[int]]
"""Returns what each block is ranked by, the lowest leaves first; a whole number of at least 1."""

HALF_LIVES = (1.0, 8.0)
"""In capacities."""
_SHORT, _LONG = range(WEIGHTS, WEIGHTS + len(HALF_LIVES))


def by_last_use(uses: Uses) -> list[int]:
    """Rank as `lru` does."""
    ticks: list[int] = uses[:, LAST].astype(np.int64).tolist()
    return ticks


def by_last_use_but_one(uses: Uses) -> list[int]:
    """Rank as `lru2` does."""
    previous, last = uses[:, PREVIOUS].astype(np.int64).tolist(), uses[:, LAST].astype(np.int64).tolist()
    return [(before << _TICK_BITS) + tick for before, tick in zip(previous, last, strict=True)]


def by_weight(uses: Uses) -> list[int]:
    """Rank as `lrfu` does."""
    bases: list[int] = ((uses[:, _SHORT] * _STEPS_PER_HALF_LIFE).astype(np.int64) + 1).tolist()
    return bases


def by_whole_weight(uses: Uses) -> list[int]:
    """Rank by weight in whole half-lives; of equals, those known longest stay.

    Requests that come round and do not fit all leave something to hit when they come again: by any finer rank, each
    would be pushed out by the others just before.
    """
    weights, first = uses[:, _LONG].astype(np.int64).tolist(), uses[:, FIRST].astype(np.int64).tolist()
    return [((weight + 1) << _TICK_BITS) - tick for weight, tick in zip(weights, first, strict=True)]


@dataclass(frozen=True, slots=True)
class Candidate:
    """One way to run a cache.

    Attributes:
        name: As `AdaptivePolicy.winner` shows it.
        ranking: What it ranks by.
        is_filtered: Whether a block is stored only at its second use.
    """

    name: str
    ranking: Ranking
    is_filtered: bool = False


CANDIDATES = (
    Candidate("lru", by_last_use),
    Candidate("lru2", by_last_use_but_one),
    Candidate("lrfu", by_weight),
    Candidate("lfu, held", by_whole_weight),
    Candidate("lru, filtered", by_last_use, is_filtered=True),
)
