"""The device contract: streams of work in order, events between them, batched copies.

A device is what holds the engine's KV blocks. Nothing above this package knows which one it is. All calls
are made by the thread that owns the offloader, except that any may prepare the device, or pin host memory; doorbells
ring from any.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Collection
from dataclasses import dataclass
from enum import Enum
from typing import TYPE_CHECKING, Self

import numpy as np
from numpy.typing import NDArray

from aiokvoffload.errors import ConfigurationError, DeviceError, InvalidRequestError
from aiokvoffload.registry import Registry

if TYPE_CHECKING:
    import torch


class Direction(Enum):
    """Which way the bytes of a transfer go."""

    STORE = "GPU->CPU"
    LOAD = "CPU->GPU"


class Stream:
    """A queue of device work that runs in order; made or adopted by a device."""


class Event:
    """A mark in a stream: done when all work put before it is done; made by `Device.record`."""


@dataclass(frozen=True, slots=True, eq=False)
class CopyPlan:
    """A batch of copies, as three int64 arrays of one length, which may be 0; equal only to itself.

    Attributes:
        sources: Addresses read from.
        destinations: Addresses written to; no two copies of a plan overlap.
        byte_counts: Bytes of each copy, all above zero.
        direction: Load or store.
        keep_alive: Whatever owns the addresses; held until the copies are over.
    """

    sources: NDArray[np.int64]
    destinations: NDArray[np.int64]
    byte_counts: NDArray[np.int64]
    direction: Direction
    keep_alive: tuple[object, ...] = ()

    @property
    def total_bytes(self) -> int:
        """Bytes of the whole batch."""
        return int(self.byte_counts.sum())

    def validate(self) -> None:
        """Check what every device asks of a batch; overlaps are not looked for.

        Raises:
            DeviceError: Arrays of other types or lengths, or a copy without bytes or address.
        """
        columns = (self.sources, self.destinations, self.byte_counts)
        if any(column.dtype != np.int64 or column.ndim != 1 for column in columns):
            raise DeviceError(
                "a copy plan is three flat int64 arrays, but these are "
                + ", ".join(f"{column.dtype} of shape {column.shape}" for column in columns)
            )
        if not self.sources.size == self.destinations.size == self.byte_counts.size:
            raise DeviceError(
                f"a copy plan has as many sources ({self.sources.size}) as destinations "
                f"({self.destinations.size}) and byte counts ({self.byte_counts.size})"
            )
        if self.byte_counts.size and min(int(column.min()) for column in columns) <= 0:
            raise DeviceError("every copy of a plan needs two addresses and a byte count above 0")


Proceed = Callable[[int, int], object]
"""Hears for how many bytes of how many a device is prepared, in the thread that does it; what it raises ends that."""


def ignore_bytes(_done_bytes: int, _total_bytes: int) -> None:
    """Do nothing."""


class Device(ABC):
    """Streams, events and batched copies of one kind of hardware.

    Attributes:
        medium: What transfers call it.
        tensor_kind: What torch calls the device of the tensors that it can copy; None if it can copy any.
    """

    medium = "GPU"
    tensor_kind: str | None = None

    @classmethod
    def for_tensors(cls, index: int | None) -> Self:
        """Return a new device for tensors on the one that torch gives this number, if it numbers them."""
        return cls()

    def prepares_at_once(self, page_bytes: Collection[int]) -> bool:
        """Return whether there is nothing to do in `prepare` that takes any time."""
        return True

    def prepare(self, page_bytes: Collection[int], proceed: Proceed = ignore_bytes) -> None:
        """Get ready for copies of pages of these sizes, which may take seconds; before the first, from any thread.

        Nothing of it goes on when it has returned or raised.

        Args:
            page_bytes: The sizes.
            proceed: Called often; see `Proceed`.

        Raises:
            DeviceError: The device cannot be used any more.
        """

    @abstractmethod
    def create_stream(self, name: str) -> Stream:
        """Return a new stream; work on different streams may run at the same time and in any order."""

    def adopt_stream(self, stream: object) -> Stream:
        """Return `stream`, made elsewhere, as a stream of this device.

        Raises:
            InvalidRequestError: It is not a stream that this device can use.
        """
        if not isinstance(stream, Stream):
            raise InvalidRequestError(
                f"{type(self).__name__} cannot use {stream!r} as a stream; make one with create_stream()"
            )
        return stream

    @abstractmethod
    def record(self, stream: Stream) -> Event:
        """Return an event that is done once all work now in `stream` is done."""

    def mark(self, stream: Stream) -> Event:
        """Return such an event that the host does not wait for, so that no doorbell has to ring for it.

        It is for streams that wait for it, and for the time since.
        """
        return self.record(stream)

    @abstractmethod
    def is_done(self, event: Event) -> bool:
        """Return whether the work before `event` is over, without waiting.

        Work that fails does so for the next event recorded on its stream, and for no other; what comes after
        it on the stream, and streams that wait for that event, go on.

        Raises:
            DeviceError: The work is over because it failed; raised on every call for this event.
        """

    @abstractmethod
    def elapsed_seconds(self, start: Event, end: Event) -> float:
        """Return the device's time between two events that are over.

        Raises:
            StateError: One of them is not.
        """

    @abstractmethod
    def wait_event(self, stream: Stream, event: Event) -> None:
        """Let work put into `stream` from now on start only after `event`; the host does not wait."""

    @abstractmethod
    def copy_batch(self, plan: CopyPlan, stream: Stream) -> None:
        """Put the copies of `plan` into `stream`; they run in any order among themselves.

        Raises:
            DeviceError: The batch was refused; then none of it runs.
            PartialCopyError: A part of it may run, and is over with the next event recorded on the stream.
        """

    @abstractmethod
    def synchronize(self, event: Event, timeout_seconds: float) -> bool:
        """Block the calling thread until `event` is over, well or not; return False at the timeout."""

    def pin(self, address: int, byte_count: int) -> None:
        """Register a range of host memory for fast copies; may be called from any thread, as `unpin` may.

        Raises:
            DeviceError: It was refused; the range then stays usable, only slower.
        """

    def unpin(self, address: int) -> None:
        """Take back the `pin` of the range that starts at `address`."""

    def add_doorbell(self, ring: Callable[[], None]) -> Callable[[], None] | None:
        """Let `ring` be called, from any thread, after an event is done; return what takes it away again.

        None means that this device has no doorbell. Polling stays the truth: a ring is only a hint.
        """
        return None

    def close(self) -> None:
        """Give back what the device holds; idempotent. Every other call then raises ClosedError."""


class SimulatedDevice(Device):
    """A device whose engine work is Python code, so that an engine can be simulated on it."""

    tensor_kind: str | None = "cpu"

    @abstractmethod
    def launch(self, stream: Stream, work: Callable[[], None]) -> None:
        """Put `work` into `stream`, as an engine launches a kernel; work that raises has failed."""


DEVICES: Registry[Device] = Registry(
    "device",
    Device,
    {"host": "aiokvoffload.devices.host:HostDevice", "cuda": "aiokvoffload.devices.cuda:CudaDevice"},
    "aiokvoffload.devices",
)

_NAME_OF_TENSORS = {"cpu": "host", "cuda": "cuda"}


def device_for_tensors(kind: str, index: int | None = None) -> Device:
    """Return a new device for tensors on a kind of torch device, such as "cpu", and its number if it has one.

    Raises:
        ConfigurationError: No device is known for them.
    """
    name = _NAME_OF_TENSORS.get(kind)
    if name is None:
        known = ", ".join(_NAME_OF_TENSORS)
        raise ConfigurationError(f"no device is known for KV caches on {kind!r}; known: {known}; or give device")
    return DEVICES.resolve(name).for_tensors(index)


def check_copies(device: Device, tensors: torch.device) -> None:
    """Refuse a device for KV caches that it cannot copy.

    Raises:
        ConfigurationError: They lie elsewhere.
    """
    if device.tensor_kind not in (None, tensors.type):
        raise ConfigurationError(
            f"{type(device).__name__} copies {device.tensor_kind.upper()} memory, but the KV caches lie on {tensors}; "
            "give device=None to use the one that fits"
        )
