"""Processes that a command spawns: each has a pipe to it, leaves interrupts to it, and does not outlive it."""

from __future__ import annotations

import multiprocessing
import select
import signal
import sys
from collections import deque
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from multiprocessing import resource_tracker
from multiprocessing.connection import Connection
from typing import Any

from aiokvoffload.cli.arguments import PROGRAM
from aiokvoffload.errors import ConfigurationError, OffloadError, RankLostError, TraceError

_EXIT_SECONDS = 5.0
"""How long a process may take to end once its pipe is closed."""


@dataclass(frozen=True, slots=True)
class _Ready:
    """The process has imported what it needs."""


@dataclass(frozen=True, slots=True)
class _Failure:
    """The last words of a process that ends early.

    Attributes:
        reason: Why, in one sentence.
        is_mistake: The command line is to blame.
    """

    reason: str
    is_mistake: bool


class ChildProcess:
    """A process that does one piece of work, and the pipe to it.

    Args:
        name: What errors call it.
        work: Runs there, with its end of the pipe as the last argument; an `OffloadError` of it is raised here.
        arguments: Of the work, before the pipe; what is large should be sent instead.
    """

    def __init__(self, name: str, work: Callable[..., object], *arguments: object) -> None:
        spawn = multiprocessing.get_context("spawn")
        self._pipe, theirs = spawn.Pipe()
        self._received: deque[Any] = deque()
        self._is_ready = False
        self._process = spawn.Process(target=_be_child, args=(work, arguments, theirs), name=name, daemon=True)
        # An interrupt from the terminal reaches all processes; it is left to this one from the start. To start the
        # tracker, which the first process needs, would unblock it again.
        resource_tracker.ensure_running()
        before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
        try:
            self._process.start()
        finally:
            signal.pthread_sigmask(signal.SIG_SETMASK, before)
        theirs.close()

    @property
    def pid(self) -> int:
        """Its number."""
        return self._process.pid or 0

    def send(self, message: object) -> None:
        """Send a message; blocks while the pipe is full.

        Raises:
            RankLostError: The process has ended.
            ConfigurationError: It has, because of a mistake on the command line.
        """
        try:
            self._pipe.send(message)
        except OSError:
            self._raise_end()

    def receive(self) -> Any:
        """Return the next message, blocking.

        Raises:
            RankLostError: The process has ended.
            ConfigurationError: It has, because of a mistake on the command line.
        """
        while not self._received:
            try:
                self._note(self._pipe.recv())
            except (EOFError, OSError):
                self._raise_end()
        return self._received.popleft()

    def check(self) -> None:
        """Refuse to go on without it.

        Raises:
            RankLostError: The process has ended.
            ConfigurationError: It has, because of a mistake on the command line.
        """
        try:
            self._hear()
        except (EOFError, OSError):
            self._raise_end()

    def end(self, patience_seconds: float) -> None:
        """Let it leave, and wait for it; kill it if it does not go, or has not come as far as its work."""
        try:
            self._hear()
        except (EOFError, OSError, OffloadError):
            self._is_ready = True  # it is leaving
        self._pipe.close()
        if self._is_ready:
            self._process.join(patience_seconds)
        if self._process.exitcode is None:
            self._process.kill()
            self._process.join()
        self._process.close()

    def _hear(self) -> None:
        while self._pipe.poll():
            self._note(self._pipe.recv())

    def _note(self, message: object) -> None:
        match message:
            case _Ready():
                self._is_ready = True
            case _Failure(reason, is_mistake):
                raise ConfigurationError(reason) if is_mistake else RankLostError(reason)
            case _:
                self._received.append(message)

    def _raise_end(self) -> None:
        """Raise why the process has ended, as far as it is known."""
        with suppress(EOFError, OSError):
            self._hear()  # its last words may be there, though it does not listen any more
        self._process.join(_EXIT_SECONDS)
        code = self._process.exitcode
        how = "closed its pipe" if code is None else f"ended with status {code}"
        raise RankLostError(f"{self._process.name} has {how}; an error of its own would be above")


def is_alone(pipe: Connection) -> bool:
    """Return whether the other end of a pipe is closed."""
    watched = select.poll()
    watched.register(pipe, 0)  # asks for nothing, but a hang-up is always told
    return bool(watched.poll(0))


def _be_child(work: Callable[..., object], arguments: tuple[object, ...], pipe: Connection) -> None:
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    try:
        pipe.send(_Ready())
        work(*arguments, pipe)
    except OffloadError as exc:
        _say_last_words(str(exc), is_mistake=isinstance(exc, ConfigurationError | TraceError), pipe=pipe)
        sys.exit(1)
    except (EOFError, ConnectionError):
        sys.exit(1)  # nobody wants the work any more


def _say_last_words(reason: str, *, is_mistake: bool, pipe: Connection) -> None:
    """Tell the parent why this process ends; if it has died, say it here."""
    try:
        pipe.send(_Failure(reason, is_mistake))
    except OSError:
        parent = multiprocessing.parent_process()
        if parent is None or not parent.is_alive():
            print(f"{PROGRAM}: {reason}", file=sys.stderr)
