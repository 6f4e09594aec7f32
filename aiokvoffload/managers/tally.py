"""What a manager counts, and whom it has to tell at the end of a step."""

from __future__ import annotations

from dataclasses import dataclass

from aiokvoffload.specs import Ticket


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


class SettledTickets:
    """The tickets whose wait has ended in this step; told once the state is consistent."""

    def __init__(self) -> None:
        self._tickets: list[Ticket] = []

    def add(self, ticket: Ticket) -> None:
        """End the wait of a ticket."""
        ticket.is_waiting = False
        self._tickets.append(ticket)

    def tell(self) -> None:
        """Call those who waited, also those whose wait ends meanwhile."""
        while self._tickets:
            settled, self._tickets = self._tickets, []
            for ticket in settled:
                ticket.settle()
