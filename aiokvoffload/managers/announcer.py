"""Hands events to a sink once the state is consistent; a sink that raises is detached."""

from __future__ import annotations

import logging
from collections.abc import Sequence

from aiokvoffload.events import EventKind, EventSink, OffloadingEvent
from aiokvoffload.keys import OffloadKey

_logger = logging.getLogger(__name__)


class Announcer:
    """Collects the events of one step and sends them at its end.

    Args:
        sink: Takes the events; None for nobody.
        medium: Where the blocks are.
    """

    def __init__(self, sink: EventSink | None, medium: str) -> None:
        self._sink = sink
        self._medium = medium
        self._waiting: list[OffloadingEvent] = []
        self._sequence = 0
        self.is_sending = False
        self.detached_count = 0

    def note(self, kind: EventKind, keys: Sequence[OffloadKey] = ()) -> None:
        """Add an event to this step; one about no keys, other than cleared, is none."""
        if self._sink is not None and (keys or kind is EventKind.CLEARED):
            self._waiting.append(OffloadingEvent(kind, tuple(keys), self._medium, self._sequence))
            self._sequence += 1

    def send(self) -> None:
        """Hand the events of this step to the sink."""
        if not self._waiting or self._sink is None or self.is_sending:
            return
        self.is_sending = True
        try:
            while self._waiting:
                events, self._waiting = self._waiting, []
                for event in events:
                    self._sink(event)
        except Exception:
            _logger.exception("an event sink raised and is detached: it gets no further events")
            self._sink = None
            self._waiting.clear()
            self.detached_count += 1
        finally:
            self.is_sending = False
