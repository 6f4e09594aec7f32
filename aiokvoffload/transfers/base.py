"""A transfer, from its queue to its landing, and the contract of whoever moves it."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Collection, Iterable, Mapping
from enum import Enum

from aiokvoffload.devices.base import Direction, Event, Stream
from aiokvoffload.errors import StateError
from aiokvoffload.specs import CPULoadStoreSpec, GPULoadStoreSpec
from aiokvoffload.transfers.pointers import Places


class AlreadyDone(Enum):
    """Says that a transfer has to wait for nothing."""

    ALREADY_DONE = "already done"


ALREADY_DONE = AlreadyDone.ALREADY_DONE
After = Stream | Event | AlreadyDone | object | None
"""What the copies wait for: a stream (all that is on it now), an event, nothing, or by default the compute stream."""


class TransferState(Enum):
    """How far a transfer has come."""

    QUEUED = "queued"
    """Nothing has been handed to the device: it can still be withdrawn."""
    SENT = "sent"
    """The device has it, or it has joined copies that are under way."""
    DROPPED = "dropped"
    """Its own copies will never be made, but others that it has joined still touch its blocks."""
    OVER = "over"
    """No copy of it touches any byte any more."""


class Transfer:
    """One transfer and its progress; made by a caller, moved on by the worker alone.

    Attributes:
        job_id: Number of the transfer, in the order of submission.
        direction: Load or store.
        gpu_spec: GPU blocks.
        cpu_spec: Slots.
        after: Event the copies must wait for.
        on_sent: Called once the device has it.
        on_over: Called once no copy touches its blocks any more, also when it was withdrawn.
        on_overdue: Called if it has not landed by its deadline.
        state: How far it is.
        is_overdue: It has missed its deadline; it may still land.
        is_withdrawn: It was taken back before it was sent.
        error: Why it failed, if it did.
        byte_count: Bytes of its own copies.
        seconds: Device time of its own copies, once landed.
        awaited: Who has not reported, where it is overdue and several processes move it.
    """

    __slots__ = (
        "after",
        "awaited",
        "byte_count",
        "cpu_spec",
        "direction",
        "end_event",
        "error",
        "gpu_spec",
        "is_overdue",
        "is_withdrawn",
        "job_id",
        "joined",
        "joined_by",
        "on_over",
        "on_overdue",
        "on_sent",
        "passed_over_count",
        "places_of",
        "resources",
        "seconds",
        "sent_at",
        "start_event",
        "state",
        "stream",
        "submitted_at",
        "waits_for",
    )

    def __init__(
        self,
        direction: Direction,
        gpu_spec: GPULoadStoreSpec,
        cpu_spec: CPULoadStoreSpec,
        *,
        after: Event | None = None,
        on_sent: Callable[[], None] = lambda: None,
        on_over: Callable[[], None] = lambda: None,
        on_overdue: Callable[[], None] = lambda: None,
    ) -> None:
        self.direction = direction
        self.gpu_spec = gpu_spec
        self.cpu_spec = cpu_spec
        self.after = after
        self.on_sent = on_sent
        self.on_over = on_over
        self.on_overdue = on_overdue
        self.job_id = 0
        self.state = TransferState.QUEUED
        self.is_overdue = False
        self.is_withdrawn = False
        self.error: str | None = None
        self.awaited = ""
        self.byte_count = 0
        self.seconds = 0.0
        self.submitted_at = 0.0
        self.sent_at = 0.0
        self.passed_over_count = 0
        self.places_of: Mapping[int, Places] = {}
        self.resources: Collection[int] = ()
        self.waits_for: list[Transfer] = []
        self.joined: list[Transfer] = []
        self.joined_by: list[Transfer] = []
        self.stream: Stream | None = None
        self.start_event: Event | None = None
        self.end_event: Event | None = None

    @property
    def is_over(self) -> bool:
        """No copy of it touches any byte any more."""
        return self.state is TransferState.OVER

    @property
    def success(self) -> bool:
        """All its bytes arrived."""
        return self.is_over and self.error is None and not self.is_withdrawn

    @property
    def transfer_type(self) -> tuple[str, str]:
        """Media, from and to."""
        media = (self.gpu_spec.medium(), self.cpu_spec.medium())
        return media if self.direction is Direction.STORE else (media[1], media[0])

    def end_events(self) -> list[Event]:
        """Return the events that are done when all of a sent transfer's bytes have arrived."""
        own = [] if self.end_event is None else [self.end_event]
        return own + [event for other in self.joined if not other.is_over for event in other.end_events()]


class TransferWorker(ABC):
    """Moves transfers, in this process or in others; the machine of an offloader knows no more of it than this.

    All calls are made by the thread that owns the offloader. What share a byte run in the order of their submission.

    Attributes:
        sends_by_itself: Whether what is queued is sent without further calls of the engine.
        in_flight_bytes: Bytes sent and not landed.
        byte_count: Bytes landed.
        busy_seconds: Device time of what has landed.
        landed_count: Transfers with copies of their own that have landed.
        queue_seconds: How long transfers stood in the queue before they were sent.
        joined_block_count: GPU blocks whose load joined a copy under way.
    """

    sends_by_itself = True

    def __init__(self) -> None:
        self.in_flight_bytes = 0
        self.byte_count = dict.fromkeys(Direction, 0)
        self.busy_seconds = dict.fromkeys(Direction, 0.0)
        self.landed_count = dict.fromkeys(Direction, 0)
        self.queue_seconds = dict.fromkeys(Direction, 0.0)
        self.joined_block_count = 0

    @property
    @abstractmethod
    def queued_count(self) -> int:
        """How many transfers have not been sent."""

    @property
    @abstractmethod
    def sent_count(self) -> int:
        """How many transfers have been sent and have not landed."""

    def check(self) -> None:
        """Refuse every call of the offloader where the worker can never work again.

        Raises:
            RankLostError: It cannot.
        """

    @abstractmethod
    def event_after(self, after: After) -> Event | None:
        """Return what a transfer that is asked for now must wait for; what this returned before may be given again.

        Raises:
            InvalidRequestError: Transfers cannot wait for that.
        """

    @abstractmethod
    def submit(self, transfer: Transfer) -> None:
        """Take a transfer over, and send it if there is room.

        Raises:
            InvalidRequestError: Its two ends do not fit; then nothing was taken over.
        """

    @abstractmethod
    def submit_now(self, transfer: Transfer) -> None:
        """Take a store over that is sent, or sure to be sent before what the engine launches next.

        It takes no notice of the byte budget: ask `sendable_bytes` before, and `blocks_with_queued_loads`.

        Raises:
            InvalidRequestError: Its two ends do not fit; then nothing was taken over.
            StateError: It would have to wait for a transfer that is queued; then nothing was taken over.
        """

    @abstractmethod
    def sendable_bytes(self) -> int | None:
        """Return how much `submit_now` may be given; None for as much as there is."""

    @abstractmethod
    def blocks_with_queued_loads(self, gpu_blocks: Iterable[int]) -> set[int]:
        """Return those GPU blocks that `submit_now` must not be given, because a queued load will fill them."""

    @abstractmethod
    def fence(self, transfer: Transfer) -> None:
        """Let what is launched on the compute stream from now on run after a transfer that is not over.

        Raises:
            StateError: That is not possible yet, or there is no compute stream.
        """

    def take_jobs(self) -> bytes:
        """Hand out what was submitted since the last call, for other processes.

        Raises:
            StateError: The worker sends it by itself.
        """
        raise StateError("this offloader moves the bytes itself; take_jobs() is for one opened with an engine_id")

    @abstractmethod
    def withdraw(self, transfer: Transfer) -> bool:
        """Take back a transfer that is not sent and that no other has joined; return whether that was so.

        It is over then, unless it has joined copies that are under way: these still touch its blocks.
        """

    @abstractmethod
    def withdraw_all(self) -> None:
        """Take back everything that is not sent, last first."""

    @abstractmethod
    def poll(self) -> list[Transfer]:
        """End what has landed, send what is queued, and return the transfers that ended since the last poll.

        A fault in one place does not keep the rest from landing; it is raised at the end.
        """

    @abstractmethod
    def seconds_to_landing(self) -> float | None:
        """Return an estimate for the transfer that lands next, below 0 if it is late.

        None if none is under way, or if the doorbell is sure to ring for it.
        """

    @abstractmethod
    def seconds_to_deadline(self) -> float | None:
        """Return when the next transfer becomes overdue; None if none will."""

    @abstractmethod
    def under_way(self) -> list[Transfer]:
        """Return the transfers that have been sent and have not landed, oldest first."""

    @abstractmethod
    def wait_for(self, transfer: Transfer, timeout_seconds: float) -> None:
        """Block the thread until the copies of a sent transfer are over, or the timeout; `poll` ends it then."""

    @abstractmethod
    def wait_for_news(self, timeout_seconds: float) -> None:
        """Block the thread until a sent transfer may be over, or the timeout; not at all if nothing is under way."""

    @abstractmethod
    def expire_all(self) -> None:
        """Make everything overdue that has been sent and has not landed."""

    @abstractmethod
    def add_doorbell(self, ring: Callable[[], None]) -> Callable[[], None] | None:
        """Let `ring` be called, from any thread, once there is something to poll for; see `Device.add_doorbell`."""

    def close(self) -> None:
        """Give back what the worker itself holds, once nothing is awaited any more; idempotent."""
