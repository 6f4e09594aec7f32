"""Tells routers which blocks CPU memory holds, in the format that vLLM's KV events have on ZMQ.

Routers that choose a replica by what it has cached, such as those of llm-d and Dynamo, subscribe to an offloader as
they do to vLLM. A block's name is its hash; its parent and its tokens are what the engine says with `note_request`. Of
a block that it has said nothing about, the name alone is announced.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from types import TracebackType
from typing import Self

import numpy as np
from numpy.typing import NDArray

from aiokvoffload.clock import wall_seconds
from aiokvoffload.errors import ConfigurationError
from aiokvoffload.events import EventKind, OffloadingEvent
from aiokvoffload.integrations.kv_event_blocks import BlockFactTable, EventTranslator, Facts
from aiokvoffload.integrations.kv_event_sender import MessageSender
from aiokvoffload.integrations.kv_event_wire import BlockNameFormat, EventBatch, check_name_format, encode_batch
from aiokvoffload.keys import OffloadKey
from aiokvoffload.kv_caches import KVGroup
from aiokvoffload.offloader.machine import OffloaderMachine
from aiokvoffload.ownership import Owner

CLOSE_SECONDS = 1.0


@dataclass(frozen=True, slots=True, kw_only=True)
class KVEventOptions:
    """Where and how events are published.

    Attributes:
        endpoint: ZMQ endpoint of the subscribers.
        binds: Whether the endpoint is offered, or one that a subscriber offers is connected to. By default `tcp://*:...`,
            an IPv6 wildcard, `ipc://` and `inproc://` are offered, as in vLLM.
        replay_endpoint: Where subscribers ask for what they have missed.
        topic: Of every message; llm-d expects `kv@<pod>@<model>`.
        data_parallel_rank: Of the engine; each rank publishes at endpoints of its own.
        block_names: `"int"`, the last 8 bytes of a hash, as vLLM does unless told otherwise; or `"bytes"`, all of it.
        is_sole_source: Nobody else announces blocks under this topic or worker. False where the engine announces its
            GPU blocks too: then a reset names the blocks that are gone from CPU memory, instead of clearing all.
        known_blocks: How many blocks of the latest requests are remembered with their tokens.
        queue_batches: How many batches may wait to be sent; vLLM's `max_queue_size`.
        replay_batches: How many are kept for replays; vLLM's `buffer_steps`.
        subscriber_batches: How many may wait for one subscriber; vLLM's `hwm`.

    Raises:
        ConfigurationError: A value cannot work.
    """

    endpoint: str = "tcp://*:5557"
    binds: bool | None = None
    replay_endpoint: str | None = None
    topic: str = ""
    data_parallel_rank: int = 0
    block_names: BlockNameFormat = "int"
    is_sole_source: bool = True
    known_blocks: int = 65_536
    queue_batches: int = 10_000
    replay_batches: int = 10_000
    subscriber_batches: int = 100_000

    def __post_init__(self) -> None:
        check_name_format(self.block_names)
        for name in ("known_blocks", "queue_batches", "replay_batches", "subscriber_batches"):
            if getattr(self, name) < 1:
                raise ConfigurationError(f"{name} is {getattr(self, name)}; it must be at least 1")

    @property
    def is_offered(self) -> bool:
        """Whether subscribers connect to the endpoint."""
        if self.binds is not None:
            return self.binds
        return "*" in self.endpoint or "::" in self.endpoint or self.endpoint.startswith(("ipc://", "inproc://"))


@dataclass(frozen=True, slots=True)
class KVEventStatistics:
    """What has been published.

    Attributes:
        batches: Batches numbered so far; the next one has this number.
        queued_batches: Of these, those that wait to be sent.
        dropped_batches: Of these, those that found the queue full: subscribers see a gap.
        failed_batches: Of these, those that could not be encoded or sent, and replays that could not be answered.
        named_blocks: Stored blocks of which only the name was known.
        known_blocks: Blocks whose tokens are remembered.
    """

    batches: int
    queued_batches: int
    dropped_batches: int
    failed_batches: int
    named_blocks: int
    known_blocks: int


@dataclass(frozen=True, slots=True)
class _Announcement:
    """An event and what was known at its moment."""

    seconds: float
    event: OffloadingEvent
    facts: Facts


class KVEventPublisher:
    """Publishes the events of one manager; an `EventSink` that never waits, with or without an event loop.

    A daemon thread encodes and sends. `close` ends it; a process that leaves without closing is not held up.

    Args:
        options: Where and how.
        groups: The KV groups of the manager's blocks.
        block_size_factor: GPU blocks per offloaded block: what is announced is the offloaded block.

    Raises:
        ConfigurationError: An endpoint cannot be used.
    """

    def __init__(self, options: KVEventOptions, groups: Sequence[KVGroup], *, block_size_factor: int = 1) -> None:
        self._owner = Owner("publisher of KV events")
        self._rank = options.data_parallel_rank
        block_tokens = [group.block_tokens * block_size_factor for group in groups]
        self._known = BlockFactTable(block_tokens, options.known_blocks)
        self._named_count = 0
        self._translator = EventTranslator(
            groups, block_size_factor, options.block_names, is_sole_source=options.is_sole_source
        )
        self._sender = MessageSender(
            options.endpoint,
            binds=options.is_offered,
            replay_endpoint=options.replay_endpoint,
            topic=options.topic,
            encode=self._encode,
            queue_messages=options.queue_batches,
            replay_messages=options.replay_batches,
            subscriber_messages=options.subscriber_batches,
        )

    @property
    def endpoint(self) -> str:
        """The endpoint in use, with the port that was found for a `*`."""
        return self._sender.endpoint

    @property
    def replay_endpoint(self) -> str | None:
        """The one for replays."""
        return self._sender.replay_endpoint

    def note_request(
        self,
        keys: Sequence[OffloadKey],
        token_ids: Sequence[int] | NDArray[np.integer],
        *,
        adapter: str = "",
        salt: str = "",
    ) -> None:
        """Say what the blocks of a request are, before they are stored or looked for; from the manager's thread.

        Args:
            keys: Of all its full blocks from the start, KV group after group.
            token_ids: Of the request, from the start.
            adapter: The adapter that shapes the KV, if any.
            salt: Whatever else keeps the request apart.

        Raises:
            InvalidRequestError: Keys and tokens do not fit.
            WrongThreadError: Another thread has called before.
        """
        self._owner.check_thread()
        self._known.note(keys, token_ids, adapter, salt)

    def __call__(self, event: OffloadingEvent) -> None:
        """Take an event of the manager."""
        self._owner.check_thread()
        facts: Facts = ()
        if event.kind is EventKind.STORED:
            facts = self._known.facts_of(event.keys)
            self._named_count += facts.count(None)
        self._sender.submit(_Announcement(wall_seconds(), event, facts))

    def statistics(self) -> KVEventStatistics:
        """Return the counts of this moment."""
        return KVEventStatistics(
            batches=self._sender.next_number,
            queued_batches=self._sender.queued_count,
            dropped_batches=self._sender.dropped_count,
            failed_batches=self._sender.failed_count,
            named_blocks=self._named_count,
            known_blocks=len(self._known),
        )

    def close(self, *, timeout_seconds: float = CLOSE_SECONDS) -> None:
        """Send what is queued, at most for so long, and stop; idempotent. Events that come later are ignored."""
        self._sender.close(timeout_seconds)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.close()

    def _encode(self, announcement: _Announcement) -> bytes:
        """Return the payload of one event; called in the sender's thread, in the order of the events."""
        said = self._translator.translate(announcement.event, announcement.facts)
        return encode_batch(EventBatch(announcement.seconds, said, self._rank))


def publish_kv_events(offloader: OffloaderMachine, options: KVEventOptions | None = None) -> KVEventPublisher:
    """Publish the events of an offloader from now on; right after opening, nothing is missed. Close what is returned.

    Raises:
        ConfigurationError: An endpoint cannot be used.
    """
    publisher = KVEventPublisher(
        options or KVEventOptions(), offloader.groups, block_size_factor=offloader.block_size_factor
    )
    offloader.add_event_sink(publisher)
    return publisher
