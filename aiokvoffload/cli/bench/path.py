"""The whole path with bytes: requests through an offloader with many CPU blocks, and many requests at once.

Processor time is that of all threads of the process, so the copies count.
"""

from __future__ import annotations

import os
import statistics
import time
import tracemalloc
from collections.abc import Sequence
from contextlib import AsyncExitStack
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Self

import anyio
import anyio.lowlevel
import torch

from aiokvoffload.cli.bench.contestants import batches, depths_of
from aiokvoffload.cli.bench.rounds import KeySource
from aiokvoffload.cli.bench.tables import Table, blocks_label
from aiokvoffload.errors import ConfigurationError
from aiokvoffload.keys import OffloadKey
from aiokvoffload.kv_caches import CanonicalKVCaches
from aiokvoffload.offloader import Offloader, open_offloader
from aiokvoffload.specs import LookupResult

PAGE_BYTES = 4096
_BLOCK_TOKENS = 16
_REQUESTS_HELD = 8
_MEMORY_STATUS = Path("/proc/self/statm")


@dataclass(frozen=True, slots=True, kw_only=True)
class PathSize:
    """How much is measured.

    Attributes:
        block_counts: CPU blocks, an offloader for each.
        policy: Name of the eviction policy.
        request_blocks: Blocks that a request loads, and as many that it stores.
        request_count: Requests, one after the other.
        concurrency: Requests at once; there are eight times as many CPU blocks as they load.
        turns: Requests that each of these makes, one after the other.
        step_seconds: How long a step of the engine blocks the event loop.
        in_flight_bytes: How much may be with the device at a time.

    Raises:
        ConfigurationError: There are too few CPU blocks for a request.
    """

    block_counts: tuple[int, ...] = (10_000, 1_000_000)
    policy: str = "lru"
    request_blocks: int = 32
    request_count: int = 500
    concurrency: int = 1000
    turns: int = 3
    step_seconds: float = 0.02
    in_flight_bytes: int = 16 << 20

    def __post_init__(self) -> None:
        if min(self.block_counts) < _REQUESTS_HELD * self.request_blocks:
            raise ConfigurationError(
                f"{min(self.block_counts)} CPU blocks are too few for requests of {self.request_blocks}; "
                f"take at least {_REQUESTS_HELD * self.request_blocks}"
            )


@dataclass(frozen=True, slots=True)
class RequestCost:
    """What a request costs that comes alone.

    Attributes:
        block_count: CPU blocks.
        processor_ms: Of all threads, median.
        p99_processor_ms: What 99 % of the requests take at most.
        loop_ms: Of the event loop's thread alone, median.
        wall_ms: On the clock, median.
        bytes_per_block: Memory of the full offloader beside slots and keys.
    """

    block_count: int
    processor_ms: float
    p99_processor_ms: float
    loop_ms: float
    wall_ms: float
    bytes_per_block: float


@dataclass(frozen=True, slots=True)
class CrowdCost:
    """How many requests at once got along while engine steps blocked the event loop.

    Attributes:
        request_count: Requests that were served.
        step_count: Steps meanwhile.
        wait_p50_ms: From asking to the last byte, median.
        wait_max_ms: The longest.
        moved_bytes_per_step: Bytes that landed from step to step, mean.
        idle_step_count: Steps after which nothing had landed though copies were waiting.
        most_in_flight_bytes: The most bytes seen with the device.
        most_queued: The most transfers seen waiting for room.
        grown_bytes: How much the process had grown at the most; None where the system does not tell.
    """

    request_count: int
    step_count: int
    wait_p50_ms: float
    wait_max_ms: float
    moved_bytes_per_step: float
    idle_step_count: int
    most_in_flight_bytes: int
    most_queued: int
    grown_bytes: int | None


@dataclass(frozen=True, slots=True, kw_only=True)
class PathCost:
    """What the whole path costs.

    Attributes:
        size: How much was measured.
        requests: Requests one after the other, by CPU blocks.
        crowd: Many requests at once.
    """

    size: PathSize
    requests: tuple[RequestCost, ...]
    crowd: CrowdCost

    def to_dict(self) -> dict[str, Any]:
        """Return the figures as plain values."""
        return {"bench": "path", **asdict(self)}

    def tables(self) -> list[Table]:
        """Return the figures for people."""
        return [self._requests_table(), self._crowd_table()]

    def _requests_table(self) -> Table:
        size, first = self.size, self.requests[0]
        rows = [
            (
                blocks_label(cost.block_count),
                f"{cost.processor_ms:.2f}",
                f"{cost.processor_ms / first.processor_ms:.2f}",
                f"{cost.p99_processor_ms:.2f}",
                f"{cost.loop_ms:.2f}",
                f"{cost.loop_ms / first.loop_ms:.2f}",
                f"{cost.wall_ms:.2f}",
                f"{cost.bytes_per_block:.0f}",
            )
            for cost in self.requests
        ]
        columns = (
            "CPU blocks",
            "processor ms",
            "growth",
            "p99",
            "of the loop's thread, ms",
            "growth",
            "on the clock, ms",
            "bytes per block beside slot and key",
        )
        blocks = f"{size.request_blocks} blocks of {PAGE_BYTES // 1024} KiB"
        return Table(f"A request that loads {blocks} and stores as many, under {size.policy}", columns, rows)

    def _crowd_table(self) -> Table:
        size, crowd = self.size, self.crowd
        rows = [
            ("wait of a request, p50", f"{crowd.wait_p50_ms:.0f} ms"),
            ("longest wait of a request", f"{crowd.wait_max_ms:.0f} ms"),
            ("longest over median", f"{crowd.wait_max_ms / crowd.wait_p50_ms:.1f}"),
            ("moved from step to step", _mebibytes(crowd.moved_bytes_per_step)),
            ("steps after which nothing had moved", f"{crowd.idle_step_count} of {crowd.step_count}"),
            ("most with the device", _mebibytes(crowd.most_in_flight_bytes)),
            ("most transfers queued", f"{crowd.most_queued}"),
            ("memory beyond that of the start", _mebibytes(crowd.grown_bytes)),
        ]
        title = (
            f"{size.concurrency:,} requests at once, {crowd.request_count:,} in all, "
            f"beside steps that block the event loop for {1e3 * size.step_seconds:.0f} ms"
        )
        return Table(title, ("", ""), rows)


USUAL = PathSize()
QUICK = PathSize(
    block_counts=(256, 1024), request_blocks=4, request_count=5, concurrency=20, turns=2, step_seconds=0.001
)


def measure_path(size: PathSize) -> PathCost:
    """Measure requests one after the other at every size, and many at once.

    Raises:
        ConfigurationError: The machine cannot give that much memory, or the policy is unknown.
    """
    crowd = anyio.run(_measure_crowd, size)  # first, as memory that was freed before would hide what it takes
    return PathCost(size=size, requests=anyio.run(_measure_requests, size), crowd=crowd)


class _Engine:
    """Blocks of a GPU, an offloader all of whose CPU blocks are taken, and requests.

    Args:
        size: How much is measured.
        block_count: CPU blocks.
        place_count: How many requests there may be at a time.

    Attributes:
        offloader: Open while the engine is entered.
        offloader_bytes: Memory that it took when it was full, beside slots and keys.
    """

    offloader: Offloader

    def __init__(self, size: PathSize, block_count: int, place_count: int) -> None:
        self._size = size
        self._block_count = block_count
        self._source = KeySource(0)
        self._layer = torch.ones((2 * size.request_blocks * place_count, PAGE_BYTES), dtype=torch.uint8)
        self._exit_stack = AsyncExitStack()
        self.offloader_bytes = 0

    async def __aenter__(self) -> Self:
        stored = self._source.new(self._block_count)
        caches = CanonicalKVCaches.from_layers([self._layer], block_tokens=_BLOCK_TOKENS)
        opening = open_offloader(
            caches,
            cpu_bytes=self._block_count * PAGE_BYTES,
            policy=self._size.policy,
            in_flight_bytes=self._size.in_flight_bytes,
        )
        tracemalloc.start()
        try:
            self.offloader = await self._exit_stack.enter_async_context(opening)
            manager = self.offloader.manager
            for batch in batches(stored, self._size.request_blocks):
                manager.complete_store_nowait(manager.prepare_store_nowait(batch, depths=depths_of(batch)))
            self.offloader_bytes, _ = tracemalloc.get_traced_memory()
        finally:
            tracemalloc.stop()
        self.offloader.memory.buffer[::PAGE_BYTES] = 1  # so that no copy waits for the system to find a page
        return self

    async def __aexit__(self, *error: object) -> None:
        await self._exit_stack.aclose()

    def holds(self, key: OffloadKey) -> bool:
        """Return whether a block is stored."""
        return self.offloader.manager.lookup_nowait([key]) == [LookupResult.HIT]

    def choose(self) -> list[OffloadKey]:
        """Return random blocks that are stored, for a request to load.

        Raises:
            ConfigurationError: There are too few.
        """
        count = self._size.request_blocks
        chosen = self._source.stored(count, [self])
        if len(chosen) < count:
            raise ConfigurationError(f"of {self._block_count} CPU blocks too few are stored; take another policy")
        return chosen

    async def serve(self, loaded: Sequence[OffloadKey], place: int) -> None:
        """Load blocks that are stored now and store new ones, with the GPU blocks of one place."""
        count = self._size.request_blocks
        first = 2 * count * place
        await self.offloader.load(loaded, range(first, first + count))
        await self.offloader.store(self._source.new(count), range(first + count, first + 2 * count))


async def _measure_requests(size: PathSize) -> tuple[RequestCost, ...]:
    """Measure requests to offloaders of all sizes in turns, so that other load on the machine meets all of them."""
    async with AsyncExitStack() as stack:
        engines = [await stack.enter_async_context(_Engine(size, count, 1)) for count in size.block_counts]
        calls: list[list[tuple[float, float, float]]] = [[] for _ in engines]
        for _ in range(size.request_count):
            for engine, found in zip(engines, calls, strict=True):
                loaded = engine.choose()
                started = time.process_time(), time.thread_time(), time.perf_counter()
                await engine.serve(loaded, 0)
                ended = time.process_time(), time.thread_time(), time.perf_counter()
                found.append((ended[0] - started[0], ended[1] - started[1], ended[2] - started[2]))
    costs = []
    for block_count, engine, found in zip(size.block_counts, engines, calls, strict=True):
        processor, loop, wall = (sorted(seconds) for seconds in zip(*found, strict=True))
        costs.append(
            RequestCost(
                block_count=block_count,
                processor_ms=1e3 * statistics.median(processor),
                p99_processor_ms=1e3 * processor[len(processor) * 99 // 100],
                loop_ms=1e3 * statistics.median(loop),
                wall_ms=1e3 * statistics.median(wall),
                bytes_per_block=engine.offloader_bytes / block_count,
            )
        )
    return tuple(costs)


async def _measure_crowd(size: PathSize) -> CrowdCost:
    waits: list[float] = []

    async def make_requests(place: int) -> None:
        for _ in range(size.turns):
            asked = time.perf_counter()
            await engine.serve(engine.choose(), place)
            waits.append(time.perf_counter() - asked)

    block_count = _REQUESTS_HELD * size.concurrency * size.request_blocks
    async with _Engine(size, block_count, size.concurrency) as engine:
        engine.choose()  # a mistake is told by itself here, and not as one of a group
        before = _resident_bytes()
        steps = _Steps(engine.offloader)
        async with anyio.create_task_group() as tasks:
            for place in range(size.concurrency):
                tasks.start_soon(make_requests, place)
            await anyio.lowlevel.checkpoint()
            while len(waits) < size.concurrency * size.turns:
                time.sleep(size.step_seconds)  # noqa: ASYNC251  blocks the event loop on purpose, as a step does
                steps.poll()
                await anyio.lowlevel.checkpoint()
    return steps.cost(waits, before)


class _Steps:
    """What is seen from step to step."""

    def __init__(self, offloader: Offloader) -> None:
        self._offloader = offloader
        self._moved_bytes = 0
        self._moves: list[int] = []
        self._idle_count = 0
        self._most_in_flight_bytes = self._most_queued = self._most_resident_bytes = 0

    def poll(self) -> None:
        """Poll, as an engine does between steps, and look."""
        before = self._offloader.statistics()
        self._offloader.poll()
        after = self._offloader.statistics()
        moved_bytes = after.stored_bytes + after.loaded_bytes
        self._moves.append(moved_bytes - self._moved_bytes)
        self._idle_count += moved_bytes == self._moved_bytes and before.sent_transfers + before.queued_transfers > 0
        self._moved_bytes = moved_bytes
        self._most_in_flight_bytes = max(self._most_in_flight_bytes, before.in_flight_bytes, after.in_flight_bytes)
        self._most_queued = max(self._most_queued, before.queued_transfers)
        self._most_resident_bytes = max(self._most_resident_bytes, _resident_bytes() or 0)

    def cost(self, waits: Sequence[float], resident_bytes_before: int | None) -> CrowdCost:
        """Sum up."""
        grown = None if resident_bytes_before is None else self._most_resident_bytes - resident_bytes_before
        return CrowdCost(
            request_count=len(waits),
            step_count=len(self._moves),
            wait_p50_ms=1e3 * statistics.median(waits),
            wait_max_ms=1e3 * max(waits),
            moved_bytes_per_step=statistics.fmean(self._moves),
            idle_step_count=self._idle_count,
            most_in_flight_bytes=self._most_in_flight_bytes,
            most_queued=self._most_queued,
            grown_bytes=grown,
        )


def _mebibytes(byte_count: float | None) -> str:
    return "-" if byte_count is None else f"{byte_count / 2**20:.1f} MiB"


def _resident_bytes() -> int | None:
    """Return the memory that this process has in use, where the system tells."""
    if not _MEMORY_STATUS.exists():
        return None
    return int(_MEMORY_STATUS.read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")
