"""How fast the host device copies pages, beside one copy of as many bytes in the same run."""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from statistics import median
from typing import Any, Self

import numpy as np

from aiokvoffload.devices.base import CopyPlan, Direction
from aiokvoffload.devices.host import HostDevice

PAGE_BYTES = tuple(kib << 10 for kib in (4, 16, 64, 256, 1024, 4096, 16384))
RUN_PAGES = 16
"""Pages of a run of neighbours, which goes as one copy."""
STREAM_COUNT = 2
BOTH = (Direction.STORE, Direction.LOAD)
_LANDING_SECONDS = 60.0


@dataclass(frozen=True, slots=True, kw_only=True)
class CopyKind:
    """A way to copy a number of bytes.

    Attributes:
        page_bytes: Bytes of a page; None for one contiguous copy of all.
        ways: In which directions at the same time, each all the bytes.
        run_pages: Pages of a run of neighbours; the runs lie in random order.
        stream_count: Streams that the copies of one direction are spread over.
    """

    page_bytes: int | None
    ways: tuple[Direction, ...]
    run_pages: int = 1
    stream_count: int = 1


@dataclass(frozen=True, slots=True, kw_only=True)
class CopyCost:
    """What copies of one kind took; medians of all turns.

    Attributes:
        kind: Which way.
        gigabytes_per_second: By the device's clock, of all directions together.
        share_of_contiguous: The same as a share of one copy of as many bytes each way, made just before.
        submission_ns_per_copy: Of the thread that submits, for each copy that the device is handed.
    """

    kind: CopyKind
    gigabytes_per_second: float
    share_of_contiguous: float
    submission_ns_per_copy: float

    def to_dict(self) -> dict[str, Any]:
        """Return the figures as plain values."""
        ways = "both" if len(self.kind.ways) > 1 else self.kind.ways[0].name.lower()
        return {**asdict(self), "kind": {**asdict(self.kind), "ways": ways}}


def kinds_of(copied_bytes: int) -> Iterator[CopyKind]:
    """Yield all kinds of copies of so many bytes, the contiguous ones first."""
    every_way = ((Direction.STORE,), (Direction.LOAD,), BOTH)
    for ways in every_way:
        yield CopyKind(page_bytes=None, ways=ways)
    for page_bytes in PAGE_BYTES:
        if page_bytes > copied_bytes:
            continue
        for ways in every_way:
            yield CopyKind(page_bytes=page_bytes, ways=ways)
        yield CopyKind(page_bytes=page_bytes, ways=(Direction.STORE,), stream_count=STREAM_COUNT)
        if page_bytes * RUN_PAGES <= copied_bytes:
            yield CopyKind(page_bytes=page_bytes, ways=(Direction.STORE,), run_pages=RUN_PAGES)


def measure_copies(copied_bytes: int, turns: int) -> tuple[CopyCost, ...]:
    """Copy in every kind of way, in turns, and in one copy before each, so that other load meets all of them alike."""
    found: dict[CopyKind, list[tuple[float, float, float]]] = {kind: [] for kind in kinds_of(copied_bytes)}
    with _HostMemory(copied_bytes) as memory:
        for _ in range(turns):
            for kind, figures in found.items():
                contiguous, _ = memory.copy(CopyKind(page_bytes=None, ways=kind.ways))
                speed, submission_ns = memory.copy(kind)
                figures.append((speed, speed / contiguous, submission_ns))
    costs = []
    for kind, figures in found.items():
        speed, share, submission_ns = map(median, zip(*figures, strict=True))
        costs.append(
            CopyCost(
                kind=kind,
                gigabytes_per_second=speed,
                share_of_contiguous=share,
                submission_ns_per_copy=submission_ns,
            )
        )
    return tuple(costs)


class _HostMemory:
    """Two places in CPU memory for each direction, and a host device that copies between them."""

    def __init__(self, byte_count: int) -> None:
        self._byte_count = byte_count
        self._device = HostDevice()
        self._random = np.random.default_rng(0)
        self._streams = {
            direction: [self._device.create_stream(f"{direction.name.lower()} {n}") for n in range(STREAM_COUNT)]
            for direction in Direction
        }
        # Written to, so that no copy waits for the system to find a page.
        self._places = {direction: [np.ones(byte_count, dtype=np.uint8) for _ in range(2)] for direction in Direction}

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._device.close()

    def copy(self, kind: CopyKind) -> tuple[float, float]:
        """Copy once; return gigabytes per second, and nanoseconds of submission per copy."""
        device = self._device
        work = [
            (plan, self._streams[direction][number])
            for direction in kind.ways
            for number, plan in enumerate(self._plans(kind, direction))
        ]
        starts = [device.record(stream) for _, stream in work]
        submission_started = time.perf_counter()
        for plan, stream in work:
            device.copy_batch(plan, stream)
        submission_seconds = time.perf_counter() - submission_started
        ends = [device.record(stream) for _, stream in work]
        for end in ends:
            device.synchronize(end, _LANDING_SECONDS)
        seconds = max(device.elapsed_seconds(start, end) for start in starts for end in ends)
        copy_count = sum(len(plan.sources) for plan, _ in work)
        return sum(plan.total_bytes for plan, _ in work) / seconds / 1e9, submission_seconds / copy_count * 1e9

    def _plans(self, kind: CopyKind, direction: Direction) -> Sequence[CopyPlan]:
        """Return the copies of one direction, for each of its streams."""
        copy_bytes = self._byte_count if kind.page_bytes is None else kind.page_bytes * kind.run_pages
        count = self._byte_count // copy_bytes
        source, destination = self._places[direction]
        from_places, to_places = (self._random.permutation(count) * copy_bytes for _ in range(2))
        byte_counts = np.full(count, copy_bytes, dtype=np.int64)
        return [
            CopyPlan(
                source.ctypes.data + from_places[number :: kind.stream_count],
                destination.ctypes.data + to_places[number :: kind.stream_count],
                byte_counts[number :: kind.stream_count],
                direction,
            )
            for number in range(min(kind.stream_count, count))
        ]
