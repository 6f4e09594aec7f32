"""The whole path with bytes: requests through an offloader with many CPU blocks, and many requests at once.

Processor time is that of all threads of the process, so the copies count.
"""

from __future__ import annotations

import gc
import os
import random
import statistics
import sys
import time
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

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

PAGE_BYTES = 4096
_BLOCK_TOKENS = 16
_REQUESTS_HELD = 8
_REFERENCES_PER_KEY = 2
_REFERENCE_BYTES = 8
_MEMORY_STATUS = Path("/proc/self/statm")


@dataclass(frozen=True, slots=True, kw_only=True)
class PathSize:
    """How much is measured.

    Attributes:
        block_counts: CPU blocks, one offloader after the other.
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
        wall_ms: On the clock, median.
        grown_bytes: Memory that the full offloader takes beside slots and keys; None where the system does not tell.
    """

    block_count: int
    processor_ms: float
    p99_processor_ms: float
    wall_ms: float
    grown_bytes: int | None


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
                f"{cost.wall_ms:.2f}",
                _mebibytes(cost.grown_bytes),
            )
            for cost in self.requests
        ]
        columns = ("CPU blocks", "processor ms", "growth", "p99", "on the clock, ms", "memory beside slots and keys")
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


def measure_path(size: PathSize) -> PathCost:
    """Measure requests one after the other at every size, and many at once.

    Raises:
        ConfigurationError: The machine cannot give that much memory, or the policy is unknown.
    """
    requests = tuple(anyio.run(_measure_requests, size, block_count) for block_count in size.block_counts)
    return PathCost(size=size, requests=requests, crowd=anyio.run(_measure_crowd, size))


class _Engine:
    """Blocks of a GPU, and requests for them.

    Args:
        size: How much is measured.
        request_count: How many requests there are at a time.
    """

    def __init__(self, size: PathSize, request_count: int) -> None:
        self._size = size
        self._source = KeySource(0)
        self._random = random.Random(0)  # noqa: S311  reproducible, not secret
        self._stored: list[OffloadKey] = []
        self._layer = torch.ones((2 * size.request_blocks * request_count, PAGE_BYTES), dtype=torch.uint8)

    @property
    def bytes_per_key(self) -> int:
        """Memory that the engine itself takes for each stored block."""
        return sys.getsizeof(self._stored[0]) + _REFERENCES_PER_KEY * _REFERENCE_BYTES

    @asynccontextmanager
    async def offloader(self, block_count: int) -> AsyncIterator[Offloader]:
        """Open an offloader, all of whose CPU blocks are taken."""
        caches = CanonicalKVCaches.from_layers([self._layer], block_tokens=_BLOCK_TOKENS)
        size = self._size
        async with open_offloader(
            caches, cpu_bytes=block_count * PAGE_BYTES, policy=size.policy, in_flight_bytes=size.in_flight_bytes
        ) as offloader:
            offloader.memory.buffer[::PAGE_BYTES] = 1  # so that no copy waits for the system to find a page
            self._stored = self._source.new(block_count)
            for batch in batches(self._stored, size.request_blocks):
                ticket = offloader.manager.prepare_store_nowait(batch, depths=depths_of(batch))
                offloader.manager.complete_store_nowait(ticket)
            yield offloader

    async def serve(self, offloader: Offloader, place: int, block_count: int) -> None:
        """Load blocks that are stored and store new ones, with the GPU blocks of one place.

        Raises:
            ConfigurationError: They are not all there, so nothing was measured.
        """
        count = self._size.request_blocks
        first = 2 * count * place
        younger = range(len(self._stored) - block_count // 2, len(self._stored))
        loaded = [self._stored[index] for index in self._random.sample(younger, count)]
        tokens = await offloader.load(loaded, range(first, first + count))
        if tokens != count * _BLOCK_TOKENS:
            raise ConfigurationError(
                f"{tokens} tokens of {count} blocks stored lately were loaded; take more CPU blocks, or another policy"
            )
        stored = self._source.new(count)
        await offloader.store(stored, range(first + count, first + 2 * count))
        self._stored += stored


async def _measure_requests(size: PathSize, block_count: int) -> RequestCost:
    engine = _Engine(size, 1)
    gc.collect()  # an offloader of before may hold its memory still
    before = _resident_bytes()
    async with engine.offloader(block_count) as offloader:
        after = _resident_bytes()
        processor, wall = [], []
        for _ in range(size.request_count):
            started = time.process_time(), time.perf_counter()
            await engine.serve(offloader, 0, block_count)
            processor.append(time.process_time() - started[0])
            wall.append(time.perf_counter() - started[1])
    processor.sort()
    return RequestCost(
        block_count=block_count,
        processor_ms=1e3 * statistics.median(processor),
        p99_processor_ms=1e3 * processor[len(processor) * 99 // 100],
        wall_ms=1e3 * statistics.median(wall),
        grown_bytes=None
        if before is None or after is None
        else after - before - block_count * (PAGE_BYTES + engine.bytes_per_key),
    )


async def _measure_crowd(size: PathSize) -> CrowdCost:
    engine = _Engine(size, size.concurrency)
    block_count = _REQUESTS_HELD * size.concurrency * size.request_blocks
    waits: list[float] = []

    async def make_requests(place: int) -> None:
        for _ in range(size.turns):
            asked = time.perf_counter()
            await engine.serve(offloader, place, block_count)
            waits.append(time.perf_counter() - asked)

    async with engine.offloader(block_count) as offloader:
        gc.collect()  # an offloader of before may hold its memory still
        before = _resident_bytes()
        steps = _Steps(offloader)
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
