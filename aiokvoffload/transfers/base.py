"""A transfer: one batch of copies between GPU blocks and slots, from its queue to its landing."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from enum import Enum

from aiokvoffload.devices.base import Direction, Event, Stream
from aiokvoffload.specs import CPULoadStoreSpec, GPULoadStoreSpec
from aiokvoffload.transfers.pointers import Places


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
    """

    __slots__ = (
        "after",
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
