"""How an engine begins, as a rank sees it: it finds the scheduler, says what it is, and is let in or not."""

from __future__ import annotations

import select
from pathlib import Path

from aiokvoffload.clock import Clock
from aiokvoffload.cluster.messages import FrameError, Join, Leaving, Message, Refused, Welcome, shortened
from aiokvoffload.cluster.peer import Peer, connect
from aiokvoffload.cluster.places import meeting_directory, socket_path
from aiokvoffload.errors import ConfigurationError, StateError
from aiokvoffload.memory.base import PreparationProgress, PreparationStep, Report, ignore_progress

_LOOK_SECONDS = 0.02
"""How often it is looked whether the scheduler listens."""
_CHECK_SECONDS = 0.5
"""How often it is looked whether the scheduler is alive; its end is heard at once."""
_NOT_IN = PreparationProgress(PreparationStep.WAITING, 0, 1)


class Admission:
    """A rank's way into an engine, until its port takes over.

    Args:
        engine_id: Which engine.
        rank: This rank, for messages.
        clock: Where the deadline is read.
        timeout_seconds: How long to wait for the scheduler and the other ranks.
        directory: Where sockets are; see `meeting_directory`.
        report: Called while it waits; what it raises ends that.

    Attributes:
        scheduler: The process that decides.

    Raises:
        ConfigurationError: The engine's name is none.
        StateError: No scheduler has come in time.
    """

    def __init__(
        self,
        engine_id: str,
        rank: int,
        clock: Clock,
        timeout_seconds: float,
        directory: Path | None = None,
        report: Report = ignore_progress,
    ) -> None:
        self._name = f"rank {rank} of engine {engine_id!r}"
        self._clock = clock
        self._timeout_seconds = timeout_seconds
        self._report = report
        self._deadline = clock.now() + timeout_seconds
        path = socket_path(meeting_directory(directory), engine_id)
        while (found := connect(path)) is None:
            if clock.now() >= self._deadline:
                raise StateError(
                    f"{self._name}: no scheduler has opened the engine on this host within {timeout_seconds:g} s; "
                    f"open_offloader(..., engine_id={engine_id!r}, world_size=...) does, and all ranks of an engine "
                    "run on one host"
                )
            report(_NOT_IN)
            clock.pause(_LOOK_SECONDS)
        self.scheduler: Peer = found

    def ask(self, join: Join) -> Welcome:
        """Ask to be let in, and wait until all ranks are.

        Raises:
            ConfigurationError: The engine does not want this rank, or cannot start.
            StateError: The scheduler has gone, or the other ranks have not come in time.
        """
        self.scheduler.send(join)
        while True:
            for message in self._hear():
                if isinstance(message, Welcome):
                    return message
            left = self._deadline - self._clock.now()
            if left <= 0:
                raise StateError(
                    f"{self._name}: the engine has not started within {self._timeout_seconds:g} s; "
                    "its scheduler knows which ranks are missing"
                )
            self._report(_NOT_IN)
            select.select([self.scheduler.connection], [], [], min(left, _CHECK_SECONDS))

    def guard(self, report: Report) -> Report:
        """Return a report that also ends the preparation of the memory when the engine has ended."""

        def report_unless_ended(progress: PreparationProgress) -> None:
            self._hear()
            report(progress)

        return report_unless_ended

    def give_up(self, error: BaseException) -> None:
        """Tell the scheduler why this rank does not come."""
        self.scheduler.send(Leaving(shortened(f"{type(error).__name__}: {error}"), is_drained=True))
        self.scheduler.close()

    def _hear(self) -> list[Message]:
        try:
            messages = self.scheduler.receive()
        except FrameError as exc:
            raise ConfigurationError(f"{self._name}: the scheduler cannot be understood: {exc}") from exc
        for message in messages or ():
            if isinstance(message, Refused):
                raise ConfigurationError(f"{self._name} is refused: {message.reason}")
            if isinstance(message, Leaving):
                raise StateError(f"{self._name}: the scheduler has ended the engine: {message.reason}")
        if messages is None or self.scheduler.is_dead:
            raise StateError(f"{self._name}: the scheduler ({self.scheduler}) has gone; start the engine again")
        return messages
