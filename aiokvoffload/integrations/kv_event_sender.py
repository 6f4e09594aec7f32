"""Sends messages to whoever subscribes, from a thread of its own; handing one over never waits."""

from __future__ import annotations

import logging
import os
import socket
import threading
from collections import deque
from collections.abc import Callable
from contextlib import suppress
from functools import partial
from typing import Generic, TypeVar

from aiokvoffload.errors import ConfigurationError

try:
    import zmq
except ImportError as exc:
    raise ConfigurationError("KV events need the package pyzmq: pip install 'aiokvoffload[kv-events]'") from exc

_logger = logging.getLogger(__name__)

_NUMBER_BYTES = 8
_END_OF_REPLAY = (-1).to_bytes(_NUMBER_BYTES, "big", signed=True)
_REQUEST_FRAMES = 3
_SENT_BEFORE_OTHERS = 64
"""Messages that are sent before requests for a replay have their turn."""

Message = TypeVar("Message")


class MessageSender(Generic[Message]):
    """Numbers messages, sends them to all subscribers, and sends the latest ones again on request.

    A message is `(topic, number, payload)`, the number 8 bytes, big-endian, from 0. Where the queue is full, or a
    subscriber does not keep up, messages are lost, and the numbers have a gap. A request for a replay is
    `(empty, first number)`; the answers are `(empty, topic, number, payload)` for what is still there, then one whose
    number is -1.

    Args:
        endpoint: Where subscribers are.
        binds: Whether they connect to `endpoint`, or it to one of them.
        replay_endpoint: Where requests for a replay are taken; None for nowhere.
        topic: Of all messages.
        encode: Makes a payload, in the sender's thread.
        queue_messages: How many may wait to be sent.
        replay_messages: How many are kept for a replay.
        subscriber_messages: How many may wait for one subscriber.

    Raises:
        ConfigurationError: An endpoint cannot be used.
    """

    def __init__(
        self,
        endpoint: str,
        *,
        binds: bool,
        replay_endpoint: str | None,
        topic: str,
        encode: Callable[[Message], bytes],
        queue_messages: int,
        replay_messages: int,
        subscriber_messages: int,
    ) -> None:
        self._topic = topic.encode()
        self._encode = encode
        self._queue: deque[tuple[int, Message]] = deque()
        self._queue_limit = queue_messages
        self._sent: deque[tuple[bytes, bytes]] = deque(maxlen=replay_messages)
        self.next_number = 0
        self.dropped_count = 0
        self.failed_count = 0
        self._linger_ms = 0
        self._is_closing = False
        self._is_rung = False
        self._process = os.getpid()
        self._context = zmq.Context()
        try:
            self._publisher = self._open(zmq.PUB, endpoint, binds=binds, limit=subscriber_messages)
            # A replay is sent in one go: all of it must find room on its way.
            limit = replay_messages + 1
            self._replay: zmq.Socket[bytes] | None = None
            if replay_endpoint is not None:
                self._replay = self._open(zmq.ROUTER, replay_endpoint, binds=True, limit=limit)
        except ConfigurationError:
            self._context.destroy(linger=0)
            raise
        self.endpoint = _endpoint_of(self._publisher)
        self.replay_endpoint = None if self._replay is None else _endpoint_of(self._replay)
        self._bell, self._clapper = socket.socketpair()
        self._bell.setblocking(False)
        self._clapper.setblocking(False)
        self._thread = threading.Thread(target=self._run, name="aiokvoffload KV events", daemon=True)
        self._thread.start()

    @property
    def queued_count(self) -> int:
        """Messages that wait to be sent."""
        return len(self._queue)

    def submit(self, message: Message) -> None:
        """Hand a message over, or lose it where the queue is full; a closed sender takes none."""
        if self._is_closing:
            return
        number = self.next_number
        self.next_number += 1
        if len(self._queue) >= self._queue_limit:
            self.dropped_count += 1
            return
        self._queue.append((number, message))
        self._ring()

    def close(self, timeout_seconds: float) -> None:
        """Send what is queued, and stop; bounded and idempotent. What a subscriber has not taken by then is lost."""
        if self._is_closing:
            return
        self._linger_ms = int(1000 * timeout_seconds)
        self._is_closing = True
        if os.getpid() != self._process:
            return  # the thread and the sockets are the parent's
        self._ring()
        self._thread.join(timeout_seconds)
        if self._thread.is_alive():
            _logger.warning("KV events: closed after %g s with messages on their way", timeout_seconds)

    # In the thread

    def _run(self) -> None:
        poller = zmq.Poller()
        poller.register(self._bell, zmq.POLLIN)
        if self._replay is not None:
            poller.register(self._replay, zmq.POLLIN)
        try:
            while self._queue or not self._is_closing:
                ready = dict(poller.poll(0 if self._queue else None))
                self._silence()
                self._send_queued()
                if self._replay is not None and self._replay in ready:
                    self._guard(partial(self._answer_request, self._replay))
        finally:
            self._publisher.close(linger=self._linger_ms)
            if self._replay is not None:
                self._replay.close(linger=self._linger_ms)
            self._bell.close()
            self._clapper.close()
            self._context.term()

    def _send_queued(self) -> None:
        for _ in range(min(len(self._queue), _SENT_BEFORE_OTHERS)):
            number, message = self._queue.popleft()
            self._guard(partial(self._send, number, message))

    def _send(self, number: int, message: Message) -> None:
        numbered = number.to_bytes(_NUMBER_BYTES, "big"), self._encode(message)
        self._sent.append(numbered)
        self._publisher.send_multipart((self._topic, *numbered), zmq.DONTWAIT)

    def _answer_request(self, asked: zmq.Socket[bytes]) -> None:
        """Send again what is asked for and still there."""
        frames = asked.recv_multipart(zmq.DONTWAIT)
        if len(frames) != _REQUEST_FRAMES or len(frames[-1]) != _NUMBER_BYTES:
            _logger.warning("KV events: a request of %d frames is none for a replay; ignored", len(frames))
            return
        client, empty, first = frames
        for number, payload in self._sent:
            if number >= first:  # of one length and big-endian, bytes are in the order of the numbers
                asked.send_multipart((client, empty, self._topic, number, payload), zmq.DONTWAIT)
        asked.send_multipart((client, empty, b"", _END_OF_REPLAY, b""), zmq.DONTWAIT)

    def _guard(self, action: Callable[[], None]) -> None:
        """Do something that concerns one message; if it fails, the others go on."""
        try:
            action()
        except Exception:
            self.failed_count += 1
            _logger.exception("KV events: a message could not be sent")

    # The bell

    def _ring(self) -> None:
        """Wake the thread."""
        if not self._is_rung:
            self._is_rung = True
            with suppress(OSError):  # it is full of rings, or the thread has just closed it
                self._clapper.send(b"!")

    def _silence(self) -> None:
        """Take the rings away, before anything is looked at that they may have announced."""
        with suppress(BlockingIOError):
            self._bell.recv(64)
        self._is_rung = False

    def _open(self, kind: int, endpoint: str, *, binds: bool, limit: int) -> zmq.Socket[bytes]:
        opened = self._context.socket(kind)
        opened.set_hwm(limit)
        try:
            (opened.bind if binds else opened.connect)(endpoint)
        except zmq.ZMQError as exc:
            what = "offered" if binds else "reached"
            raise ConfigurationError(f"the endpoint {endpoint!r} cannot be {what}: {exc}") from exc
        return opened


def _endpoint_of(opened: zmq.Socket[bytes]) -> str:
    return opened.getsockopt_string(zmq.LAST_ENDPOINT)
