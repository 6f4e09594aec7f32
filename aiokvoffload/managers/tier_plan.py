"""How a tier is used, and what came of it."""

from __future__ import annotations

from dataclasses import dataclass, fields
from typing import Literal, get_args

from aiokvoffload.errors import ConfigurationError
from aiokvoffload.tiers.base import Tier
from aiokvoffload.tiers.statistics import TierStatistics

Cascade = Literal["write-through", "reused", "ahead"]
"""When blocks are written down: all as soon as they are stored, those that come back, or those about to leave."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TierPlan:
    """How one tier is used.

    Attributes:
        cascade: When blocks are written to it. "reused" spares flash memory: a block is written once `min_uses`
            requests have used it. "ahead" writes the coldest blocks, so that an eviction never waits; a block that
            leaves before it was written is lost, and counted.
        min_uses: Uses that make a block worth writing, for "reused".
        clean_share: Share of the slots, at the cold end, that "ahead" keeps written.
        read_bytes: How much may be read at a time; further loads stand in line. One load always may.
        write_bytes: How much may be written at a time.
        queue_bytes: How much may wait to be written; what comes beyond it is dropped and counted.
        lookup_seconds: How long a lookup may take; then what is unanswered is a miss.
        read_seconds: How long reading may take.
        write_seconds: How long writing may take.
        retry_seconds: How long a block that could not be read is not asked for again; also, how long a tier that was
            slower than computing again is not tried again.

    Raises:
        ConfigurationError: A value cannot work.
    """

    cascade: Cascade = "write-through"
    min_uses: int = 2
    clean_share: float = 0.05
    read_bytes: int = 1 << 30
    write_bytes: int = 256 << 20
    queue_bytes: int = 1 << 30
    lookup_seconds: float = 1.0
    read_seconds: float = 10.0
    write_seconds: float = 30.0
    retry_seconds: float = 10.0

    def __post_init__(self) -> None:
        if self.cascade not in get_args(Cascade):
            raise ConfigurationError(f"cascade is {self.cascade!r}; it must be one of {', '.join(get_args(Cascade))}")
        if not 0 < self.clean_share <= 1:
            raise ConfigurationError(f"clean_share is {self.clean_share}; it must be above 0 and at most 1")
        for field in fields(self):
            value = getattr(self, field.name)
            if field.name != "cascade" and not value > 0:
                raise ConfigurationError(f"{field.name} is {value}; it must be above 0")


@dataclass(slots=True)
class TierTally:
    """What came of using a tier; blocks.

    Attributes:
        promoted: Read into CPU memory.
        failed_promotions: Found by a lookup, but could not be read.
        written: Written down, or found there already.
        refused_writes: The tier did not take them.
        dropped_writes: There were too many of them to write, or they left CPU memory before their turn.
        dirty_evictions: Left CPU memory before they were written, under "ahead".
        too_slow: Not asked for, because computing them again is faster.
    """

    promoted: int = 0
    failed_promotions: int = 0
    written: int = 0
    refused_writes: int = 0
    dropped_writes: int = 0
    dirty_evictions: int = 0
    too_slow: int = 0


@dataclass(frozen=True, slots=True)
class TierUseStatistics:
    """One tier, as its manager uses it; blocks as in `TierTally`.

    Attributes:
        tier: What the tier says of itself.
        waiting_write_bytes: Waiting to be written.
        writing_bytes: Being written.
        reading_bytes: Being read.
    """

    tier: TierStatistics
    promoted: int
    failed_promotions: int
    written: int
    refused_writes: int
    dropped_writes: int
    dirty_evictions: int
    too_slow: int
    waiting_write_bytes: int
    writing_bytes: int
    reading_bytes: int


class PlannedTier:
    """A tier, its plan, and what is under way.

    Attributes:
        tier: The tier.
        plan: How it is used.
        number: Position among the tiers, the fastest first.
        tally: What came of it.
        reading_bytes: Being read.
        writing_bytes: Being written.
        waiting_bytes: Waiting to be written.
        seconds_per_byte: How long reading takes, as measured; 0 before.
        measured_at: When that was, or was last tried.
    """

    def __init__(self, tier: Tier, plan: TierPlan, number: int) -> None:
        self.tier = tier
        self.plan = plan
        self.number = number
        self.tally = TierTally()
        self.reading_bytes = 0
        self.writing_bytes = 0
        self.waiting_bytes = 0
        self.seconds_per_byte = 0.0
        self.measured_at = 0.0

    def statistics(self) -> TierUseStatistics:
        """Return the counts of this moment."""
        tally = self.tally
        return TierUseStatistics(
            tier=self.tier.statistics(),
            promoted=tally.promoted,
            failed_promotions=tally.failed_promotions,
            written=tally.written,
            refused_writes=tally.refused_writes,
            dropped_writes=tally.dropped_writes,
            dirty_evictions=tally.dirty_evictions,
            too_slow=tally.too_slow,
            waiting_write_bytes=self.waiting_bytes,
            writing_bytes=self.writing_bytes,
            reading_bytes=self.reading_bytes,
        )
