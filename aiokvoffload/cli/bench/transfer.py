"""What copies on the host device reach, and how soon whoever waits for one learns that it has landed."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import anyio
import torch

from aiokvoffload.cli.bench.copies import (
    BOTH,
    PAGE_BYTES,
    RUN_PAGES,
    STREAM_COUNT,
    CopyCost,
    CopyKind,
    measure_copies,
)
from aiokvoffload.cli.bench.rounds import KeySource
from aiokvoffload.cli.bench.tables import Table
from aiokvoffload.cli.figures import require_matplotlib, save_figure
from aiokvoffload.cli.stall import LoopStallMeter
from aiokvoffload.clock import SystemClock
from aiokvoffload.devices.base import Direction
from aiokvoffload.devices.host import HostDevice
from aiokvoffload.kv_caches import CanonicalKVCaches
from aiokvoffload.offloader import open_offloader

_WAITED_BYTES = 1 << 20
_WAITED_PAGE_BYTES = 4 << 10
_STALL_SHARE = 4
"""One in so many transfers is made once more beside a heartbeat on the loop, which itself delays waiters."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TransfersSize:
    """How much is measured.

    Attributes:
        copied_bytes: Bytes of a batch of copies.
        turns: How often each kind of copies is made; medians count.
        transfers: Transfers that are waited for.
    """

    copied_bytes: int = 64 << 20
    turns: int = 9
    transfers: int = 200


@dataclass(frozen=True, slots=True, kw_only=True)
class Waits:
    """How waiting for transfers one after the other went on one event loop.

    Attributes:
        loop: Name of the event loop.
        has_doorbell: Whether the device rang when a copy had landed; else the poller asks it.
        polls_per_transfer: How often the poller polled.
        delay_p50_ms: From the landing to the waiter going on, median.
        delay_p99_ms: What 99 % of them take at most.
        stall_max_ms: The longest that a task which only sleeps on that loop was kept waiting.
    """

    loop: str
    has_doorbell: bool
    polls_per_transfer: float
    delay_p50_ms: float
    delay_p99_ms: float
    stall_max_ms: float


@dataclass(frozen=True, slots=True, kw_only=True)
class TransferCost:
    """What transfers cost.

    Attributes:
        size: How much was measured.
        copies: Each kind of copies.
        waits: On each event loop that can be had.
    """

    size: TransfersSize
    copies: tuple[CopyCost, ...]
    waits: tuple[Waits, ...]

    def to_dict(self) -> dict[str, Any]:
        """Return the figures as plain values."""
        return {
            "bench": "transfer",
            "size": asdict(self.size),
            "copies": [cost.to_dict() for cost in self.copies],
            "waits": [asdict(waits) for waits in self.waits],
        }

    def cost_of(self, kind: CopyKind) -> CopyCost | None:
        """Return what a kind of copies took, if it was measured."""
        return next((cost for cost in self.copies if cost.kind == kind), None)

    def tables(self) -> list[Table]:
        """Return the figures for people."""
        return [self._copies_table(), self._waits_table()]

    def plot(self, path: Path) -> None:
        """Draw the speeds by the bytes of a page into an image file.

        Raises:
            ConfigurationError: matplotlib is not installed, or the file cannot be written.
        """
        figure = require_matplotlib()(figsize=(8, 5), layout="constrained")
        panel = figure.subplots()
        pages = [page for page in PAGE_BYTES if page <= self.size.copied_bytes]
        for number, (name, variant) in enumerate(_VARIANTS.items()):
            drawn = [(page, cost.gigabytes_per_second) for page in pages if (cost := self.cost_of(variant(page)))]
            panel.plot(
                [page for page, _ in drawn], [speed for _, speed in drawn], label=name, color=f"C{number}", marker="."
            )
        for number, (name, ways) in enumerate(_WAYS.items()):
            if contiguous := self.cost_of(CopyKind(page_bytes=None, ways=ways)):
                speed = contiguous.gigabytes_per_second
                panel.axhline(speed, linestyle=":", color=f"C{number}", label=f"one copy, {name}")
        panel.set(xscale="log", ylim=(0, None), xlabel="bytes of a page", ylabel="GB/s")
        panel.set_xticks(pages, labels=[_size_name(page) for page in pages])
        panel.tick_params(axis="x", which="minor", bottom=False, labelbottom=False)
        panel.legend(fontsize="small")
        save_figure(figure, path)

    def _copies_table(self) -> Table:
        rows = [
            self._row(_size_name(page), page)
            for page in PAGE_BYTES
            if any(cost.kind.page_bytes == page for cost in self.copies)
        ]
        rows.append(self._row("one copy", None))
        shares = (f"{name}, of one copy" for name in list(_VARIANTS)[:_SHARE_COUNT])
        columns = ("pages of", *_VARIANTS, *shares, "ns to submit a copy")
        title = f"{_size_name(self.size.copied_bytes)} in pages, each to a random place, GB/s"
        return Table(title, columns, rows)

    def _row(self, name: str, page_bytes: int | None) -> tuple[str, ...]:
        costs = [self.cost_of(variant(page_bytes)) for variant in _VARIANTS.values()]
        return (
            name,
            *(f"{cost.gigabytes_per_second:.2f}" if cost else "" for cost in costs),
            *(f"{cost.share_of_contiguous:.0%}" if cost else "" for cost in costs[:_SHARE_COUNT]),
            f"{costs[0].submission_ns_per_copy:,.0f}" if costs[0] else "",
        )

    def _waits_table(self) -> Table:
        rows = [
            (
                f"{waits.loop}, {'doorbell' if waits.has_doorbell else 'polling alone'}",
                f"{waits.polls_per_transfer:.2f}",
                f"{waits.delay_p50_ms:.2f}",
                f"{waits.delay_p99_ms:.2f}",
                f"{waits.stall_max_ms:.2f}",
            )
            for waits in self.waits
        ]
        columns = ("", "polls per transfer", "delay p50 ms", "delay p99 ms", "longest stall ms")
        return Table("From the landing of 1 MiB to its waiter, one transfer after the other", columns, rows)


_WAYS = {"store": (Direction.STORE,), "load": (Direction.LOAD,), "both at once": BOTH}
_VARIANTS: dict[str, Callable[[int | None], CopyKind]] = {
    "store": lambda page: CopyKind(page_bytes=page, ways=(Direction.STORE,)),
    "load": lambda page: CopyKind(page_bytes=page, ways=(Direction.LOAD,)),
    "both at once": lambda page: CopyKind(page_bytes=page, ways=BOTH),
    f"store, {STREAM_COUNT} streams": lambda page: CopyKind(
        page_bytes=page, ways=(Direction.STORE,), stream_count=STREAM_COUNT
    ),
    f"store, runs of {RUN_PAGES} merged": lambda page: CopyKind(
        page_bytes=page, ways=(Direction.STORE,), run_pages=RUN_PAGES
    ),
}
_SHARE_COUNT = 3
"""The first of the variants, which are also shown as shares of one copy."""
USUAL = TransfersSize()
QUICK = TransfersSize(copied_bytes=1 << 20, turns=1, transfers=5)


def measure_transfers(size: TransfersSize) -> TransferCost:
    """Measure copies on the host device, and waits for them on every event loop that is installed."""
    copies = measure_copies(size.copied_bytes, size.turns)
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
    return TransferCost(size=size, copies=copies, waits=tuple(waits))


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
        async with LoopStallMeter(SystemClock()) as meter:
            for _ in range(-(-transfers // _STALL_SHARE)):
                await offloader.store(source.new(block_count), range(block_count))
    device.close()
    delays.sort()
    return Waits(
        loop=loop,
        has_doorbell=has_doorbell,
        polls_per_transfer=polls / transfers,
        delay_p50_ms=1e3 * delays[len(delays) // 2],
        delay_p99_ms=1e3 * delays[len(delays) * 99 // 100],
        stall_max_ms=meter.max_stall_ms,
    )


def _size_name(byte_count: int) -> str:
    return f"{byte_count >> 20} MiB" if byte_count >= 1 << 20 else f"{byte_count >> 10} KiB"
