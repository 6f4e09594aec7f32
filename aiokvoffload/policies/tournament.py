"""A tournament: small caches without bytes try every way to rank on a sample of the blocks.

After the idea of miniature simulations in C. Waldspurger et al., "Cache Modeling and Optimization using Miniature
Simulations", USENIX ATC 2017: a cache of a share of the capacity, asked for the blocks whose hash falls into that
share, hits about as often as the whole one.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from zlib import crc32

import numpy as np
import numpy.typing as npt

from aiokvoffload.keys import OffloadKey
from aiokvoffload.policies.candidates import CANDIDATES
from aiokvoffload.policies.shadow import ENTRY_BYTES, ROW_BYTES, ShadowCaches
from aiokvoffload.policies.uses import Uses

_SAMPLED_SLOTS = 2048
"""Above this many sampled slots a coarser sample is as good and costs less."""
_MIN_SAMPLE = 4
_FINE_SAMPLE_CAPACITY = 1024
"""Up to this capacity the finest sample is taken; a coarser one leaves more memory for blocks that left."""
_MAX_SAMPLE = 1024
_ROUND_CAPACITIES = 0.1
"""After so many looked-up blocks, in units of the capacity, a round ends."""
_MIN_ROUND_BLOCKS = 256
_MEMORY_CAPACITIES = 10.0
_MIN_MEMORY_BLOCKS = 40_000
"""After so many looked-up blocks a round counts 1/e of a new one."""
_HEARD_AT_ONCE = 512
"""A larger request is seen in parts, so that what it costs is not left to the next one."""
_DEVIATIONS = 0.5
"""By how many standard deviations of the difference between rounds a candidate must lead, so that it is not chance."""


class Tournament:
    """Scores the candidates by what their shadows hit.

    Args:
        capacity: Number of slots of the real cache.
        budget_bytes: Memory for the shadows; where it does not suffice, there are none and the first candidate wins.
        store_cost: What storing a block costs, in hits.
    """

    def __init__(self, capacity: int, budget_bytes: int, store_cost: float) -> None:
        self._store_cost = store_cost
        self._sample = _MIN_SAMPLE
        if capacity > _FINE_SAMPLE_CAPACITY:
            self._sample *= 2
        while capacity // self._sample > _SAMPLED_SLOTS and self._sample < _MAX_SAMPLE:
            self._sample *= 2
        shadow_slots = max(1, capacity // self._sample)
        most_bytes = shadow_slots * len(CANDIDATES) * (ROW_BYTES + ENTRY_BYTES)
        self._has_shadows = most_bytes <= budget_bytes
        self.reserved_bytes = most_bytes if self._has_shadows else 0
        """What the shadows take at most."""
        self._shadows = ShadowCaches(capacity, shadow_slots)
        self._round_end = max(_MIN_ROUND_BLOCKS, _ROUND_CAPACITIES * capacity)
        self._memory_blocks = max(_MIN_MEMORY_BLOCKS, _MEMORY_CAPACITIES * capacity)
        self.clear()

    @property
    def used_bytes(self) -> int:
        """Memory taken by the shadows."""
        return self._shadows.used_bytes

    def clear(self) -> None:
        """Forget everything; the first candidate wins."""
        self._shadows.clear()
        self.winner = 0
        """Index of the candidate that is best as far as is known."""
        self._heard: dict[int, tuple[int, Uses]] = {}
        self._heard_at = (0, 0)
        self._round_blocks = 0
        self._round = np.zeros(len(CANDIDATES))
        self.scores = np.zeros(len(CANDIDATES))
        """What each candidate has hit lately, less the cost of what it has stored."""
        self._variances = np.zeros((len(CANDIDATES), len(CANDIDATES)))

    def sampled(self, keys: Sequence[OffloadKey]) -> npt.NDArray[np.bool_]:
        """Return for each key whether it is in the sample."""
        if not self._has_shadows:
            return np.zeros(len(keys), dtype=np.bool_)
        mask = self._sample - 1
        return np.array([not crc32(key) & mask for key in keys], dtype=np.bool_)

    def count(self, block_count: int) -> None:
        """Count blocks that were looked up."""
        self._round_blocks += block_count

    def hear(self, hashes: Sequence[int], uses: Uses, depths: Sequence[int], tick: int, time: int) -> None:
        """Note uses of sampled blocks; the shadows see those of one request together, when the next one is heard.

        Args:
            hashes: The blocks, by the hashes of their keys.
            uses: What is known of each, this use counted.
            depths: The token position of each.
            tick: When they were used.
            time: The same in insertions.
        """
        if tick != self._heard_at[0]:
            self._play()
            self._heard_at = (tick, time)
        for hashed, depth, row in zip(hashes, depths, uses, strict=True):
            self._heard.setdefault(hashed, (depth, row))
        if len(self._heard) > _HEARD_AT_ONCE:
            self._play()

    def _play(self) -> None:
        """Let every shadow serve the request that was heard, and end the round if it is long enough."""
        if self._heard:
            heard = sorted(self._heard.items(), key=lambda item: item[1][0])
            self._heard = {}
            outcomes = self._shadows.request(
                [hashed for hashed, _ in heard],
                np.array([row for _, (_, row) in heard]),
                [depth for _, (depth, _) in heard],
                *self._heard_at,
            )
            self._round += [hits - self._store_cost * stores for hits, stores in outcomes]
        if self._round_blocks >= self._round_end:
            self._end_round()

    def _end_round(self) -> None:
        """Add the round to the scores, and let another candidate win if it is better by more than chance."""
        fading = math.exp(-self._round_blocks / self._memory_blocks)
        self._round_blocks = 0
        differences = self._round[:, None] - self._round
        self._variances = fading * fading * self._variances + differences * differences
        self.scores = fading * self.scores + self._round
        self._round = np.zeros(len(CANDIDATES))
        best = int(self.scores.argmax())
        lead = self.scores[best] - self.scores[self.winner]
        if lead > _DEVIATIONS * math.sqrt(self._variances[best, self.winner]):
            self.winner = best
