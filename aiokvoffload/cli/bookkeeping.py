"""A replay without bytes: one request after the other through a manager, to find hit rates."""

from __future__ import annotations

from aiokvoffload.cli.options import ReplayOptions
from aiokvoffload.cli.report import ReplayReport, progress
from aiokvoffload.cli.requests import gpu_hashes_of, keys_of, requests_of
from aiokvoffload.cli.trace import TRACE_BLOCK_TOKENS
from aiokvoffload.clock import SystemClock
from aiokvoffload.managers.cpu import CPUOffloadingManager
from aiokvoffload.managers.reuse import with_reuse_filter
from aiokvoffload.specs import ReqContext


class TraceClock(SystemClock):
    """Shows the time of the request that is being replayed, as policies would see it."""

    seconds = 0.0

    def now(self) -> float:
        """Return the seconds since the start of the trace."""
        return self.seconds


def simulate(options: ReplayOptions) -> ReplayReport:
    """Replay the bookkeeping alone.

    A request's hits are its longest leading run of stored blocks. Then it touches all its blocks, and stores what
    is missing.

    Raises:
        TraceError: The trace cannot be read.
        ConfigurationError: The policy is unknown.
    """
    trace_clock = TraceClock()
    manager = with_reuse_filter(
        CPUOffloadingManager(options.cpu_blocks, policy=options.policy, clock=trace_clock), options.store_threshold
    )
    requests = requests_of(options)
    factor = options.block_size_factor
    width = TRACE_BLOCK_TOKENS * factor
    looked_up = hits = 0
    clock = SystemClock()
    started = clock.now()
    with progress(len(requests), "replaying") as advance:
        for number, request in enumerate(requests):
            trace_clock.seconds = request.timestamp_ms / 1000
            ctx = ReqContext(str(number), session_id=request.session)
            keys = keys_of(gpu_hashes_of(request), factor)
            depths = range(width, width * (len(keys) + 1), width)
            looked_up += len(request.hash_ids)
            hits += manager.lookup_prefix_nowait(keys, ctx) * factor
            manager.touch(keys, ctx, depths=depths)
            ticket = manager.prepare_store_nowait(keys, ctx, when_full="leading", depths=depths)
            manager.complete_store_nowait(ticket)
            advance(1)
    statistics = manager.statistics()
    return ReplayReport(
        policy=options.policy,
        cpu_blocks=options.cpu_blocks,
        requests=len(requests),
        blocks_looked_up=looked_up,
        blocks_hit=hits,
        evictions=statistics.evicted_blocks,
        refused_stores=statistics.refused_blocks,
        left_pinned=statistics.pinned,
        left_leased=statistics.writing + statistics.leased_without_key,
        seconds=clock.now() - started,
    )
