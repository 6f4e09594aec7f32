"""A happens-before race detector around a device: finds accesses that nothing orders, whether or not they collided.

Every stream, and the host, has a vector clock. Work on a stream knows what the host knew when it was submitted and
what stood before it on the stream; a wait adds what the event knew, and an event that the host has seen done adds
it to the host. An access is too early if its clock does not know of an earlier access to the same cell that it
conflicts with. That is decided at submission and does not depend on timing: a race is found even in a run in which
it did no harm. (Vector clocks as in DJIT+, Pozniansky and Schuster 2003; FastTrack, Flanagan and Freund 2009, is
the same with fewer numbers kept.)
"""

from __future__ import annotations

import threading
import weakref
from collections.abc import Callable, Collection
from dataclasses import dataclass
from typing import Literal

import numpy as np
from numpy.typing import NDArray

from aiokvoffload.devices.base import CopyPlan, Event, Proceed, SimulatedDevice, Stream, ignore_bytes
from aiokvoffload.errors import DeviceError
from aiokvoffload.testing.order_clocks import AccessTable, Owner, VectorClock
from aiokvoffload.testing.order_regions import Accesses, RegionMap

ViolationKind = Literal["read-too-early", "overwrite-too-early", "outside"]

HOST = "host"


@dataclass(frozen=True, slots=True)
class Violation:
    """One row accessed by one operation before that was safe.

    Attributes:
        kind: A read before the bytes were known to be written, an overwrite before the earlier read or write was
            known to be over, or, in strict mode, a copy outside all watched regions.
        region: Name of the region; "" if outside.
        row: Row of the region; the address if outside.
        stream: Where the access was submitted: a stream, or the host.
        access: What it was.
        earlier_stream: Where the access was submitted that it may collide with.
        earlier_access: What that was.
    """

    kind: ViolationKind
    region: str
    row: int
    stream: str
    access: str
    earlier_stream: str
    earlier_access: str

    def __str__(self) -> str:
        if self.kind == "outside":
            return f"{self.access} on {self.stream} leaves the watched regions at {self.row:#x}"
        return (
            f"{self.kind}: {self.access} on {self.stream} touches row {self.row} of {self.region!r}, but nothing "
            f"orders it after {self.earlier_access} on {self.earlier_stream}"
        )


class OrderChecker(SimulatedDevice):
    """A device that delegates to another and notes every access that came too early.

    Streams and events are those of the wrapped device, which can therefore still be controlled directly. Nothing
    is ever delayed, refused or raised because of a violation. Calls may come from any thread: all are one host.

    Args:
        wrapped: Does the work.
        strict: Copies of bytes that no region watches are violations too; otherwise they are ignored.
        most_violations: How many are kept; all are counted.

    Attributes:
        wrapped: The device inside.
        violations: The first ones found: one for each row of an operation.
        violation_count: How many there were.
        access_count: Cells accessed so far; a check that saw nothing has checked nothing.
    """

    def __init__(self, wrapped: SimulatedDevice, *, strict: bool = False, most_violations: int = 100) -> None:
        self.wrapped = wrapped
        self.medium = wrapped.medium
        self.violations: list[Violation] = []
        self.violation_count = 0
        self.access_count = 0
        self._lock = threading.RLock()  # a doorbell may ring inside a call, and lead to another one
        self._strict = strict
        self._most_violations = most_violations
        self._regions = RegionMap()
        self._reads = AccessTable()
        self._writes = AccessTable()
        self._capacity = 8
        self._host = Owner(HOST, 0, self._capacity)
        self._owners = [self._host]
        self._owner_of: weakref.WeakKeyDictionary[Stream, Owner] = weakref.WeakKeyDictionary()
        self._clock_of: weakref.WeakKeyDictionary[Event, VectorClock] = weakref.WeakKeyDictionary()

    def watch(
        self,
        name: str,
        address: int,
        row_count: int,
        row_bytes: int,
        *,
        cell_bytes: int | None = None,
        row_stride_bytes: int | None = None,
    ) -> None:
        """Watch `row_count` rows of memory, such as the blocks of a GPU tensor or the slots of CPU memory.

        Args:
            name: What violations and declared accesses call it.
            address: Where row 0 begins.
            row_count: Rows.
            row_bytes: Bytes of a row.
            cell_bytes: Accesses to different cells never collide; default: a row is one cell. A slot whose parts are
                copied on their own needs cells of the smallest part.
            row_stride_bytes: From one row to the next; default: rows lie side by side. Gaps are not watched, and
                may hold another region.

        Raises:
            InvalidRequestError: The name is taken, or the sizes make no rows.
        """
        self._regions.add(name, address, row_count, row_bytes, cell_bytes or row_bytes, row_stride_bytes or row_bytes)

    def host_access(self, reads: Accesses = (), writes: Accesses = (), *, label: str = "host access") -> None:
        """Note that host code reads or writes whole rows now.

        Raises:
            InvalidRequestError: There is no such region or row.
        """
        read_cells, written_cells = self._regions.cells_of_rows(reads), self._regions.cells_of_rows(writes)
        with self._lock:
            time = self._host.tick(label)
            self._note(self._host, self._host.clock, time, read_cells, written_cells)

    def prepares_at_once(self, page_bytes: Collection[int]) -> bool:
        """Ask the wrapped device."""
        return self.wrapped.prepares_at_once(page_bytes)

    def prepare(self, page_bytes: Collection[int], proceed: Proceed = ignore_bytes) -> None:
        """Prepare the wrapped device."""
        self.wrapped.prepare(page_bytes, proceed)

    def create_stream(self, name: str) -> Stream:
        """Return a new stream of the wrapped device."""
        stream = self.wrapped.create_stream(name)
        with self._lock:
            self._owner_of[stream] = self._new_owner(name)
        return stream

    def adopt_stream(self, stream: object) -> Stream:
        """Return `stream` as the wrapped device adopts it."""
        return self.wrapped.adopt_stream(stream)

    def record(self, stream: Stream) -> Event:
        """Record an event that knows what its stream knows."""
        return self._record(stream, self.wrapped.record)

    def mark(self, stream: Stream) -> Event:
        """Record an event of the other kind that does."""
        return self._record(stream, self.wrapped.mark)

    def _record(self, stream: Stream, record: Callable[[Stream], Event]) -> Event:
        with self._lock:
            clock = self._reach(stream).clock.copy()
            event = record(stream)
            self._clock_of[event] = clock
        return event

    def is_done(self, event: Event) -> bool:
        """Ask the wrapped device; the host learns from a yes, and from a failure."""
        try:
            is_done = self.wrapped.is_done(event)
        except DeviceError:
            self._learn_from(event)
            raise
        if is_done:
            self._learn_from(event)
        return is_done

    def elapsed_seconds(self, start: Event, end: Event) -> float:
        """Return the wrapped device's time."""
        return self.wrapped.elapsed_seconds(start, end)

    def wait_event(self, stream: Stream, event: Event) -> None:
        """Let a stream wait, and learn what the event knows."""
        with self._lock:
            owner = self._reach(stream)
            self.wrapped.wait_event(stream, event)
            owner.learn(self._known_by(event))

    def copy_batch(self, plan: CopyPlan, stream: Stream) -> None:
        """Submit a batch and note its accesses, unless it is refused."""
        with self._lock:
            owner = self._reach(stream)
            time = owner.tick(f"a copy batch {plan.direction.value} of {len(plan.byte_counts)}")
            # Taken before submission: a doorbell may ring inside it and teach the host what this batch cannot know.
            clock = owner.clock.copy()
            self.wrapped.copy_batch(plan, stream)
            read_cells, reads_outside = self._regions.cells_of_ranges(plan.sources, plan.byte_counts)
            written_cells, writes_outside = self._regions.cells_of_ranges(plan.destinations, plan.byte_counts)
            if self._strict:
                for address in (*plan.sources[reads_outside].tolist(), *plan.destinations[writes_outside].tolist()):
                    self._report(Violation("outside", "", address, owner.name, owner.labels[time], "", ""))
            self._note(owner, clock, time, read_cells, written_cells)

    def launch(
        self,
        stream: Stream,
        work: Callable[[], None],
        reads: Accesses = (),
        writes: Accesses = (),
        *,
        label: str = "launched work",
    ) -> None:
        """Launch `work`, which reads and writes the whole rows named.

        Raises:
            InvalidRequestError: There is no such region or row; nothing was launched.
        """
        read_cells, written_cells = self._regions.cells_of_rows(reads), self._regions.cells_of_rows(writes)
        with self._lock:
            owner = self._reach(stream)
            time = owner.tick(label)
            clock = owner.clock.copy()
            self.wrapped.launch(stream, work)
            self._note(owner, clock, time, read_cells, written_cells)

    def synchronize(self, event: Event, timeout_seconds: float) -> bool:
        """Wait on the wrapped device; the host learns what is over."""
        is_over = self.wrapped.synchronize(event, timeout_seconds)
        if is_over:
            self._learn_from(event)
        return is_over

    def pin(self, address: int, byte_count: int) -> None:
        """Pin on the wrapped device."""
        self.wrapped.pin(address, byte_count)

    def unpin(self, address: int) -> None:
        """Unpin on the wrapped device."""
        self.wrapped.unpin(address)

    def add_doorbell(self, ring: Callable[[], None]) -> Callable[[], None] | None:
        """Add a doorbell to the wrapped device; a ring orders nothing."""
        return self.wrapped.add_doorbell(ring)

    def close(self) -> None:
        """Close the wrapped device."""
        self.wrapped.close()

    # Inside

    def _reach(self, stream: Stream) -> Owner:
        """Return the owner of `stream`, which has learned what the host knows now."""
        owner = self._owner_of.get(stream)
        if owner is None:
            owner = self._owner_of[stream] = self._new_owner(f"stream {len(self._owners)}")
        owner.learn(self._host.clock)
        return owner

    def _learn_from(self, event: Event) -> None:
        """Let the host know what a finished event knows."""
        with self._lock:
            self._host.learn(self._known_by(event))

    def _known_by(self, event: Event) -> VectorClock:
        return self._clock_of.get(event, self._host.clock[:0])

    def _new_owner(self, name: str) -> Owner:
        if len(self._owners) == self._capacity:
            self._capacity *= 2
            for owner in self._owners:
                owner.grow(self._capacity)
        owner = Owner(name, len(self._owners), self._capacity)
        self._owners.append(owner)
        return owner

    def _note(
        self,
        owner: Owner,
        clock: VectorClock,
        time: int,
        read_cells: NDArray[np.int64],
        written_cells: NDArray[np.int64],
    ) -> None:
        self.access_count += len(read_cells) + len(written_cells)
        for table in (self._reads, self._writes):
            table.grow(self._regions.cell_count, self._capacity)
        if len(read_cells):
            self._report_cells("read-too-early", owner, time, self._writes.unordered(read_cells, clock))
        if len(written_cells):
            unordered = [table.unordered(written_cells, clock) for table in (self._writes, self._reads)]
            self._report_cells("overwrite-too-early", owner, time, unordered[0] + unordered[1])
        self._reads.times[read_cells, owner.index] = time
        self._writes.times[written_cells, owner.index] = time

    def _report_cells(
        self, kind: ViolationKind, owner: Owner, time: int, unordered: list[tuple[int, int, int]]
    ) -> None:
        reported: set[tuple[str, int]] = set()
        for cell, earlier_index, earlier_time in unordered:
            region, row = place = self._regions.locate(cell)
            if place in reported:
                continue
            reported.add(place)
            earlier = self._owners[earlier_index]
            self._report(
                Violation(kind, region, row, owner.name, owner.labels[time], earlier.name, earlier.labels[earlier_time])
            )

    def _report(self, violation: Violation) -> None:
        self.violation_count += 1
        if len(self.violations) < self._most_violations:
            self.violations.append(violation)
