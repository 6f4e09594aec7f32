"""A replay with bytes: an async serving loop that loads, computes, stores and reuses GPU blocks."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence

import anyio

from aiokvoffload.cli.gpu import BlockPool, Corruption, SimulatedGpu
from aiokvoffload.cli.options import ReplayOptions
from aiokvoffload.cli.report import ReplayReport, progress
from aiokvoffload.cli.requests import gpu_hashes_of, keys_of, requests_of
from aiokvoffload.cli.stall import DurationHistogram, LoopStallMeter
from aiokvoffload.cli.trace import TRACE_BLOCK_TOKENS, TraceRequest
from aiokvoffload.clock import SystemClock
from aiokvoffload.devices.base import SimulatedDevice
from aiokvoffload.devices.host import HostDevice
from aiokvoffload.errors import ConfigurationError
from aiokvoffload.kv_caches import CanonicalKVCaches
from aiokvoffload.offloader import Offloader, open_offloader
from aiokvoffload.specs import LookupResult, ReqContext
from aiokvoffload.testing.order import OrderChecker

_STALL_INTERVAL_SECONDS = 0.002


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
        if longest > block_count:
            raise ConfigurationError(
                f"a request needs {longest} GPU blocks, but there are {block_count}; use --gpu-blocks {longest} or more"
            )
        self._clock = SystemClock()
        self._device = device or HostDevice()
        if options.check_order:
            self._device = OrderChecker(self._device)
        self._gpu = SimulatedGpu(options, block_count, self._device)
        self._pool = BlockPool(block_count)
        self._corruption = Corruption(options.corrupt, options.seed)
        self._load_waits = DurationHistogram()
        self._looked_up = self._hits = 0

    async def run(self) -> ReplayReport:
        """Replay all requests and return what was found."""
        options = self._options
        caches = CanonicalKVCaches.from_layers(self._gpu.layers, block_tokens=TRACE_BLOCK_TOKENS)
        started = self._clock.now()
        async with open_offloader(
            caches,
            cpu_bytes=options.cpu_bytes,
            block_size_factor=options.block_size_factor,
            policy=options.policy,
            store_threshold=options.store_threshold,
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
            statistics = offloader.statistics()
        self._device.close()
        return ReplayReport(
            policy=options.policy,
            cpu_blocks=options.cpu_blocks,
            requests=len(self._requests),
            blocks_looked_up=self._looked_up,
            blocks_hit=self._hits,
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
        """Load what hits, compute the rest, store it, and give the GPU blocks back."""
        factor = self._options.block_size_factor
        hashes = gpu_hashes_of(request)
        keys = keys_of(hashes, factor)
        self._looked_up += len(hashes)
        self._corruption.strike(offloader.manager, offloader.memory, keys)
        asked = self._clock.now()
        with offloader.prepare_load(keys, ctx) as ticket:
            await ticket.ready()
            waited = self._clock.now() - asked
            blocks = await self._pool.take(len(hashes))
            hit_count = 0
            if ticket.result is LookupResult.HIT:
                started = self._clock.now()
                result = await ticket.start(blocks[: sum(ticket.group_sizes)])
                hit_count = result.token_count // TRACE_BLOCK_TOKENS
                self._load_waits.record(waited + self._clock.now() - started)
        self._hits += hit_count
        content = dict(zip(blocks, hashes, strict=True))
        self._gpu.step(
            {block: content[block] for block in blocks[:hit_count]},
            {block: content[block] for block in blocks[hit_count:]},
        )
        first = hit_count // factor
        await offloader.store_soon(keys[first:], blocks[hit_count : len(keys) * factor], ctx, first_block=first)
        self._pool.give_back(blocks)


def bandwidth(byte_count: int, seconds: float) -> float | None:
    """Return gigabytes per second; None if nothing has taken any time."""
    return byte_count / seconds / 1e9 if seconds > 0 else None


def replay(options: ReplayOptions) -> ReplayReport:
    """Replay requests with bytes, in an event loop of its own.

    Raises:
        TraceError: The trace cannot be read.
        ConfigurationError: The policy is unknown, or a request needs more GPU blocks than there are.
    """
    requests = requests_of(options)

    async def main() -> ReplayReport:
        return await Replay(options, requests).run()

    return anyio.run(main, backend=options.backend)
