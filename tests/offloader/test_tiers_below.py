"""An offloader with tiers below it."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import anyio
import pytest
import torch
from offloader_rig import BLOCK_BYTES, BLOCK_TOKENS, PAGE_BYTES, on_both_loops, settle

from aiokvoffload import (
    CacheIdentity,
    ConfigurationError,
    Deadlines,
    LookupResult,
    Offloader,
    OffloadKey,
    ReqContext,
    SyncOffloader,
    TierPlan,
    open_offloader,
)
from aiokvoffload.offloader import OffloaderContext
from aiokvoffload.testing.asserts import assert_idle
from aiokvoffload.testing.clock import ManualClock
from aiokvoffload.testing.device import ManualDevice
from aiokvoffload.testing.manual_tier import ManualTier
from aiokvoffload.tiers.memory import MemoryTier

SLOTS = 4


class TieredRig:
    """Two layers of GPU blocks, and what an offloader over them needs."""

    def __init__(self, **options: object) -> None:
        self.clock = ManualClock(start=50.0)
        self.device = ManualDevice()
        self.layers = [torch.zeros((16, PAGE_BYTES), dtype=torch.uint8) for _ in range(2)]
        self.tier = ManualTier(CacheIdentity(), block_bytes=BLOCK_BYTES, capacity_bytes=1 << 16, clock=self.clock)
        self.plan = TierPlan(lookup_seconds=1.0, read_seconds=5.0, write_seconds=60.0)
        self.options = options

    def open(self) -> OffloaderContext:
        return open_offloader(
            self.layers,
            cpu_bytes=SLOTS * BLOCK_BYTES,
            block_tokens=BLOCK_TOKENS,
            policy="lru",
            device=self.device,
            tiers=[(self.tier, self.plan)],
            deadlines=Deadlines(pending_seconds=3.0, drain_seconds=2.0, landing_seconds=20.0),
            clock=self.clock,
            **self.options,  # type: ignore[arg-type]
        )

    def fill(self, blocks: range, first: int = 0) -> None:
        for place, block in enumerate(blocks):
            for layer, tensor in enumerate(self.layers):
                tensor[block] = 10 * (first + place) + layer + 1

    def holds(self, blocks: range) -> bool:
        return all(
            self.layers[layer][block].tolist() == [10 * place + layer + 1] * PAGE_BYTES
            for place, block in enumerate(blocks)
            for layer in range(2)
        )

    async def let_tier_work(self) -> None:
        await settle()
        while self.tier.waiting_count or self.tier.begun_count:
            self.tier.land()
            await settle()

    async def store_eight(self, offloader: Offloader) -> list[OffloadKey]:
        """Store a prefix of eight blocks, twice what CPU memory holds."""
        keys = offloader.keys(range(8 * BLOCK_TOKENS))
        for first in range(0, 8, 2):
            self.fill(range(2), first)
            handle = offloader.store_soon(keys[first : first + 2], [0, 1], ReqContext("store"), first_block=first)
            self.device.land_all()
            await self.let_tier_work()
            assert (await handle).success
        return keys


@on_both_loops
async def test_a_prefix_larger_than_cpu_memory_comes_back_piece_by_piece() -> None:
    rig = TieredRig()
    async with rig.open() as offloader:
        keys = await rig.store_eight(offloader)
        assert offloader.statistics().tiers[0].written == 8
        with offloader.prepare_load(keys[:4], ReqContext("load")) as ticket:
            assert ticket.result is LookupResult.PENDING
            await rig.let_tier_work()
            assert await ticket.ready() is LookupResult.HIT
            assert ticket.token_count == 4 * BLOCK_TOKENS
            handle = ticket.start([8, 9, 10, 11])
        rig.device.land_all()
        assert (await handle).success
        assert rig.holds(range(8, 12))
        await rig.let_tier_work()
        assert_idle(offloader)


@on_both_loops
async def test_an_awaited_prefix_lookup_sees_what_only_a_tier_has() -> None:
    rig = TieredRig()
    async with rig.open() as offloader:
        keys = await rig.store_eight(offloader)
        tokens: list[int] = []

        async def look(timeout_seconds: float | None) -> None:
            tokens.append(await offloader.lookup_prefix(keys, timeout_seconds=timeout_seconds))

        async with anyio.create_task_group() as tasks:
            tasks.start_soon(look, None)
            tasks.start_soon(look, 0.0)
            await settle()
            in_cpu_memory = offloader.manager.lookup_prefix_nowait(keys)
            assert tokens == [in_cpu_memory]
            await rig.let_tier_work()
        assert tokens == [in_cpu_memory, 8 * BLOCK_TOKENS]
        assert in_cpu_memory < 8 * BLOCK_TOKENS
        assert_idle(offloader)


@on_both_loops
async def test_a_load_waits_for_a_tier_before_it_touches_its_gpu_blocks() -> None:
    rig = TieredRig()
    async with rig.open() as offloader:
        keys = await rig.store_eight(offloader)
        tokens: list[int] = []

        async def load() -> None:
            tokens.append(await offloader.load(keys[:4], [8, 9, 10, 11]))

        async with anyio.create_task_group() as tasks:
            tasks.start_soon(load)
            await settle()
            assert offloader.gpu_blocks_in_flight() == frozenset()
            await rig.let_tier_work()
            assert offloader.gpu_blocks_in_flight() == {8, 9, 10, 11}
            rig.device.land_all()
        assert tokens == [4 * BLOCK_TOKENS]
        await rig.let_tier_work()
        assert_idle(offloader)


@on_both_loops
@pytest.mark.parametrize("landed", range(8))
async def test_a_load_cancelled_while_a_tier_works_leaves_nothing_behind(landed: int) -> None:
    rig = TieredRig()
    async with rig.open() as offloader:
        keys = await rig.store_eight(offloader)
        scope = anyio.CancelScope()

        async def load() -> None:
            with scope:
                await offloader.load(keys[:4], [8, 9, 10, 11])

        async with anyio.create_task_group() as tasks:
            tasks.start_soon(load)
            await settle()
            for _ in range(landed):
                rig.tier.land(1)
            scope.cancel()
        await rig.let_tier_work()
        assert_idle(offloader)
        assert offloader.gpu_blocks_in_flight() == frozenset()


@on_both_loops
@pytest.mark.parametrize("landed", range(8))
async def test_a_load_out_of_time_while_a_tier_works_loads_what_is_there(landed: int) -> None:
    rig = TieredRig()
    async with rig.open() as offloader:
        keys = await rig.store_eight(offloader)
        tokens: list[int] = []

        async def load() -> None:
            tokens.append(await offloader.load(keys[:4], [8, 9, 10, 11], timeout_seconds=0.5))

        async with anyio.create_task_group() as tasks:
            tasks.start_soon(load)
            await settle()
            for _ in range(landed):
                rig.tier.land(1)
            await settle()
            assert not tokens
            rig.clock.advance(0.5)
            await settle()
            rig.device.land_all()
        assert tokens[0] in range(0, 4 * BLOCK_TOKENS + 1, BLOCK_TOKENS)
        assert rig.holds(range(8, 8 + tokens[0] // BLOCK_TOKENS))
        await rig.let_tier_work()
        assert_idle(offloader)
        # What was being read was read for the next one.
        with offloader.prepare_load(keys[:4]) as ticket:
            await rig.let_tier_work()
            assert ticket.token_count == 4 * BLOCK_TOKENS


@on_both_loops
async def test_a_tier_that_never_answers_costs_its_deadline_and_what_it_has() -> None:
    rig = TieredRig()
    async with rig.open() as offloader:
        keys = await rig.store_eight(offloader)
        tokens: list[int] = []

        async def load() -> None:
            tokens.append(await offloader.load(keys, range(8, 16), timeout_seconds=30.0))

        async with anyio.create_task_group() as tasks:
            tasks.start_soon(load)
            await settle()
            rig.clock.advance(1.0)
            await settle()
            rig.device.land_all()
        assert tokens == [2 * BLOCK_TOKENS]  # what CPU memory has
        await rig.let_tier_work()
        assert_idle(offloader)


@on_both_loops
async def test_waiting_for_writes_ends_when_they_are_done_or_the_time_is_up() -> None:
    rig = TieredRig()
    async with rig.open() as offloader:
        assert await offloader.wait_written()
        handle = offloader.store_soon(offloader.keys(range(BLOCK_TOKENS)), [0])
        rig.device.land_all()
        await handle
        written: list[bool] = []

        async def wait(timeout_seconds: float | None) -> None:
            written.append(await offloader.wait_written(timeout_seconds=timeout_seconds))

        async with anyio.create_task_group() as tasks:
            tasks.start_soon(wait, 2.0)
            await settle()
            rig.clock.advance(2.0)
        assert written == [False]
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(wait, None)
            await rig.let_tier_work()
        assert written == [False, True]


@on_both_loops
async def test_a_tier_that_becomes_ready_in_a_thread_of_its_own_is_written_at_once() -> None:
    rig = TieredRig()
    rig.tier.is_ready = False
    async with rig.open() as offloader:
        keys = offloader.keys(range(2 * BLOCK_TOKENS))
        handle = offloader.store_soon(keys, [0, 1], ReqContext("store"))
        rig.device.land_all()
        assert (await handle).success
        await rig.let_tier_work()
        assert offloader.statistics().tiers[0].waiting_write_bytes == 2 * BLOCK_BYTES

        def become_ready() -> None:
            rig.tier.is_ready = True

        await anyio.to_thread.run_sync(become_ready)
        await rig.let_tier_work()
        counts = offloader.statistics().tiers[0]
        assert (counts.written, counts.refused_writes, counts.waiting_write_bytes) == (2, 0, 0)
        assert_idle(offloader)


@on_both_loops
async def test_closing_waits_for_writes_but_not_for_ever() -> None:
    rig = TieredRig()
    context = rig.open()
    offloader = await context.__aenter__()
    keys = await rig.store_eight(offloader)
    handle = offloader.store_soon(offloader.keys(range(BLOCK_TOKENS), salt="another"), [0])
    rig.device.land_all()
    await handle
    waiting = offloader.prepare_load(keys[2:4])
    rig.tier.begin_work()
    closed: list[bool] = []

    async def close() -> None:
        await context.__aexit__(None, None, None)
        closed.append(True)

    async with anyio.create_task_group() as tasks:
        tasks.start_soon(close)
        await settle()
        assert not closed
        rig.clock.advance(2.0)
    assert closed
    assert waiting.result is LookupResult.MISS
    # The tier was given open and stays so. What it had begun still reads the memory, which is still there.
    rig.tier.land()
    statistics = offloader.manager.statistics()
    assert (statistics.pinned, statistics.promoting, statistics.leased_without_key) == (0, 0, 0)


@on_both_loops
async def test_closing_with_a_lookup_a_read_and_a_write_in_work_is_bounded() -> None:
    rig = TieredRig()
    context = rig.open()
    offloader = await context.__aenter__()
    keys = await rig.store_eight(offloader)
    loaded: list[int] = []

    async def load(wanted: list[OffloadKey], blocks: list[int]) -> None:
        loaded.append(await offloader.load(wanted, blocks, timeout_seconds=1e6))

    async with anyio.create_task_group() as tasks:
        tasks.start_soon(load, keys[2:3], [8])
        await settle()
        rig.tier.land(2)  # the use is noted, the block is found
        await settle()
        rig.tier.begin_work()
        assert offloader.statistics().tiers[0].reading_bytes == BLOCK_BYTES
        handle = offloader.store_soon(offloader.keys(range(BLOCK_TOKENS), salt="another"), [0])
        rig.device.land_all()
        assert (await handle).success
        await settle()
        assert offloader.statistics().tiers[0].writing_bytes == BLOCK_BYTES
        tasks.start_soon(load, keys[3:4], [9])
        await settle()
        assert rig.tier.waiting_count == 3  # the write, the use and the lookup
        rig.tier.begin_work()
        tasks.start_soon(context.__aexit__, None, None, None)
        await settle()
        rig.clock.advance(2.0)
        await settle()
    assert loaded == [0, 0]
    rig.tier.land()
    statistics = offloader.manager.statistics()
    assert (statistics.pinned, statistics.promoting, statistics.leased_without_key) == (0, 0, 0)


@on_both_loops
async def test_after_a_weight_update_the_tier_has_nothing_for_anyone() -> None:
    rig = TieredRig()
    async with rig.open() as offloader:
        keys = await rig.store_eight(offloader)
        await offloader.bump_epoch()
        with offloader.prepare_load(keys, ReqContext("old keys, new epoch")) as ticket:
            await rig.let_tier_work()
            assert await ticket.ready() is LookupResult.MISS


def test_without_an_event_loop_polling_moves_tiers_too() -> None:
    rig = TieredRig()
    with rig.open() as offloader:
        keys = offloader.keys(range(6 * BLOCK_TOKENS))
        for first in range(0, 6, 2):
            rig.fill(range(2), first)
            store(rig, offloader, keys[first : first + 2], first)
        ticket = offloader.prepare_load(keys[:2])
        assert ticket.result is LookupResult.PENDING
        poll_until(rig, offloader, lambda: ticket.result is not LookupResult.PENDING)
        assert ticket.token_count == 2 * BLOCK_TOKENS
        handle = ticket.start([8, 9])
        rig.device.land_all()
        offloader.poll()
        assert handle.result is not None
        assert handle.result.success
        assert rig.holds(range(8, 10))
        poll_until(rig, offloader, lambda: offloader.manager.is_at_rest)


def store(rig: TieredRig, offloader: SyncOffloader, keys: list[OffloadKey], first: int) -> None:
    offloader.store_soon(keys, [0, 1], first_block=first)
    rig.device.land_all()
    offloader.poll()
    poll_until(rig, offloader, lambda: offloader.manager.is_at_rest)


def poll_until(rig: TieredRig, offloader: SyncOffloader, is_over: Callable[[], bool]) -> None:
    for _ in range(50):
        rig.tier.land()
        offloader.poll()
        if is_over():
            return
    raise AssertionError("it is not over")


@on_both_loops
async def test_tiers_given_as_urls_are_closed_and_found_again(tmp_path: Path) -> None:
    layers = [torch.arange(64, dtype=torch.uint8).reshape(8, 8).clone()]
    url = f"file://{tmp_path}/kv?capacity=1MiB&keep_free=1KiB"
    for expected in (0, 32):
        async with open_offloader(layers, cpu_bytes=32, block_tokens=4, tiers=[url]) as offloader:
            keys = offloader.keys(range(32))
            tokens = 0
            for first in range(0, 8, 4):
                with offloader.prepare_load(keys[: first + 4], resident_tokens=4 * first) as ticket:
                    if await ticket.ready() is LookupResult.HIT:
                        await ticket.start(range(first, first + 4))
                        tokens = ticket.token_count
                    else:
                        await offloader.store(keys[first : first + 4], range(first, first + 4), first_block=first)
                        assert await offloader.wait_written(timeout_seconds=30.0)
            assert tokens == expected
        layers[0].zero_() if expected == 0 else None
    assert layers[0].flatten().tolist() == list(range(64))


def test_a_tier_that_cannot_be_opened_leaves_the_others_closed(monkeypatch: pytest.MonkeyPatch) -> None:
    closed: list[str] = []
    close = MemoryTier.close

    def note(tier: MemoryTier, *, drain_seconds: float = 5.0) -> None:
        closed.append(tier.url)
        close(tier, drain_seconds=drain_seconds)

    monkeypatch.setattr(MemoryTier, "close", note)
    tiers = ["memory://?capacity=1MiB", "memory://?capacity=1"]
    with (
        pytest.raises(ConfigurationError, match="capacity"),
        open_offloader([torch.zeros((4, 64))], cpu_bytes=1 << 12, tiers=tiers),
    ):
        pass
    assert closed == ["memory://"]
