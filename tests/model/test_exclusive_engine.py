"""An engine with a prefix cache over an exclusive offloader, whose copies land whenever chance says so.

GPU blocks are used again as soon as they are given up, behind the fence of their demotion; loads go into them while
the copies out of them are still under way. Every byte of every prefix is checked, and the order of every access.
"""

from __future__ import annotations

import random
from collections import Counter
from dataclasses import dataclass

import pytest

from aiokvoffload import (
    CanonicalKVCaches,
    LoadTicket,
    LookupResult,
    ReqContext,
    StoreOutcome,
    SyncOffloader,
    TransferHandle,
    open_offloader,
)
from aiokvoffload.cli.gpu import SimulatedGpu
from aiokvoffload.cli.options import ReplayOptions
from aiokvoffload.cli.prefix_cache import Grant, PrefixCache
from aiokvoffload.cli.requests import keys_of
from aiokvoffload.devices.base import Direction
from aiokvoffload.testing.asserts import assert_idle
from aiokvoffload.testing.clock import ManualClock
from aiokvoffload.testing.device import ManualDevice
from aiokvoffload.testing.order import OrderChecker

BLOCK_TOKENS = 4
GPU_BLOCKS = 12
CPU_BLOCKS = 10
SIZES = ReplayOptions(page_bytes=8, layers=2)
STEPS = 400


@dataclass(eq=False)
class Request:
    """One request in work."""

    grant: Grant
    ticket: LoadTicket
    load: TransferHandle | None = None
    steps_left: int = -1


class Engine:
    """Does one random thing per step."""

    def __init__(self, seed: int) -> None:
        self.random = random.Random(seed)
        self.counts: Counter[str] = Counter()
        self.clock = ManualClock()
        self.device = ManualDevice(clock=self.clock)
        self.checker = OrderChecker(self.device, strict=True)
        self.gpu = SimulatedGpu(SIZES, GPU_BLOCKS, self.checker)
        self.cache = PrefixCache(GPU_BLOCKS)
        self.requests: list[Request] = []
        self.number = 0

    def run(self) -> None:
        """Open an offloader, do many steps, and let everything end."""
        caches = CanonicalKVCaches.from_layers(self.gpu.layers, block_tokens=BLOCK_TOKENS)
        block_bytes = SIZES.page_bytes * SIZES.layers
        with open_offloader(
            caches,
            cpu_bytes=CPU_BLOCKS * block_bytes,
            placement="exclusive",
            device=self.checker,
            compute_stream=self.gpu.compute_stream,
            in_flight_bytes=4 * block_bytes,
            clock=self.clock,
        ) as offloader:
            memory = offloader.memory
            self.checker.watch(
                "slots", memory.address, memory.slot_count, memory.slot_bytes, cell_bytes=SIZES.page_bytes
            )
            for _ in range(STEPS):
                self.step(offloader)
            while self.requests:
                self.device.land_all()
                offloader.poll()
                for request in list(self.requests):
                    self.move_on(offloader, request)
            self.device.land_all()
            offloader.poll()
            self.device.land_all()
            offloader.hint(keys_of(self.content(), 1), keep_seconds=0)
            assert_idle(offloader)
            self.counts["taken along"] = offloader.statistics().manager.taken_along_blocks
            self.counts["rescued"] = offloader.statistics().manager.rescued_blocks

    def step(self, offloader: SyncOffloader) -> None:
        match self.random.choices(
            ["land", "poll", "admit", "move on", "fail", "cancel", "keep", "end session", "reset"],
            [10, 6, 6, 10, 0.5, 0.5, 0.3, 0.3, 0.1],
        )[0]:
            case "land":
                self.device.land_next()
            case "poll":
                offloader.poll()
                self.clock.advance(0.01)
            case "admit":
                self.admit(offloader)
            case "move on":
                for request in list(self.requests):
                    self.move_on(offloader, request)
            case "fail":
                if not self.device.pending_copies:
                    self.device.fail_next_copy(self.random.choice(list(Direction)), "on purpose")
            case "cancel":
                for request in self.requests:
                    self.counts["cancelled"] += request.load is not None and request.load.cancel()
            case "keep":
                offloader.hint(keys_of(self.content(), 1), keep_seconds=0.05)
            case "end session":
                offloader.hint(keys_of(self.content(), 1), session_ended=True)
            case _:
                offloader.reset()

    def content(self) -> list[bytes]:
        """Conversations that share their first two blocks."""
        session, count = self.random.randrange(5), self.random.randint(1, 6)
        return [bytes([1 + (session if position > 1 else 9), position]) * 8 for position in range(count)]

    def admit(self, offloader: SyncOffloader) -> None:
        hashes = self.content()
        grant = self.cache.take(hashes)
        if grant is None:
            return
        self.number += 1
        self.counts["hits in the GPU"] += grant.hit_count
        ctx = ReqContext(str(self.number), session_id=str(hashes[-1][0]))
        resident_tokens = grant.hit_count * BLOCK_TOKENS
        ticket = offloader.prepare_load(keys_of(hashes, 1), ctx, resident_tokens=resident_tokens)
        if grant.given_up:
            given_up, blocks = zip(*reversed(grant.given_up), strict=True)
            handle = offloader.demote_soon(keys_of(given_up, 1), blocks)
            assert handle.is_sent
            handle.fence()
            self.counts.update(outcome.name for outcome in handle.outcomes)
        self.requests.append(Request(grant, ticket))

    def move_on(self, offloader: SyncOffloader, request: Request) -> None:
        grant = request.grant
        if request.steps_left > 0:
            request.steps_left -= 1
        elif request.steps_left == 0:
            self.requests.remove(request)
            self.cache.release(grant)
        elif request.load is None and request.ticket.result is not LookupResult.PENDING:
            (size,), (first,) = request.ticket.group_sizes, request.ticket.block_indices
            if request.ticket.result is LookupResult.HIT:
                request.load = request.ticket.start(grant.blocks[first : first + size])
            else:
                request.ticket.abort()
                self.compute(request, grant.hit_count)
        elif request.load is not None and request.load.is_idle:
            assert request.load.result is not None
            self.counts["loads"] += request.load.result.success
            self.counts["failed loads"] += not request.load.result.success
            self.compute(request, max(grant.hit_count, request.load.result.token_count // BLOCK_TOKENS))

    def compute(self, request: Request, known_count: int) -> None:
        grant = request.grant
        content = list(zip(grant.blocks, grant.hashes, strict=True))
        self.gpu.step(dict(content[:known_count]), dict(content[known_count:]))
        self.cache.publish(grant)
        request.steps_left = self.random.randrange(4)


def test_every_byte_is_right_whenever_copies_land() -> None:
    counts: Counter[str] = Counter()
    for seed in range(25):
        engine = Engine(seed)
        engine.run()
        assert engine.gpu.mismatch_count == 0, seed
        assert engine.checker.violation_count == 0, seed
        counts += engine.counts
        counts["verified"] += engine.gpu.verified_count
    assert min(counts[outcome.name] for outcome in (StoreOutcome.ACCEPTED, StoreOutcome.REFUSED)) > 100
    for what in ("RESIDENT", "hits in the GPU", "loads", "failed loads", "cancelled", "taken along", "rescued"):
        assert counts[what], what
    assert counts["verified"] > 1000


def test_a_block_that_is_used_again_without_a_fence_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(TransferHandle, "fence", lambda handle: None)
    found = 0
    for seed in range(5):
        engine = Engine(seed)
        engine.run()
        found += engine.checker.violation_count
    assert found
