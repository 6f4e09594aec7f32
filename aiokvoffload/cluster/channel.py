"""Sockets between the processes of an engine.

A thread of the scheduler reads all of them. It decides nothing: what it hears goes into an inbox, which the thread
that owns the offloader empties in `poll()`.
"""

from __future__ import annotations

import logging
import os
import select
import selectors
import socket
import struct
import threading
from collections import deque
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from aiokvoffload.cluster.messages import FrameError, FrameReader, Leaving, Message, encode
from aiokvoffload.devices.bookkeeping import Doorbells
from aiokvoffload.errors import ConfigurationError

_logger = logging.getLogger(__name__)

_READ_BYTES = 1 << 16
_SEND_SECONDS = 5
"""A process that reads nothing for so long is given up."""
_DYING_SECONDS = 0.5
_BACKLOG = 256
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


@dataclass(frozen=True, slots=True)
class Received:
    """A message has come."""

    peer: Peer
    message: Message


@dataclass(frozen=True, slots=True)
class Gone:
    """Nothing more will come.

    Attributes:
        peer: From whom.
        is_dead: Its process has ended, so that none of its copies is under way any more.
    """

    peer: Peer
    is_dead: bool


News = Received | Gone


class Inbox:
    """News for the thread that owns an offloader, put in by others."""

    def __init__(self) -> None:
        self._news: deque[News] = deque()
        self._has_news = threading.Condition()
        self._doorbells = Doorbells()

    def put(self, news: News) -> None:
        """Add news and ring; from any thread."""
        with self._has_news:
            self._news.append(news)
            self._has_news.notify_all()
        self._doorbells.ring()

    def take_all(self) -> list[News]:
        """Return all news, oldest first."""
        with self._has_news:
            taken = list(self._news)
            self._news.clear()
        return taken

    def wait(self, timeout_seconds: float) -> bool:
        """Block the thread until there is news, or the timeout; return whether there is."""
        with self._has_news:
            return self._has_news.wait_for(lambda: bool(self._news), timeout_seconds)

    def add_doorbell(self, ring: Callable[[], None]) -> Callable[[], None]:
        """Let `ring` be called, from any thread, after news has come; return what takes it away again."""
        return self._doorbells.add(ring)


class Channel:
    """The scheduler's end of all connections, and the thread that reads them.

    Args:
        path: Where to listen; a socket that is left there is removed, so hold the `EngineLock` first.
        inbox: Where news goes.

    Raises:
        ConfigurationError: The socket cannot be made.
    """

    def __init__(self, path: Path, inbox: Inbox) -> None:
        self._path = path
        self._inbox = inbox
        self._listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        try:
            path.unlink(missing_ok=True)
            self._listener.bind(os.fspath(path))
            path.chmod(0o600)
            self._listener.listen(_BACKLOG)
        except OSError as exc:
            self._listener.close()
            raise ConfigurationError(f"cannot listen at {path}: {exc}") from exc
        self._listener.setblocking(False)
        self._wake_up = WakeUp()
        self._peers: set[Peer] = set()
        self._selector = selectors.DefaultSelector()
        self._selector.register(self._listener, selectors.EVENT_READ, self._accept)
        self._selector.register(self._wake_up, selectors.EVENT_READ)
        # A daemon: it waits for ever, and must not keep the process from leaving.
        self._thread = threading.Thread(target=self._run, name="aiokvoffload-channel", daemon=True)
        self._thread.start()

    def close(self) -> None:
        """Close all connections and remove the socket; idempotent."""
        if self._wake_up.fileno() < 0:
            return
        self._path.unlink(missing_ok=True)
        self._wake_up.ring()
        self._thread.join()
        self._selector.close()
        self._listener.close()
        for peer in self._peers:
            peer.close()
        self._peers.clear()
        self._wake_up.close()

    # In the thread

    def _run(self) -> None:
        while True:
            for key, _ in self._selector.select():
                if key.data is None:
                    return
                try:
                    key.data()
                except Exception:
                    _logger.exception("a fault at the sockets of the engine; one of them is not heard any more")
                    self._selector.unregister(key.fileobj)

    def _accept(self) -> None:
        try:
            connection, _ = self._listener.accept()
        except BlockingIOError:
            return
        except OSError as exc:
            # Tried again at once, it would only fail again, and this thread would spin.
            self._selector.unregister(self._listener)
            _logger.error("no more processes can join at %s: %s", self._path, exc)
            return
        peer = Peer(connection)
        self._peers.add(peer)
        self._selector.register(connection, selectors.EVENT_READ, partial(self._read, peer))
        if peer.process >= 0:
            self._selector.register(peer.process, selectors.EVENT_READ, partial(self._bury, peer))

    def _read(self, peer: Peer) -> bool:
        """Pass on what a peer has sent; return whether there may be more of it."""
        if peer not in self._peers:
            return False  # its end was found together with this
        try:
            messages = peer.receive()
        except FrameError as exc:
            _logger.warning("dropped the connection of %s: %s", peer, exc)
            messages = None
        if messages is None:
            self._selector.unregister(peer.connection)
            peer.hang_up()
            self._note_end(peer)
            return False
        for message in messages:
            self._inbox.put(Received(peer, message))
        return bool(messages)

    def _note_end(self, peer: Peer) -> None:
        """Pass on that nothing more will come from a peer that may live on."""
        can_be_watched = peer.process >= 0
        if not peer.has_spoken:
            if can_be_watched:
                self._selector.unregister(peer.process)
            self._drop(peer)
        elif not can_be_watched:
            self._inbox.put(Gone(peer, is_dead=True))
            self._drop(peer)
        elif peer.has_left or not peer.dies_within(_DYING_SECONDS):
            # The system closes the connections of a killed process a little before it is seen to be dead.
            self._inbox.put(Gone(peer, is_dead=False))

    def _bury(self, peer: Peer) -> None:
        """Pass on the last words of a process that has ended, and that it has."""
        while self._hears(peer) and self._read(peer):
            pass
        if peer not in self._peers:
            return  # it never spoke
        self._selector.unregister(peer.process)
        if self._hears(peer):  # a process forked from it holds the connection
            self._selector.unregister(peer.connection)
        self._inbox.put(Gone(peer, is_dead=True))
        self._drop(peer)

    def _hears(self, peer: Peer) -> bool:
        return peer in self._peers and peer.connection in self._selector.get_map()

    def _drop(self, peer: Peer) -> None:
        self._peers.discard(peer)
        peer.close()


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
