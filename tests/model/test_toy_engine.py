"""An LLM server in small on top of the offloader: every byte it reads is checked, and every access ordered."""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Sequence

import anyio
import pytest
import torch
from anyio.lowlevel import checkpoint

from aiokvoffload import CacheIdentity, CanonicalKVCaches, Deadlines, Offloader, OffloadKey, SystemClock
from aiokvoffload.clock import Clock
from aiokvoffload.devices.base import Direction, SimulatedDevice
from aiokvoffload.devices.host import HostDevice
from aiokvoffload.offloader import OffloaderContext
from aiokvoffload.offloader.machine import OffloaderMachine
from aiokvoffload.offloader.parts import build_parts
from aiokvoffload.testing.clock import ManualClock
from aiokvoffload.testing.device import ManualDevice
from aiokvoffload.testing.order import OrderChecker
from aiokvoffload.testing.toy_engine import ToyEngine
from aiokvoffload.testing.toy_kernel import block_content
from aiokvoffload.testing.toy_requests import ToyWorkload

GPU_BLOCKS = 24
LAYERS = 2
BLOCK_TOKENS = 4
PAGE_BYTES = 32
LANDING_SECONDS = 5.0
STEP_SECONDS = 0.1
SEEDS = range(6)
STEPS = 400


class Server:
    """GPU blocks, a watched device, and an offloader that is about to be opened.

    Args:
        device: Moves the bytes.
        clock: For deadlines.
        seed: Of everything random; also picks policy and reuse filter.
        factor: GPU blocks per offloaded block.
        cpu_blocks: Room in CPU memory, in GPU blocks.
        budget_blocks: GPU blocks that may be under way at once, few, so that transfers queue.
    """

    def __init__(
        self,
        device: SimulatedDevice,
        clock: Clock,
        seed: int,
        *,
        factor: int = 1,
        cpu_blocks: int = 24,
        budget_blocks: int = 6,
    ) -> None:
        self.source = random.Random(seed)
        self.checker = OrderChecker(device, strict=True)
        self.compute_stream = self.checker.create_stream("compute")
        layers = [torch.zeros((GPU_BLOCKS, PAGE_BYTES), dtype=torch.int8) for _ in range(LAYERS)]
        self.caches = CanonicalKVCaches.from_layers(layers, block_tokens=BLOCK_TOKENS)
        parts = build_parts(
            self.caches,
            cpu_bytes=cpu_blocks * LAYERS * PAGE_BYTES,
            block_size_factor=factor,
            identity=CacheIdentity(model="toy"),
            policy="lru" if seed % 2 else "arc",
            store_threshold=2 if seed % 3 == 0 else 0,
            device=self.checker,
            compute_stream=self.compute_stream,
            deadlines=Deadlines(landing_seconds=LANDING_SECONDS),
            clock=clock,
            in_flight_bytes=budget_blocks * LAYERS * PAGE_BYTES,
        )
        self.context = OffloaderContext(lambda: parts)

    def make_engine(
        self, offloader: OffloaderMachine, *, free_too_early: bool = False, workload: ToyWorkload | None = None
    ) -> ToyEngine:
        return ToyEngine(
            offloader,
            self.caches,
            self.checker,
            self.compute_stream,
            self.source,
            workload=workload,
            free_too_early=free_too_early,
        )


class ManualServer(Server):
    """A server whose copies land, fail and are refused as the seed has it."""

    def __init__(self, seed: int, *, factor: int = 1, has_faults: bool = True) -> None:
        self.clock = ManualClock()
        self.has_faults = has_faults
        landing_order = random.Random(seed)
        self.manual = ManualDevice(random_order=landing_order, clock=self.clock)
        super().__init__(self.manual, self.clock, seed, factor=factor)

    def pass_time(self) -> None:
        """Let some work land, in any order, and now and then let some of it fail."""
        source = self.source
        if self.has_faults and source.random() < 0.04:
            direction = source.choice(list(Direction))
            self.manual.fail_next_copy(direction, "it broke on purpose", moved_copies=source.randrange(3))
        if self.has_faults and source.random() < 0.01:
            self.manual.refuse_next("it was refused on purpose")
        # Sometimes nothing lands for long, so that copies miss their deadline.
        is_stalled = self.has_faults and source.random() < 0.02
        self.clock.advance(LANDING_SECONDS if is_stalled else STEP_SECONDS)
        for _ in range(0 if is_stalled else source.randrange(7)):
            self.manual.land_next()

    def serve(self, engine: ToyEngine, step_count: int) -> None:
        for _ in range(step_count):
            engine.step()
            self.pass_time()

    def drain(self, engine: ToyEngine) -> None:
        """Let all requests end."""
        self.has_faults = False
        for _ in range(2000):
            if engine.is_drained:
                break
            engine.step(is_open=False)
            self.pass_time()
        self.manual.land_all()


def check_bytes_and_order(server: Server, engine: ToyEngine) -> None:
    assert list(map(str, server.checker.violations)) == []
    assert engine.wrong_block_count == 0
    assert engine.verified_block_count > 1000
    assert server.checker.access_count > 1000


def check_at_rest(offloader: OffloaderMachine) -> None:
    offloader.poll()
    offloader.poll()
    statistics = offloader.statistics()
    manager = statistics.manager
    assert statistics.fault is None
    assert (statistics.queued_transfers, statistics.sent_transfers, statistics.in_flight_bytes) == (0, 0, 0)
    assert manager.free + manager.ready == manager.total
    assert (manager.pinned, manager.waiting_loads, manager.waiting_stores) == (0, 0, 0)
    assert offloader.gpu_blocks_in_flight() == frozenset()


@pytest.mark.parametrize("factor", [1, 2])
def test_an_engine_reads_right_bytes_whatever_order_copies_land_in(factor: int) -> None:
    seen: Counter[str] = Counter()
    for seed in SEEDS:
        server = ManualServer(seed, factor=factor)
        with server.context as offloader:
            engine = server.make_engine(offloader)
            server.serve(engine, STEPS)
            server.drain(engine)
            assert engine.is_drained
            check_bytes_and_order(server, engine)
            check_at_rest(offloader)
            statistics = offloader.statistics()
        seen += engine.counts
        seen["joined blocks"] += statistics.joined_blocks
        seen["evictions"] += statistics.manager.evicted_blocks
        seen["stale completions"] += statistics.manager.rejected_completions
    assert seen["steps"] >= STEPS * len(SEEDS)
    # A load that is refused or waits too long to be sent is no longer there to be joined.
    assert seen["shared blocks"] >= seen["joined blocks"] > 0.9 * seen["shared blocks"]
    for event in (
        "finished",
        "GPU hits",
        "loads",
        "fenced",
        "pending",
        "joined blocks",
        "evictions",
        "accepted stores",
        "resident stores",
        "filtered stores",
        "refused stores",
        "failed stores",
        "failed loads",
        "overdue loads",
        "withdrawn loads",
        "no room to load",
        "no room to compute",
        "preemptions",
        "aborts",
        "aborts while loading",
        "resets",
        "epochs",
        "stale completions",
    ):
        assert seen[event] >= 3, f"{event!r} hardly happened: {seen}"


def test_freeing_gpu_blocks_too_early_is_caught() -> None:
    wrong_block_count = 0
    for seed in SEEDS:
        for free_too_early in (False, True):
            server = ManualServer(seed, has_faults=False)
            with server.context as offloader:
                engine = server.make_engine(offloader, free_too_early=free_too_early)
                server.serve(engine, 150)
                server.drain(engine)
                found = server.checker.violations
                if not free_too_early:
                    assert found == []
                    assert engine.wrong_block_count == 0
                    continue
                # Nothing is overwritten or read too early but GPU blocks: slots are the library's own.
                assert {violation.region for violation in found} == {"GPU tensor 0", "GPU tensor 1"}
                assert "overwrite-too-early" in {violation.kind for violation in found}
                assert {"store", "compute"} <= {
                    stream.partition("-")[0] for it in found for stream in (it.stream, it.earlier_stream)
                }
                wrong_block_count += engine.wrong_block_count
    assert wrong_block_count > 0


@pytest.mark.parametrize("factor", [1, 2])
def test_an_engine_reads_right_bytes_with_true_threads(factor: int) -> None:
    device = HostDevice()
    server = Server(device, SystemClock(), seed=factor, factor=factor)
    with server.context as offloader:
        engine = server.make_engine(offloader, workload=ToyWorkload(forget_chance=0.2, reset_chance=0.02))
        last = engine.step()
        for _ in range(400):
            event = engine.step()
            # Like a server, it launches one step ahead of the device.
            assert server.checker.synchronize(last, 60.0)
            last = event
        for _ in range(2000):
            if engine.is_drained:
                break
            assert server.checker.synchronize(engine.step(is_open=False), 60.0)
        assert engine.is_drained
        check_bytes_and_order(server, engine)
        check_at_rest(offloader)
        statistics = offloader.statistics()
    device.close()
    assert statistics.manager.evicted_blocks > 50
    for name in ("loads", "fenced", "preemptions", "aborts", "resets", "epochs"):
        assert engine.counts[name] >= 1, f"{name!r} never happened: {engine.counts}"


@pytest.mark.anyio
async def test_an_engine_steps_inside_an_event_loop() -> None:
    server = ManualServer(5)
    async with server.context as offloader:
        engine = server.make_engine(offloader)
        for _ in range(300):
            engine.step()
            server.pass_time()
            await checkpoint()
        server.drain(engine)
        assert engine.is_drained
        check_bytes_and_order(server, engine)
        check_at_rest(offloader)
        assert engine.counts["loads"] > 20
        assert offloader.poll_count > 100


class Tasks:
    """Tasks that each own some GPU blocks, and store and load what belongs to their keys."""

    def __init__(self, server: ManualServer, offloader: Offloader) -> None:
        self.server = server
        self.offloader = offloader
        self.counts: Counter[str] = Counter()
        self.wrong: list[str] = []
        self.pages = [canonical.tensor.numpy() for canonical in server.caches.tensors]
        for layer, canonical in enumerate(server.caches.tensors):
            server.checker.watch(f"layer {layer}", canonical.tensor.data_ptr(), GPU_BLOCKS, PAGE_BYTES)
        memory = offloader.memory
        server.checker.watch("slots", memory.address, memory.slot_count, memory.slot_bytes)

    async def serve(self, number: int, blocks: Sequence[int], round_count: int) -> None:
        """Write, store, overwrite, load and check; give up in the middle now and then."""
        source = random.Random(number)
        for _ in range(round_count):
            tokens = [source.randrange(40)] * (BLOCK_TOKENS * source.randint(1, len(blocks)))
            keys = self.offloader.keys(tokens)
            used = blocks[: len(keys)]
            self.write(keys, used)
            with anyio.CancelScope() as scope:
                async with anyio.create_task_group() as others:
                    if source.random() < 0.4:
                        others.start_soon(self.cancel_later, scope, source.randrange(12))
                    outcomes = await self.offloader.store(keys, used)
                    self.counts.update(f"{outcome.value} stores" for outcome in outcomes)
                    self.write([OffloadKey(b"nothing")] * len(used), used)
                    token_count = await self.offloader.load(keys, used)
                    self.counts["loaded blocks"] += token_count // BLOCK_TOKENS
                    self.check(keys[: token_count // BLOCK_TOKENS], used)
                    others.cancel_scope.cancel()
            self.counts["given up"] += scope.cancel_called
            # However that ended, no copy touches the blocks any more.
            assert not self.offloader.gpu_blocks_in_flight() & set(used)

    async def cancel_later(self, scope: anyio.CancelScope, checkpoint_count: int) -> None:
        for _ in range(checkpoint_count):
            await checkpoint()
        scope.cancel()

    async def land_until_over(self, workers: anyio.CancelScope) -> None:
        while not workers.cancel_called:
            self.server.manual.land_next()
            await checkpoint()

    def write(self, keys: Sequence[OffloadKey], blocks: Sequence[int]) -> None:
        def work() -> None:
            for layer, pages in enumerate(self.pages):
                for key, block in zip(keys, blocks, strict=True):
                    pages[block] = block_content(key, layer, 0, PAGE_BYTES)

        writes = [(f"layer {layer}", blocks) for layer in range(LAYERS)]
        self.server.checker.launch(self.server.compute_stream, work, writes=writes, label="writing")

    def check(self, keys: Sequence[OffloadKey], blocks: Sequence[int]) -> None:
        rows = blocks[: len(keys)]

        def work() -> None:
            for layer, pages in enumerate(self.pages):
                for key, block in zip(keys, rows, strict=True):
                    if pages[block].tobytes() != block_content(key, layer, 0, PAGE_BYTES).tobytes():
                        self.wrong.append(f"layer {layer} of block {block}")

        reads = [(f"layer {layer}", rows) for layer in range(LAYERS)]
        self.server.checker.launch(self.server.compute_stream, work, reads=reads, label="checking")


@pytest.mark.anyio
async def test_many_tasks_await_stores_and_loads_that_land_in_any_order() -> None:
    server = ManualServer(7)
    async with server.context as offloader:
        tasks = Tasks(server, offloader)
        done = anyio.CancelScope()
        async with anyio.create_task_group() as outer:
            outer.start_soon(tasks.land_until_over, done)
            async with anyio.create_task_group() as workers:
                for number in range(6):
                    workers.start_soon(tasks.serve, number, range(4 * number, 4 * number + 4), 40)
            done.cancel()
        server.manual.land_all()
        check_at_rest(offloader)
        assert tasks.wrong == []
        assert list(map(str, server.checker.violations)) == []
        for event in ("loaded blocks", "accepted stores", "resident stores", "given up"):
            assert tasks.counts[event] >= 10, f"{event!r} hardly happened: {tasks.counts}"
