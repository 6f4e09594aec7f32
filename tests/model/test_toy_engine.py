"""An LLM server in small on top of the offloader: every byte it reads is checked, and every access ordered."""

from __future__ import annotations

import random
from collections import Counter
from dataclasses import replace

import anyio
import pytest
import torch
from anyio.lowlevel import checkpoint

from aiokvoffload import CacheIdentity, CanonicalKVCaches, Deadlines, Offloader, open_offloader
from aiokvoffload.devices.base import Direction, Event, SimulatedDevice
from aiokvoffload.devices.host import HostDevice
from aiokvoffload.offloader import OffloaderContext
from aiokvoffload.offloader.machine import OffloaderMachine
from aiokvoffload.offloader.opening import build_parts
from aiokvoffload.testing.clock import ManualClock
from aiokvoffload.testing.device import ManualDevice
from aiokvoffload.testing.order import OrderChecker
from aiokvoffload.testing.toy_engine import ToyEngine, ToyWorkload
from aiokvoffload.transfers.device_host import SingleDirectionOffloadingHandler
from aiokvoffload.transfers.worker import OffloadingWorker

GPU_BLOCKS = 24
LAYERS = 2
BLOCK_TOKENS = 4
PAGE_BYTES = 32
GPU_BLOCK_BYTES = LAYERS * PAGE_BYTES
LANDING_SECONDS = 5.0
STEP_SECONDS = 0.1


def make_caches() -> CanonicalKVCaches:
    layers = [torch.zeros((GPU_BLOCKS, PAGE_BYTES), dtype=torch.int8) for _ in range(LAYERS)]
    return CanonicalKVCaches.from_layers(layers, block_tokens=BLOCK_TOKENS)


class Server:
    """A toy engine, and the machine room below it: copies land, fail and are refused as the seed has it.

    Args:
        seed: Of everything random.
        factor: GPU blocks per offloaded block.
        cpu_blocks: Slots of CPU memory.
        budget_blocks: GPU blocks that may be under way at once, so that transfers queue.
        has_faults: Copies fail and are refused now and then.
    """

    def __init__(
        self,
        seed: int,
        *,
        factor: int = 1,
        cpu_blocks: int = 24,
        budget_blocks: int = 6,
        has_faults: bool = True,
    ) -> None:
        self.source = random.Random(seed)
        self.clock = ManualClock()
        self.manual = ManualDevice(random_order=self.source, clock=self.clock)
        self.checker = OrderChecker(self.manual, strict=True)
        self.caches = make_caches()
        self.compute_stream = self.checker.create_stream("compute")
        self.has_faults = has_faults
        parts = build_parts(
            self.caches,
            cpu_bytes=cpu_blocks * factor * GPU_BLOCK_BYTES,
            block_size_factor=factor,
            identity=CacheIdentity(model="toy"),
            policy="lru" if seed % 2 else "arc",
            store_threshold=2 * (seed % 3 == 0),
            device=self.checker,
            compute_stream=self.compute_stream,
            deadlines=Deadlines(landing_seconds=LANDING_SECONDS),
            clock=self.clock,
        )
        handlers = {
            direction: SingleDirectionOffloadingHandler(direction, parts.layout, parts.memory, self.checker)
            for direction in Direction
        }
        worker = OffloadingWorker(
            self.checker,
            parts.layout,
            handlers,
            self.clock,
            in_flight_bytes=budget_blocks * GPU_BLOCK_BYTES,
            landing_seconds=LANDING_SECONDS,
        )
        self.context = OffloaderContext(lambda: replace(parts, worker=worker))

    def make_engine(self, offloader: OffloaderMachine, *, free_too_early: bool = False) -> ToyEngine:
        return ToyEngine(
            offloader, self.caches, self.checker, self.compute_stream, self.source, free_too_early=free_too_early
        )

    def pass_time(self) -> None:
        """Let some work land, in any order, and now and then let some of it fail."""
        source = self.source
        if self.has_faults and source.random() < 0.04:
            direction = source.choice(list(Direction))
            self.manual.fail_next_copy(direction, "it broke on purpose", moved_copies=source.randrange(3))
        if self.has_faults and source.random() < 0.01:
            self.manual.refuse_next("it was refused on purpose")
        # Sometimes nothing lands for long, so that copies miss their deadline.
        is_stalled = source.random() < 0.02
        self.clock.advance(LANDING_SECONDS if is_stalled else STEP_SECONDS)
        for _ in range(0 if is_stalled else source.randrange(7)):
            self.manual.land_next()

    def serve(self, engine: ToyEngine, step_count: int) -> None:
        for _ in range(step_count):
            engine.step()
            self.pass_time()

    def drain(self, engine: ToyEngine) -> None:
        """End all requests."""
        self.has_faults = False
        for _ in range(2000):
            if engine.is_drained:
                break
            engine.step(is_open=False)
            self.pass_time()
        self.manual.land_all()


def check_at_rest(server: Server, engine: ToyEngine, offloader: OffloaderMachine) -> None:
    offloader.poll()
    offloader.poll()
    assert engine.is_drained
    statistics = offloader.statistics()
    manager = statistics.manager
    assert statistics.fault is None
    assert (statistics.queued_transfers, statistics.sent_transfers, statistics.in_flight_bytes) == (0, 0, 0)
    assert manager.free + manager.ready == manager.total
    assert (manager.pinned, manager.waiting_loads, manager.waiting_stores) == (0, 0, 0)
    assert offloader.gpu_blocks_in_flight() == frozenset()


def check_clean(server: Server, engine: ToyEngine) -> None:
    assert list(map(str, server.checker.violations)) == []
    assert engine.wrong_block_count == 0


SEEDS = range(8)
STEPS = 500


@pytest.mark.parametrize("factor", [1, 2])
def test_thousands_of_steps_with_copies_landing_in_any_order(factor: int) -> None:
    seen: Counter[str] = Counter()
    for seed in SEEDS:
        server = Server(seed, factor=factor, cpu_blocks=24 // factor)
        with server.context as offloader:
            engine = server.make_engine(offloader)
            server.serve(engine, STEPS)
            server.drain(engine)
            check_clean(server, engine)
            check_at_rest(server, engine, offloader)
            statistics = offloader.statistics()
            seen += engine.counts
            seen["evictions"] += statistics.manager.evicted_blocks
            seen["joined blocks"] += statistics.joined_blocks
            seen["stale completions"] += statistics.manager.rejected_completions
    print(seen)
    assert seen["joined blocks"] == seen["shared blocks"]
    for event in (
        "finished",
        "GPU hits",
        "loads",
        "fenced",
        "pending",
        "preemptions",
        "aborts",
        "aborts while loading",
        "withdrawn loads",
        "failed loads",
        "overdue loads",
        "failed stores",
        "refused stores",
        "filtered stores",
        "resident stores",
        "joined blocks",
        "evictions",
        "resets",
        "epochs",
        "stale completions",
        "no room to compute",
    ):
        assert seen[event] >= 5, f"{event} hardly happened: {seen}"
