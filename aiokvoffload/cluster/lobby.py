"""How an engine begins, as its scheduler sees it: ranks join, and have to agree before any memory is mapped."""

from __future__ import annotations

import logging
import secrets
from dataclasses import replace
from pathlib import Path

from aiokvoffload.clock import Clock
from aiokvoffload.cluster.channel import Channel, Gone, Inbox, News, Received
from aiokvoffload.cluster.messages import Join, Leaving, Refused, Welcome, name_ranks
from aiokvoffload.cluster.peer import Peer, connect
from aiokvoffload.cluster.places import EngineLock, boot_id, describe_taken, meeting_directory, socket_path
from aiokvoffload.errors import ConfigurationError, OffloadError, StateError
from aiokvoffload.kv_caches import CacheShape
from aiokvoffload.memory.base import PreparationProgress, PreparationStep, Report

_logger = logging.getLogger(__name__)

_REPORT_SECONDS = 0.05
"""How often a wait can be stopped."""


class Lobby:
    """Waits until all ranks of an engine have joined, and refuses those that do not fit.

    Args:
        engine_id: What the ranks name too.
        world_size: How many ranks there are, from 0.
        clock: Where the deadline is read.
        join_seconds: How long to wait.
        cache: What the KV caches must look like, but for the number of blocks; by default what the ranks agree on.
        dtype: Element type of the KV cache; by default what the ranks agree on.
        layout: How a page is laid out; by default what the ranks agree on.
        directory: Where sockets are; see `meeting_directory`.

    Attributes:
        engine: Names this opening of the engine.
        inbox: What the ranks say.
        members: Those that have joined.
        can_fence: Whether all of them have named a compute stream.

    Raises:
        ConfigurationError: The name is taken or no name, or the world has no rank.
    """

    prepares_at_once = False

    def __init__(
        self,
        engine_id: str,
        world_size: int,
        *,
        clock: Clock,
        join_seconds: float,
        cache: CacheShape | None = None,
        dtype: str = "",
        layout: str = "",
        directory: Path | None = None,
    ) -> None:
        if world_size < 1:
            raise ConfigurationError(f"world_size is {world_size}, it must be at least 1")
        self.engine_id = engine_id
        self.engine = f"{engine_id}-{secrets.token_hex(8)}"
        self.world_size = world_size
        self.inbox = Inbox()
        self.members: dict[int, Peer] = {}
        self.can_fence = True
        self._clock = clock
        self._join_seconds = join_seconds
        self._cache = cache
        self._reference: Join | None = None
        self._words = {"dtype": dtype, "layout": layout}
        self._boot_id = boot_id()
        meeting_place = meeting_directory(directory)
        path = socket_path(meeting_place, engine_id)
        # Before the lock file is opened: to close it again would give up the lock of an engine in this process.
        if (other := connect(path)) is not None:
            other.close()
            raise ConfigurationError(describe_taken(engine_id, other.pid))
        self._lock = EngineLock(meeting_place, engine_id)
        try:
            self._channel = Channel(path, self.inbox)
        except BaseException:
            self._lock.release()
            raise

    @property
    def cache(self) -> CacheShape:
        """What the KV caches of all ranks look like; as many blocks as the smallest of them has."""
        if self._cache is None:
            raise StateError("no rank has joined yet")
        return self._cache

    @property
    def words(self) -> dict[str, str]:
        """What the ranks say of dtype and layout."""
        return dict(self._words)

    def prepare(self, report: Report) -> None:
        """Wait, blocking, until all ranks have joined; named as what `prepare_in_thread` runs.

        Raises:
            ConfigurationError: Two ranks do not agree.
            StateError: A rank has not joined in time, or has gone again.
        """
        deadline = self._clock.now() + self._join_seconds
        try:
            while missing := [rank for rank in range(self.world_size) if rank not in self.members]:
                report(PreparationProgress(PreparationStep.WAITING, len(self.members), self.world_size))
                left = deadline - self._clock.now()
                if left <= 0:
                    raise StateError(
                        f"engine {self.engine_id!r}: within {self._join_seconds:g} s, {name_ranks(missing)} did not "
                        "join; look for an error there. All ranks of an engine run on one host"
                    )
                self.inbox.wait(min(left, _REPORT_SECONDS))
                for news in self.inbox.take_all():
                    self._hear(news)
        except OffloadError as exc:
            self.refuse_all(str(exc))
            raise

    def welcome(self, slot_count: int, *, is_replicated: bool, landing_seconds: float) -> None:
        """Let all ranks go on to map the memory."""
        message = Welcome(self.engine, self.world_size, slot_count, is_replicated, landing_seconds)
        for peer in self.members.values():
            peer.send(message)

    def guard(self, report: Report) -> Report:
        """Return a report that also ends the preparation of the memory when a rank has gone."""

        def report_unless_gone(progress: PreparationProgress) -> None:
            try:
                for news in self.inbox.take_all():
                    self._hear(news)
            except OffloadError as exc:
                self.refuse_all(str(exc))
                raise
            report(progress)

        return report_unless_gone

    def refuse_all(self, reason: str) -> None:
        """Tell all ranks why the engine does not start."""
        for peer in self.members.values():
            peer.send(Refused(reason))

    def close(self) -> None:
        """Give name and sockets back; idempotent."""
        self._channel.close()
        self._lock.release()

    # Inside

    def _hear(self, news: News) -> None:
        rank = next((rank for rank, peer in self.members.items() if peer is news.peer), None)
        match news:
            case Received(peer, Join() as join) if rank is None:
                self._admit(peer, join)
            case Received(_, Leaving(reason)) if rank is not None:
                raise StateError(f"engine {self.engine_id!r}: rank {rank} has left: {reason}")
            case Gone(peer) if rank is not None:
                raise StateError(f"engine {self.engine_id!r}: rank {rank} ({peer}) has died while the engine started")
            case Received(peer, message):
                _logger.warning("%s said %s too early; ignored", peer, type(message).__name__)

    def _admit(self, peer: Peer, join: Join) -> None:
        """Take a rank in, or refuse it alone, or raise where the engine cannot start with it."""
        if join.boot_id and self._boot_id and join.boot_id != self._boot_id:
            peer.send(Refused("it runs on another host, but all ranks that share CPU memory run on one"))
        elif not 0 <= join.rank < self.world_size:
            peer.send(Refused(f"rank is {join.rank}, but there are {self.world_size} ranks, from 0"))
        elif join.rank in self.members:
            peer.send(Refused(f"rank {join.rank} has joined already: {self.members[join.rank]}"))
        else:
            self.members[join.rank] = peer
            self.can_fence = self.can_fence and join.has_compute_stream
            self._compare(join)

    def _compare(self, join: Join) -> None:
        """Refuse a rank that differs from the others, naming both values."""
        name = f"rank {join.rank}"
        if join.world_size is not None:
            self._agree("world_size", (name, join.world_size), ("the scheduler", self.world_size))
        for word, value in (("dtype", join.dtype), ("layout", join.layout)):
            if value and self._words[word]:
                self._agree(word, (name, value), ("the engine so far", self._words[word]))
            self._words[word] = self._words[word] or value
        found = join.cache()
        if self._cache is None:
            self._cache, self._reference = found, join
            return
        other = f"rank {self._reference.rank}" if self._reference else "the scheduler"
        for field in ("block_size_factor", "group_page_bytes", "groups"):
            self._agree(field, (name, getattr(found, field)), (other, getattr(self._cache, field)))
        self._cache = replace(self._cache, block_count=min(self._cache.block_count, found.block_count))

    def _agree(self, what: str, first: tuple[str, object], second: tuple[str, object]) -> None:
        if first[1] != second[1]:
            raise ConfigurationError(
                f"engine {self.engine_id!r} cannot start: {what} is {first[1]} on {first[0]}, "
                f"but {second[1]} on {second[0]}"
            )
