"""A replay without bytes: one request after the other through a manager, to find hit rates."""

from __future__ import annotations

from aiokvoffload.cli.options import ReplayOptions, require_room
from aiokvoffload.cli.prefix_cache import PrefixCache
from aiokvoffload.cli.report import GpuLevelReport, ReplayReport, progress
from aiokvoffload.cli.requests import gpu_hashes_of, keys_of, requests_of
from aiokvoffload.cli.trace import TRACE_BLOCK_TOKENS, TraceRequest
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

    A request's hits are its longest leading run of blocks that the GPU level, if there is one, or CPU memory has. It
    touches all its blocks. Then it stores what is missing; or, under exclusive placement, what the GPU level gives up
    for it is stored.

    Raises:
        TraceError: The trace cannot be read.
        ConfigurationError: The policy is unknown, or a request is larger than the GPU level.
    """
    requests = requests_of(options)
    if options.gpu_blocks is not None:
        require_room(max(len(request.hash_ids) for request in requests), options.gpu_blocks)
    simulation = _Simulation(options)
    clock = SystemClock()
    started = clock.now()
    with progress(len(requests), "replaying") as advance:
        for number, request in enumerate(requests):
            simulation.serve(number, request)
            advance(1)
    statistics = simulation.manager.statistics()
    return ReplayReport(
        policy=options.policy,
        cpu_blocks=options.cpu_blocks,
        requests=len(requests),
        blocks_looked_up=simulation.looked_up_count,
        blocks_hit=simulation.hit_count,
        gpu_level=GpuLevelReport.of(options, simulation.gpu_hit_count),
        evictions=statistics.evicted_blocks,
        refused_stores=statistics.refused_blocks,
        left_pinned=statistics.pinned,
        left_leased=statistics.writing + statistics.leased_without_key,
        seconds=clock.now() - started,
    )


class _Simulation:
    """Serves one request after the other.

    Args:
        options: Sizes, policy and placement.
    """

    def __init__(self, options: ReplayOptions) -> None:
        self._clock = TraceClock()
        self._factor = options.block_size_factor
        self._is_exclusive = options.placement == "exclusive"
        self._gpu_level = None if options.gpu_blocks is None else PrefixCache(options.gpu_blocks)
        self.manager = with_reuse_filter(
            CPUOffloadingManager(
                options.cpu_blocks,
                policy=options.policy,
                blocks_above=options.gpu_blocks or 0 if self._is_exclusive else 0,
                clock=self._clock,
            ),
            options.store_threshold,
        )
        self.looked_up_count = self.hit_count = self.gpu_hit_count = 0

    def serve(self, number: int, request: TraceRequest) -> None:
        """Serve a request."""
        factor, manager = self._factor, self.manager
        self._clock.seconds = request.timestamp_ms / 1000
        ctx = ReqContext(str(number), session_id=request.session)
        hashes = gpu_hashes_of(request)
        keys = keys_of(hashes, factor)
        width = TRACE_BLOCK_TOKENS * factor
        depths = range(width, width * (len(keys) + 1), width)
        grant = self._gpu_level.take(hashes) if self._gpu_level is not None else None
        gpu_hits = grant.hit_count if grant is not None else 0
        self.looked_up_count += len(hashes)
        self.gpu_hit_count += gpu_hits
        manager.touch(keys, ctx, depths=depths)
        if self._is_exclusive:
            # What the request loads is pinned while the GPU gives up blocks for it.
            load = manager.prepare_load_nowait(keys, ctx, take="leading", resident_tokens=gpu_hits)
            if grant is not None:
                # What was given up last was used last, and of one request the head was given up last.
                given_up = keys_of([content for content, _ in reversed(grant.given_up)], 1)
                manager.complete_store_nowait(manager.prepare_demotion_nowait(given_up))
            hits = max(gpu_hits, load.token_count)
            manager.complete_load_nowait(load, take_along=True)
        else:
            found = manager.lookup_prefix_nowait(keys, ctx, resident_tokens=gpu_hits // factor)
            hits = max(gpu_hits, found * factor)
            first = hits // factor
            store = manager.prepare_store_nowait(keys[first:], ctx, when_full="leading", depths=depths[first:])
            manager.complete_store_nowait(store)
        self.hit_count += hits
        if self._gpu_level is not None and grant is not None:
            self._gpu_level.publish(grant)
            self._gpu_level.release(grant)
