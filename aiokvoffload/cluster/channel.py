"""Sockets between the processes of an engine.

A thread of the scheduler reads all of them. It decides nothing: what it hears goes into an inbox, which the thread
that owns the offloader empties in `poll()`.
"""

from __future__ import annotations

import logging
import os
import selectors
import socket
import threading
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from aiokvoffload.cluster.messages import FrameError, Message
from aiokvoffload.cluster.peer import Peer, WakeUp
from aiokvoffload.devices.bookkeeping import Doorbells
from aiokvoffload.errors import ConfigurationError

_logger = logging.getLogger(__name__)

_DYING_SECONDS = 0.5
_BACKLOG = 256


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
