"""The scheduler's end of an engine's transfers: decides nothing, moves nothing, and knows what the ranks have done."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Mapping
from typing import Literal, get_args

from aiokvoffload.clock import Clock
from aiokvoffload.cluster.channel import Gone, Inbox, News, Received
from aiokvoffload.cluster.jobs import Job, encode_batch
from aiokvoffload.cluster.messages import Fault, Join, Landing, Landings, Leaving, Refused, name_ranks
from aiokvoffload.cluster.peer import Peer
from aiokvoffload.devices.base import Direction, Event
from aiokvoffload.errors import ConfigurationError, DeviceError, InvalidRequestError, RankLostError, StateError
from aiokvoffload.kv_caches import CacheShape
from aiokvoffload.transfers.base import ALREADY_DONE, After, Transfer, TransferState, TransferWorker

_logger = logging.getLogger(__name__)

OnLostRank = Literal["miss", "close"]
"""What becomes of an offloader that has lost a rank: it misses and refuses, or every call raises one error."""


class _ComputeStreams(Event):
    """What is on the compute stream of each rank when it gets the job."""


class ClusterWorker(TransferWorker):
    """Hands transfers to the ranks of an engine, and ends them once every rank has reported or is dead.

    A transfer is queued until `take_jobs` hands it out. It has failed if it has failed on one rank. A rank that
    leaves, or whose process dies, counts as having failed what it has not reported; one that has only fallen silent
    does not, for it may still be copying.

    Args:
        cache: The KV cache of every rank.
        members: The ranks.
        inbox: What they report.
        clock: Where deadlines are read.
        engine: Name of this opening of the engine, carried by its jobs.
        landing_seconds: A transfer not reported by all ranks this long after it was handed out is overdue; one not
            handed out this long after it was submitted has failed.
        is_replicated: All ranks hold the same bytes: all load them, rank 0 stores them.
        on_lost_rank: What a lost rank means.
        can_fence: Whether all ranks have named a compute stream.
        close_channel: Called once, by `close`.

    Attributes:
        in_flight_bytes: Of all ranks together.
        byte_count: Of all ranks together.
        busy_seconds: For each transfer that of its slowest rank.
        joined_block_count: The most that any rank counts; all of them are asked to join the same copies.
    """

    sends_by_itself = False

    def __init__(
        self,
        cache: CacheShape,
        members: Mapping[int, Peer],
        inbox: Inbox,
        clock: Clock,
        *,
        engine: str,
        landing_seconds: float,
        is_replicated: bool = False,
        on_lost_rank: OnLostRank = "miss",
        can_fence: bool = True,
        close_channel: Callable[[], None] = lambda: None,
    ) -> None:
        super().__init__()
        check_on_lost_rank(on_lost_rank)
        self._cache = cache
        self._members = dict(members)
        self._rank_of = {peer: rank for rank, peer in members.items()}
        self._inbox = inbox
        self._clock = clock
        self._engine = engine
        self._landing_seconds = landing_seconds
        self._is_replicated = is_replicated
        self._on_lost_rank = on_lost_rank
        self._can_fence = can_fence
        self._close_channel = close_channel
        self._compute_streams = _ComputeStreams()
        self._block_bytes = [sum(page_bytes) for page_bytes in cache.group_page_bytes]
        self._last_job_id = 0
        self._last_batch_number = 0
        self._queued: dict[int, Transfer] = {}
        self._urgent: set[int] = set()
        self._fences: dict[int, Transfer] = {}
        self._sent: dict[int, Transfer] = {}
        self._awaited_of: dict[int, set[int]] = {}
        self._lost: dict[int, str] = {}
        self._finished: list[Transfer] = []
        self._faults: list[Exception] = []
        self._is_closed = False

    @property
    def queued_count(self) -> int:
        """How many transfers `take_jobs` has not handed out."""
        return len(self._queued)

    @property
    def sent_count(self) -> int:
        """How many transfers have been handed out and are not over on every rank."""
        return len(self._sent)

    def check(self) -> None:
        """Refuse all calls after a lost rank, where that was asked for."""
        if self._lost and self._on_lost_rank == "close":
            raise RankLostError(f"{self._describe_lost()}; close this offloader and start the engine again")

    def event_after(self, after: After) -> Event | None:
        """Return what stands for the compute streams of the ranks, or None for nothing to wait for."""
        if after is None or after is self._compute_streams:
            return self._compute_streams
        if after is ALREADY_DONE:
            return None
        raise InvalidRequestError(
            f"after is {after!r}, but ranks have streams of their own: a transfer waits for each one's compute stream, "
            "as of the submit of its jobs (the default), or for nothing (ALREADY_DONE)"
        )

    # From the machine to the ranks

    def submit(self, transfer: Transfer) -> None:
        """Queue a transfer until the next `take_jobs`."""
        self._last_job_id += 1
        transfer.job_id = self._last_job_id
        transfer.submitted_at = self._clock.now()
        self._queued[transfer.job_id] = transfer

    def submit_now(self, transfer: Transfer) -> None:
        """Queue a store that every rank sends at once: before the step whose message carries the next `take_jobs`."""
        self.submit(transfer)
        self._urgent.add(transfer.job_id)

    def sendable_bytes(self) -> None:
        """There is no budget: what is urgent is sent by every rank whatever else it sends."""

    def blocks_with_queued_loads(self, gpu_blocks: Iterable[int]) -> set[int]:
        """None: what a rank sends at once takes with it what must be sent before."""
        return set()

    def fence(self, transfer: Transfer) -> None:
        """Let the steps from the one on that carries the next `take_jobs` run after a transfer, on every rank."""
        if not self._can_fence:
            raise StateError(
                "a rank has joined without a compute stream, so nothing can be held back there; wait instead"
            )
        self._fences[transfer.job_id] = transfer
        if transfer.state is TransferState.QUEUED:
            self._urgent.add(transfer.job_id)

    def take_jobs(self) -> bytes:
        """Hand out what was submitted and fenced since the last call; empty if nothing was."""
        if self._lost or not (self._queued or self._fences):
            return b""  # what is queued fails at the next poll where a rank is lost
        jobs = tuple(Job.of(transfer, is_urgent=job_id in self._urgent) for job_id, transfer in self._queued.items())
        data = encode_batch(self._engine, self._last_batch_number + 1, jobs, tuple(self._fences))
        self._last_batch_number += 1
        handed_out, self._queued = self._queued, {}
        self._urgent.clear()
        self._fences.clear()
        for job_id, transfer in handed_out.items():
            ranks = set(self._ranks_of(transfer))
            transfer.state = TransferState.SENT
            transfer.sent_at = self._clock.now()
            self.queue_seconds[transfer.direction] += transfer.sent_at - transfer.submitted_at
            transfer.byte_count = self._bytes_of(transfer) * len(ranks)
            self.in_flight_bytes += transfer.byte_count
            self._sent[job_id] = transfer
            self._awaited_of[job_id] = ranks
        for transfer in handed_out.values():
            transfer.on_sent()
        return data

    def withdraw(self, transfer: Transfer) -> bool:
        """Take back a transfer that was not handed out; return whether that was so."""
        if transfer.state is not TransferState.QUEUED or transfer.job_id not in self._queued:
            return False
        transfer.is_withdrawn = True
        self._end(transfer)
        return True

    def withdraw_all(self) -> None:
        """Take back everything that was not handed out, last first."""
        for transfer in reversed(list(self._queued.values())):
            self.withdraw(transfer)

    # From the ranks to the machine

    def poll(self) -> list[Transfer]:
        """End what all ranks have reported, and return the transfers that ended since the last poll."""
        self._receive()
        self._expire()
        if self._lost:
            for transfer in list(self._queued.values()):
                self._fail(transfer, self._describe_lost())
        if self._faults:
            raise self._faults.pop(0)
        finished, self._finished = self._finished, []
        return finished

    def seconds_to_landing(self) -> None:
        """Nothing to estimate: the inbox rings."""

    def seconds_to_deadline(self) -> float | None:
        """Return when the next transfer becomes overdue; None if none will."""
        starts = [transfer.sent_at for transfer in self._sent.values() if not transfer.is_overdue]
        starts += [transfer.submitted_at for transfer in self._queued.values()]
        return min(starts) + self._landing_seconds - self._clock.now() if starts else None

    def under_way(self) -> list[Transfer]:
        """Return the transfers that were handed out and are not over, oldest first."""
        return list(self._sent.values())

    def wait_for(self, transfer: Transfer, timeout_seconds: float) -> None:
        """Block the thread until all ranks have reported a transfer, or the timeout."""
        deadline = self._clock.now() + timeout_seconds
        while not transfer.is_over:
            left = deadline - self._clock.now()
            if left <= 0 or not self._inbox.wait(left):
                return
            self._receive()

    def wait_for_news(self, timeout_seconds: float) -> None:
        """Block the thread until a rank has reported something, or the timeout."""
        if self._sent:
            self._inbox.wait(timeout_seconds)

    def expire_all(self) -> None:
        """Make everything overdue that is not over on every rank."""
        for transfer in self.under_way():
            self._make_overdue(transfer)

    def add_doorbell(self, ring: Callable[[], None]) -> Callable[[], None]:
        """Let `ring` be called when a rank has reported something."""
        return self._inbox.add_doorbell(ring)

    def close(self) -> None:
        """Tell the ranks, and close all connections; idempotent."""
        if not self._is_closed:
            self._is_closed = True
            for peer in self._members.values():
                peer.send(Leaving("the offloader was closed", is_drained=not self._sent))
            self._close_channel()

    # Inside

    def _receive(self) -> None:
        for news in self._inbox.take_all():
            rank = self._rank_of.get(news.peer)
            if rank is None:
                self._answer_stranger(news)
            else:
                self._hear(rank, news)

    def _answer_stranger(self, news: News) -> None:
        if isinstance(news, Received) and isinstance(news.message, Join):
            news.peer.send(Refused("the engine has started already, with all its ranks"))
            news.peer.hang_up()

    def _hear(self, rank: int, news: News) -> None:
        match news:
            case Received(_, Landings(landings, joined_block_count)):
                self.joined_block_count = max(self.joined_block_count, joined_block_count)
                for landing in landings:
                    self._report(rank, landing)
            case Received(_, Fault(reason)):
                self._faults.append(DeviceError(f"a fault inside rank {rank}: {reason}"))
            case Received(peer, Leaving(reason, is_drained)):
                self._lose(rank, f"rank {rank} ({peer}) has left: {reason}")
                if is_drained:
                    self._give_up_on(rank)
            case Gone(peer, is_dead):
                what = "has died" if is_dead else "has closed its connection without a word"
                self._lose(rank, f"rank {rank} ({peer}) {what}")
                if is_dead:
                    self._give_up_on(rank)
            case Received(peer, message):
                _logger.warning("rank %d (%s) said %s out of place; ignored", rank, peer, type(message).__name__)

    def _report(self, rank: int, landing: Landing) -> None:
        transfer = self._sent.get(landing.transfer_id)
        awaited = self._awaited_of.get(landing.transfer_id, set())
        if transfer is None or rank not in awaited:
            _logger.debug("rank %d reported transfer %d, which nobody awaits of it", rank, landing.transfer_id)
            return
        if landing.error is not None and transfer.error is None:
            transfer.error = f"rank {rank}: {landing.error}"
        if landing.error is None:
            self.byte_count[transfer.direction] += landing.byte_count
        transfer.seconds = max(transfer.seconds, landing.seconds)
        self._strike_off(rank, transfer)

    def _strike_off(self, rank: int, transfer: Transfer) -> None:
        """Await nothing more of one rank, and end the transfer with the last one."""
        awaited = self._awaited_of[transfer.job_id]
        awaited.discard(rank)
        if not awaited:
            self._end(transfer)

    def _lose(self, rank: int, reason: str) -> None:
        """Note that the engine is not whole any more."""
        if rank not in self._lost:
            self._lost[rank] = reason
            if not self._is_closed:
                self._faults.append(RankLostError(reason))

    def _give_up_on(self, rank: int) -> None:
        """A rank will never touch a byte again: what it has not reported has failed."""
        for transfer in self.under_way():
            if rank in self._awaited_of[transfer.job_id]:
                transfer.error = transfer.error or self._lost[rank]
                self._strike_off(rank, transfer)

    def _fail(self, transfer: Transfer, reason: str) -> None:
        transfer.error = reason
        self._end(transfer)

    def _end(self, transfer: Transfer) -> None:
        """No rank touches its bytes any more, or none ever will: let go of it and tell."""
        if transfer.state is TransferState.SENT:
            self.in_flight_bytes -= transfer.byte_count
            self.busy_seconds[transfer.direction] += transfer.seconds
            self.landed_count[transfer.direction] += transfer.error is None
        for kept in (self._queued, self._sent, self._awaited_of, self._fences):
            kept.pop(transfer.job_id, None)
        self._urgent.discard(transfer.job_id)
        transfer.state = TransferState.OVER
        self._finished.append(transfer)
        try:
            transfer.on_over()
        except Exception as exc:  # noqa: BLE001  raised by poll
            self._faults.append(exc)

    def _expire(self) -> None:
        for transfer in self.under_way():
            if self._is_late(transfer.sent_at):
                self._make_overdue(transfer)
        for transfer in list(self._queued.values()):
            if self._is_late(transfer.submitted_at):
                self._fail(
                    transfer,
                    f"take_jobs() was not called within {self._landing_seconds:g} s; call it for every step of the "
                    "engine",
                )

    def _make_overdue(self, transfer: Transfer) -> None:
        if not transfer.is_overdue:
            transfer.is_overdue = True
            transfer.awaited = f"{name_ranks(self._awaited_of[transfer.job_id])} did not report it"
            _logger.warning("transfer %d is overdue: %s", transfer.job_id, transfer.awaited)
            transfer.on_overdue()

    def _is_late(self, since: float) -> bool:
        # The same sum as in seconds_to_deadline: rounded in another way, a deadline of 0 s might not be one yet.
        return since + self._landing_seconds <= self._clock.now()

    def _ranks_of(self, transfer: Transfer) -> Iterable[int]:
        """Return the ranks that have something to copy for a transfer."""
        return (0,) if self._is_replicated and transfer.direction is Direction.STORE else self._members

    def _bytes_of(self, transfer: Transfer) -> int:
        """Return the bytes of a transfer on one rank."""
        return sum(
            size * block_bytes
            for size, block_bytes in zip(transfer.gpu_spec.group_sizes, self._block_bytes, strict=True)
        )

    def _describe_lost(self) -> str:
        return "; ".join(self._lost.values())


def check_on_lost_rank(on_lost_rank: object) -> None:
    """Refuse what is no choice.

    Raises:
        ConfigurationError: It is none.
    """
    if on_lost_rank not in get_args(OnLostRank):
        raise ConfigurationError(
            f"on_lost_rank is {on_lost_rank!r}, it must be one of {', '.join(get_args(OnLostRank))}"
        )
