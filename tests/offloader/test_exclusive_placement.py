"""Exclusive placement through the front doors: demotions, loads that take blocks along, hints."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import anyio
import pytest
from offloader_rig import BLOCK_BYTES, Rig, keys_of, on_both_loops, settle, states

from aiokvoffload import (
    ConfigurationError,
    DeviceError,
    InvalidRequestError,
    LookupResult,
    Offloader,
    OffloadKey,
    ReqContext,
    StateError,
    StoreOutcome,
    open_offloader,
)
from aiokvoffload.devices.base import Direction, Event, Stream
from aiokvoffload.offloader.machine import OffloaderMachine
from aiokvoffload.offloader.parts import LocalParts
from aiokvoffload.policies.lru import LRUPolicy
from aiokvoffload.specs import Placement
from aiokvoffload.testing.asserts import assert_idle
from aiokvoffload.testing.device import ManualDevice
from aiokvoffload.testing.streams import ManualEvent

pytestmark = pytest.mark.timeout(60)

ACCEPTED, RESIDENT, REFUSED = StoreOutcome.ACCEPTED, StoreOutcome.RESIDENT, StoreOutcome.REFUSED


class PlacementRig(Rig):
    """A rig whose offloader has a placement."""

    def __init__(self, *, placement: Placement = "exclusive", **options: Any) -> None:
        super().__init__(**options)
        self._placement = placement

    def parts(self) -> LocalParts:
        return replace(super().parts(), placement=self._placement)


def store_now(rig: Rig, offloader: OffloaderMachine, count: int = 4) -> list[OffloadKey]:
    """Demote GPU blocks 0, 1, ... and let them land."""
    keys = keys_of(offloader, count)
    rig.write(range(count))
    offloader.demote_soon(keys, range(count))
    rig.manual_device.land_all()
    offloader.poll()
    return keys


def taken_along(offloader: OffloaderMachine) -> int:
    return offloader.statistics().manager.taken_along_blocks


# Demotion


def test_a_demotion_is_sent_before_it_returns_and_its_blocks_can_be_used_behind_a_fence() -> None:
    rig = PlacementRig(compute_stream=True, in_flight_bytes=2 * BLOCK_BYTES)
    with rig.open() as offloader:
        keys = keys_of(offloader, 2)
        rig.write([0, 1])
        handle = offloader.demote_soon(keys, [0, 1])
        assert (handle.is_sent, handle.is_idle, handle.outcomes) == (True, False, (ACCEPTED, ACCEPTED))
        handle.fence()
        assert rig.compute is not None
        rig.manual_device.launch(rig.compute, lambda: rig.write([0, 1], seed=9))
        rig.manual_device.land_all()
        assert offloader.poll() == [handle]
        assert rig.holds([0, 1], seed=9)
        load = offloader.prepare_load(keys).start([4, 5])
        rig.manual_device.land_all()
        offloader.poll()
        assert load.result is not None
        assert load.result.success
        assert rig.holds([4, 5])
        assert_idle(offloader)


def test_what_the_byte_budget_has_no_room_for_is_refused_and_reserves_nothing() -> None:
    rig = PlacementRig(in_flight_bytes=3 * BLOCK_BYTES)
    with rig.open() as offloader:
        keys = keys_of(offloader, 5)
        first = offloader.demote_soon(keys[:1], [0])
        second = offloader.demote_soon(keys[1:], [1, 2, 3, 4])
        assert second.outcomes == (ACCEPTED, ACCEPTED, REFUSED, REFUSED)
        assert second.gpu_blocks == {1, 2}
        third = offloader.demote_soon(keys[3:], [3, 4])
        assert (third.is_idle, third.outcomes) == (True, (REFUSED, REFUSED))
        third.fence()
        assert offloader.manager.statistics().writing == 3
        rig.manual_device.land_all()
        assert set(offloader.poll()) == {first, second}
        assert states(offloader, keys) == ["HIT"] * 3 + ["MISS"] * 2


def test_one_demotion_larger_than_the_budget_is_sent_when_nothing_else_is() -> None:
    rig = PlacementRig(in_flight_bytes=BLOCK_BYTES)
    with rig.open() as offloader:
        assert offloader.demote_soon(keys_of(offloader, 3), [0, 1, 2]).outcomes == (ACCEPTED,) * 3
        rig.manual_device.land_all()
        offloader.poll()
        assert_idle(offloader)


def test_stored_blocks_are_rescued_even_without_room_for_copies() -> None:
    rig = PlacementRig(cpu_blocks=4, in_flight_bytes=BLOCK_BYTES)
    with rig.open() as offloader:
        keys = store_now(rig, offloader)
        other = keys_of(offloader, 4, salt="other")
        offloader.prepare_load(keys).start([4, 5, 6, 7])
        rig.manual_device.land_all()
        offloader.poll()
        assert taken_along(offloader) == 4
        handle = offloader.demote_soon([*other[:1], keys[0], other[1]], [8, 4, 9])
        assert handle.outcomes == (ACCEPTED, RESIDENT, ACCEPTED)
        handle = offloader.demote_soon([other[2], keys[1]], [10, 5])
        assert handle.outcomes == (REFUSED, RESIDENT)
        assert offloader.statistics().manager.rescued_blocks == 2
        rig.manual_device.land_all()
        offloader.poll()
        assert states(offloader, keys) == ["HIT", "HIT", "MISS", "MISS"]


def test_a_block_that_a_queued_load_will_fill_is_refused_the_others_are_sent() -> None:
    rig = PlacementRig(in_flight_bytes=3 * BLOCK_BYTES)
    with rig.open() as offloader:
        keys = store_now(rig, offloader, 2)
        other = keys_of(offloader, 2, salt="other")
        offloader.prepare_load(keys).start([4, 5])
        queued = offloader.prepare_load(keys).start([6, 7])
        assert not queued.is_sent
        handle = offloader.demote_soon([*other, other[0]], [6, 8, 9])
        assert handle.outcomes == (REFUSED, ACCEPTED, REFUSED)
        assert handle.is_sent  # ahead of the load, which is larger than what is left of the budget
        for _ in range(2):
            rig.manual_device.land_all()
            offloader.poll()
        assert queued.is_idle
        assert states(offloader, other) == ["MISS", "HIT"]
        assert_idle(offloader)


def test_a_refused_batch_is_an_outcome_and_the_slots_are_free() -> None:
    rig = PlacementRig()
    with rig.open() as offloader:
        rig.manual_device.refuse_next("on purpose")
        handle = offloader.demote_soon(keys_of(offloader, 2), [0, 1])
        assert (handle.is_idle, handle.outcomes) == (True, (REFUSED, REFUSED))
        assert_idle(offloader)
        assert offloader.statistics().manager.free == 8


def test_a_copy_that_fails_commits_nothing() -> None:
    rig = PlacementRig()
    with rig.open() as offloader:
        keys = keys_of(offloader, 2)
        rig.manual_device.fail_next_copy(Direction.STORE, "on purpose")
        handle = offloader.demote_soon(keys, [0, 1])
        rig.manual_device.land_all()
        offloader.poll()
        assert handle.outcomes == (REFUSED, REFUSED)
        assert states(offloader, keys) == ["MISS", "MISS"]
        assert_idle(offloader)


class ForgetfulDevice(ManualDevice):
    """Fails to record events while asked to."""

    failures_left = 0

    def record(self, stream: Stream) -> ManualEvent:
        if self.failures_left and any(plan.direction is Direction.STORE for plan in self.pending_copies):
            self.failures_left -= 1
            raise DeviceError("no event on purpose")
        return super().record(stream)


def test_a_fence_that_has_no_event_says_so_in_place_of_letting_the_engine_go_on() -> None:
    device = ForgetfulDevice()
    rig = PlacementRig(device=device, compute_stream=True)
    with rig.open() as offloader:
        device.failures_left = 2
        handle = offloader.demote_soon(keys_of(offloader, 1), [0])
        with pytest.raises(DeviceError, match="no event on purpose"):
            handle.fence()
        handle.fence()
        device.land_all()
        offloader.poll()
        assert_idle(offloader)


def test_without_room_in_cpu_memory_the_leading_part_is_taken() -> None:
    rig = PlacementRig(cpu_blocks=2)
    with rig.open() as offloader:
        assert offloader.demote(keys_of(offloader, 3), [0, 1, 2]) == (ACCEPTED, ACCEPTED, REFUSED)
        assert_idle(offloader)


def test_the_last_block_of_a_demotion_leaves_first() -> None:
    rig = PlacementRig(cpu_blocks=4)
    with rig.open() as offloader:
        keys = store_now(rig, offloader)
        offloader.demote(keys_of(offloader, 1, salt="other"), [5])
        assert states(offloader, keys) == ["HIT", "HIT", "HIT", "MISS"]


def test_demotions_pass_the_filter_when_asked_to() -> None:
    rig = PlacementRig(store_threshold=2)
    with rig.open() as offloader:
        keys = keys_of(offloader, 1)
        assert offloader.demote(keys, [0]) == (StoreOutcome.FILTERED,)
        assert offloader.demote(keys, [0], filtered=False) == (ACCEPTED,)


def test_bad_input_and_an_old_epoch() -> None:
    rig = PlacementRig()
    with rig.open() as offloader:
        keys = keys_of(offloader, 2)
        ctx = ReqContext("1")
        offloader.manager.lookup_nowait(keys, ctx)
        with pytest.raises(InvalidRequestError, match="1 GPU blocks were given, but 2 are needed"):
            offloader.demote_soon(keys, [0])
        with pytest.raises(InvalidRequestError, match="out of range"):
            offloader.demote_soon(keys, [0, 99])
        offloader.bump_epoch()
        assert offloader.demote_soon(keys, [0, 1], ctx).outcomes == (REFUSED, REFUSED)
        assert_idle(offloader)


@on_both_loops
async def test_demote_returns_the_outcomes_when_the_blocks_are_idle() -> None:
    rig = PlacementRig()
    outcomes: list[object] = []
    async with rig.open() as offloader, anyio.create_task_group() as tasks:
        keys = keys_of(offloader, 2)
        rig.write([0, 1])

        async def demote() -> None:
            outcomes.append(await offloader.demote(keys, [0, 1]))

        tasks.start_soon(demote)
        await settle()
        assert not outcomes
        await rig.land()
        assert outcomes == [(ACCEPTED, ACCEPTED)]
        assert states(offloader, keys) == ["HIT", "HIT"]
        assert_idle(offloader)


@on_both_loops
async def test_a_cancelled_demotion_ends_with_the_landing_and_is_stored() -> None:
    rig = PlacementRig()
    async with rig.open() as offloader, anyio.create_task_group() as tasks:
        keys = keys_of(offloader, 2)
        rig.write([0, 1])
        is_over = anyio.Event()
        scope = anyio.CancelScope()

        async def demote() -> None:
            with scope:
                await offloader.demote(keys, [0, 1])
            is_over.set()

        tasks.start_soon(demote)
        await settle()
        scope.cancel()
        await settle()
        assert not is_over.is_set()
        await rig.land()
        assert is_over.is_set()
        assert scope.cancelled_caught
        assert states(offloader, keys) == ["HIT", "HIT"]


@on_both_loops
async def test_a_demotion_in_a_cancelled_scope_does_nothing() -> None:
    rig = PlacementRig()
    async with rig.open() as offloader:
        with anyio.CancelScope() as scope:
            scope.cancel()
            await offloader.demote(keys_of(offloader, 1), [0])
        assert scope.cancelled_caught
        assert not rig.manual_device.copies
        assert_idle(offloader)


# Loads


async def stored(rig: Rig, offloader: Offloader, count: int = 4) -> Sequence[OffloadKey]:
    keys = keys_of(offloader, count)
    rig.write(range(count))
    handle = offloader.demote_soon(keys, range(count))
    await rig.land()
    await handle
    return keys


@on_both_loops
async def test_a_load_takes_its_blocks_along_once_it_has_landed() -> None:
    rig = PlacementRig(cpu_blocks=4)
    async with rig.open() as offloader, anyio.create_task_group() as tasks:
        keys = await stored(rig, offloader)
        tasks.start_soon(offloader.load, keys, [4, 5, 6, 7])
        await settle()
        assert taken_along(offloader) == 0
        await rig.land()
        assert taken_along(offloader) == 4
        assert rig.holds([4, 5, 6, 7])
        assert states(offloader, keys) == ["HIT"] * 4
        offloader.demote_soon(keys_of(offloader, 1, salt="other"), [8])
        await rig.land()
        assert states(offloader, keys) == ["HIT", "HIT", "HIT", "MISS"]
        assert_idle(offloader)


@on_both_loops
@pytest.mark.parametrize(
    ("placement", "take_along", "expected"),
    [("exclusive", None, 2), ("exclusive", False, 0), ("inclusive", None, 0), ("inclusive", True, 2)],
)
async def test_a_caller_may_say_otherwise(placement: Placement, take_along: bool | None, expected: int) -> None:
    rig = PlacementRig(placement=placement)
    async with rig.open() as offloader, anyio.create_task_group() as tasks:
        keys = await stored(rig, offloader, 2)

        async def load() -> None:
            await offloader.load(keys, [4, 5], take_along=take_along)

        tasks.start_soon(load)
        await settle()
        await rig.land()
        assert taken_along(offloader) == expected


def test_of_two_readers_the_last_takes_along() -> None:
    rig = PlacementRig()
    with rig.open() as offloader:
        keys = store_now(rig, offloader, 2)
        first, second = offloader.prepare_load(keys), offloader.prepare_load(keys)
        first.start([4, 5])
        rig.manual_device.land_all()
        offloader.poll()
        assert taken_along(offloader) == 0
        second.start([6, 7])
        rig.manual_device.land_all()
        offloader.poll()
        assert taken_along(offloader) == 2


def test_a_load_that_has_joined_another_takes_along_at_the_end_of_both() -> None:
    rig = PlacementRig()
    with rig.open() as offloader:
        keys = store_now(rig, offloader, 2)
        handles = [offloader.prepare_load(keys).start([4, 5]) for _ in range(2)]
        assert offloader.statistics().joined_blocks == 2
        rig.manual_device.land_all()
        offloader.poll()
        assert all(handle.is_idle for handle in handles)
        assert taken_along(offloader) == 2
        assert_idle(offloader)


@pytest.mark.parametrize("what", ["fails", "is refused", "is cancelled", "is aborted", "is overdue", "is stale"])
def test_a_load_that_comes_to_nothing_takes_nothing_along(what: str) -> None:
    rig = PlacementRig(in_flight_bytes=2 * BLOCK_BYTES)
    with rig.open() as offloader:
        keys = store_now(rig, offloader, 2)
        ticket = offloader.prepare_load(keys)
        match what:
            case "fails":
                rig.manual_device.fail_next_copy(Direction.LOAD, "on purpose")
            case "is refused":
                rig.manual_device.refuse_next("on purpose")
            case "is cancelled":
                offloader.store_soon(keys_of(offloader, 2, salt="other"), [10, 11])
            case "is aborted":
                ticket.abort()
        if what != "is aborted":
            handle = ticket.start([4, 5])
            if what == "is cancelled":
                assert handle.cancel()
            if what == "is overdue":
                rig.manual_clock.advance(1000)
                offloader.poll()
            if what == "is stale":
                offloader.reset()
        rig.manual_device.land_all()
        offloader.poll()
        assert taken_along(offloader) == 0
        assert_idle(offloader)


def test_a_load_that_waits_for_a_store_takes_along_what_it_got() -> None:
    rig = PlacementRig()
    with rig.open() as offloader:
        keys = keys_of(offloader, 2)
        rig.write([0, 1])
        offloader.demote_soon(keys, [0, 1])
        ticket = offloader.prepare_load(keys)
        assert ticket.result is LookupResult.PENDING
        rig.manual_device.land_all()
        offloader.poll()
        ticket.start([4, 5])
        rig.manual_device.land_all()
        offloader.poll()
        assert taken_along(offloader) == 2
        assert rig.holds([4, 5])


@on_both_loops
async def test_a_cancelled_load_that_landed_takes_its_blocks_along() -> None:
    """The copy was not cancelled, and its blocks are in the GPU."""
    rig = PlacementRig()
    async with rig.open() as offloader, anyio.create_task_group() as tasks:
        keys = await stored(rig, offloader, 2)
        scope = anyio.CancelScope()

        async def load() -> None:
            with scope:
                await offloader.load(keys, [4, 5])

        tasks.start_soon(load)
        await settle()
        scope.cancel()
        await settle()
        assert taken_along(offloader) == 0
        await rig.land()
        assert taken_along(offloader) == 2
        assert_idle(offloader)


# Opening


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"placement": "exclusive", "block_size_factor": 2}, "block_size_factor is 2; make it 1, or use inclusive"),
        ({"placement": "both"}, "placement is 'both', it must be one of inclusive, exclusive"),
    ],
)
def test_a_placement_that_cannot_work_is_refused(options: dict[str, Any], message: str) -> None:
    rig = Rig()
    with pytest.raises(ConfigurationError, match=message), open_offloader(rig.layers, cpu_bytes=1 << 16, **options):
        pass


def test_taking_along_needs_single_blocks() -> None:
    rig = Rig(factor=2)
    with rig.open() as offloader:
        keys = keys_of(offloader, 1)
        offloader.store(keys, [0, 1])
        ticket = offloader.prepare_load(keys)
        with pytest.raises(InvalidRequestError, match="take_along needs a block_size_factor of 1, not 2"):
            ticket.start([4, 5], take_along=True)
        ticket.abort()


def test_an_exclusive_offloader_tells_its_policy_of_the_gpu_level() -> None:
    rig = Rig()
    heard: list[int] = []

    class Listening(LRUPolicy):
        def widen(self, blocks_above: int) -> None:
            heard.append(blocks_above)

    for placement in ("inclusive", "exclusive"):
        with open_offloader(rig.layers, cpu_bytes=1 << 10, policy=Listening, placement=placement):
            pass
    assert heard == [16]


# Hints


def test_hints_reach_the_manager_with_depths() -> None:
    rig = PlacementRig(cpu_blocks=4)
    with rig.open() as offloader:
        keys = keys_of(offloader, 3)
        ctx = ReqContext("1", session_id="one")
        offloader.store(keys, [0, 1, 2], ctx)
        assert offloader.hint(keys, keep_seconds=5) == 2
        assert offloader.statistics().manager.kept == 2
        assert_idle(offloader)
        assert offloader.hint(keys, session_ended=True) == 3
        offloader.store(keys_of(offloader, 2, salt="other"), [5, 6])
        assert states(offloader, keys) == ["HIT", "HIT", "MISS"]
        with pytest.raises(InvalidRequestError, match="give one of them"):
            offloader.hint(keys)


@on_both_loops
async def test_kept_blocks_expire_by_the_clock_of_the_offloader() -> None:
    rig = PlacementRig(cpu_blocks=2)
    async with rig.open() as offloader:
        keys = await stored(rig, offloader, 2)
        other = keys_of(offloader, 2, salt="other")
        assert offloader.hint(keys, keep_seconds=5) == 1
        assert offloader.demote_soon(other, [4, 5]).outcomes == (ACCEPTED, REFUSED)
        await rig.land()
        rig.manual_clock.advance(5)
        assert offloader.demote_soon(other, [4, 5]).outcomes == (RESIDENT, ACCEPTED)
        await rig.land()
        assert states(offloader, keys) == ["MISS", "MISS"]
        assert_idle(offloader)


def test_a_fence_needs_a_stream() -> None:
    rig = PlacementRig()
    with rig.open() as offloader:
        handle = offloader.demote_soon(keys_of(offloader, 1), [0])
        with pytest.raises(StateError, match="no compute stream"):
            handle.fence()
        rig.manual_device.land_all()
        offloader.poll()


def test_a_demotion_waits_for_what_it_is_told_to() -> None:
    rig = PlacementRig()
    with rig.open() as offloader:
        stream = rig.manual_device.create_stream("other")
        rig.manual_device.launch(stream, lambda: rig.write([0]))
        event: Event = rig.manual_device.record(stream)
        keys = keys_of(offloader, 1)
        handle = offloader.demote_soon(keys, [0], after=event)
        assert handle.is_sent
        rig.manual_device.land_all()
        offloader.poll()
        load = offloader.prepare_load(keys).start([4])
        rig.manual_device.land_all()
        offloader.poll()
        assert load.is_idle
        assert rig.holds([4])
