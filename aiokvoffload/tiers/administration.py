"""Looking at the storage of a tier from outside: for the command line, whoever's blocks they are."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass, field


@dataclass(frozen=True, slots=True)
class StoredIdentity:
    """What one identity has stored.

    Attributes:
        name: Its place in the storage.
        description: What it is, as it was written beside its blocks.
        block_count: Blocks.
        used_bytes: Bytes they take, envelopes included.
    """

    name: str
    description: Mapping[str, object]
    block_count: int
    used_bytes: int


@dataclass(frozen=True, slots=True)
class Verification:
    """What a reading of all blocks has found.

    Attributes:
        good_blocks: Blocks in order.
        bad_by_reason: Blocks that are not, by what is wrong.
        removed_blocks: Bad ones that were removed.
    """

    good_blocks: int = 0
    bad_by_reason: Mapping[str, int] = field(default_factory=dict)
    removed_blocks: int = 0


class TierAdministration(ABC):
    """Looks at all blocks of a storage, and can remove them. Blocking; for tools."""

    @abstractmethod
    def stored(self) -> list[StoredIdentity]:
        """Return what is there, by identity."""

    @abstractmethod
    def verify(self, *, remove_bad: bool = False) -> Verification:
        """Read every block and check it."""

    @abstractmethod
    def purge(self) -> int:
        """Remove every block of every identity, and return how many there were."""
