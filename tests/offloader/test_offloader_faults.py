"""Faults that the field's leading implementation shows, at the level of the offloader."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from typing import Any

import anyio
import pytest
from offloader_rig import Rig, keys_of, on_both_loops, settle, states

from aiokvoffload import (
    CPUOffloadingManager,
    LookupResult,
    OffloadKey,
    PrepareLoadOutput,
    ReqContext,
    StoreOutcome,
)
from aiokvoffload.devices.base import Direction
from aiokvoffload.testing.asserts import assert_idle

pytestmark = pytest.mark.timeout(30)

READER_COUNT = 50


class CountingManager(CPUOffloadingManager):
    """Counts what is asked."""

    def __init__(self, block_count: int, **options: Any) -> None:
        self.calls: Counter[str] = Counter()
        super().__init__(block_count, **options)

    def lookup_nowait(self, keys: Sequence[OffloadKey], ctx: ReqContext | None = None) -> list[LookupResult]:
        self.calls["lookup"] += 1
        return super().lookup_nowait(keys, ctx)

    def lookup_prefix_nowait(self, *arguments: Any, **options: Any) -> int:
        self.calls["lookup_prefix"] += 1
        return super().lookup_prefix_nowait(*arguments, **options)

    def prepare_load_nowait(self, *arguments: Any, **options: Any) -> PrepareLoadOutput:
        self.calls["prepare_load"] += 1
        return super().prepare_load_nowait(*arguments, **options)


@on_both_loops
async def test_fifty_loads_of_a_prefix_that_is_being_stored_look_once_each_and_all_get_it() -> None:
    rig = Rig(manager_class=CountingManager, gpu_blocks=128, cpu_blocks=4)
    async with rig.open() as offloader, anyio.create_task_group() as tasks:
        manager = offloader.manager
        assert isinstance(manager, CountingManager)
        keys = keys_of(offloader, 2)
        rig.write([0, 1])
        offloader.store_soon(keys, [0, 1])
        tokens: list[int] = []

        async def load(number: int) -> None:
            tokens.append(await offloader.load(keys, [2 + 2 * number, 3 + 2 * number]))

        for number in range(READER_COUNT):
            tasks.start_soon(load, number)
        await settle()
        assert offloader.statistics().manager.waiting_loads == READER_COUNT
        assert offloader.statistics().manager.pinned == 0
        rig.manual_device.land_next()
        offloader.poll()
        # In the step of the commit, before anybody could wake up, all of them are readers.
        assert offloader.statistics().manager.waiting_loads == 0
        assert offloader.statistics().manager.pinned == 2
        assert offloader.store_soon(keys_of(offloader, 4, salt="greedy"), [0] * 4).outcomes == (
            StoreOutcome.ACCEPTED,
            StoreOutcome.ACCEPTED,
            StoreOutcome.REFUSED,
            StoreOutcome.REFUSED,
        )
        await settle()
        await rig.land()
        assert tokens == [8] * READER_COUNT
        assert all(rig.holds([2 + 2 * number, 3 + 2 * number]) for number in range(READER_COUNT))
        assert manager.calls == {"prepare_load": READER_COUNT}
        assert_idle(offloader)


@on_both_loops
async def test_fifty_loads_of_a_prefix_whose_store_fails_all_miss_once() -> None:
    rig = Rig(manager_class=CountingManager, gpu_blocks=128)
    async with rig.open() as offloader, anyio.create_task_group() as tasks:
        keys = keys_of(offloader, 2)
        rig.manual_device.fail_next_copy(Direction.STORE, "link lost")
        offloader.store_soon(keys, [0, 1])
        tokens: list[int] = []

        async def load(number: int) -> None:
            tokens.append(await offloader.load(keys, [2 + 2 * number, 3 + 2 * number]))

        for number in range(READER_COUNT):
            tasks.start_soon(load, number)
        await settle()
        await rig.land()
        assert tokens == [0] * READER_COUNT
        assert rig.copies(Direction.LOAD) == 0
        assert_idle(offloader)


@on_both_loops
async def test_identical_pairs_in_flight_are_one_copy_and_different_gpu_blocks_are_different_copies() -> None:
    rig = Rig()
    async with rig.open() as offloader, anyio.create_task_group() as tasks:
        keys = keys_of(offloader, 2)
        rig.write([0, 1])
        offloader.store_soon(keys, [0, 1])
        await rig.land()
        tokens: list[int] = []

        async def load(blocks: list[int]) -> None:
            tokens.append(await offloader.load(keys, blocks))

        for blocks in ([4, 5], [4, 5], [4, 6], [7, 8], [4, 5]):
            tasks.start_soon(load, blocks)
            await settle()
        # (4, 5) once, then 6 alone, then (7, 8).
        assert rig.copies(Direction.LOAD) == 2 + 1 + 2
        assert offloader.statistics().joined_blocks == 2 + 1 + 2
        await rig.land()
        assert tokens == [8] * 5
        assert all(rig.holds(blocks) for blocks in ([4, 5], [4, 6], [7, 8]))
        assert_idle(offloader)
        # What has landed is not joined: the engine may have written over it.
        rig.write([4, 5], seed=7)
        tasks.start_soon(load, [4, 5])
        await settle()
        await rig.land()
        assert rig.holds([4, 5])


@on_both_loops
async def test_the_failure_of_a_joined_copy_is_everybodys_miss() -> None:
    rig = Rig()
    async with rig.open() as offloader:
        keys = keys_of(offloader, 2)
        offloader.store_soon(keys, [0, 1])
        await rig.land()
        rig.manual_device.fail_next_copy(Direction.LOAD, "link lost")
        handles = [offloader.prepare_load(keys).start(blocks) for blocks in ([4, 5], [4, 6])]
        await rig.land()
        for handle in handles:
            assert handle.result is not None
            assert not handle.result.success
            assert "link lost" in str(handle.result.error)
        assert_idle(offloader)


@on_both_loops
async def test_a_waiter_never_loses_its_block_between_the_commit_and_its_waking_up() -> None:
    rig = Rig(cpu_blocks=1)
    async with rig.open() as offloader, anyio.create_task_group() as tasks:
        keys = keys_of(offloader, 1)
        rig.write([0])
        offloader.store_soon(keys, [0])
        tokens: list[int] = []

        async def load() -> None:
            tokens.append(await offloader.load(keys, [5]))

        tasks.start_soon(load)
        await settle()
        rig.manual_device.land_next()
        offloader.poll()
        # The reader has not run since; the only slot must not go to anybody else.
        assert offloader.store_soon(keys_of(offloader, 1, salt="greedy"), [1]).outcomes == (StoreOutcome.REFUSED,)
        await settle()
        await rig.land()
        assert tokens == [4]
        assert rig.holds([5])
        assert_idle(offloader)


@on_both_loops
async def test_a_duplicate_key_in_one_offer_leaks_nothing() -> None:
    rig = Rig()
    async with rig.open() as offloader:
        (key,) = keys_of(offloader, 1)
        rig.write([0])
        rig.write([1], seed=9)
        handle = offloader.store_soon([key, key], [0, 1])
        assert handle.outcomes == (StoreOutcome.ACCEPTED,) * 2
        assert handle.gpu_blocks == {0}
        await rig.land()
        assert_idle(offloader)
        assert offloader.statistics().manager.ready == 1
        load = offloader.prepare_load([key]).start([5])
        await rig.land()
        assert load.is_idle
        assert rig.holds([5])


@on_both_loops
async def test_a_missing_key_in_the_middle_is_where_a_load_ends() -> None:
    rig = Rig()
    async with rig.open() as offloader:
        keys = keys_of(offloader, 3)
        offloader.store_soon([keys[0], keys[2]], [0, 2])
        await rig.land()
        ticket = offloader.prepare_load(keys)
        assert ticket.token_count == 4
        assert offloader.statistics().manager.pinned == 1
        ticket.abort()
        ticket = offloader.prepare_load(keys[1:])
        assert ticket.result is LookupResult.MISS
        assert offloader.statistics().manager.pinned == 0


@on_both_loops
async def test_keys_of_an_offer_are_never_evicted_for_it() -> None:
    rig = Rig(cpu_blocks=2)
    async with rig.open() as offloader:
        keys = keys_of(offloader, 4)
        offloader.store_soon(keys[:2], [0, 1])
        await rig.land()
        handle = offloader.store_soon(keys, [0, 1, 2, 3])
        assert handle.outcomes == (StoreOutcome.RESIDENT,) * 2 + (StoreOutcome.REFUSED,) * 2
        assert handle.is_idle
        assert states(offloader, keys) == ["HIT", "HIT", "MISS", "MISS"]


# Generations


@on_both_loops
async def test_a_reset_with_stores_and_loads_in_flight() -> None:
    rig = Rig()
    async with rig.open() as offloader, anyio.create_task_group() as tasks:
        keys = keys_of(offloader, 2)
        rig.write([0, 1])
        offloader.store_soon(keys, [0, 1])
        await rig.land()
        load = offloader.prepare_load(keys).start([5, 6])
        late_keys = keys_of(offloader, 2, salt="late")
        store = offloader.store_soon(late_keys, [2, 3])
        waited: list[int] = []

        async def wait() -> None:
            waited.append(await offloader.load(late_keys, [7, 8]))

        tasks.start_soon(wait)
        await settle()
        await offloader.reset()
        await settle()
        assert waited == [0], "a waiter of a block that is gone misses"
        manager = offloader.statistics().manager
        assert (manager.leased_without_key, manager.ready, manager.writing) == (4, 0, 0)
        assert states(offloader, keys + late_keys) == ["MISS"] * 4
        # The slots in use are not handed out, so nothing of the old generation can touch the new one.
        rig.write([9, 10], seed=4)
        again = offloader.store_soon(keys, [9, 10])
        await rig.land()
        assert load.result is not None
        assert load.result.success, "a load in flight finishes"
        assert rig.holds([5, 6])
        assert store.result is not None
        assert not store.result.success, "a store from before changes nothing"
        assert store.outcomes == (StoreOutcome.REFUSED,) * 2
        assert again.result is not None
        assert again.result.success
        assert states(offloader, keys + late_keys) == ["HIT", "HIT", "MISS", "MISS"]
        assert_idle(offloader)
        check = offloader.prepare_load(keys).start([11, 12])
        await rig.land()
        assert check.is_idle
        assert rig.holds([11, 12], seed=4)


@on_both_loops
async def test_a_new_epoch_fails_loads_in_flight_and_refuses_older_requests() -> None:
    rig = Rig()
    async with rig.open() as offloader:
        old = ReqContext("old")
        keys = keys_of(offloader, 2)
        offloader.store_soon(keys, [0, 1], old)
        await rig.land()
        load = offloader.prepare_load(keys, old).start([5, 6])
        store = offloader.store_soon(keys_of(offloader, 1, salt="late"), [2], old)
        old_root = offloader.root()
        await offloader.bump_epoch()
        assert offloader.root() != old_root
        await rig.land()
        for handle in (load, store):
            assert handle.result is not None
            assert not handle.result.success
        assert store.outcomes == (StoreOutcome.REFUSED,)
        new_keys = keys_of(offloader, 2)
        assert set(new_keys).isdisjoint(keys)
        # The weights behind an older request's bytes are gone.
        assert offloader.store_soon(new_keys, [0, 1], old).outcomes == (StoreOutcome.REFUSED,) * 2
        assert offloader.store_soon(new_keys, [0, 1], ReqContext("new")).outcomes == (StoreOutcome.ACCEPTED,) * 2
        await rig.land()
        assert await offloader.lookup_prefix(new_keys, ReqContext("new")) == 8
        assert await offloader.lookup_prefix(new_keys, old) == 0
        assert offloader.prepare_load(new_keys, old).result is LookupResult.MISS
        assert await offloader.load(new_keys, [5, 6], old) == 0
        assert_idle(offloader)


@on_both_loops
async def test_a_ticket_of_before_a_new_epoch_loads_nothing_that_counts() -> None:
    rig = Rig()
    async with rig.open() as offloader:
        keys = keys_of(offloader, 1)
        offloader.store_soon(keys, [0])
        await rig.land()
        ticket = offloader.prepare_load(keys)
        await offloader.bump_epoch()
        handle = ticket.start([5])
        await rig.land()
        assert handle.result is not None
        assert not handle.result.success
        assert handle.result.token_count == 0
        assert_idle(offloader)
