"""What an offloader has done and is doing."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from concurrent.futures import Future
from concurrent.futures import TimeoutError as NoAnswer
from dataclasses import dataclass, replace

from aiokvoffload.devices.base import Direction
from aiokvoffload.managers.base import ManagerStatistics
from aiokvoffload.managers.tier_plan import TierUseStatistics
from aiokvoffload.offloader.parts import Parts

_MAX_ASKERS = 64
"""Threads that wait for an answer; of more, the first get what was taken last. Those that gave up count until the next
answer."""


@dataclass(frozen=True, slots=True)
class OffloaderStatistics:
    """What an offloader has done and is doing.

    Attributes:
        manager: Where the slots are.
        queued_transfers: Not sent yet.
        sent_transfers: Sent and not landed.
        in_flight_bytes: Bytes sent and not landed.
        stored_bytes: Bytes landed in CPU memory.
        loaded_bytes: Bytes landed in GPU memory.
        store_seconds: Device time of the stores.
        load_seconds: Device time of the loads.
        landed_stores: Stores whose own copies have landed.
        landed_loads: Loads whose own copies have landed.
        store_queue_seconds: How long stores stood in the queue before they were sent, together.
        load_queue_seconds: The same of loads.
        memory_is_pinned: Whether the device copies CPU memory at full speed.
        joined_blocks: GPU blocks whose load joined a copy under way.
        fault: Why everything is now a miss and a refusal; None while all is well.
        tiers: Each tier below CPU memory.
        poll_count: How often the background task has polled; 0 without an event loop.
        loop_stall_seconds: How long the event loop kept that task waiting for its turn, together.
        longest_loop_stall_seconds: The longest of these waits.
    """

    manager: ManagerStatistics
    queued_transfers: int
    sent_transfers: int
    in_flight_bytes: int
    stored_bytes: int
    loaded_bytes: int
    store_seconds: float
    load_seconds: float
    landed_stores: int
    landed_loads: int
    store_queue_seconds: float
    load_queue_seconds: float
    joined_blocks: int
    memory_is_pinned: bool
    fault: str | None
    tiers: tuple[TierUseStatistics, ...] = ()
    poll_count: int = 0
    loop_stall_seconds: float = 0.0
    longest_loop_stall_seconds: float = 0.0


def take_statistics(parts: Parts, fault: str | None) -> OffloaderStatistics:
    """Return the counts of this moment, apart from those of an event loop; for the owner."""
    worker, manager = parts.worker, parts.manager.statistics()
    return OffloaderStatistics(
        manager=replace(manager, detached_sinks=manager.detached_sinks + parts.hub.detached_count),
        queued_transfers=worker.queued_count,
        sent_transfers=worker.sent_count,
        in_flight_bytes=worker.in_flight_bytes,
        stored_bytes=worker.byte_count[Direction.STORE],
        loaded_bytes=worker.byte_count[Direction.LOAD],
        store_seconds=worker.busy_seconds[Direction.STORE],
        load_seconds=worker.busy_seconds[Direction.LOAD],
        landed_stores=worker.landed_count[Direction.STORE],
        landed_loads=worker.landed_count[Direction.LOAD],
        store_queue_seconds=worker.queue_seconds[Direction.STORE],
        load_queue_seconds=worker.queue_seconds[Direction.LOAD],
        joined_blocks=worker.joined_block_count,
        memory_is_pinned=parts.memory.is_pinned,
        fault=fault,
        tiers=parts.manager.tier_statistics(),
    )


@dataclass(frozen=True, slots=True)
class StatisticsSnapshot:
    """Statistics, and how old they are.

    Attributes:
        statistics: The counts.
        age_seconds: How long ago they were taken.
    """

    statistics: OffloaderStatistics
    age_seconds: float


class StatisticsDesk:
    """Where other threads ask for statistics, which only the owner of an offloader can take.

    The owner answers when it next polls; whoever cannot wait for that gets what was taken last.

    Args:
        statistics: Those of this moment.
        now: The time.
    """

    def __init__(self, statistics: OffloaderStatistics, now: Callable[[], float]) -> None:
        self._now = now
        self._last, self._taken_at = statistics, now()
        self._askers: deque[Future[None]] = deque(maxlen=_MAX_ASKERS)

    @property
    def is_asked(self) -> bool:
        """Somebody waits for an answer."""
        return bool(self._askers)

    def answer(self, statistics: OffloaderStatistics) -> None:
        """Give the statistics of this moment to whoever waits; for the owner."""
        self._last, self._taken_at = statistics, self._now()
        while self._askers:
            self._askers.popleft().set_result(None)

    def ask(self, ring: Callable[[], None], timeout_seconds: float) -> None:
        """Wait until the owner has answered, or the timeout; for any other thread."""
        asked: Future[None] = Future()
        self._askers.append(asked)
        ring()
        try:
            asked.result(timeout_seconds)
        except NoAnswer:
            return

    def last(self) -> StatisticsSnapshot:
        """Return what was taken last."""
        return StatisticsSnapshot(self._last, max(0.0, self._now() - self._taken_at))
