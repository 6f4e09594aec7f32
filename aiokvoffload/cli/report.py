"""What a replay found, as a table and as JSON, and the progress shown meanwhile."""

from __future__ import annotations

import json
import sys
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass, fields, replace
from typing import Any, Protocol, Self, TextIO

from aiokvoffload.cli.options import ReplayOptions
from aiokvoffload.managers.tier_plan import TierUseStatistics


@dataclass(frozen=True, slots=True, kw_only=True)
class GpuLevelReport:
    """What the GPU level of a replay has done.

    Attributes:
        placement: Whether CPU memory also held what the GPU held.
        gpu_blocks: Blocks of the GPU level.
        gpu_blocks_hit: Blocks found there, within a request's leading run.
    """

    placement: str
    gpu_blocks: int
    gpu_blocks_hit: int

    @classmethod
    def of(cls, options: ReplayOptions, gpu_blocks_hit: int) -> Self | None:
        """Return the report of a replay's GPU level, if it has one."""
        if options.gpu_blocks is None:
            return None
        return cls(placement=options.placement, gpu_blocks=options.gpu_blocks, gpu_blocks_hit=gpu_blocks_hit)


@dataclass(frozen=True, slots=True, kw_only=True)
class TierReport:
    """What one tier has done in a replay; blocks, and times of its calls."""

    url: str
    lookups: int
    hits: int
    bytes_read: int
    bytes_written: int
    misses_by_reason: dict[str, int]
    breaker: str
    p50_ms: float
    p99_ms: float

    @classmethod
    def of(cls, use: TierUseStatistics) -> Self:
        """Return the report of a tier."""
        tier = use.tier
        return cls(
            url=tier.url,
            lookups=tier.lookups,
            hits=tier.hits,
            bytes_read=tier.bytes_read,
            bytes_written=tier.bytes_written,
            misses_by_reason=dict(tier.misses_by_reason),
            breaker=tier.breaker.value,
            p50_ms=tier.p50_ms,
            p99_ms=tier.p99_ms,
        )

    def joined(self, other: Self) -> Self:
        """Return what this one and a later or another process's have done together; of times, the longer ones."""
        return replace(
            self,
            lookups=self.lookups + other.lookups,
            hits=self.hits + other.hits,
            bytes_read=self.bytes_read + other.bytes_read,
            bytes_written=self.bytes_written + other.bytes_written,
            misses_by_reason=dict(Counter(self.misses_by_reason) + Counter(other.misses_by_reason)),
            breaker=other.breaker,
            p50_ms=max(self.p50_ms, other.p50_ms),
            p99_ms=max(self.p99_ms, other.p99_ms),
        )

    def describe(self) -> str:
        """Say it in one line."""
        return (
            f"{self.hits:,} of {self.lookups:,} found, {_bytes(self.bytes_read)} read, "
            f"{_bytes(self.bytes_written)} written, breaker {self.breaker}"
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class ReplayReport:
    """The figures of one replay; None where a figure does not apply, as those of bytes without data.

    Attributes:
        policy: Name of the eviction policy.
        cpu_blocks: Offloaded blocks that CPU memory holds.
        requests: Requests replayed.
        blocks_looked_up: Block references of all requests.
        blocks_hit: Those within a request's leading run of cached blocks, all levels together.
        gpu_level: The GPU level, if there was one; the other hits were in CPU memory.
        bytes_stored: Bytes copied from GPU to CPU memory.
        bytes_loaded: Bytes copied from CPU to GPU memory.
        store_gigabytes_per_second: Bandwidth of the stores while at least one was being copied.
        load_gigabytes_per_second: The same for the loads.
        blocks_verified: Loaded blocks whose bytes were compared.
        mismatches: Loaded blocks with a wrong byte.
        order_violations: Reads and overwrites that came too early.
        evictions: Blocks that left CPU memory for others.
        refused_stores: Blocks that were not stored because nothing could leave.
        max_loop_stall_ms: The longest that the event loop kept a ready task waiting.
        load_wait_p50_ms: Median time from the call of a load to its end.
        load_wait_p99_ms: What 99 % of the loads took at most.
        left_pinned: Blocks still pinned at the end, which is a fault.
        left_leased: Blocks that a copy might still touch at the end, which is a fault.
        seconds: Duration of the replay.
        tiers: What each tier has done.
    """

    policy: str
    cpu_blocks: int
    requests: int
    blocks_looked_up: int
    blocks_hit: int
    gpu_level: GpuLevelReport | None = None
    bytes_stored: int | None = None
    bytes_loaded: int | None = None
    store_gigabytes_per_second: float | None = None
    load_gigabytes_per_second: float | None = None
    blocks_verified: int | None = None
    mismatches: int | None = None
    order_violations: int | None = None
    evictions: int
    refused_stores: int
    max_loop_stall_ms: float | None = None
    load_wait_p50_ms: float | None = None
    load_wait_p99_ms: float | None = None
    left_pinned: int
    left_leased: int
    seconds: float
    tiers: tuple[TierReport, ...] = ()

    def joined(self, other: Self) -> Self:
        """Return the figures of this replay and of another part of it; durations and rates are the larger ones."""
        merged: dict[str, Any] = {}
        for field in fields(self):
            name, mine, others = field.name, getattr(self, field.name), getattr(other, field.name)
            if name == "tiers":
                merged[name] = tuple(a.joined(b) for a, b in zip(mine, others, strict=True))
            elif name == "gpu_level" and mine is not None:
                merged[name] = replace(mine, gpu_blocks_hit=mine.gpu_blocks_hit + others.gpu_blocks_hit)
            elif name in ("policy", "cpu_blocks", "gpu_level") or others is None:
                merged[name] = mine
            else:
                merged[name] = max(mine, others) if isinstance(mine, float) else mine + others
        return type(self)(**merged)

    @property
    def hit_rate(self) -> float:
        """Share of the blocks looked up that hit, from 0 to 1."""
        return self.blocks_hit / self.blocks_looked_up if self.blocks_looked_up else 0.0

    @property
    def is_faultless(self) -> bool:
        """Whether every byte was right, every access in order, and nothing stayed behind."""
        return not any(getattr(self, name) for name in FAULTS)

    def figures(self) -> dict[str, str | int | float | None]:
        """Return every figure by its name, `hit_rate` after the two that it is made of, the GPU level's after that."""
        figures: dict[str, str | int | float | None] = {}
        for field in fields(self):
            if field.name == "tiers":
                continue
            if field.name == "gpu_level":
                figures |= self._level_figures()
                continue
            figures[field.name] = getattr(self, field.name)
            if field.name == "blocks_hit":
                figures["hit_rate"] = self.hit_rate
        return figures

    def _level_figures(self) -> dict[str, str | int | float | None]:
        if self.gpu_level is None:
            return {}
        gpu_hit = self.gpu_level.gpu_blocks_hit
        cpu_hit = self.blocks_hit - gpu_hit
        looked_up = self.blocks_looked_up or 1
        return {
            **asdict(self.gpu_level),
            "gpu_hit_rate": gpu_hit / looked_up,
            "cpu_blocks_hit": cpu_hit,
            "cpu_hit_rate": cpu_hit / looked_up,
        }

    def to_json(self) -> str:
        """Return all figures as one JSON object on one line."""
        figures: dict[str, Any] = self.figures()
        if self.tiers:
            figures["tiers"] = [asdict(tier) for tier in self.tiers]
        return json.dumps(figures, allow_nan=False)

    def table_rows(self) -> list[tuple[str, str]]:
        """Return name and value of each figure that applies, as people read them."""
        rows = []
        for name, value in self.figures().items():
            if value is not None:
                label, wording = _WORDING[name]
                rows.append((label, wording(value)))
        return rows + [(tier.url, tier.describe()) for tier in self.tiers]


FAULTS = ("mismatches", "order_violations", "left_pinned", "left_leased")


class Advance(Protocol):
    """Moves a progress bar."""

    def __call__(self, count: int = 1) -> None:
        """Report that `count` more steps are done."""


def write_report(report: ReplayReport, stream: TextIO | None = None) -> None:
    """Write the table: with rich on a terminal, in plain aligned lines elsewhere and without rich.

    Args:
        report: The figures.
        stream: Where to; standard output by default.
    """
    stream = sys.stdout if stream is None else stream
    rows = report.table_rows()
    if not (stream.isatty() and _write_rich_table(rows, stream)):
        width = max(len(name) for name, _ in rows)
        stream.writelines(f"{name:<{width}}  {value}\n" for name, value in rows)


@contextmanager
def progress(total: int, description: str, *, stream: TextIO | None = None) -> Iterator[Advance]:
    """Show a progress bar while the body runs, if rich is there and the stream is a terminal.

    Args:
        total: Number of steps.
        description: What is being done.
        stream: Where to; standard error by default, so that standard output stays clean.

    Yields:
        A function that reports steps done; any thread may call it.
    """
    stream = sys.stderr if stream is None else stream
    if not stream.isatty():
        yield _advance_nothing
        return
    try:
        from rich.console import Console
        from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn
    except ImportError:
        yield _advance_nothing
        return
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
    # Redirecting would send what the body prints on standard output to the stream of the bar.
    bar = Progress(*columns, console=Console(file=stream), transient=True, redirect_stdout=False, redirect_stderr=False)
    with bar:
        task = bar.add_task(description, total=total)

        def advance(count: int = 1) -> None:
            bar.advance(task, count)

        yield advance


def _advance_nothing(count: int = 1) -> None:
    pass


def _write_rich_table(rows: list[tuple[str, str]], stream: TextIO) -> bool:
    """Write the rows with rich and return whether it is installed."""
    try:
        from rich.console import Console
        from rich.table import Table
        from rich.text import Text
    except ImportError:
        return False
    table = Table(show_header=False)
    table.add_column(style="bold")
    table.add_column(justify="right")
    faults = {_WORDING[name][0] for name in FAULTS}
    for name, value in rows:
        # Text, as a policy's name may look like markup.
        table.add_row(name, Text(value, style="bold red" if name in faults and value != "0" else ""))
    Console(file=stream).print(table)
    return True


def _count(value: float) -> str:
    return f"{value:,}"


def _percent(value: float) -> str:
    return f"{100 * value:.2f} %"


def _bytes(value: float) -> str:
    for unit in ("kB", "MB", "GB"):
        value /= 1_000
        if value < 1_000:
            return f"{value:.2f} {unit}"
    return f"{value / 1_000:,.2f} TB"


def _bandwidth(value: float) -> str:
    return f"{value:.2f} GB/s" if value >= 0.1 else f"{1_000 * value:.2f} MB/s"


def _milliseconds(value: float) -> str:
    return f"{value:.2f} ms"


_WORDING: dict[str, tuple[str, Callable[[Any], str]]] = {
    "policy": ("policy", str),
    "cpu_blocks": ("CPU blocks", _count),
    "requests": ("requests", _count),
    "blocks_looked_up": ("blocks looked up", _count),
    "blocks_hit": ("blocks hit", _count),
    "hit_rate": ("hit rate", _percent),
    "placement": ("placement", str),
    "gpu_blocks": ("GPU blocks", _count),
    "gpu_blocks_hit": ("blocks hit in the GPU", _count),
    "gpu_hit_rate": ("hit rate of the GPU", _percent),
    "cpu_blocks_hit": ("blocks hit in CPU memory", _count),
    "cpu_hit_rate": ("hit rate of CPU memory", _percent),
    "bytes_stored": ("bytes stored", _bytes),
    "bytes_loaded": ("bytes loaded", _bytes),
    "store_gigabytes_per_second": ("store bandwidth", _bandwidth),
    "load_gigabytes_per_second": ("load bandwidth", _bandwidth),
    "blocks_verified": ("blocks verified", _count),
    "mismatches": ("mismatches", _count),
    "order_violations": ("order violations", _count),
    "evictions": ("evictions", _count),
    "refused_stores": ("refused stores", _count),
    "max_loop_stall_ms": ("longest event-loop stall", _milliseconds),
    "load_wait_p50_ms": ("load wait, p50", _milliseconds),
    "load_wait_p99_ms": ("load wait, p99", _milliseconds),
    "left_pinned": ("left pinned", _count),
    "left_leased": ("left leased", _count),
    "seconds": ("time", lambda value: f"{value:.2f} s"),
}
