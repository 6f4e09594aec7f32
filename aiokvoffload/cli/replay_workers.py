"""A replay with several worker processes: the scheduler is this one, each rank a process with a GPU of its own."""

from __future__ import annotations

import os
import secrets
from collections.abc import Callable, Iterator, Sequence

import anyio

from aiokvoffload.cli.children import ChildProcess
from aiokvoffload.cli.gpu import BlockPool, Corruption
from aiokvoffload.cli.options import ReplayOptions, require_room
from aiokvoffload.cli.prefix_cache import PrefixCache
from aiokvoffload.cli.rank_process import JOIN_SECONDS, RankProcess, RankReport, Step
from aiokvoffload.cli.replay import bandwidth
from aiokvoffload.cli.report import ReplayReport, TierReport, progress
from aiokvoffload.cli.requests import gpu_hashes_of, keys_of, requests_of
from aiokvoffload.cli.stall import DurationHistogram, LoopStallMeter
from aiokvoffload.cli.trace import TRACE_BLOCK_TOKENS, TraceRequest
from aiokvoffload.clock import SystemClock
from aiokvoffload.errors import RankLostError
from aiokvoffload.keys import CacheIdentity
from aiokvoffload.memory.base import PreparationProgress
from aiokvoffload.offloader import Deadlines, Offloader, TransferHandle, open_offloader
from aiokvoffload.specs import LookupResult, ReqContext

_STALL_INTERVAL_SECONDS = 0.002
_END_SECONDS = 30.0


class RankProcesses:
    """The processes of all ranks, and the pipes to them; whoever leaves the context leaves none behind.

    Args:
        options: What is replayed.
        block_count: GPU blocks of each.
        engine_id: Which engine they join.
        rank_class: What they run.
    """

    def __init__(
        self, options: ReplayOptions, block_count: int, engine_id: str, rank_class: type[RankProcess] = RankProcess
    ) -> None:
        self._processes: list[ChildProcess] = []
        try:
            for rank in range(options.workers or 1):
                arguments = (options, block_count, engine_id, rank)
                self._processes.append(ChildProcess(f"rank {rank}", rank_class.work, *arguments))
        except BaseException:
            self.end()
            raise

    def __len__(self) -> int:
        return len(self._processes)

    def check_alive(self, _progress: PreparationProgress | None = None) -> None:
        """Refuse to go on without one of them.

        Raises:
            RankLostError: One has ended.
        """
        for process in self._processes:
            process.check()

    def send(self, step: Step | None) -> None:
        """Send a message to all of them; blocks while their pipes are full.

        Raises:
            RankLostError: One has ended.
        """
        for process in self._processes:
            process.send(step)

    def reports(self) -> list[RankReport]:
        """End the steps, and return what all of them have found.

        Raises:
            RankLostError: One has ended without saying so.
        """
        self.send(None)
        return [process.receive() for process in self._processes]

    def end(self) -> None:
        """Let them leave, and wait for them; kill those that do not go."""
        for process in self._processes:
            process.end(_END_SECONDS)
        self._processes.clear()


class Stepper:
    """Makes the steps of the engine: what tasks want computed, and the jobs so far, go out together.

    Args:
        offloader: Whose jobs.
        ranks: Where to.
    """

    def __init__(self, offloader: Offloader, ranks: RankProcesses) -> None:
        self._offloader = offloader
        self._ranks = ranks
        self._loaded: dict[int, bytes] = {}
        self._computed: dict[int, bytes] = {}
        self._is_wanted = anyio.Event()
        self._is_sent = anyio.Event()

    def want(self) -> None:
        """Let there be a step soon."""
        self._is_wanted.set()

    async def step(self, loaded: dict[int, bytes], computed: dict[int, bytes]) -> None:
        """Have blocks read and written in the next step, and wait until its message is sent."""
        self._loaded |= loaded
        self._computed |= computed
        self.want()
        await self._is_sent.wait()

    async def run(self) -> None:
        """Make steps until cancelled; the last one takes the jobs that are left, which closing waits for."""
        try:
            await self._make_steps()
        except anyio.get_cancelled_exc_class():
            with anyio.CancelScope(shield=True):
                await anyio.to_thread.run_sync(self._ranks.send, Step(self._offloader.take_jobs(), {}, {}))
            raise

    async def _make_steps(self) -> None:
        while True:
            await self._is_wanted.wait()
            self._is_wanted = anyio.Event()
            is_sent, self._is_sent = self._is_sent, anyio.Event()
            step = Step(self._offloader.take_jobs(), self._loaded, self._computed)
            self._loaded, self._computed = {}, {}
            await anyio.to_thread.run_sync(self._ranks.send, step)
            is_sent.set()


class WorkersReplay:
    """Replays requests through a scheduler and its ranks.

    Args:
        options: What to replay, and how.
        requests: The requests, in the order of their arrival.
        rank_class: What the ranks run.

    Raises:
        ConfigurationError: A request needs more GPU blocks than there are.
    """

    def __init__(
        self, options: ReplayOptions, requests: Sequence[TraceRequest], rank_class: type[RankProcess] = RankProcess
    ) -> None:
        self._options = options
        self._requests = requests
        self._rank_class = rank_class
        longest = max(len(request.hash_ids) for request in requests)
        self._block_count = options.gpu_blocks or max(options.block_size_factor, options.concurrency * longest)
        require_room(longest, self._block_count)
        self._clock = SystemClock()
        self._pool = BlockPool(PrefixCache(self._block_count, is_caching=False))
        self._corruption = Corruption(options.corrupt, options.seed)
        self._load_waits = DurationHistogram()
        self._looked_up = self._hits = 0

    async def run(self) -> ReplayReport:
        """Replay all requests and return what was found.

        Raises:
            RankLostError: A rank has ended.
        """
        options = self._options
        engine_id = f"replay-{os.getpid()}-{secrets.token_hex(4)}"
        ranks = RankProcesses(options, self._block_count, engine_id, self._rank_class)
        try:
            started = self._clock.now()
            async with open_offloader(
                None,
                cpu_bytes=options.cpu_bytes,
                policy=options.policy,
                store_threshold=options.store_threshold,
                identity=CacheIdentity(model="aiokvoffload replay"),
                tiers=options.tiers,
                deadlines=Deadlines(join_seconds=JOIN_SECONDS),
                on_progress=ranks.check_alive,
                clock=self._clock,
                engine_id=engine_id,
                world_size=len(ranks),
            ) as offloader:
                meter = LoopStallMeter(self._clock, interval_seconds=_STALL_INTERVAL_SECONDS)
                async with meter, anyio.create_task_group() as background:
                    stepper = Stepper(offloader, ranks)
                    background.start_soon(stepper.run)
                    await self._serve_all(offloader, stepper)
                    background.cancel_scope.cancel()
                await offloader.wait_written()
                statistics = offloader.statistics()
                reports = await anyio.to_thread.run_sync(ranks.reports)
        except BaseExceptionGroup as group:
            if (lost := group.subgroup(RankLostError)) is not None:
                raise _first(lost) from group
            raise
        finally:
            ranks.end()
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
            blocks_verified=min(report.verified_count for report in reports),
            mismatches=sum(report.mismatch_count for report in reports),
            order_violations=sum(report.violation_count or 0 for report in reports) if options.check_order else None,
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

    async def _serve_all(self, offloader: Offloader, stepper: Stepper) -> None:
        arrivals = iter(enumerate(self._requests))
        with progress(len(self._requests), "replaying") as advance:
            async with anyio.create_task_group() as tasks:
                for _ in range(self._options.concurrency):
                    tasks.start_soon(self._serve, offloader, stepper, arrivals, advance)

    async def _serve(
        self,
        offloader: Offloader,
        stepper: Stepper,
        arrivals: Iterator[tuple[int, TraceRequest]],
        advance: Callable[[int], None],
    ) -> None:
        for number, request in arrivals:
            await self._serve_one(offloader, stepper, number, request)
            advance(1)

    async def _serve_one(self, offloader: Offloader, stepper: Stepper, number: int, request: TraceRequest) -> None:
        """Load what hits, compute the rest, store it, and give the GPU blocks back.

        Every second request is computed behind a fence, in the very step that carries its load.
        """
        factor = self._options.block_size_factor
        ctx = ReqContext(str(number), session_id=request.session)
        hashes = gpu_hashes_of(request)
        keys = keys_of(hashes, factor)
        self._looked_up += len(hashes)
        self._corruption.strike(offloader.manager, offloader.memory, keys)
        asked = self._clock.now()
        with offloader.prepare_load(keys, ctx) as ticket:
            await ticket.ready()
            waited = self._clock.now() - asked
            grant = await self._pool.take(hashes)
            blocks = grant.blocks
            handle: TransferHandle | None = None
            hit_count = 0
            started = self._clock.now()
            if ticket.result is LookupResult.HIT:
                hit_count = ticket.token_count // TRACE_BLOCK_TOKENS
                handle = ticket.start(blocks[:hit_count])
                if number % 2:
                    handle.fence()
                else:
                    stepper.want()
                    hit_count = (await handle).token_count // TRACE_BLOCK_TOKENS
        content = list(zip(blocks, hashes, strict=True))
        await stepper.step(dict(content[:hit_count]), dict(content[hit_count:]))
        if handle is not None:
            hit_count = (await handle).token_count // TRACE_BLOCK_TOKENS
            self._load_waits.record(waited + self._clock.now() - started)
        self._hits += hit_count
        first = hit_count // factor
        store = offloader.store_soon(keys[first:], blocks[first * factor : len(keys) * factor], ctx, first_block=first)
        stepper.want()
        await store
        self._pool.give_back(grant)


def _first(group: BaseExceptionGroup[RankLostError]) -> RankLostError:
    first = group.exceptions[0]
    return _first(first) if isinstance(first, BaseExceptionGroup) else first


def replay_workers(options: ReplayOptions, *, rank_class: type[RankProcess] = RankProcess) -> ReplayReport:
    """Replay requests with several worker processes, in an event loop of its own.

    Args:
        options: What to replay, and how.
        rank_class: What the ranks run.

    Raises:
        TraceError: The trace cannot be read.
        ConfigurationError: The policy is unknown, or a request needs more GPU blocks than there are.
        RankLostError: A rank has ended.
    """
    requests = requests_of(options)

    async def main() -> ReplayReport:
        return await WorkersReplay(options, requests, rank_class).run()

    return anyio.run(main, backend=options.backend)
