"""A connection between two processes of an engine, and the process at its other end."""

from __future__ import annotations

import logging
import os
import select
import socket
import struct
from contextlib import suppress
from pathlib import Path

from aiokvoffload.cluster.messages import FrameReader, Leaving, Message, encode

_logger = logging.getLogger(__name__)

_READ_BYTES = 1 << 16
_SEND_SECONDS = 5
"""A process that reads nothing for so long is given up."""
_CREDENTIALS = struct.Struct("3i")
_TIMEVAL = struct.Struct("ll")


class WakeUp:
    """Ends a `select` of another thread."""

    def __init__(self) -> None:
        self._descriptor = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)

    def fileno(self) -> int:
        """Return what to select on."""
        return self._descriptor

    def ring(self) -> None:
        """Let the other thread go on; from any thread."""
        with suppress(OSError):  # closed: nobody waits any more
            os.eventfd_write(self._descriptor, 1)

    def clear(self) -> None:
        """Forget the rings so far."""
        with suppress(BlockingIOError):
            os.eventfd_read(self._descriptor)

    def close(self) -> None:
        """Close the descriptor; idempotent."""
        if self._descriptor >= 0:
            descriptor, self._descriptor = self._descriptor, -1
            os.close(descriptor)


class Peer:
    """The process at the other end of a connection.

    Args:
        connection: The connection; belongs to the peer from now on.

    Attributes:
        pid: Its number; 0 if it lives where it cannot be seen.
        has_spoken: A message has come from it.
        has_left: Its last message has come.
    """

    def __init__(self, connection: socket.socket) -> None:
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_SNDTIMEO, _TIMEVAL.pack(_SEND_SECONDS, 0))
        self._connection = connection
        self._reader = FrameReader()
        self.pid: int = _CREDENTIALS.unpack(
            connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _CREDENTIALS.size)
        )[0]
        self.has_spoken = self.has_left = False
        self._process = -1
        self._was_dead = False
        if self.pid:
            try:
                self._process = os.pidfd_open(self.pid)
            except ProcessLookupError:
                self._was_dead = True  # one forked from it may hold the connection
            except OSError as exc:
                _logger.warning("the death of %s will be seen only by the end of its connection: %s", self, exc)

    def __str__(self) -> str:
        return f"process {self.pid}" if self.pid else "an unknown process"

    @property
    def connection(self) -> socket.socket:
        """What to select on for messages."""
        return self._connection

    @property
    def process(self) -> int:
        """What to select on for its death; negative if that cannot be seen."""
        return self._process

    @property
    def is_dead(self) -> bool:
        """Whether the process has ended, as far as can be seen."""
        return self.dies_within(0.0)

    def dies_within(self, timeout_seconds: float) -> bool:
        """Wait until the process has ended, as far as can be seen, or the timeout; return whether it has."""
        if self._process < 0:
            return self._was_dead
        watched = select.poll()
        watched.register(self._process, select.POLLIN)
        return bool(watched.poll(1000 * timeout_seconds))

    def receive(self) -> list[Message] | None:
        """Return what has arrived, without waiting; None once nothing more will.

        Raises:
            FrameError: It is no message.
        """
        try:
            data = self._connection.recv(_READ_BYTES, socket.MSG_DONTWAIT)
        except BlockingIOError:
            return []
        except OSError:
            return None
        if not data:
            return None
        messages = list(self._reader.feed(data))
        self.has_spoken = self.has_spoken or bool(messages)
        self.has_left = self.has_left or any(isinstance(message, Leaving) for message in messages)
        return messages

    def send(self, message: Message) -> bool:
        """Send a message; False if the other end is gone."""
        try:
            self._connection.sendall(encode(message))
        except OSError:
            self.hang_up()
            return False
        return True

    def hang_up(self) -> None:
        """Let both ends see the end of the connection; from any thread."""
        with suppress(OSError):
            self._connection.shutdown(socket.SHUT_RDWR)

    def close(self) -> None:
        """Close the connection, once nobody selects on it any more; idempotent."""
        self._connection.close()
        if self._process >= 0:
            os.close(self._process)
            self._process = -1


def connect(path: Path) -> Peer | None:
    """Return the living scheduler that listens at `path`; None if none does."""
    connection = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    try:
        connection.connect(os.fspath(path))
    except OSError:
        connection.close()
        return None
    peer = Peer(connection)
    if peer.is_dead:
        peer.close()
        return None
    return peer
