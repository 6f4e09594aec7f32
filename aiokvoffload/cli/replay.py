"""A replay with bytes: an async serving loop that loads, computes, stores and reuses GPU blocks."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from functools import reduce
from multiprocessing.connection import Connection

import anyio

from aiokvoffload.cli.children import ChildProcess
from aiokvoffload.cli.gpu import BlockPool, Corruption, SimulatedGpu
from aiokvoffload.cli.options import ReplayOptions, require_room
from aiokvoffload.cli.prefix_cache import Grant, PrefixCache
from aiokvoffload.cli.report import GpuLevelReport, ReplayReport, TierReport, progress
from aiokvoffload.cli.requests import gpu_hashes_of, keys_of, requests_of
from aiokvoffload.cli.stall import DurationHistogram, LoopStallMeter
from aiokvoffload.cli.trace import TRACE_BLOCK_TOKENS, TraceRequest
from aiokvoffload.clock import SystemClock
from aiokvoffload.devices.base import SimulatedDevice
from aiokvoffload.devices.host import HostDevice
from aiokvoffload.keys import CacheIdentity
from aiokvoffload.kv_caches import CanonicalKVCaches
from aiokvoffload.offloader import Offloader, TransferHandle, open_offloader
from aiokvoffload.specs import LookupResult, ReqContext
from aiokvoffload.testing.order import OrderChecker

_STALL_INTERVAL_SECONDS = 0.002
_END_SECONDS = 30.0


class Replay:
    """Replays requests through an offloader on a simulated GPU.

    Args:
        options: What to replay, and how.
        requests: The requests, in the order of their arrival.
        device: Runs the GPU's work, and is closed at the end; by default the host device.

    Raises:
        ConfigurationError: A request needs more GPU blocks than there are.
    """

    def __init__(
        self, options: ReplayOptions, requests: Sequence[TraceRequest], device: SimulatedDevice | None = None
    ) -> None:
        self._options = options
        self._requests = requests
        longest = max(len(request.hash_ids) for request in requests)
        block_count = options.gpu_blocks or max(options.block_size_factor, options.concurrency * longest)
        require_room(longest, block_count)
        self._clock = SystemClock()
        self._device = device or HostDevice()
        if options.check_order:
            self._device = OrderChecker(self._device)
        self._gpu = SimulatedGpu(options, block_count, self._device)
        self._cache = PrefixCache(block_count, is_caching=options.gpu_blocks is not None)
        self._pool = BlockPool(self._cache)
        self._corruption = Corruption(options.corrupt, options.seed)
        self._load_waits = DurationHistogram()
        self._looked_up = self._hits = self._gpu_hits = 0

    async def run(self) -> ReplayReport:
        """Replay all requests and return what was found."""
        options = self._options
        caches = CanonicalKVCaches.from_layers(self._gpu.layers, block_tokens=TRACE_BLOCK_TOKENS)
        started = self._clock.now()
        async with open_offloader(
            caches,
            cpu_bytes=options.cpu_bytes,
            block_size_factor=options.block_size_factor,
            identity=CacheIdentity(model="aiokvoffload replay"),
            policy=options.policy,
            placement=options.placement,
            store_threshold=options.store_threshold,
            tiers=options.tiers,
            device=self._device,
            compute_stream=self._gpu.compute_stream,
            clock=self._clock,
        ) as offloader:
            if isinstance(self._device, OrderChecker):
                memory = offloader.memory
                self._device.watch(
                    "slots", memory.address, memory.slot_count, memory.slot_bytes, cell_bytes=options.page_bytes
                )
            arrivals = iter(enumerate(self._requests))
            meter = LoopStallMeter(self._clock, interval_seconds=_STALL_INTERVAL_SECONDS)
            with progress(len(self._requests), "replaying") as advance:
                async with meter, anyio.create_task_group() as tasks:
                    for _ in range(options.concurrency):
                        tasks.start_soon(self._serve, offloader, arrivals, advance)
            self._device.synchronize(self._device.record(self._gpu.compute_stream), offloader.deadlines.landing_seconds)
            await offloader.wait_written()
            statistics = offloader.statistics()
        self._device.close()
        return ReplayReport(
            policy=options.policy,
            cpu_blocks=options.cpu_blocks,
            requests=len(self._requests),
            blocks_looked_up=self._looked_up,
            blocks_hit=self._hits,
            gpu_level=GpuLevelReport.of(options, self._gpu_hits),
            bytes_stored=statistics.stored_bytes,
            bytes_loaded=statistics.loaded_bytes,
            store_gigabytes_per_second=bandwidth(statistics.stored_bytes, statistics.store_seconds),
            load_gigabytes_per_second=bandwidth(statistics.loaded_bytes, statistics.load_seconds),
            blocks_verified=self._gpu.verified_count,
            mismatches=self._gpu.mismatch_count,
            order_violations=self._device.violation_count if isinstance(self._device, OrderChecker) else None,
            evictions=statistics.manager.evicted_blocks,
            refused_stores=statistics.manager.refused_blocks,
            max_loop_stall_ms=meter.max_stall_ms,
            load_wait_p50_ms=self._load_waits.percentile_seconds(50) * 1000,
            load_wait_p99_ms=self._load_waits.percentile_seconds(99) * 1000,
            left_pinned=statistics.manager.pinned,
            left_leased=statistics.manager.writing + statistics.manager.leased_without_key,
            seconds=self._clock.now() - started,
            tiers=tuple(map(TierReport.of, statistics.tiers)),
        )

    async def _serve(
        self,
        offloader: Offloader,
        arrivals: Iterator[tuple[int, TraceRequest]],
        advance: Callable[[int], None],
    ) -> None:
        for number, request in arrivals:
            await self._serve_one(offloader, ReqContext(str(number), session_id=request.session), request)
            advance(1)

    async def _serve_one(self, offloader: Offloader, ctx: ReqContext, request: TraceRequest) -> None:
        """Load what hits below the GPU, compute the rest, store what must be stored, and give the GPU blocks back."""
        factor = self._options.block_size_factor
        hashes = gpu_hashes_of(request)
        keys = keys_of(hashes, factor)
        self._looked_up += len(hashes)
        self._corruption.strike(offloader.manager, offloader.memory, keys)
        grant = await self._pool.take(hashes)
        hit_count = grant.hit_count
        asked = self._clock.now()
        with offloader.prepare_load(keys, ctx, resident_tokens=hit_count * TRACE_BLOCK_TOKENS) as ticket:
            demotion = self._demote(offloader, grant)  # what this request is about to load is pinned by now
            await ticket.ready()
            if ticket.result is LookupResult.HIT:
                (size,), (first,) = ticket.group_sizes, ticket.block_indices
                result = await ticket.start(grant.blocks[first : first + size])
                hit_count = max(hit_count, result.token_count // TRACE_BLOCK_TOKENS)
                self._load_waits.record(self._clock.now() - asked)
        self._gpu_hits += grant.hit_count
        self._hits += hit_count
        content = list(zip(grant.blocks, hashes, strict=True))
        self._gpu.step(dict(content[:hit_count]), dict(content[hit_count:]))
        self._cache.publish(grant)
        if self._options.placement == "inclusive":
            first = hit_count // factor
            blocks = grant.blocks[first * factor : len(keys) * factor]
            await offloader.store_soon(keys[first:], blocks, ctx, first_block=first)
        if demotion is not None:
            await demotion
        self._pool.give_back(grant)
        if self._options.cascade == "wait":
            await offloader.wait_written()

    def _demote(self, offloader: Offloader, grant: Grant) -> TransferHandle | None:
        """Store what the GPU has given up for a request; its blocks can be written again behind the fence."""
        if self._options.placement == "inclusive" or not grant.given_up:
            return None
        hashes, blocks = zip(*reversed(grant.given_up), strict=True)
        handle = offloader.demote_soon(keys_of(hashes, 1), blocks)
        handle.fence()
        return handle


def bandwidth(byte_count: int, seconds: float) -> float | None:
    """Return gigabytes per second; None if nothing has taken any time."""
    return byte_count / seconds / 1e9 if seconds > 0 else None


def replay(options: ReplayOptions) -> ReplayReport:
    """Replay requests with bytes, in an event loop of its own; several engines each in a process of their own.

    Raises:
        TraceError: The trace cannot be read.
        ConfigurationError: The policy is unknown, or a request needs more GPU blocks than there are.
        RankLostError: The process of an engine has ended.
    """
    requests = requests_of(options)
    return _replay(options, requests) if options.engines == 1 else _replay_engines(options, requests)


def _replay_engines(options: ReplayOptions, requests: Sequence[TraceRequest]) -> ReplayReport:
    """Replay requests in several engines, each in a process of its own; none outlives an error or an interrupt."""
    engines: list[ChildProcess] = []
    patience_seconds = 0.0
    try:
        engines.extend(ChildProcess(f"engine {number}", _be_engine, options) for number in range(options.engines))
        for number, engine in enumerate(engines):
            engine.send(requests[number :: options.engines])
        reports: list[ReplayReport] = [engine.receive() for engine in engines]
        patience_seconds = _END_SECONDS
    finally:
        for engine in engines:
            engine.end(patience_seconds)
    return reduce(ReplayReport.joined, reports)


def _be_engine(options: ReplayOptions, pipe: Connection) -> None:
    pipe.send(_replay(options, pipe.recv()))


def _replay(options: ReplayOptions, requests: Sequence[TraceRequest]) -> ReplayReport:
    """Replay requests in one engine, which may be closed and opened again on the way."""
    first = options.restart_after or len(requests)

    async def main() -> ReplayReport:
        report = await Replay(options, requests[:first]).run()
        if rest := requests[first:]:
            later = await Replay(options, rest).run()
            report = replace(report.joined(later), seconds=report.seconds + later.seconds)
        return report

    return anyio.run(main, backend=options.backend)
