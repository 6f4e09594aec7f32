"""Loads that wait for blocks which are still being written."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Literal

from aiokvoffload.keys import OffloadKey
from aiokvoffload.specs import PrepareLoadOutput, PrepareStoreOutput

Take = Literal["all", "leading"]


@dataclass(slots=True)
class LoadRequest:
    """What a load has asked for.

    Attributes:
        parts: Keys of each KV group.
        take: All of them, what the longest prefix needs, or nothing: then it only watches.
        resident_tokens: Tokens that need not be loaded.
        writes: The store tickets it waits for.
    """

    parts: Sequence[Sequence[OffloadKey]]
    take: Take | Literal["nothing"]
    resident_tokens: int = 0
    writes: set[PrepareStoreOutput] = field(default_factory=set)


class WriteWaits:
    """Which loads wait for which writes: one entry per write, however many wait for it."""

    def __init__(self) -> None:
        self._requests: dict[PrepareLoadOutput, LoadRequest] = {}
        self._loads_on: dict[PrepareStoreOutput, list[PrepareLoadOutput]] = {}

    @property
    def tickets(self) -> list[PrepareLoadOutput]:
        """The loads that wait, in the order in which they came."""
        return list(self._requests)

    def add(self, ticket: PrepareLoadOutput, request: LoadRequest, writes: set[PrepareStoreOutput]) -> None:
        """Let a load wait for writes, if there are any."""
        if writes:
            request.writes = writes
            ticket.is_waiting = True
            self._requests[ticket] = request
            for write in writes:
                self._loads_on.setdefault(write, []).append(ticket)

    def remove(self, ticket: PrepareLoadOutput) -> LoadRequest:
        """Let a load wait no longer, and return what it had asked for."""
        request = self._requests.pop(ticket)
        for write in request.writes:
            loads = self._loads_on[write]
            loads.remove(ticket)
            if not loads:
                del self._loads_on[write]
        return request

    def end_write(self, write: PrepareStoreOutput, success: bool) -> list[PrepareLoadOutput]:
        """Return the loads whose wait ends with a write: the last one they waited for, or a failed one of all."""
        over = []
        for ticket in self._loads_on.pop(write, ()):
            request = self._requests[ticket]
            request.writes.remove(write)
            if not request.writes or (request.take == "all" and not success):
                over.append(ticket)
        return over
