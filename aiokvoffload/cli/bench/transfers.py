"""What copies on the host device reach, and how soon whoever waits for one learns that it has landed."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from importlib.util import find_spec
from typing import Any, Self

import anyio
import numpy as np
import torch

from aiokvoffload.cli.bench.rounds import KeySource
from aiokvoffload.cli.bench.tables import Table
from aiokvoffload.devices.base import CopyPlan, Direction
from aiokvoffload.devices.host import HostDevice
from aiokvoffload.kv_caches import CanonicalKVCaches
from aiokvoffload.offloader import open_offloader

PAGE_BYTES = (4 << 10, 16 << 10, 64 << 10, 1 << 20)
LONG_COPY_FACTOR = 4
_BOTH_WAYS_PAGE_BYTES = 64 << 10
_WAITED_BYTES = 1 << 20
_WAITED_PAGE_BYTES = 4 << 10
_LANDING_SECONDS = 60.0
_Copies = tuple[int, int, tuple[Direction, ...]]
"""Bytes in all, bytes of a page, and the directions in which they go at the same time."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TransfersSize:
    """How much is measured.

    Attributes:
        copied_bytes: Bytes of a batch of copies.
        repeats: How often each is copied; the best counts, as other load on the machine only takes away.
        transfers: Transfers that are waited for.
    """

    copied_bytes: int = 64 << 20
    repeats: int = 7
    transfers: int = 200


@dataclass(frozen=True, slots=True)
class Waits:
    """How waiting for transfers one after the other went on one event loop.

    Attributes:
        loop: Name of the event loop.
        has_doorbell: Whether the device rang when a copy had landed; else the poller asks it.
        polls_per_transfer: How often the poller polled.
        delay_p50_ms: From the landing to the waiter going on, median.
        delay_p99_ms: What 99 % of them take at most.
    """

    loop: str
    has_doorbell: bool
    polls_per_transfer: float
    delay_p50_ms: float
    delay_p99_ms: float


@dataclass(frozen=True, slots=True, kw_only=True)
class TransferCost:
    """What transfers cost.

    Attributes:
        size: How much was measured.
        contiguous_gigabytes_per_second: One copy of all bytes.
        long_gigabytes_per_second: One copy of four times as many, for which the C library may leave the caches out.
        scattered_gigabytes_per_second: Pages in random order, by bytes of a page.
        one_way_gigabytes_per_second: Pages of 64 KiB one way, of which there are two.
        both_ways_gigabytes_per_second: The same in both directions at once, added up.
        waits: On each event loop that can be had.
    """

    size: TransfersSize
    contiguous_gigabytes_per_second: float
    long_gigabytes_per_second: float
    scattered_gigabytes_per_second: dict[int, float]
    one_way_gigabytes_per_second: float
    both_ways_gigabytes_per_second: float
    waits: tuple[Waits, ...]

    def to_dict(self) -> dict[str, Any]:
        """Return the figures as plain values."""
        return {"bench": "transfers", **asdict(self)}

    def tables(self) -> list[Table]:
        """Return the figures for people."""
        return [self._copies_table(), self._directions_table(), self._waits_table()]

    def _copies_table(self) -> Table:
        size_name = f"{self.size.copied_bytes / 2**20:g} MiB"
        long_name = f"{LONG_COPY_FACTOR * self.size.copied_bytes / 2**20:g} MiB"
        rows = [
            (
                f"{page // 1024:,} KiB",
                f"{speed:.2f}",
                f"{speed / self.contiguous_gigabytes_per_second:.0%}",
                f"{speed / self.long_gigabytes_per_second:.0%}",
            )
            for page, speed in self.scattered_gigabytes_per_second.items()
        ]
        rows.append(("one copy", f"{self.contiguous_gigabytes_per_second:.2f}", "100%", ""))
        columns = ("pages of", "GB/s", f"of one copy of {size_name}", f"of one copy of {long_name}")
        return Table(f"{size_name} in pages, each to a random place, on one stream", columns, rows)

    def _directions_table(self) -> Table:
        one, both = self.one_way_gigabytes_per_second, self.both_ways_gigabytes_per_second
        rows = [("one direction", f"{one:.2f}", ""), ("both at once, added up", f"{both:.2f}", f"{both / one:.2f}")]
        return Table("Pages of 64 KiB, a stream for each direction", ("", "GB/s", "of one direction"), rows)

    def _waits_table(self) -> Table:
        rows = [
            (
                f"{waits.loop}, {'doorbell' if waits.has_doorbell else 'polling alone'}",
                f"{waits.polls_per_transfer:.2f}",
                f"{waits.delay_p50_ms:.2f}",
                f"{waits.delay_p99_ms:.2f}",
            )
            for waits in self.waits
        ]
        columns = ("", "polls per transfer", "delay p50 ms", "delay p99 ms")
        return Table("From the landing of 1 MiB to its waiter, one transfer after the other", columns, rows)


USUAL = TransfersSize()
QUICK = TransfersSize(copied_bytes=1 << 20, repeats=1, transfers=5)


def measure_transfers(size: TransfersSize) -> TransferCost:
    """Measure copies on the host device, and waits for them on every event loop that is installed."""
    copied = size.copied_bytes
    pages = [page for page in PAGE_BYTES if page <= copied]
    both_ways = (copied, _BOTH_WAYS_PAGE_BYTES, tuple(Direction))
    one_way = (copied, _BOTH_WAYS_PAGE_BYTES, (Direction.STORE,))
    contiguous, long = ((count, count, (Direction.STORE,)) for count in (copied, LONG_COPY_FACTOR * copied))
    scattered = {page: (copied, page, (Direction.STORE,)) for page in pages}
    with _HostMemory(LONG_COPY_FACTOR * copied) as memory:
        speed = memory.gigabytes_per_second([contiguous, long, *scattered.values(), one_way, both_ways], size.repeats)
    loops: dict[str, dict[str, Any]] = {"asyncio": {"backend": "asyncio"}}
    if find_spec("uvloop") is not None:
        loops["uvloop"] = {"backend": "asyncio", "backend_options": {"use_uvloop": True}}
    if find_spec("trio") is not None:
        loops["trio"] = {"backend": "trio"}
    waits = [
        anyio.run(_measure_waits, name, has_doorbell, size.transfers, **options)
        for name, options in loops.items()
        for has_doorbell in (True, False)
    ]
    return TransferCost(
        size=size,
        contiguous_gigabytes_per_second=speed[contiguous],
        long_gigabytes_per_second=speed[long],
        scattered_gigabytes_per_second={page: speed[copies] for page, copies in scattered.items()},
        one_way_gigabytes_per_second=speed[one_way],
        both_ways_gigabytes_per_second=speed[both_ways],
        waits=tuple(waits),
    )


class _HostMemory:
    """Two places in CPU memory for each direction, and a host device that copies between them."""

    def __init__(self, byte_count: int) -> None:
        self._device = HostDevice()
        self._random = np.random.default_rng(0)
        self._streams = {direction: self._device.create_stream(direction.name.lower()) for direction in Direction}
        # Written to, so that no copy waits for the system to find a page.
        self._places = {direction: [np.ones(byte_count, dtype=np.uint8) for _ in range(2)] for direction in Direction}

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._device.close()

    def gigabytes_per_second(self, kinds: Sequence[_Copies], repeats: int) -> dict[_Copies, float]:
        """Make copies of every kind in turns and return the best bandwidth of each, of all its directions together."""
        found: dict[_Copies, float] = dict.fromkeys(kinds, 0.0)
        for _ in range(repeats):
            for kind in found:
                total_bytes, page_bytes, directions = kind
                work = [(self._plan(total_bytes, page_bytes, direction), direction) for direction in directions]
                speed = sum(plan.total_bytes for plan, _ in work) / self._seconds(work) / 1e9
                found[kind] = max(found[kind], speed)
        return found

    def _plan(self, total_bytes: int, page_bytes: int, direction: Direction) -> CopyPlan:
        """Return copies of all pages, each to a random place."""
        count = max(1, total_bytes // page_bytes)
        source, destination = self._places[direction]
        from_pages, to_pages = (self._random.permutation(count) * page_bytes for _ in range(2))
        byte_counts = np.full(count, page_bytes, dtype=np.int64)
        return CopyPlan(source.ctypes.data + from_pages, destination.ctypes.data + to_pages, byte_counts, direction)

    def _seconds(self, work: Sequence[tuple[CopyPlan, Direction]]) -> float:
        """Run plans at the same time and return the device's time from the first start to the last end."""
        device = self._device
        starts, ends = [], []
        for plan, direction in work:
            stream = self._streams[direction]
            starts.append(device.record(stream))
            device.copy_batch(plan, stream)
            ends.append(device.record(stream))
        for end in ends:
            device.synchronize(end, _LANDING_SECONDS)
        return max(device.elapsed_seconds(start, end) for start in starts for end in ends)


class _WatchedDevice(HostDevice):
    """A host device that notes when it last rang, and may leave it to the poller to ask.

    Args:
        has_doorbell: Whether its users hear it ring.
    """

    def __init__(self, *, has_doorbell: bool) -> None:
        super().__init__()
        self._has_doorbell = has_doorbell
        self.rung_at = 0.0
        super().add_doorbell(self._note)

    def add_doorbell(self, ring: Callable[[], None]) -> Callable[[], None] | None:  # type: ignore[override]
        """Let `ring` be called after each event, or never, as a device without a doorbell would."""
        return super().add_doorbell(ring) if self._has_doorbell else None

    def _note(self) -> None:
        self.rung_at = time.perf_counter()


async def _measure_waits(loop: str, has_doorbell: bool, transfers: int) -> Waits:
    """Store blocks of 1 MiB in all, one transfer after the other, and see when each waiter goes on."""
    block_count = _WAITED_BYTES // _WAITED_PAGE_BYTES
    device = _WatchedDevice(has_doorbell=has_doorbell)
    layer = torch.ones((block_count, _WAITED_PAGE_BYTES), dtype=torch.uint8)
    caches = CanonicalKVCaches.from_layers([layer], block_tokens=1)
    delays = []
    source = KeySource(0)
    async with open_offloader(caches, cpu_bytes=2 * _WAITED_BYTES, device=device) as offloader:
        await offloader.store(source.new(block_count), range(block_count))
        polls_before = offloader.poll_count
        for _ in range(transfers):
            await offloader.store(source.new(block_count), range(block_count))
            delays.append(time.perf_counter() - device.rung_at)
        polls = offloader.poll_count - polls_before
    device.close()
    delays.sort()
    return Waits(
        loop=loop,
        has_doorbell=has_doorbell,
        polls_per_transfer=polls / transfers,
        delay_p50_ms=1e3 * delays[len(delays) // 2],
        delay_p99_ms=1e3 * delays[len(delays) * 99 // 100],
    )
