"""What a manager counts, and whom it has to tell at the end of a step."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Literal

from aiokvoffload.keys import OffloadKey
from aiokvoffload.specs import PrepareLoadOutput, Ticket

MissReason = Literal["absent", "stale", "failed"]
"""Why a load did not get a block; see `ManagerStatistics`."""


@dataclass(slots=True)
class Tally:
    """Blocks, but for `rejected`, which are completions; see `ManagerStatistics`."""

    stored: int = 0
    evicted: int = 0
    refused: int = 0
    failed: int = 0
    hits: int = 0
    taken_along: int = 0
    rescued: int = 0
    rejected: int = 0
    missed: dict[str, int] = field(default_factory=dict)

    def note_misses(self, count: int, reason: MissReason) -> None:
        """Count blocks that a load did not get."""
        if count:
            self.missed[reason] = self.missed.get(reason, 0) + count


class WaitTally:
    """Counts tickets that had to wait, and for how long.

    Args:
        now: The time.
    """

    def __init__(self, now: Callable[[], float]) -> None:
        self._now = now
        self.loads = 0
        self.stores = 0
        self.load_seconds = 0.0
        self.store_seconds = 0.0

    def begin(self, ticket: Ticket) -> None:
        """Note a new ticket, which may have to wait."""
        if ticket.is_waiting:
            ticket.waits_since = self._now()

    def end(self, ticket: Ticket) -> None:
        """Count the wait of a ticket, once, if it had one."""
        if ticket.waits_since is None:
            return
        seconds = self._now() - ticket.waits_since
        ticket.waits_since = None
        if isinstance(ticket, PrepareLoadOutput):
            self.loads += 1
            self.load_seconds += seconds
        else:
            self.stores += 1
            self.store_seconds += seconds


class SettledTickets:
    """The tickets whose wait has ended in this step; told once the state is consistent.

    Args:
        waits: Counts the waits.
    """

    def __init__(self, waits: WaitTally) -> None:
        self._waits = waits
        self._tickets: list[Ticket] = []

    def add(self, ticket: Ticket) -> None:
        """End the wait of a ticket."""
        ticket.is_waiting = False
        self._waits.end(ticket)
        self._tickets.append(ticket)

    def tell(self) -> None:
        """Call those who waited, also those whose wait ends meanwhile."""
        while self._tickets:
            settled, self._tickets = self._tickets, []
            for ticket in settled:
                ticket.settle()


def blocks_beyond(parts: Sequence[Sequence[OffloadKey]], block_tokens: Sequence[int], token_count: int) -> int:
    """Return how many of the blocks asked for come after the prefix that was found."""
    return sum(max(0, len(part) - token_count // tokens) for part, tokens in zip(parts, block_tokens, strict=True))
