"""The contract of an eviction policy: who leaves first.

A policy is plain, synchronous and knows slots by number; the manager alone knows which key lives in which
slot, and a policy keeps keys only as ghosts (keys of blocks that left). Calls come in batches, and each costs
O(1) amortized per slot of the batch, whatever else is held, pinned or protected.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Collection, Sequence
from dataclasses import dataclass, replace
from typing import ClassVar

from aiokvoffload.keys import OffloadKey
from aiokvoffload.policies.slots import SlotArray, slot_array
from aiokvoffload.registry import Registry


@dataclass(frozen=True, slots=True)
class Access:
    """One request's use of some blocks.

    Attributes:
        tick: Counts requests; all blocks of one request share its tick, also those it stores later.
        time: Seconds on the manager's clock.
        turn: Turn of the conversation, 0 where unknown.
        priority: The request's priority, higher stays longer where a policy cares.
        depths: Token position of each block's end, one per slot or key of the batch; None where unknown.
    """

    tick: int
    time: float = 0.0
    turn: int = 0
    priority: int = 0
    depths: Sequence[int] | None = None

    def select(self, positions: Sequence[int]) -> Access:
        """Return the access to just those positions of the batch."""
        if self.depths is None:
            return self
        return replace(self, depths=[self.depths[position] for position in positions])

    def part(self, start: int, stop: int) -> Access:
        """Return the access to neighbours in the batch."""
        return self if self.depths is None else replace(self, depths=self.depths[start:stop])


class CachePolicy(ABC):
    """Ranks the slots of a cache; the lowest rank leaves first.

    A slot is *resident* from `insert` to `evict` or `remove`. It is *evictable* while resident and not pinned;
    `insert` leaves it pinned (it is being written), the first `unpin` makes it ready. The manager pins a slot
    when its first user comes and unpins it when the last one has gone.

    Args:
        capacity: Number of slots; they are numbered from 0.

    Attributes:
        takes_arrays: Whether batches of slots may come as arrays of numpy, which saves a conversion for each call.
    """

    takes_arrays: ClassVar[bool] = False

    def __init__(self, capacity: int) -> None:
        self.capacity = capacity

    @property
    @abstractmethod
    def evictable_count(self) -> int:
        """How many slots could be evicted now."""

    def admit(self, keys: Sequence[OffloadKey], access: Access) -> Sequence[OffloadKey]:
        """Return those of `keys` that are worth a slot, in order; all of them unless a policy knows better."""
        return keys

    @abstractmethod
    def insert(self, slots: Sequence[int], keys: Sequence[OffloadKey], access: Access) -> None:
        """Make `slots` resident and pinned, as new at `access`; a ghost of their keys ends."""

    @abstractmethod
    def touch(self, slots: Sequence[int], access: Access) -> None:
        """Note a use of resident slots; one already used at this tick or a later one is left as it is."""

    def miss(self, keys: Sequence[OffloadKey], access: Access) -> None:
        """Note a use of blocks that are not resident; for policies with ghosts, once per tick and key."""
        return

    @abstractmethod
    def pin(self, slots: Collection[int]) -> None:
        """Keep evictable slots from being evicted."""

    @abstractmethod
    def unpin(self, slots: Collection[int]) -> None:
        """Make pinned slots evictable, at the rank they have."""

    @abstractmethod
    def demote(self, slots: Sequence[int]) -> None:
        """Put resident slots first in line, after those demoted before; in the order given. They leave no ghost."""

    def take_along(self, slots: Sequence[int]) -> None:
        """Demote slots whose blocks have moved to the level above: they leave no ghost.

        What is known of their uses may be kept, for those blocks will come back; by default it is not.
        """
        self.demote(slots)

    def rescue(self, slots: Sequence[int], access: Access) -> None:
        """Note that the level above gives up blocks of resident slots; no use, though by default it is taken for one.

        What was demoted goes back among the others, as if it were inserted at `access`.
        """
        self.touch(slots, access)

    def end_session(self, slots: Sequence[int]) -> None:
        """Note that the only session that has used some slots is over, deepest block first; demotes them by default."""
        self.demote(slots)

    def widen(self, blocks_above: int) -> None:
        """Note, once and before any slot is used, that a level above holds so many other blocks.

        For policies that count in capacities. Uses of blocks up there are told by `miss`.
        """
        return

    @abstractmethod
    def coldest(self, count: int) -> list[int]:
        """Return up to `count` evictable slots in the order in which they would leave."""

    @abstractmethod
    def evict(self, count: int, protected: Collection[int] = ()) -> list[int] | None:
        """Drop exactly `count` evictable slots that are not `protected` and return them, first to leave first.

        None if there are not that many: then nothing has changed. `protected` are resident slots, each once.
        """

    def evict_array(self, count: int, protected: Collection[int] = ()) -> SlotArray | None:
        """Do what `evict` does, and return an array; for policies that have one at that point anyway."""
        victims = self.evict(count, protected)
        return None if victims is None else slot_array(victims)

    @abstractmethod
    def remove(self, slots: Collection[int]) -> None:
        """Drop resident slots, pinned or not, without a ghost."""

    @abstractmethod
    def clear(self) -> None:
        """Drop all slots and ghosts."""


POLICIES: Registry[CachePolicy] = Registry(
    "eviction policy",
    CachePolicy,
    {
        "lru": "aiokvoffload.policies.lru:LRUPolicy",
        "arc": "aiokvoffload.policies.arc:ARCPolicy",
        "arc-reference": "aiokvoffload.policies.arc:ReferenceARCPolicy",
        "adaptive": "aiokvoffload.policies.adaptive:AdaptivePolicy",
        "lru2": "aiokvoffload.policies.lru2:LRU2Policy",
        "lrfu": "aiokvoffload.policies.lrfu:LRFUPolicy",
        "s3fifo": "aiokvoffload.policies.s3fifo:S3FIFOPolicy",
    },
    "aiokvoffload.policies",
)
