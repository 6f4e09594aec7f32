"""What a manager announces about the blocks it holds."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from enum import Enum

from aiokvoffload.keys import OffloadKey


class EventKind(Enum):
    """What happened to blocks of one medium."""

    STORED = "stored"
    """Committed: from now on a lookup can hit them."""
    REMOVED = "removed"
    """Evicted or dropped; only blocks that were announced as stored."""
    CLEARED = "cleared"
    """All blocks of the medium are gone; comes before anything of the new generation."""


@dataclass(frozen=True, slots=True)
class OffloadingEvent:
    """One announcement.

    Attributes:
        kind: Stored, removed or cleared.
        keys: The blocks; empty for cleared.
        medium: Where they are, or were: "CPU".
        sequence: Counts up by one per event of a manager, so that a gap can be seen.
    """

    kind: EventKind
    keys: tuple[OffloadKey, ...]
    medium: str
    sequence: int


EventSink = Callable[[OffloadingEvent], None]
"""Takes an event once the manager's state is consistent; must return at once and must not call the manager."""
